"""Query-by-example sets: folders, splits, relevance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError
from research.by_example.data import (
    Examples,
    digits_examples,
    load_examples,
    open_examples,
    random_splits,
    save_examples,
    synthetic_classes,
)


def items(count: int = 20, *, ids: bool = False) -> Examples:
    rng = np.random.default_rng(count)
    sets = [rng.permutation([j for j in range(count) if j != i])[: rng.integers(0, 5)] for i in range(count)]
    return Examples(
        torch.from_numpy(rng.normal(size=(count, 3)).astype(np.float32)),
        torch.tensor([row for rows in sets for row in rows], dtype=torch.long),
        torch.tensor(np.concatenate([[0], np.cumsum([len(rows) for rows in sets])])),
        tuple(f"song {i}" for i in range(count)) if ids else None,
        random_splits(count, seed=1),
    )


@pytest.mark.parametrize("ids", [False, True])
def test_round_trip(ids: bool, tmp_path: Path) -> None:
    given = items(ids=ids)
    save_examples(given, tmp_path / "CAL10K")
    back = open_examples("cal10k", tmp_path)
    assert torch.equal(back.features, given.features)
    assert torch.equal(back.relevant, given.relevant)
    assert torch.equal(back.offsets, given.offsets)
    assert back.ids == given.ids
    assert len(back.splits) == 10
    for a, b in zip(back.splits, given.splits, strict=True):
        assert all(torch.equal(getattr(a, part), getattr(b, part)) for part in ("train", "valid", "test"))
    assert repr(back) == f"Examples(20 items, 3 features, {len(given.relevant)} relevant pairs, 10 splits)"
    with pytest.raises(DataError, match="query-by-example set 'songs' not found below "):
        open_examples("songs", tmp_path)


def test_random_splits_are_disjoint_and_of_the_asked_size(tmp_path: Path) -> None:
    for split in random_splits(100, seed=3):
        assert (len(split.train), len(split.valid), len(split.test)) == (40, 30, 30)
        assert torch.cat([split.train, split.valid, split.test]).sort().values.tolist() == list(range(100))
    first, second = random_splits(50)[0], random_splits(50)[1]
    assert not torch.equal(first.train, second.train)
    assert torch.equal(first.train, random_splits(50)[0].train)
    np.savetxt(tmp_path / "features.csv", np.eye(4), delimiter=",")
    (tmp_path / "relevant.txt").write_text("1\n0 2\n\n0\n")
    loaded = load_examples(tmp_path, seed=5)
    assert torch.equal(loaded.features, torch.eye(4))
    assert torch.equal(loaded.splits[3].valid, random_splits(4, seed=5)[3].valid)


@pytest.mark.parametrize(("queries", "database"), [("test", "train"), ("train", "train"), ("valid", "test")])
def test_example_set_by_loops(queries: str, database: str) -> None:
    given = items()
    asked, ranked = getattr(given.splits[0], queries), getattr(given.splits[0], database)
    got = given.example_set(asked, ranked)
    assert torch.equal(got.queries, given.features[asked])
    assert torch.equal(got.database, given.features[ranked])
    for i, query in enumerate(asked.tolist()):
        wanted = given.relevant[given.offsets[query] : given.offsets[query + 1]].tolist()
        rows = got.relevant[got.offsets[i] : got.offsets[i + 1]]
        assert ranked[rows].tolist() == [row for row in wanted if row in ranked.tolist()]
        assert got.own_rows[i] == (ranked.tolist().index(query) if query in ranked.tolist() else -1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("relevant.txt", "1\n", r"relevant\.txt:1: 3 items need 3 lines, got 1"),
        ("relevant.txt", "1\n7\n\n", r"relevant\.txt:2: row numbers must lie in \[0, 3\), got '7'"),
        ("relevant.txt", "1\n\nx\n", r"relevant\.txt:3: row numbers must lie in \[0, 3\), got 'x'"),
        ("relevant.txt", "1 1\n\n\n", r"relevant\.txt:1: an item is listed twice"),
        ("relevant.txt", "\n1\n\n", r"relevant\.txt:2: item 1 must not be relevant to itself"),
        ("ids.txt", "a\nb\n", r"ids\.txt:2: 3 items need 3 names, got 2"),
        ("Split1/test.txt", "0\n", r"Split1: an item must be in one part only, got item 0 more than once"),
        ("features.npy", "junk", r"features\.npy: cannot be read as numbers"),
    ],
)
def test_bad_folders(name: str, text: str, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "features.npy", np.eye(3))
    (tmp_path / "relevant.txt").write_text("1\n0\n\n")
    (tmp_path / "Split1").mkdir()
    for part, row in (("train", 0), ("vali", 1), ("test", 2)):
        (tmp_path / "Split1" / f"{part}.txt").write_text(f"{row}\n")
    assert len(load_examples(tmp_path)) == 3
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_examples(tmp_path)


def test_bad_features(tmp_path: Path) -> None:
    np.save(tmp_path / "features.npy", np.array([[1.0], [np.nan]]))
    with pytest.raises(DataError, match=r"features\.npy: values must be finite, got nan in row 1"):
        load_examples(tmp_path)
    np.save(tmp_path / "features.npy", np.ones(3))
    with pytest.raises(DataError, match=r"features\.npy: must hold one row per item, got shape \(3,\)"):
        load_examples(tmp_path)
    np.save(tmp_path / "features.npy", np.ones((2, 1)))
    with pytest.raises(DataError, match=r"relevant\.txt: no such file"):
        load_examples(tmp_path)


def folder_of(home: Path, features: np.ndarray, relevant: str) -> Path:
    home.mkdir(exist_ok=True)
    np.save(home / "features.npy", features)
    (home / "relevant.txt").write_text(relevant)
    return home


@pytest.mark.parametrize("name", ["features.csv", "features.csv.gz"])
def test_features_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "relevant.txt").write_text("1\n0\n\n")
    np.savetxt(tmp_path / name, np.array([[1.5, 2], [3, 4], [5, 6]]), delimiter=",")
    assert load_examples(tmp_path).features.tolist() == [[1.5, 2], [3, 4], [5, 6]]
    np.savetxt(tmp_path / name, np.array([7.0, 8, 9]), delimiter=",")
    assert load_examples(tmp_path).features.tolist() == [[7], [8], [9]]
    (tmp_path / "relevant.txt").write_text("\n")
    np.savetxt(tmp_path / name, np.array([[7.0, 8, 9]]), delimiter=",")
    assert load_examples(tmp_path).features.tolist() == [[7, 8, 9]]


def test_the_first_file_of_features_is_read(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "features.csv", np.ones((3, 1)), delimiter=",")
    home = folder_of(tmp_path, np.eye(3), "\n\n\n")
    assert load_examples(home).features.tolist() == np.eye(3).tolist()


def test_items_without_anything_relevant(tmp_path: Path) -> None:
    home = folder_of(tmp_path, np.eye(3), "\n\n\n")
    given = load_examples(home, dtype=torch.float64)
    assert given.features.dtype == torch.float64
    assert load_examples(home).features.dtype == torch.float32
    assert (given.relevant.tolist(), given.relevant.dtype) == ([], torch.long)
    assert given.offsets.tolist() == [0, 0, 0, 0]
    assert given.ids is None
    part = given.example_set(torch.tensor([0, 2]), torch.tensor([2, 1]))
    assert part.offsets.tolist() == [0, 0, 0]
    assert part.own_rows.tolist() == [-1, 0]
    assert torch.equal(given.splits[0].train, random_splits(3, seed=0)[0].train)
    other = [load_examples(home, seed=seed).splits for seed in (1, 2)]
    assert any(not torch.equal(a.train, b.train) for a, b in zip(*other, strict=True))


def test_parts_that_are_empty(tmp_path: Path) -> None:
    home = folder_of(tmp_path, np.eye(3), "\n\n\n")
    for part, text in (("train", "2\n0\n"), ("vali", ""), ("test", "1\n")):
        (home / "Split1").mkdir(exist_ok=True)
        (home / "Split1" / f"{part}.txt").write_text(text)
    (split,) = load_examples(home).splits
    assert (split.train.tolist(), split.valid.tolist(), split.test.tolist()) == ([2, 0], [], [1])
    assert {split.train.dtype, split.valid.dtype, split.test.dtype} == {torch.long}
    (home / "Split1" / "vali.txt").unlink()
    with pytest.raises(DataError, match=r"vali\.txt: no such file"):
        load_examples(home)


@pytest.mark.parametrize("word", ["3", "10", "1" * 17, "1" * 40, "0" * 18 + "3", "0" * 18 + "1", "-1", "1.0"])
def test_row_numbers_end_with_the_items(tmp_path: Path, word: str) -> None:
    home = folder_of(tmp_path, np.eye(3), f"2\n0 {word}\n\n")
    with pytest.raises(DataError, match=rf"relevant\.txt:2: row numbers must lie in \[0, 3\), got '{word[:40]}'"):
        load_examples(home)
    folder_of(tmp_path, np.eye(3), f"2 1\n0 2\n{'0' * 17}1\n")
    assert load_examples(home).relevant.tolist() == [2, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([["a"], ["b"]]), "cannot be read as numbers"),
        (np.zeros((0, 3)), r"must hold one row per item, got shape \(0, 3\)"),
        (np.zeros((2, 2, 2)), r"must hold one row per item, got shape \(2, 2, 2\)"),
        (np.array([[0.0, 1.0], [np.inf, 0.0]]), "values must be finite, got inf in row 1"),
    ],
)
def test_features_that_are_no_table(tmp_path: Path, values: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=rf"features\.npy: {message}"):
        load_examples(folder_of(tmp_path, values, "\n\n"))


def test_shares_of_splits_need_not_add_up_to_one() -> None:
    for fractions in ((2.0, 1.0, 1.0), (0.5, 0.25, 0.25)):
        (split,) = random_splits(20, splits=1, fractions=fractions)
        assert (len(split.train), len(split.valid), len(split.test)) == (10, 5, 5)
    (split,) = random_splits(10, splits=1, fractions=(0.25, 0.5, 0.25))
    assert (len(split.train), len(split.valid), len(split.test)) == (2, 6, 2)
    assert len(random_splits(4)) == 10
    for a, b in zip(random_splits(30), random_splits(30, seed=0), strict=True):
        assert torch.equal(a.train, b.train)
        assert a.train.tolist() == sorted(a.train.tolist())


def plain_classes(classes: int, dim: int, points: int, seed: int, condition: float) -> np.ndarray:
    """Gaussian classes by the definition of an ellipsoid that touches another, pair by pair."""
    from scipy.stats import chi2

    rng = np.random.default_rng(np.random.SeedSequence([seed, classes, dim, points]))
    spread = condition ** rng.uniform(-0.25, 0.25, (classes, dim))
    axes = []
    for _ in range(classes):
        q, r = np.linalg.qr(rng.normal(size=(dim, dim)))
        axes.append(np.stack([q[:, i] * np.sign(r[i, i]) for i in range(dim)], axis=1))
    centres = rng.normal(size=(classes, dim))
    radius = np.sqrt(chi2.ppf(0.95, dim))

    def reach(one: int, u: np.ndarray) -> float:
        precision = axes[one] @ np.diag(spread[one] ** -2.0) @ axes[one].T
        return radius / np.sqrt(u @ precision @ u)

    touching = []
    for i in range(classes):
        factors = []
        for j in range(classes):
            if j != i:
                length = np.linalg.norm(centres[i] - centres[j])
                u = (centres[j] - centres[i]) / length
                factors.append((reach(i, u) + reach(j, u)) / length)
        touching.append(max(factors))
    drawn = rng.normal(size=(classes, points, dim))
    scaled = np.median(touching) * centres
    return np.stack([[scaled[c] + axes[c] @ (spread[c] * z) for z in drawn[c]] for c in range(classes)])


@pytest.mark.parametrize(
    ("classes", "dim", "points", "condition"), [(2, 1, 2, 3e3), (2, 2, 3, 1.0), (5, 4, 5, 50.0), (4, 7, 4, 3e3)]
)
@pytest.mark.parametrize("seed", range(4))
def test_classes_are_those_of_the_definition(classes: int, dim: int, points: int, condition: float, seed: int) -> None:
    want = plain_classes(classes, dim, points, seed, condition)
    given = synthetic_classes(classes, dim, points, seed=seed, condition=condition, dtype=torch.float64)
    half = points // 2
    np.testing.assert_allclose(given.database.numpy(), want[:, :half].reshape(-1, dim), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(given.queries.numpy(), want[:, half:].reshape(-1, dim), rtol=1e-6, atol=1e-8)
    for query in range(len(given.queries)):
        own = query // (points - half)
        rows = given.relevant[given.offsets[query] : given.offsets[query + 1]]
        assert rows.tolist() == list(range(own * half, (own + 1) * half))


def test_classes_by_default() -> None:
    given = synthetic_classes(2)
    same = synthetic_classes(2, 20, 40, seed=0, condition=3000.0, dtype=torch.float32)
    assert torch.equal(given.database, same.database)
    assert given.queries.dtype == torch.float32


def test_digits_by_hand() -> None:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    asked: list[int] = []
    for digit in range(10):
        rows = rng.permutation([row for row in range(len(digits)) if digits[row] == digit])
        asked += rows[: len(rows) // 2].tolist()
    given, rest = digits_examples(), sorted(set(range(len(digits))) - set(asked))
    assert torch.equal(given.queries, torch.from_numpy(images[sorted(asked)] / 16).float())
    assert torch.equal(given.database, torch.from_numpy(images[rest] / 16).float())
    for place, row in enumerate(sorted(asked)[:50]):
        own = given.relevant[given.offsets[place] : given.offsets[place + 1]].tolist()
        assert own == [at for at, other in enumerate(rest) if digits[other] == digits[row]]
    assert digits_examples(dtype=torch.float64).queries.dtype == torch.float64
    for share in (0, 1):
        with pytest.raises(LGMMLError, match=f"`queries` must be strictly between 0 and 1, got {share}"):
            digits_examples(queries=share)
    with pytest.raises(LGMMLError, match=r"`queries` must lie in \[0, 1\], got -0.5"):
        digits_examples(queries=-0.5)


def test_the_smallest_classes() -> None:
    given = synthetic_classes(2, 1, 2, condition=1.0)
    assert (len(given.database), len(given.queries)) == (2, 2)
