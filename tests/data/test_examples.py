"""Query-by-example sets: folders, splits, relevance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data.catalog import open_dataset, open_examples
from lgmml_torch.data.examples import Examples, load_examples, random_splits, save_examples


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
    with pytest.raises(DataError, match="holds a query-by-example set: use `open_examples`"):
        open_dataset(tmp_path / "CAL10K")


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
