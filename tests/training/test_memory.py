"""Memory of processes that share a set: each holds its own part of it, and a little."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lgmml_torch.data.shards import open_shards
from lgmml_torch.data.write import write_shards
from lgmml_torch.fitting.boosted import BoostedBuilder
from lgmml_torch.models.preprocess.compose import all_views, list_rank_features
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.stages import prepare
from research.speed.harness import watched
from tests.processes import in_processes
from tests.training.tiny import trained_recipe

DOCUMENTS, FEATURES = 80_000, 64
MIB = DOCUMENTS * FEATURES * 4 / 2**20


def prepared(folder: Path, kind: str) -> dict[str, float]:
    """How much more of its own memory, and of mapped files, a process has at most while it prepares its lists."""
    recipe = replace(trained_recipe(), preprocess=partial(all_views, ramps=2), features="all")
    if kind == "boosted":
        recipe = replace(recipe, preprocess=list_rank_features, fit_bank=BoostedBuilder(rounds=2, candidates=3))
    with watched(every=0.005) as most:
        start = dict(most)
        data = open_shards(folder, cache=folder.parent / "cache", progress=False)
        prepare({"train": data}, recipe)
    return {name: (most[name] - start[name]) * 1024 for name in ("anonymous", "mapped")}


@pytest.mark.skipif("LGMML_PROCESSOR" in os.environ, reason="the pretend processor copies the terms of products")
def test_each_process_holds_its_part(tmp_path: Path) -> None:
    """The set has 20 MiB of features, 39 or 98 more in all views: two copies of those would be too much."""
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.rand(DOCUMENTS, FEATURES, generator=generator), torch.arange(DOCUMENTS) % 3
    lists = RankingData.from_arrays(features, labels, group=[100] * (DOCUMENTS // 100))
    write_shards(lists, tmp_path / "shards", documents=5_000)
    for kind, views in (("trained", 5), ("boosted", 2)):
        found = {count: in_processes(count, prepared, tmp_path / "shards", kind) for count in (1, 3)}
        total = (1 + views) * MIB
        assert max(each["mapped"] for each in found[3]) < found[1][0]["mapped"] - total / 2, (kind, found)
        for count, processes in found.items():
            for each in processes:
                assert each["mapped"] < total / count + 75, (kind, found)  # and what programs map of libraries
                assert each["anonymous"] < 130, (kind, found)
