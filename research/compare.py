"""The compared systems, one list for the paper's experiments and the quality benchmark alike.

A system is one function of a fold, a seed and options; the options come from the paper's configuration or from what the
quality benchmark chose on validation queries. Everything that calls the package's own training
(`lgmml_torch.app.train`, `lgmml_torch.training.stages`) is in the first half of this file and nowhere else in research.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.loggers import Logger
from torch import Tensor

from lgmml_torch.app.compose import recipe_of, settle
from lgmml_torch.app.config import load_config
from lgmml_torch.app.rankers import fit_lightgbm
from lgmml_torch.app.train import add_base, search_recipes, train_best_phi
from lgmml_torch.checks import ConfigError, DegenerateScoresWarning, did_you_mean
from lgmml_torch.fitting.bank import merge_banks
from lgmml_torch.fitting.sampled import SampledBuilder, fit_sampled
from lgmml_torch.functional.losses import lambda_gradients
from lgmml_torch.functional.measures import Measure, mean_measure
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain, list_rank_features
from lgmml_torch.models.preprocess.steps import Quantile, RemoveConstant, Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import centre_segments
from lgmml_torch.training.recipe import Recipe, TrainerSettings
from lgmml_torch.training.stages import Prepared, prepare, train_phi
from research.protocol import NOISES, RankingFold
from research.store import quiet
from research.systems.base import ExampleSystem
from research.systems.gmml import GlobalGMML, LocationGMML
from research.systems.mlr import RMLR, Limits
from research.systems.simple import Euclidean, LinearRanker, RandomDistances, RandomRanker
from research.systems.trees import GBRT, LambdaMART, TreeRanker, XGBoostRanker

Score = Callable[[RankingData], Tensor]
Options = Mapping[str, Any]

# --- training of L-GMML ---

SILENT = (
    "callbacks=quiet", "~callbacks.log_model", "logger=none", "loader.num_workers=0", "paths.cache_dir=false",
    "paths.output_dir=unused", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false",
)  # fmt: skip

PUBLISHED = ("ones", "mean", "knn")  # policies for new queries that the tables of the paper's system have


@dataclass(frozen=True)
class Trained:
    """A trained model and facts about the run: epochs, policy, CPU seconds."""

    model: LGMML
    info: dict[str, Any]


def fit_bank(fold: RankingFold, overrides: Sequence[str] = (), seed: int = 0) -> Prepared:
    """Preprocessing and local metrics as ``train.py`` fits them with the same overrides."""
    cfg = load_config([*overrides, f"seed={seed}", *SILENT])
    return prepare({"train": fold.train, "valid": fold.valid}, recipe_of(cfg))


def bank_info(bank: Prepared) -> dict[str, Any]:
    """How many metrics, and what validation chose for them."""
    history = bank.bank.history
    facts = {"bandwidth": history.get("bandwidth"), "rounds": history.get("best_round")}
    return {"metrics": bank.bank.metrics.num_metrics, **{key: v for key, v in facts.items() if v is not None}}


def starting_model(bank: Prepared) -> LGMML:
    """The bank with its own Φ₀, before any training of Φ."""
    return bank.model(partial(Phi, mode="shared")).eval()


def train_weights(bank: Prepared, overrides: Sequence[str] = (), seed: int = 0) -> Trained:
    """Φ on a bank as ``train.py`` trains it; a bank may be used several times."""
    return train_configured(load_config([*overrides, f"seed={seed}", *SILENT]), bank)


class Stopwatch(Logger):
    """Validation NDCG@10 over the CPU seconds of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[tuple[float, float]] = []

    name, version = "stopwatch", "0"

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Every logger must have this; there is nothing to note."""
        del params, args, kwargs

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Note the time of every validation."""
        if "val/ndcg@10" in metrics:
            self.curve.append((time.process_time(), metrics["val/ndcg@10"]))


def train_configured(cfg: DictConfig, bank: Prepared, watch: Stopwatch | None = None) -> Trained:
    """The same with a configuration that is ready."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder, quiet("pytorch_lightning"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateScoresWarning)  # a finding, seen in the figures
        candidates = search_recipes(cfg, recipe_of(cfg), validated=True)
        trained = train_best_phi(cfg, bank, candidates, [] if watch is None else [watch], Path(folder))
    model, keeper = trained.model.eval(), trained.keeper
    info = {
        "seconds": time.process_time() - start, "epoch kept": keeper.best_epoch, "valid by epoch": keeper.curve,
        "policy": model.phi.policy,
    }  # fmt: skip
    return Trained(model, info)


MOVED = (0.5, 1.0, 2.0, 4.0)  # how far anchors may be moved away from the negatives


def sampled_bank(train: RankingData, valid: RankingData, *, metrics: int, seed: int) -> tuple[Prepared, LGMML]:
    """For timings stage by stage, first stage: sampled metrics on quantiles; also the model with fresh weights."""
    recipe = Recipe(_normal_quantiles, SampledBuilder(num_metrics=metrics, alphas=MOVED), seed=seed)
    bank = prepare({"train": train, "valid": valid}, recipe)
    return bank, bank.model(recipe.make_phi)


def _normal_quantiles() -> Chain:
    return Chain([RemoveConstant(), Quantile(output="normal"), Standardize()])


def train_on_lists(
    bank: Prepared, *, folder: Path, passes: int, callbacks: Sequence[pl.Callback], seed: int
) -> tuple[LGMML, dict[int, float]]:
    """Third stage: one Φ for all queries on whole lists; the model, and validation NDCG@10 by pass."""
    recipe = Recipe(_normal_quantiles, fit_sampled, seed=seed)
    around = TrainerSettings(folder, {"max_epochs": passes, "log_every_n_steps": 50}, callbacks=callbacks)
    trained = train_phi(bank, recipe, around)
    return trained.model, dict(trained.keeper.curve)


# --- systems for given lists ---


@dataclass(frozen=True)
class Fitted:
    """Scores by row of a table, of which one fit may give several, and facts about the fit.

    Attributes:
        scores: the reported way of scoring comes first.
        info: ``metrics`` or ``trees`` is the size of the model.
        own: scores training queries with their own Φ, where they have one.
    """

    scores: dict[str, Score]
    info: dict[str, Any] = field(default_factory=dict)
    own: Score | None = None


Fit = Callable[[RankingFold, int, Options], Fitted]
MakeBank = Callable[[RankingFold, Sequence[str], int], Prepared]


def _scorer(model: LGMML, **options: Any) -> Score:
    return partial(model.score, **options)


def fit_bag(fold: RankingFold, overrides: Sequence[str], seed: int) -> Prepared:
    """Five boosted banks of different seeds as one, each over the spread of its scores within the training lists."""
    members = [fit_bank(fold, overrides, seed + 1000 * member) for member in range(5)]
    scores = [starting_model(member).score(fold.train).double() for member in members]
    spreads = [float(centre_segments(found, fold.train.offsets).square().mean().sqrt()) for found in scores]
    bank = merge_banks([member.bank for member in members], [1 / (5 * spread) for spread in spreads])
    rounds = [member.bank.history["best_round"] for member in members]
    return replace(members[0], bank=replace(bank, history={"best_round": rounds}))


def boosted(
    name: str = "boosted", overrides: Sequence[str] = (), *, warp: bool = True, make: MakeBank = fit_bank
) -> Fit:
    """Boosted metrics with their Φ₀, and with ``warp`` also after WARP, which is what ``train.py`` does by default."""

    def fit(fold: RankingFold, seed: int, options: Options) -> Fitted:
        settings = [*overrides, *options.get("overrides", ())]
        bank = make(fold, settings, seed)
        scores, info = {name: _scorer(starting_model(bank))}, bank_info(bank)
        if warp:
            trained = train_weights(bank, settings, seed)
            scores = {f"{name}+warp": _scorer(trained.model), **scores}
            info["warp"] = trained.info
        return Fitted(scores, info)

    return fit


def fit_default(fold: RankingFold, seed: int, options: Options) -> Fitted:
    """What ``train.py`` does with such data by default; with the option ``trees``, also what ``base=auto`` does."""
    asked = [*options.get("overrides", ()), f"seed={seed}", *SILENT]
    splits = {"train": fold.train, "valid": fold.valid}
    cfg = settle(load_config(asked), asked, splits)
    bank = prepare(splits, recipe_of(cfg))
    trained = train_configured(cfg, bank, options.get("watch"))
    scores, info = (
        {"default": _scorer(trained.model, alone=True)},
        {**bank_info(bank), **trained.info, "way": cfg.chosen},
    )
    if options.get("trees"):
        start = time.process_time()
        threads = torch.get_num_threads()
        trees = fit_lightgbm(splits, Measure.of("ndcg@10"), seed=seed, threads=threads, list_ranks=True)
        add_base(trained.model, trees, fold.valid)
        scores["default + trees"] = _scorer(trained.model)
        info["trees seconds"] = time.process_time() - start
    return Fitted(scores, info)


def fit_published(fold: RankingFold, seed: int, options: Options, *, bank: Prepared | None = None) -> Fitted:
    """The paper's model, ``train.py experiment=paper``, under each policy for new queries."""
    settings = ["experiment=paper", *options.get("overrides", ())]
    bank = fit_bank(fold, settings, seed) if bank is None else bank
    trained = train_weights(bank, settings, seed)
    scores = {f"published {policy}": _scorer(trained.model, policy=policy) for policy in PUBLISHED}
    return Fitted(scores, {**bank_info(bank), "phi": trained.info}, own=_scorer(trained.model, known_queries=True))


def fit_sampled_phi(
    fold: RankingFold, seed: int, options: Options, *, mode: str, bank: Prepared | None = None
) -> Fitted:
    """The paper's metrics with one Φ for all queries (``shared``), or one computed from the list (``amortized``)."""
    bank = fit_bank(fold, ["experiment=paper"], seed) if bank is None else bank
    trained = train_weights(bank, [f"phi={mode}", *options.get("overrides", ())], seed)
    return Fitted({f"sampled {mode}": _scorer(trained.model)}, {**bank_info(bank), "phi": trained.info})


def with_list_ranks(data: RankingData) -> RankingData:
    """Every feature's rank within its list beside the feature itself."""
    return data.replace(features=TreeBase.with_list_ranks(data.features, data.offsets))


def trees(make: type[TreeRanker], name: str, *, ranks: bool = False, members: int = 1) -> Fit:
    """Boosted trees, or the mean of several models' scores, each over its spread on the training documents.

    Options are those of `TreeRanker`; as many threads as torch has.
    """

    def fit(fold: RankingFold, seed: int, options: Options) -> Fitted:
        view = with_list_ranks if ranks else lambda data: data
        seen = fold.each(view)
        threads = torch.get_num_threads()
        models = [
            make(**options, seed=seed + 1000 * member, num_threads=threads).fit(seen.train, seen.valid)
            for member in range(members)
        ]
        spreads = [float(m.score(seen.train).std().clamp_min(1e-12)) if members > 1 else 1.0 for m in models]

        def score(data: RankingData) -> Tensor:
            rows = view(data)
            return torch.stack([m.score(rows) / spread for m, spread in zip(models, spreads, strict=True)]).mean(0)

        return Fitted({name: score}, {"trees": sum(m.best_round for m in models), "chosen": dict(models[0].chosen)})

    return fit


STEPS, EVERY, RATE = 150, 5, 0.02


def fit_linear(fold: RankingFold, seed: int, options: Options) -> Fitted:
    """LambdaRank by Adam on all lists at once; validation NDCG@10 keeps the best step."""
    features = list_rank_features()
    seen = fold.prepared(features)
    train, valid = seen.train, seen.valid
    weights = torch.zeros(train.num_features, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=RATE)
    best, kept, kept_step = -1.0, weights.detach().clone(), 0
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            scores = train.features @ weights
            gradients, _ = lambda_gradients(scores, train.labels.to(scores), train.offsets)
            weights.grad = -(train.features.mT @ gradients.to(scores)) / train.num_queries
        optimizer.step()
        if step % EVERY == 0:
            value = mean_measure(valid.features @ weights.detach(), valid)
            if value > best:
                best, kept, kept_step = value, weights.detach().clone(), step
    return Fitted({"linear": lambda data: features(data.features, data.offsets) @ kept}, {"step": kept_step})


def fit_ridge(fold: RankingFold, seed: int, options: Options) -> Fitted:
    """Ridge regression on the default's features; validation chooses the penalty."""
    features = list_rank_features()
    seen = fold.prepared(features)
    ranker = LinearRanker().fit(seen.train, seen.valid)

    def score(data: RankingData) -> Tensor:
        return ranker.score(data.replace(features=features(data.features, data.offsets)))

    return Fitted({"ridge": score}, {"chosen": dict(ranker.chosen)})


def fit_random(fold: RankingFold, seed: int, options: Options) -> Fitted:
    """Random order."""
    return Fitted({"random": RandomRanker(seed).fit(fold.train, fold.valid).score})


MAIN_SEEDS = 10  # of the two systems the main target compares; the spread over seeds is as large as the target
# The default's features without the list ranks.
NO_RANKS = (
    "preprocess=standardize",
    "preprocess.spec.args.steps=[{name:remove_constant},{name:quantile,args:{max_knots:1024}},"
    "{name:remove_constant,args:{tolerance:1e-6}},{name:standardize},{name:clip,args:{limit:5.0}}]",
)


@dataclass(frozen=True)
class System:
    """One or several rows of a table that come from one fit.

    Attributes:
        name: by which it is stored and named on the command line and in the paper's configuration.
        fit: see `Fitted`.
        rows: row names and how they read in the quality benchmark's tables.
        title: how its reported row reads in the paper's tables.
        choice: what the quality benchmark chooses on validation beforehand.
        seeds: at most so many are of use (1: nothing is random).
        noises: kinds of noise the quality benchmark runs it with.
    """

    name: str
    fit: Fit
    rows: Mapping[str, str]
    title: str = ""
    choice: str | None = None
    seeds: int = 3
    noises: tuple[str, ...] = ()


# In the order in which the quality benchmark runs them: what the targets are about comes first. The default is what
# ``train.py`` does: boosting, then WARP; the ablations stop before WARP and are compared with the default's Φ₀.
SYSTEMS = (
    System("random", fit_random, {"random": "random order"}, "random"),
    System("ridge", fit_ridge, {"ridge": "linear, ridge regression"}, "linear", seeds=1),
    System("linear", fit_linear, {"linear": "linear, LambdaRank"}, seeds=1),
    System("default", fit_default, {"default": "**L-GMML (default)**"}, seeds=MAIN_SEEDS),
    System(
        "boosted", boosted(),
        {"boosted+warp": "boosted L-GMML, then WARP", "boosted": "boosted, Φ₀ before WARP"},
        "L-GMML boosted (our default)",
    ),
    System(
        "lightgbm+ranks", trees(LambdaMART, "lightgbm+ranks", ranks=True), {"lightgbm+ranks": "LightGBM + list ranks"},
        choice="lightgbm+ranks", seeds=MAIN_SEEDS,
    ),
    System("lightgbm", trees(LambdaMART, "lightgbm"), {"lightgbm": "LightGBM"}, "λ-MART", choice="lightgbm"),
    System(
        "published", fit_published,
        {f"published {policy}": f"paper's L-GMML, new queries: {policy}" for policy in PUBLISHED},
        "L-GMML as published", choice="published",
    ),
    System(
        "sampled shared", partial(fit_sampled_phi, mode="shared"), {"sampled shared": "paper's metrics, shared Φ"},
        choice="sampled shared",
    ),
    System(
        "sampled amortized", partial(fit_sampled_phi, mode="amortized"),
        {"sampled amortized": "paper's metrics, amortized Φ"}, choice="sampled amortized",
    ),
    System(
        "boosted bag", boosted("boosted bag", make=fit_bag),
        {"boosted bag+warp": "bag of 5 boosted L-GMML", "boosted bag": "bag of 5 boosted, Φ₀ before WARP"},
    ),
    System(
        "lightgbm bag", trees(LambdaMART, "lightgbm bag", ranks=True, members=5),
        {"lightgbm bag": "bag of 5 LightGBM + list ranks"}, choice="lightgbm+ranks",
    ),
    System(
        "boosted identity", boosted("boosted identity", ["local_metrics.metric=identity"], warp=False),
        {"boosted identity": "boosted, identity metric, Φ₀"},
    ),
    System(
        "boosted pooled", boosted("boosted pooled", ["local_metrics.metric=gmml-pooled"], warp=False),
        {"boosted pooled": "boosted, pooled pairs, Φ₀"},
    ),
    System(
        "boosted no ranks", boosted("boosted no ranks", NO_RANKS, warp=False),
        {"boosted no ranks": "boosted, no list ranks, Φ₀"},
    ),
    System(
        "boosted noise", boosted("boosted noise"),
        {"boosted noise+warp": "boosted L-GMML with noise", "boosted noise": "boosted, Φ₀, with noise"}, noises=NOISES,
    ),
    System(
        "lightgbm noise", trees(LambdaMART, "lightgbm noise", ranks=True),
        {"lightgbm noise": "LightGBM + list ranks with noise"}, choice="lightgbm+ranks", noises=NOISES,
    ),
    System(
        "xgboost+ranks", trees(XGBoostRanker, "xgboost+ranks", ranks=True), {"xgboost+ranks": "XGBoost + list ranks"},
        choice="xgboost+ranks",
    ),
    System("xgboost", trees(XGBoostRanker, "xgboost"), {"xgboost": "XGBoost"}, choice="xgboost"),
)  # fmt: skip
PAPER_ONLY = (System("gbrt", trees(GBRT, "gbrt"), {"gbrt": "GBRT"}, "GBRT"),)
ROWS = {row: label for system in SYSTEMS for row, label in system.rows.items()}


def find_system(name: str) -> System:
    """The system of that name.

    Raises:
        ConfigError: there is none.
    """
    known = {system.name: system for system in (*SYSTEMS, *PAPER_ONLY)}
    if name not in known:
        raise ConfigError(f"no ranking system {name!r}{did_you_mean(name, list(known))}")
    return known[name]


# --- systems for query by example ---


def _rmlr(options: Options, seed: int) -> ExampleSystem:
    settings = dict(options)
    return RMLR(limits=Limits(time_limit=settings.pop("time_limit", None)), **settings)


# Titles, and how each is made of options and a seed.
EXAMPLE_SYSTEMS: Mapping[str, tuple[str, Callable[[Options, int], ExampleSystem]]] = {
    "random": ("random", lambda options, seed: RandomDistances(seed=seed)),
    "euclidean": ("Euclidean", lambda options, seed: Euclidean()),
    "rmlr": ("R-MLR", _rmlr),
    "gmml": ("GMML", lambda options, seed: GlobalGMML(**options)),
    "lgmml": ("L-GMML", lambda options, seed: LocationGMML(**options, seed=seed)),
}
NAMES = {name: title for name, (title, _) in EXAMPLE_SYSTEMS.items()} | {
    system.name: system.title for system in (*SYSTEMS, *PAPER_ONLY) if system.title
}
