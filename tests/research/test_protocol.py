from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError
from research.by_example.data import Examples, random_splits, save_examples
from research.compare import System
from research.paper.jobs import ranking_job
from research.protocol import (
    NOISES,
    TOY,
    Noise,
    RankingFold,
    example_fold,
    has_folder,
    noise_columns,
    noisy_examples,
    present,
    ranking_fold,
)
from research.quality.work import Plan, fit_job
from research.store import Job, Store


@pytest.mark.parametrize("name", ["synthetic-3", "digits-300"])
def test_example_folds_share_no_item(name: str) -> None:
    fold, other = example_fold(name, 0), example_fold(name, 1)
    assert not torch.equal(fold.train.database, other.train.database)
    assert torch.equal(fold.train.database, fold.train.queries)
    for part in (fold.valid, fold.test):
        assert torch.equal(part.database, fold.train.database)
        assert float(torch.cdist(part.queries, part.database).min()) > 0
    assert float(torch.cdist(fold.valid.queries, fold.test.queries).min()) > 0
    assert bool(fold.test.usable.all())


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
    name, queries = "generated-20-4", 20
    folds = [ranking_fold(name, number) for number in range(5)]
    assert sorted(qid for fold in folds for qid in fold.test.qids) == list(range(queries))
    for number, fold in enumerate(folds):
        parts = [set(part.qids) for part in (fold.train, fold.valid, fold.test)]
        assert [len(part) for part in parts] == [queries * 3 // 5, queries // 5, queries // 5]
        assert len(set.union(*parts)) == queries
        assert fold.valid.qids == folds[(number + 1) % 5].test.qids
    with pytest.raises(DataError, match=rf"`fold` must lie in \[0, 4\] for '{name}', got 5"):
        ranking_fold(name, 5)


def test_files_are_pooled_in_their_order_and_cut_by_one_permutation(tmp_path: Path) -> None:
    """The numbers of the lists, written into their one feature, against the cut done by hand."""
    rows = [f"{number % 2} qid:{qid} 1:{number}\n" for number, qid in enumerate([9, 9, 3, 5, 5, 7, 2, 2, 4, 8, 6, 1])]
    for part, lines in (("train", rows[:5]), ("vali", rows[5:8]), ("test", rows[8:])):
        (tmp_path / f"{part}.txt").write_text("".join(lines))
    lists = [[0, 1], [2], [3, 4], [5], [6, 7], [8], [9], [10], [11]]  # as they follow one another
    shuffled = np.random.default_rng(0).permutation(len(lists))
    for fold in range(5):
        found = ranking_fold(str(tmp_path), fold)
        expected = {tuple(lists[i]) for i in shuffled[fold::5]}
        test = found.test
        assert {tuple(sorted(part.tolist())) for part in test.features[:, 0].split(test.sizes.tolist())} == expected
        assert found.train.num_queries + found.valid.num_queries + test.num_queries == 9


class Seen(Exception):  # noqa: N818
    pass


def seen_by(job: Job) -> RankingFold:
    """The fold a job of either command hands to its system."""
    with pytest.raises(Seen) as caught:
        job.make()
    fold: RankingFold = caught.value.args[0]
    return fold


@pytest.mark.parametrize("noise", [None, "permuted"])
def test_paper_and_quality_use_the_same_queries(
    noise: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(fold: RankingFold, seed: int, options: object) -> None:
        raise Seen(fold)

    spy = System("spy", look, {"spy": "spy"})  # type: ignore[arg-type]
    monkeypatch.setattr("research.paper.jobs.find_system", lambda _: spy)
    cfg = type("Settings", (), {"data_dir": None, "threads": 1})
    paper = seen_by(ranking_job(cfg, TOY, 3, "spy", {}, 0, None if noise is None else Noise(noise, 2)))
    quality = seen_by(fit_job(Store(tmp_path), Plan(), spy, TOY, 3, noise, 0))
    for one, two in zip(vars(paper).values(), vars(quality).values(), strict=True):
        assert one.qids == two.qids
        assert torch.equal(one.features, two.features)
        assert torch.equal(one.labels, two.labels)


@pytest.mark.realdata
def test_the_cut_is_the_one_the_published_figures_are_from(data_dir: Path) -> None:
    """Queries without a relevant document, fold by fold, as in the stored values of every test query."""
    stored = Path(__file__).parents[2] / "research" / "results" / "quality-per-query.npz"
    with np.load(stored) as arrays:
        values = arrays["random|lgbm-rank"][0]
    tests = [ranking_fold("lgbm-rank", fold, str(data_dir)).test for fold in range(5)]
    relevant = [bool((part > 0).any()) for test in tests for part in test.labels.split(test.sizes.tolist())]
    assert (~np.isnan(values)).tolist() == relevant


def test_noise_keeps_the_features_and_means_nothing() -> None:
    X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 100.0])
    for kind in NOISES:
        noisy = noise_columns(X, Noise(kind, 2), np.random.default_rng(1))
        assert noisy.shape == (200, 9)
        assert torch.equal(noisy[:, :3], X)
        both = torch.corrcoef(noisy.T)[:3, 3:]
        assert float(both.abs().max()) < 0.25
        assert torch.equal(noisy, noise_columns(X, Noise(kind, 2), np.random.default_rng(1)))
    assert torch.equal(noisy[:, 3:6].sort(0).values, X.sort(0).values)
    assert torch.equal(noise_columns(X, Noise("normal", 0), np.random.default_rng(0)), X)


def test_noise_of_a_fold_is_drawn_for_each_part_by_itself() -> None:
    clean, noisy = ranking_fold(TOY, 0), ranking_fold(TOY, 0, noise=Noise("permuted", 2))
    width = clean.train.num_features
    for name, part in vars(noisy).items():
        real = vars(clean)[name].features
        assert part.num_features == 3 * width
        assert torch.equal(part.features[:, :width], real)
        assert torch.equal(part.features[:, width : 2 * width].sort(0).values, real.sort(0).values)
        assert not torch.equal(part.features[:, width : 2 * width], part.features[:, 2 * width :])


def test_noisy_examples_share_one_database() -> None:
    fold = example_fold("synthetic-3", 0)
    noisy = noisy_examples(fold, Noise("normal", 1), seed=5)
    assert torch.equal(noisy.train.queries, noisy.train.database)
    for part in (noisy.valid, noisy.test):
        assert torch.equal(part.database, noisy.train.database)
        assert part.queries.shape[1] == 2 * fold.train.database.shape[1]
    scaled = noisy.train.database[:, : fold.train.database.shape[1]]
    assert float(scaled.std(0, correction=0).square().mean()) == pytest.approx(1, abs=1e-5)
