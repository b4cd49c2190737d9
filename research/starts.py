"""Which start of trained metrics is the best, and what each of their parts is worth: on validation queries only.

Run with ``python -m research.starts``; finished fits are kept, the page is docs/starts.md. Written down before the run:

- Large set ``debian``, 300 and 1,000 of its training queries, five seeds; the seed draws the queries, too. K = 64
  metrics of rank 8, no ramps, otherwise the settings of ``experiment=trained``: small enough to be run many times.
- A start is judged by validation NDCG@10 of the best epoch, query by query against random factors of the same seed, and
  by the first epoch at which it reaches what random factors reach in the end. It wins if the interval of its mean
  difference over queries, seeds averaged, lies above zero at both sizes, or above zero at one and not below at the
  other. A start that wins is the default; if several do, the one with the larger mean over the sizes.
- Losses and parts left out: 1,000 queries, three seeds, in the same way against the full recipe.
- Closed forms as preconditioners, added later with the same rules and three seeds: random factors seen through M^½,
  with M the geometric mean of all pairs within lists (λ = .1; t = ½ and, nearer to the dissimilar scatter, 1), or the
  mean outer product of the score's gradients at the training documents (xRFM's closed form) after three epochs from
  random factors. Each has the mean square of random factors. The best must beat `strength`, too, to become the default.
- A penalty towards the closed form, added later still: 300 queries, three seeds. In every step the factors move towards
  their start by the learning rate times 10 or 100 of what lies between (a decoupled penalty; it takes the place of the
  decay towards zero), from a start through the global geometric mean. The same from `strength` tells the closed form
  from the penalty; cut for time before the run, it comes second, and only if time is left. It
  wins if its best weight beats un-pulled `strength` by an interval above zero.
- Closed form and Φ in turns: MQ2008, five folds, three seeds, K = 100 sampled metrics on quantiles, one Φ trained by
  WARP with Adam (at most ten epochs). After training, LambdaRank's gradients at the scores weight the documents of each
  region, as in boosting (λ = .1, t = ½); its metric is computed again, and Φ trained again, once and twice. Judged on
  validation queries against the first closed form and against the identity at the same anchors. The bandwidth (.3, .5,
  1, 2) is chosen for each. It wins if the better of both turns is above both by intervals above zero.
- Added after that table had been seen, because its anchors were chosen with the closed form's metrics and the identity
  has to live with them: the identity, the inverse similar scatter (t = 0) and the dissimilar scatter (t = 1), each with
  anchors of its own.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lgmml_torch.files import write_text
from lgmml_torch.fitting.trained import STARTS, Shape, weighted_factors
from lgmml_torch.functional.boosting import list_scatter
from lgmml_torch.functional.gmml import gmml, scatter_matrices
from lgmml_torch.functional.measures import rank_data
from lgmml_torch.functional.regions import sample_regions
from lgmml_torch.functional.score import kernel
from lgmml_torch.functional.spd import cholesky_jittered
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_min
from research.closed_forms import TowardsStart, alternating_job, ends_job
from research.compare import fit_bank, train_weights
from research.protocol import RankingFold, large_fold
from research.stats import counts, gain, markdown, signed
from research.store import Job, Record, Store

log = logging.getLogger("research.starts")

ROOT = Path(__file__).parent.parent
SIZES, SEEDS, PART_SEEDS = (300, 1000), 5, 3
SMALL = ("experiment=trained", "local_metrics.num_metrics=64", "preprocess.ramps=0", "trainer.max_epochs=12")
GRADIENT_DOCUMENTS = 5_000
SCATTER_QUERIES = 300  # diagonal scatters of more lists are the same
START_SETTINGS: dict[str, tuple[str, ...]] = {
    "random": ("local_metrics.start=random",),
    "strength": ("local_metrics.start=strength",),
    "diagonal": ("local_metrics.start=diagonal",),
    "ratio": ("local_metrics.start=ratio",),
    "ratio of large regions": ("local_metrics.start=large_ratio",),
}
CLOSED_SEEDS = 3
CLOSED_FORMS: dict[str, tuple[str, ...]] = {
    "random": START_SETTINGS["random"],
    "strength": START_SETTINGS["strength"],
    "through the global geometric mean": ("local_metrics.start=global_mean",),
    "through the global dissimilar scatter (t = 1)": ("local_metrics.start=global_dissimilar",),
    "through gradient outer products": ("local_metrics.start=gradients",),
}
PULLS = (10, 100)
PULLED = ("through the global geometric mean", "strength")
TURNS = (alternating_job, ends_job)
TURN_DATA, FOLDS = "mq2008", range(5)
PARTS: Mapping[str, tuple[str, ...]] = {
    "the recipe": (),
    "with 6 ramps of a feature": ("preprocess.ramps=6",),
    "without views of the list": (
        "preprocess=standardize",
        "preprocess.spec.args.steps=[{name:remove_constant},{name:quantile},{name:standardize},{name:clip}]",
    ),
    "with quantiles and list ranks only": ("preprocess=list_rank",),
    "without dropout": ("dropout.features=0", "dropout.metrics=0"),
    "rank 2": ("local_metrics.rank=2",),
    "K = 16": ("local_metrics.num_metrics=16",),
    "loss LambdaRank": ("loss=lambdarank",),
    "loss WARP": ("loss=warp",),
}
NO_RAMPS = "preprocess.ramps=0"
READING = (
    "How to read this: **`strength` wins at both sizes and is the default.** It knows what each feature says by itself "
    "and leaves directions to chance. The geometric mean of diagonal scatters (`diagonal`) gains nothing over random "
    "factors, and directions of the largest ratio of dissimilar to similar scatter (`ratio`) lose much: they start all "
    "metrics of a region in the same few directions, small regions more than large ones. Holding metrics fixed for the "
    "first epochs was not tried. Of the parts, views of the list, width and "
    "rank carry most, ramps add .011 at twice the time, and the listwise softmax is the best of the losses. Dropout "
    "does not earn its place at this small width (K = 64, twelve epochs); the default's shares were chosen for wider "
    "banks.\n\n"
    "**Closed forms as preconditioners do not help**, with 300 queries: the geometric mean of all pairs is not "
    "told apart from random factors and lies behind `strength`, by .0085 [.0051, .0119]; the dissimilar scatter "
    "alone and gradient outer products lose to random factors. 1,000 queries were not run. **Nor does a penalty "
    "towards the start**: weight 10 changes nothing, weight 100 loses; its control from `strength` was not run, "
    "as there is no gain to explain.\n\n"
    "**In turns with Φ the closed form gets worse**, by .024 after one turn and .022 after two. The first closed "
    "form is ahead of the identity, also of an identity with anchors of its own, by .0531 [.0355, .0705]: with "
    "sampled regions, where nothing else chooses a metric, the geometric mean carries much. But the dissimilar "
    "scatter alone (t = 1), with anchors of its own, is ahead of the mean by another .0522 [.0352, .0688]. That "
    "row was added after the others had been seen, and stands on the validation queries of one set; t is a "
    "setting of the sampled metrics (`local_metrics.t`), and no test query was scored with it.\n\n"
    "The trials with closed forms: release 0.3, AMD EPYC, 2 cores, one thread, November 2026, beside much other "
    "work. CPU seconds are of training; the start is not among them."
)


def diagonal_start(data: RankingData, shape: Shape, generator: torch.Generator, *, lam: float = 0.1) -> Tensor:
    """Each feature times (D_jj/S_jj)^¼: the factor of the geometric mean where both scatters are diagonal."""
    some = data.select(torch.randperm(data.num_queries, generator=generator)[:SCATTER_QUERIES].sort().values)
    lowest = segment_min(some.labels, some.offsets)[some.query_index]
    above = (some.labels - lowest).to(some.features)
    S, D = list_scatter(some.features[:, :, None], above, (above == 0).to(above), some.offsets)
    S, D = S[:, 0, 0].double(), D[:, 0, 0].double()
    level = lam * (S + D).mean() / 2  # the regularisation that other metrics have, too
    return weighted_factors(((D + level) / (S + level).clamp_min(1e-6)).pow(0.25), shape, generator)


def ratio_start(
    data: RankingData, shape: Shape, generator: torch.Generator, *, pool: int = 16, lam: float = 0.1
) -> Tensor:
    """Of regions of ``pool`` queries, the directions with the largest ratio of dissimilar to similar scatter.

    They are generalised eigenvectors, of length 1 in the similar scatter.
    """
    regions = sample_regions(data.labels, data.offsets, shape[0], pool=pool, generator=generator)
    similar, dissimilar = scatter_matrices(data.features, regions)
    scale = (similar + dissimilar).diagonal(dim1=-2, dim2=-1).mean(dim=-1, keepdim=True) / 2
    similar.diagonal(dim1=-2, dim2=-1).add_(lam * scale)
    L = cholesky_jittered(similar, name="similar")
    half = torch.linalg.solve_triangular(L, dissimilar, upper=False)
    whitened = torch.linalg.solve_triangular(L, half.mT, upper=False)
    vectors = torch.linalg.eigh((whitened + whitened.mT) / 2).eigenvectors[..., -shape[2] :].flip(-1)
    found: Tensor = torch.linalg.solve_triangular(L.mT, vectors, upper=True)
    return found[torch.arange(shape[0]) % len(found)]  # fewer regions than metrics serve several times


def square_root(matrix: Tensor) -> Tensor:
    """Of a symmetric positive definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
    return root


def seen_through(root: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """Random factors times a matrix, with the mean square of random ones."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    factors: Tensor = root.double() @ drawn
    return factors / factors.square().mean().sqrt() / math.sqrt(shape[1] * shape[2])


def global_start(
    data: RankingData, shape: Shape, generator: torch.Generator, *, t: float = 0.5, lam: float = 0.1
) -> Tensor:
    """Random factors seen through M^½, with M the geometric mean of the scatters over pairs within lists."""
    lowest = segment_min(data.labels, data.offsets)[data.query_index]
    above = (data.labels - lowest).to(data.features)
    S, D = list_scatter(data.features[:, None, :], above, (above == 0).to(above), data.offsets)
    metric = gmml(S[0].double(), D[0].double(), t, lam=lam).metric
    return seen_through(square_root(metric), shape, generator)


def gradient_start(data: RankingData, shape: Shape, generator: torch.Generator, *, epochs: int = 3) -> Tensor:
    """Random factors seen through the root of the mean outer product of the gradients of a bank trained briefly."""
    settings = [text for text in SMALL if text != NO_RAMPS]
    settings += ["local_metrics.start=random", f"trainer.max_epochs={epochs}", "keep=last"]
    settings += [
        "features=all",
        "preprocess=standardize",
        "preprocess.spec.args.steps=[]",
    ]  # the features are preprocessed
    seed = int(torch.randint(2**31, (), generator=generator))
    few = data.select(range(min(10, data.num_queries)))  # validation decides nothing here
    trained = train_weights(fit_bank(RankingFold(data, few, few), settings, seed), settings, seed)
    rows = data.features[torch.randperm(data.num_documents, generator=generator)[:GRADIENT_DOCUMENTS]]
    rows = rows.clone().requires_grad_()
    model = trained.model
    kappa = kernel(model.metrics.traced(rows), model.kernel)
    (gradients,) = torch.autograd.grad(-(kappa @ model.phi(torch.zeros(1, dtype=torch.long))[0]).sum(), rows)
    outer = (gradients.mT @ gradients).double() / len(gradients)
    outer.diagonal().add_(1e-3 * outer.trace() / len(outer))
    return seen_through(square_root(outer), shape, generator)


OWN_STARTS: dict[str, Callable[[RankingData, Shape, torch.Generator], Tensor]] = {
    "diagonal": diagonal_start,
    "ratio": ratio_start,
    "large_ratio": partial(ratio_start, pool=64, lam=0.5),
    "global_mean": global_start,
    "global_dissimilar": partial(global_start, t=1.0),
    "gradients": gradient_start,
}


def fit_job(queries: int, seed: int, name: str, overrides: Sequence[str]) -> Job:
    """One fit: NDCG@10 of every validation query at the best epoch, and the curve."""
    asked = [text for text in SMALL if not (text == NO_RAMPS and any(o.startswith("preprocess") for o in overrides))]
    asked += overrides

    def make() -> Record:
        STARTS.update(OWN_STARTS)
        os.environ["LGMML_TARGETS"] = TowardsStart.__module__  # which the configuration may name, too
        fold = large_fold("debian", queries, seed)
        trained = train_weights(fit_bank(fold, asked, seed), asked, seed)
        values = rank_data(trained.model.score(fold.valid), fold.valid, metrics=["ndcg@10"])
        return Record({name: found.tolist() for name, found in values.items()}, trained.info)

    return Job("starts", {"queries": queries, "seed": seed, "name": name, "overrides": list(asked)}, make)


def closed_jobs() -> Iterator[Job]:
    """Closed forms as preconditioners, a seed at a time."""
    for seed in range(CLOSED_SEEDS):
        for queries in SIZES:
            for name, overrides in CLOSED_FORMS.items():
                yield fit_job(queries, seed, name, overrides)


def pulled() -> dict[str, tuple[str, ...]]:
    """Two starts, each by itself and with factors that are pulled towards it."""
    found = {name: CLOSED_FORMS[name] for name in PULLED}
    target = f"optimizer._target_={TowardsStart.__module__}.{TowardsStart.__name__}"
    for name in PULLED:
        for pull in PULLS:
            found[f"{name}, pulled {pull}"] = (*CLOSED_FORMS[name], target, f"+optimizer.pull={pull}")
    return found


def pulled_jobs() -> Iterator[Job]:
    """A penalty towards the start, on the small size, one setting after the other."""
    for name, overrides in pulled().items():
        for seed in range(CLOSED_SEEDS):
            yield fit_job(SIZES[0], seed, name, overrides)


def turn_jobs() -> list[Job]:
    """Closed form and Φ in turns, and the ends of the geodesic: all folds of a seed, then the next seed."""
    return [make(TURN_DATA, fold, seed) for make in TURNS for seed in range(CLOSED_SEEDS) for fold in FOLDS]


def turn_rows(store: Store) -> list[list[str]]:
    """A table: means of seeds, and differences to the closed form and the identity; empty where a fit is missing."""
    found = [store.find(job) for job in turn_jobs()]
    records = [record for record in found if record is not None]
    if len(records) < len(found):
        return []
    each, count = len(records) // len(TURNS), len(FOLDS)
    values: dict[str, Tensor] = {}  # (seeds, Q)
    for first in range(0, len(records), each):
        for name in records[first].values:
            by_fold = [record.tensor(name) for record in records[first : first + each]]
            values[name] = torch.stack([torch.cat(by_fold[i : i + count]) for i in range(0, each, count)])
    rows = []
    for name, table in values.items():
        measured = counts(table[0])
        means = table.nanmean(1).tolist()
        against = [signed(gain(table.mean(0), values[base].mean(0)).difference) for base in ("closed form", "identity")]
        rows.append([name, f"{statistics.fmean(means):.4f} ± {statistics.stdev(means):.4f}", *against, measured])
    return rows


def jobs(*, starts: bool = True) -> Iterator[Job]:
    """Everything, starts first, a seed at a time."""
    yield from closed_jobs()
    yield from pulled_jobs()
    yield from turn_jobs()
    for seed in range(SEEDS if starts else 0):
        for queries in SIZES:
            for name, overrides in START_SETTINGS.items():
                yield fit_job(queries, seed, name, overrides)
    for seed in range(PART_SEEDS):
        for name, overrides in PARTS.items():
            yield fit_job(SIZES[-1], seed, name, overrides)


def compared(
    store: Store, queries: int, settings: Mapping[str, tuple[str, ...]], base: str, seeds: int
) -> list[list[str]]:
    """Rows of a table: mean, difference to the base with its interval, when the base's best is reached, seconds.

    What has not been run with all seeds is left out.
    """
    stored = {
        name: [store.find(fit_job(queries, seed, name, overrides)) for seed in range(seeds)]
        for name, overrides in settings.items()
    }
    found = {name: [record for record in records if record is not None] for name, records in stored.items()}
    found = {name: records for name, records in found.items() if len(records) == seeds}
    if base not in found:
        return []
    values = {
        name: torch.stack([record.tensor("ndcg@10") for record in records]).mean(0) for name, records in found.items()
    }
    rows = []
    for name, records in found.items():
        means = [record.mean("ndcg@10") for record in records]
        difference = "" if name == base else signed(gain(values[name], values[base]).difference)
        reached = [_reached(record, other) for record, other in zip(records, found[base], strict=True)]
        seconds = statistics.median(record.info["seconds"] for record in records)
        spread = f"{statistics.fmean(means):.4f} ± {statistics.stdev(means):.4f}"
        rows.append([name, spread, difference, ", ".join(map(str, reached)), f"{seconds:.0f}"])
    return rows


def _reached(record: Record, base: Record) -> str:
    goal = max(base.info["valid by epoch"].values())
    epochs = [int(epoch) for epoch, value in record.info["valid by epoch"].items() if value >= goal]
    return str(min(epochs)) if epochs else "–"


def page(store: Store, before: str = "") -> str:
    """docs/starts.md; a table whose fits are not in the store is that of the page ``before``."""
    columns = ["", "NDCG@10 ± over seeds", "difference", "epoch that reaches the base's best, by seed", "CPU s"]
    opening = "After this page you can judge which start, which loss and which parts trained metrics need."
    written = "Written by `python -m research.starts`."
    parts = ["# Starts, losses and parts of trained metrics", opening, written, *_rules()]
    for queries in SIZES:
        title = f"## Starts, {queries:,} training queries, {SEEDS} seeds"
        rows = compared(store, queries, START_SETTINGS, "random", SEEDS)
        parts += [title, markdown(columns, rows) if rows else _kept(before, title)]
    for queries in SIZES:
        title = f"## Closed forms as preconditioners, {queries:,} training queries, {CLOSED_SEEDS} seeds"
        rows = compared(store, queries, CLOSED_FORMS, "random", CLOSED_SEEDS)
        parts += [title, markdown(columns, rows) if rows else _kept(before, title)]
    title = f"## A penalty towards the start, {SIZES[0]:,} training queries, {CLOSED_SEEDS} seeds"
    rows = compared(store, SIZES[0], pulled(), "strength", CLOSED_SEEDS)
    parts += [title, markdown(columns, rows) if rows else _kept(before, title)]
    title = f"## Closed form and Φ in turns, MQ2008, {len(FOLDS)} folds, {CLOSED_SEEDS} seeds"
    rows = turn_rows(store)
    turn_columns = [
        "metrics",
        "NDCG@10 ± over seeds",
        "against the closed form",
        "against the identity",
        "validation queries",
    ]
    parts += [title, markdown(turn_columns, rows) if rows else _kept(before, title)]
    title = f"## Losses and parts, {SIZES[-1]:,} training queries, {PART_SEEDS} seeds"
    rows = compared(store, SIZES[-1], PARTS, "the recipe", PART_SEEDS)
    parts += [title, markdown(columns, rows) if rows else _kept(before, title)]
    return "\n\n".join(parts) + "\n"


def _kept(page: str, title: str) -> str:
    """What a page has below a title."""
    return page.partition(f"{title}\n\n")[2].partition("\n\n## ")[0].strip() or "Not run yet."


def _rules() -> list[str]:
    rules = (__doc__ or "").split("Written down before the run:", 1)[1].strip().replace("``", "`")
    fold = large_fold("debian")
    counted = (
        f"NDCG@10 (gain 2^y − 1, ties in the order of the file) of {fold.valid.num_queries:,} validation queries, none "
        "skipped; no test query was scored. Differences are paired per query, with 95% bootstrap intervals."
    )
    return [counted, "Written down before the run:", rules, READING]


STAGES: Mapping[str, Callable[[], Iterable[Job]]] = {
    "closed": closed_jobs, "pulled": pulled_jobs, "turns": turn_jobs,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m research.starts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stage",
        choices=("all", *STAGES, "parts", "report"),
        default="all",
        help="closed, pulled and turns: the trials with closed forms; report: write the page, fit nothing",
    )
    parser.add_argument("--store", type=Path, help="where finished fits are kept (default: outputs/starts)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "starts.md", help="the page")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    store = Store(args.store or ROOT / "outputs" / "starts")
    if args.stage in STAGES:
        store.share(STAGES[args.stage]())
    elif args.stage != "report":
        store.share(jobs(starts=args.stage == "all"))
    write_text(args.out, page(store, args.out.read_text(encoding="utf-8") if args.out.is_file() else ""))


if __name__ == "__main__":
    main()
