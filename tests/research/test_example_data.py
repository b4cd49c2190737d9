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
from research.by_example.sets import ExampleSet, example_metrics, squared_distances


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


def test_round_trip(tmp_path: Path) -> None:
    given = items(ids=True)
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


@pytest.mark.parametrize(("queries", "database"), [("test", "train"), ("train", "train")])
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
        ("relevant.txt", "1\n\nx\n", r"relevant\.txt:3: row numbers must lie in \[0, 3\), got 'x'"),
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


@pytest.mark.parametrize(("classes", "dim", "points", "condition"), [(2, 1, 2, 3e3), (5, 4, 5, 50.0)])
def test_classes_are_those_of_the_definition(classes: int, dim: int, points: int, condition: float) -> None:
    seed = 1
    want = plain_classes(classes, dim, points, seed, condition)
    given = synthetic_classes(classes, dim, points, seed=seed, condition=condition, dtype=torch.float64)
    half = points // 2
    np.testing.assert_allclose(given.database.numpy(), want[:, :half].reshape(-1, dim), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(given.queries.numpy(), want[:, half:].reshape(-1, dim), rtol=1e-6, atol=1e-8)
    for query in range(len(given.queries)):
        own = query // (points - half)
        rows = given.relevant[given.offsets[query] : given.offsets[query + 1]]
        assert rows.tolist() == list(range(own * half, (own + 1) * half))


def mean_ap(data: ExampleSet, factors: torch.Tensor | None = None) -> float:
    """MAP with one factor for all queries, or one for each class of consecutive queries."""
    if factors is None or factors.dim() == 2:
        distances = squared_distances(data.queries, data.database, factors)
    else:
        parts = data.queries.chunk(len(factors))
        distances = torch.cat([squared_distances(q, data.database, f) for q, f in zip(parts, factors, strict=True)])
    return float(example_metrics(distances, *data.masks())["map"].nanmean())


def whitening(centred: torch.Tensor) -> torch.Tensor:  # (n, D) -> (D, D)
    scatter = centred.mT @ centred / len(centred)
    ridge = 0.1 * scatter.trace() / len(scatter) * torch.eye(len(scatter), dtype=scatter.dtype)
    return torch.linalg.cholesky(torch.linalg.inv(scatter + ridge))


def test_classes_need_a_local_metric() -> None:
    classes = 10
    data = synthetic_classes(classes, seed=0, dtype=torch.float64)
    groups = data.database.view(classes, 20, 20)
    centred = groups - groups.mean(1, keepdim=True)
    together = mean_ap(data, whitening(centred.flatten(0, 1)))
    apart = mean_ap(data, torch.stack([whitening(group) for group in centred]))
    assert 1 / classes < together < 0.6
    assert apart > together + 0.3


def test_round_classes_are_easy() -> None:
    assert mean_ap(synthetic_classes(10, seed=0, condition=1.0)) > 0.999


def test_digits() -> None:
    data, again, other = digits_examples(seed=1), digits_examples(seed=1), digits_examples(seed=2)
    assert len(data.database) + len(data.queries) == 1797
    assert torch.equal(data.queries, again.queries)
    assert not torch.equal(data.queries, other.queries)
    assert data.usable.all()
    assert 0.6 < mean_ap(data) < 0.75
    with pytest.raises(LGMMLError, match="`queries` must be strictly between 0 and 1, got 1"):
        digits_examples(queries=1.0)
