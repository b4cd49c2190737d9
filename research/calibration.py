"""How far chances of relevance are off on unseen queries, before and after the map that training fits.

Run with ``python -m research.calibration``; figures go to research/results/calibration.json, the tables of
docs/calibration.md to standard output. Models have the default settings and one seed. A document is relevant if its
label is at least 1. Without the map, a user has the raw score: through the logistic function, or scaled to [0, 1] by
the lowest and highest score of the validation queries. Both are compared with the map on test queries.

Whether one straight line of the log odds is enough is decided on validation queries alone: five parts, by query; a line
and an isotonic regression are fitted to four of them and judged on the fifth by the Brier score.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from lgmml_torch import LGMMLRanker, RankingData
from lgmml_torch.app.rankers import fit_lightgbm
from lgmml_torch.files import write_text
from lgmml_torch.functional.calibration import fit_grade_map, reliability
from lgmml_torch.functional.measures import Measure, mean_measure
from research.protocol import RankingFold, large_fold, ranking_fold
from research.stats import markdown
from research.store import machine_facts

log = logging.getLogger("research.calibration")

RESULTS = Path(__file__).parent / "results" / "calibration.json"
SETS: dict[str, Callable[[], RankingFold]] = {
    "MQ2008, fold 1": lambda: ranking_fold("mq2008", 0),
    "lgbm-rank, fold 1": lambda: ranking_fold("lgbm-rank", 0),
    "debian, 500 training queries": lambda: large_fold("debian", 500),
    "OHSUMED, fold 1": lambda: ranking_fold("ohsumed", 0),
}
TOY: dict[str, Callable[[], RankingFold]] = {"toy": lambda: ranking_fold("toy", 0)}  # for tests
PARTS = 5


def in_arrays(data: RankingData) -> tuple[Any, Any, Any]:
    """X, y and qid for the estimator."""
    return data.features.numpy(), data.labels.numpy(), data.query_index.numpy()


def as_chances(valid: RankingData, on_valid: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """What a user may take for a chance: before the map, and by it."""
    low, high = on_valid.min(), on_valid.max()
    return {
        "logistic of the score": torch.sigmoid(scores.double()),
        "score scaled to [0, 1]": ((scores - low) / (high - low)).clamp(0, 1).double(),
        "one chance for all": torch.full(scores.shape, float((valid.labels >= 1).double().mean()), dtype=torch.float64),
        "the map": fit_grade_map(on_valid, valid.labels).at_least(scores),
    }


def line_or_steps(valid: RankingData, scores: Tensor, seed: int) -> dict[str, float]:
    """Brier scores on the validation queries, each part by what the other parts give."""
    part = torch.randperm(valid.num_queries, generator=torch.Generator().manual_seed(seed))[valid.query_index] % PARTS
    relevant = valid.labels >= 1
    line, steps = torch.zeros(len(scores), dtype=torch.float64), torch.zeros(len(scores), dtype=torch.float64)
    for number in range(PARTS):
        seen, new = part != number, part == number
        line[new] = fit_grade_map(scores[seen], valid.labels[seen]).at_least(scores[new])
        isotonic = IsotonicRegression(out_of_bounds="clip").fit(scores[seen].double(), relevant[seen].double())
        steps[new] = torch.from_numpy(isotonic.predict(scores[new].double()))
    return {"line": reliability(line, relevant).brier, "isotonic": reliability(steps, relevant).brier}


def measure(name: str, fold: RankingFold, seed: int, *, budget: str = "normal") -> dict[str, Any]:
    """All figures of one set."""
    ranker = LGMMLRanker(random_state=seed, budget=budget, n_jobs=1)
    X, y, qid = in_arrays(fold.train)
    model = ranker.fit(X, y, qid=qid, eval_set=in_arrays(fold.valid)).model_
    on_valid, scores, relevant = model.score(fold.valid), model.score(fold.test), fold.test.labels >= 1
    rows = {}
    for kind, chances in as_chances(fold.valid, on_valid, scores).items():
        found = reliability(chances, relevant)
        rows[kind] = {"ece": found.error, "brier": found.brier}
    trees = fit_lightgbm({"train": fold.train, "valid": fold.valid}, Measure.of("ndcg@10"), seed=seed, threads=1)
    theirs = as_chances(fold.valid, *(trees.predict(part.features, part.offsets) for part in (fold.valid, fold.test)))
    for kind in ("logistic of the score", "the map"):
        found = reliability(theirs[kind], relevant)
        rows[f"LightGBM, {kind}"] = {"ece": found.error, "brier": found.brier}
    log.info("%s: %s", name, rows)
    return {
        "rows": rows,
        "ndcg@10": [mean_measure(scores, fold.test), mean_measure(model.calibrated.at_least(scores), fold.test)],
        "ndcg@10 by expected label": mean_measure(model.calibrated.expected(scores), fold.test),
        "validation": line_or_steps(fold.valid, on_valid, seed),
        "queries": {"train": len(fold.train), "validation": len(fold.valid), "test": len(fold.test)},
        "test documents": fold.test.num_documents,
        "share relevant": {
            "validation": float((fold.valid.labels >= 1).double().mean()), "test": float(relevant.double().mean()),
        },
    }  # fmt: skip


def tables(sets: dict[str, Any]) -> str:
    """Calibration error and Brier score of every set, then NDCG and counts, as Markdown."""
    kinds = next(iter(sets.values()))["rows"]
    rows = []
    for kind in kinds:
        cells = [f"{found['rows'][kind]['ece']:.4f} / {found['rows'][kind]['brier']:.4f}" for found in sets.values()]
        rows.append([kind, *cells])
    errors = markdown(["calibration error / Brier score", *sets], rows)
    facts = []
    for name, found in sets.items():
        before, after = found["ndcg@10"]
        shares = [f"{share:.3f}" for share in found["share relevant"].values()]
        brier = found["validation"]
        facts.append([
            name, *found["queries"].values(), f"{found['test documents']:,}", *shares, f"{before:.6f}", f"{after:.6f}",
            f"{brier['line']:.4f}", f"{brier['isotonic']:.4f}",
        ])  # fmt: skip
    head = ["set", "training queries", "validation queries", "test queries", "test documents", "relevant, validation",
            "relevant, test", "NDCG@10 before", "NDCG@10 after", "Brier, line", "Brier, isotonic"]  # fmt: skip
    return f"{errors}\n\n{markdown(head, facts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a generated set and little work, without a file")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    chosen, budget = (TOY, "fast") if args.quick else (SETS, "normal")
    found = {}
    for name, fold in chosen.items():
        found[name] = measure(name, fold(), args.seed, budget=budget)
    if not args.quick:
        content = {"seed": args.seed, "machine": machine_facts(), "sets": found}
        write_text(RESULTS, json.dumps(content, indent=1) + "\n")
    print(tables(found))


if __name__ == "__main__":
    main()
