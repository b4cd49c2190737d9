"""Work that several experiments with given lists have in common: one system on one fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from research.protocol import ranking_fold
from research.store import Job, Record, Store
from research.systems import NAMES, noisy_ranking, rank_with, ranking_system

Noise = tuple[int, str] | None  # how many times as many features, and of which kind


def ranking_job(
    cfg: Any, data: str, fold: int, system: str, options: Mapping[str, Any], seed: int, noise: Noise = None
) -> Job:
    """Fit one system on one fold, with or without features that mean nothing."""

    def make() -> Record:
        parts = ranking_fold(data, fold, cfg.data_dir)
        if noise is not None:
            parts = noisy_ranking(parts, *noise, seed=fold)
        return rank_with(ranking_system(system, options, seed=seed, threads=cfg.threads), parts)

    settings: dict[str, Any] = {
        "data": data, "fold": fold, "system": system, "options": dict(options), "seed": seed, "threads": cfg.threads,
    }  # fmt: skip
    if noise is not None:
        settings |= {"noise": noise[1], "times": noise[0]}
    return Job("ranking", settings, make)


def all_folds(
    cfg: Any, store: Store, data: str, system: str, folds: Sequence[int], noise: Noise = None
) -> list[list[Record]]:
    """Records by seed, then by fold."""
    options = dict(cfg.systems[system] or {})
    shown = "" if noise is None else f", {noise[0]}x {noise[1]}"
    return [
        store.all(
            [ranking_job(cfg, data, fold, system, options, seed, noise) for fold in folds],
            f"{data}{shown}, {NAMES[system]}, seed {seed}",
        )
        for seed in cfg.seeds
    ]


def per_query(records: list[list[Record]], metric: str) -> Tensor:  # (Q,)
    """The values of all folds, averaged over seeds."""
    rows = [torch.cat([record.tensor(metric) for record in by_fold]) for by_fold in records]
    return torch.stack(rows).mean(0)


def flat(records: list[list[Record]]) -> list[Record]:
    """All records of all seeds."""
    return [record for by_fold in records for record in by_fold]
