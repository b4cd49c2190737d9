from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lgmml_torch.checks import ConfigError, DataError
from lgmml_torch.data.examples import Examples, random_splits, save_examples
from lgmml_torch.functional.examples import ExampleSet
from research.protocol import (
    class_labels,
    example_fold,
    has_folder,
    present,
    ranking_fold,
    split_name,
    with_noise,
)


def test_class_labels_are_found_again() -> None:
    rows, asked = torch.tensor([0, 1, 1, 2, 0]), torch.tensor([2, 0, 1, 1])
    data = ExampleSet.from_labels(torch.randn(5, 2), rows, torch.randn(4, 2), asked)
    found, queries = class_labels(data)
    assert torch.equal(queries[:, None] == found, asked[:, None] == rows)
    assert torch.equal(found[:, None] == found, rows[:, None] == rows)


@pytest.mark.parametrize(("name", "sizes"), [("synthetic-3", (60, 30, 30)), ("digits-300", (103, 77, 77))])
def test_example_folds_share_no_item(name: str, sizes: tuple[int, int, int]) -> None:
    fold, other = example_fold(name, 0), example_fold(name, 1)
    assert not torch.equal(fold.train.database, other.train.database)
    assert torch.equal(fold.train.database, fold.train.queries)
    for part in (fold.valid, fold.test):
        assert torch.equal(part.database, fold.train.database)
        assert float(torch.cdist(part.queries, part.database).min()) > 0
    assert float(torch.cdist(fold.valid.queries, fold.test.queries).min()) > 0
    assert bool(fold.test.usable.all())
    for part, size in zip((fold.train, fold.valid, fold.test), sizes, strict=True):
        assert abs(part.num_queries - size) <= 20


def test_folder_like_cal10k_is_a_fold(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, 3, generator=generator)
    relevant = torch.tensor([(i + 1) % 20 for i in range(20)])
    save_examples(
        Examples(features, relevant, torch.arange(21), splits=random_splits(20, splits=2)), tmp_path / "songs"
    )
    fold = example_fold("songs", 1, str(tmp_path))
    assert (fold.train.num_queries, fold.valid.num_queries, fold.test.num_queries) == (8, 6, 6)
    assert torch.equal(fold.train.own_rows, torch.arange(8))
    with pytest.raises(DataError, match="`fold` must be below the number of splits, 2, got 2"):
        example_fold("songs", 2, str(tmp_path))
    assert present(["songs", "cal10k"], str(tmp_path)) == (["songs"], ["cal10k"])
    assert has_folder(str(tmp_path / "songs"), None)


def test_ranking_folds_hold_out_every_query_once() -> None:
    folds = [ranking_fold("generated-20-4", number) for number in range(5)]
    assert sorted(qid for fold in folds for qid in fold.test.qids) == sorted(
        {qid for fold in folds for part in (fold.train, fold.valid, fold.test) for qid in part.qids}
    )
    for fold in folds:
        assert (fold.train.num_queries, fold.valid.num_queries, fold.test.num_queries) == (12, 4, 4)
        assert not set(fold.train.qids) & set(fold.test.qids)
        assert not set(fold.valid.qids) & set(fold.test.qids)


@pytest.mark.realdata
def test_real_sets_without_folds_keep_all_their_queries(data_dir: Path) -> None:
    fold = ranking_fold("lgbm-rank", 0, str(data_dir))
    assert fold.train.num_queries + fold.valid.num_queries + fold.test.num_queries == 251
    assert ranking_fold("ohsumed", 4, str(data_dir)).test.num_queries == 21


def test_yahoo_has_one_split() -> None:
    with pytest.raises(DataError, match="'yahoo1' comes in one split, got fold 1"):
        ranking_fold("yahoo1", 1)
    assert split_name("yahoo1") == "official split"
    assert split_name("mq2008") == "official folds"


def test_noise_keeps_the_features_and_means_nothing() -> None:
    X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 100.0])
    for kind in ("normal", "permuted"):
        noisy = with_noise(X, 2, kind, seed=1)
        assert noisy.shape == (200, 9)
        assert torch.equal(noisy[:, :3], X)
        both = torch.corrcoef(noisy.T)[:3, 3:]
        assert float(both.abs().max()) < 0.25
        assert torch.equal(noisy, with_noise(X, 2, kind, seed=1))
    assert torch.equal(noisy[:, 3:6].sort(0).values, X.sort(0).values)
    assert torch.equal(with_noise(X, 0, "normal", seed=0), X)
    with pytest.raises(ConfigError, match="`kind` of noise must be normal or permuted, got 'pink'"):
        with_noise(X, 1, "pink", seed=0)
