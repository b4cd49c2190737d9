"""L-GMML for the quality benchmark: the paper's model under each policy, boosted metrics, WARP on top, and bags."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from torch import Tensor

from lgmml_torch.app.config import load_config
from lgmml_torch.app.train import fit_metrics, train_best_phi
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.models.phi import POLICIES, Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import build_preprocess, list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.stages import Prepared, prepare
from research.protocol import RankingFold
from research.quality.trees import Score

SEARCH_EPOCHS = 2  # of the paper's thirty, to choose among nine settings in reasonable time
PAPER_INITS, PAPER_MARGINS = (1.0, 0.1, 10.0), (0.1, 0.01, 1.0)
RATES = (0.001, 0.01, 0.1)
QUIET = (
    "callbacks=quiet", "~callbacks.story", "logger=none", "loader.num_workers=0", "paths.cache_dir=false",
    "paths.output_dir=unused", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false",
)  # fmt: skip


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for checkpoints nobody keeps; Lightning's greetings are left out."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def scorer(model: LGMML, policy: str | None = None) -> Score:
    """Scores under a policy."""

    def score(data: RankingData) -> Tensor:
        return model.score(data, policy=policy)

    return score


def paper_bank(fold: RankingFold, seed: int) -> Prepared:
    """The paper's regions, metrics and anchors."""
    cfg = load_config(["experiment=paper", f"seed={seed}", *QUIET])
    return fit_metrics(cfg, {"train": fold.train, "valid": fold.valid}, [])


def paper_phi(prepared: Prepared, seed: int, init: float, margin: float, epochs: int) -> LGMML:
    """The paper's Φ: a row for each training query, plain SGD with its falling step."""
    search = (f"search.init=[{init}]", f"search.margin=[{margin}]")
    rare = f"trainer.check_val_every_n_epoch={epochs}"  # nothing is chosen by the validation of single epochs
    cfg = load_config(["experiment=paper", f"seed={seed}", *QUIET, *search, f"trainer.max_epochs={epochs}", rare])
    with scratch() as folder:
        return train_best_phi(cfg, prepared, [], folder)[0].model.eval()


def choose_paper(fold: RankingFold, quick: bool = False) -> tuple[dict[str, Any], float]:
    """Starting weight and margin by validation NDCG@10 under ``mean``; ``ones`` would not tell them apart."""
    prepared = paper_bank(fold, 0)
    found = []
    points = list(product(PAPER_INITS, PAPER_MARGINS))
    for number, (init, margin) in enumerate(points[:2] if quick else points):
        model = paper_phi(prepared, 0, init, margin, SEARCH_EPOCHS)
        value = mean_ndcg(scorer(model, "mean")(fold.valid), fold.valid)
        found.append((value, -number, {"init": init, "margin": margin}))
    best = max(found, key=lambda item: item[:2])
    return best[2], best[0]


def fit_paper(fold: RankingFold, seed: int, chosen: Mapping[str, Any]) -> tuple[dict[str, Score], dict[str, Any]]:
    """The paper's model with each policy for new queries."""
    prepared = paper_bank(fold, seed)
    model = paper_phi(prepared, seed, chosen["init"], chosen["margin"], 30)
    info = {"metrics": prepared.bank.metrics.num_metrics, "bandwidth": prepared.bank.history["bandwidth"]}
    scores = {f"paper {policy}": scorer(model, policy) for policy in POLICIES["per_query"]}
    info["valid by policy"] = {name: mean_ndcg(score(fold.valid), fold.valid) for name, score in scores.items()}
    return scores, info


def sampled_phi(prepared: Prepared, mode: str, seed: int, rate: float) -> LGMML:
    """One Φ for all queries, or one with a gate, on the paper's bank."""
    cfg = load_config([f"phi={mode}", f"seed={seed}", *QUIET, f"optimizer.lr={rate}"])
    with scratch() as folder:
        return train_best_phi(cfg, prepared, [], folder)[0].model.eval()


def choose_rate(fold: RankingFold, mode: str) -> tuple[dict[str, Any], float]:
    """The learning rate by validation NDCG@10."""
    prepared = paper_bank(fold, 0)
    found = []
    for number, rate in enumerate(RATES):
        model = sampled_phi(prepared, mode, 0, rate)
        found.append((mean_ndcg(scorer(model)(fold.valid), fold.valid), -number, {"rate": rate}))
    best = max(found, key=lambda item: item[:2])
    return best[2], best[0]


def fit_sampled_phi(
    fold: RankingFold, seed: int, chosen: Mapping[str, Any], *, mode: str
) -> tuple[dict[str, Score], dict[str, Any]]:
    """Shared or amortised Φ on the paper's bank."""
    model = sampled_phi(paper_bank(fold, seed), mode, seed, chosen["rate"])
    return {f"sampled {mode}": scorer(model)}, {}


def quantile_features() -> Preprocess:
    """The default's features without the list ranks."""
    steps = [step for step in list_rank_features().spec()["args"]["steps"] if step["name"] != "concat"]
    steps.insert(1, {"name": "quantile", "args": {"max_knots": 1024}})
    return build_preprocess({"name": "chain", "args": {"steps": steps}})


def fit_boosted_bank(
    fold: RankingFold,
    seed: int,
    settings: Sequence[str] = (),
    preprocess: Callable[[], Preprocess] = list_rank_features,
) -> Prepared:
    """Preprocessing and boosted metrics as `train.py` fits them by default, with some settings changed."""
    cfg = load_config([f"seed={seed}", *QUIET, *settings])
    fit_bank = instantiate(cfg.local_metrics, _convert_="all")
    return prepare(fold.train, fold.valid, preprocess=preprocess(), fit_bank=fit_bank, kernel=cfg.kernel, seed=seed)


def fit_boosted_model(
    fold: RankingFold,
    seed: int,
    chosen: Mapping[str, Any],
    *,
    name: str = "boosted",
    settings: Sequence[str] = (),
    preprocess: Callable[[], Preprocess] = list_rank_features,
    warp: bool = False,
) -> tuple[dict[str, Score], dict[str, Any]]:
    """A boosted bank with its own Φ₀; with ``warp`` also after the WARP stage, whose best epoch may be epoch 0."""
    prepared = fit_boosted_bank(fold, seed, settings, preprocess)
    history = prepared.bank.history
    info: dict[str, Any] = {"metrics": prepared.bank.metrics.num_metrics, "rounds": history.get("best_round")}
    scores = {name: scorer(prepared.model(partial(Phi, mode="shared")).eval())}
    if warp:
        start = time.process_time()
        cfg = load_config([f"seed={seed}", *QUIET, *settings])
        with scratch() as folder:
            module, keeper, _ = train_best_phi(cfg, prepared, [], folder)
        scores[f"{name}+warp"] = scorer(module.model.eval())
        info["warp"] = {
            "seconds": time.process_time() - start, "epoch kept": keeper.best_epoch, "valid by epoch": keeper.curve
        }  # fmt: skip
    return scores, info


def fit_default(fold: RankingFold, settings: Sequence[str] = ()) -> Score:
    """What `train.py` does by default: boosting, then WARP."""
    return fit_boosted_model(fold, 0, {}, settings=settings, warp=True)[0]["boosted+warp"]
