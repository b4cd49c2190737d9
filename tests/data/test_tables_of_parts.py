"""One table or a folder of them: weights and places shown, parts by a column, names of features, defaults and keys."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data.catalog import load_parts, open_dataset, open_table
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.letor import load_file
from lgmml_torch.data.write import save_letor, save_table
from lgmml_torch.ragged import RankingData
from tests.data.test_letor import assert_same, random_data
from tests.data.test_source import in_order
from tests.doors import save_lightgbm

pd = pytest.importorskip("pandas")


def clicks(queries: int = 10) -> Any:
    """Two rows of each query, scattered; weights of documents, places from 1."""
    rows = 2 * queries
    return pd.DataFrame(
        {
            "qid": [row % queries for row in range(rows)],
            "label": [row % 3 for row in range(rows)],
            "x": [float(row) for row in range(rows)],
            "w": [1 + 0.5 * (row % 4) for row in range(rows)],
            "p": [rows - row for row in range(rows)],
        }
    )


def save(frame: Any, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(file, index=False) if file.suffix == ".csv" else frame.to_parquet(file)
    return file


def by_x(part: RankingData, values: torch.Tensor | None) -> dict[float, float]:
    """A value for each document, by its only feature."""
    assert values is not None
    return dict(zip(part.features[:, 0].tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("ending", ["csv", "parquet", "pieces"])
def test_weights_and_places_of_each_row(tmp_path: Path, ending: str) -> None:
    frame = clicks()
    path = tmp_path / f"t.{ending}"
    if ending == "pieces":
        for number in range(2):
            save(frame[frame["qid"] % 2 == number], path / f"{number}.csv")
    else:
        save(frame, path)
    parts = open_table(path, weight="w", position="p", cache=False)
    assert [part.num_queries for part in parts.values()] == [6, 2, 2]
    for part in parts.values():
        assert part.feature_names == ("x",)
        assert by_x(part, part.document_weights) == {x: 1 + 0.5 * (x % 4) for x in part.features[:, 0].tolist()}
        assert by_x(part, part.positions) == {x: 20 - x for x in part.features[:, 0].tolist()}
        assert part.query_weights is None
    plain = open_table(path, drop=["w", "p"], cache=False)["train"]
    assert plain.document_weights is plain.positions is None


def test_weights_that_are_the_same_in_a_list_are_those_of_queries(tmp_path: Path) -> None:
    frame = clicks()
    frame["w"] = frame["qid"] + 1.0
    part = open_table(save(frame, tmp_path / "t.csv"), weight="w", drop=["p"], cache=False)["train"]
    assert part.document_weights is None
    assert part.query_weights is not None
    assert part.query_weights.tolist() == [qid + 1.0 for qid in part.qids]  # type: ignore[operator]


@pytest.mark.parametrize("asked", ["weight", "position"])
def test_only_training_needs_the_columns_of_clicks(tmp_path: Path, asked: str) -> None:
    frame, options = clicks(), {asked: "w", "cache": False, "drop": []}
    frame = frame.drop(columns="p").assign(w=range(1, 21))
    save(frame[frame["qid"] < 6], tmp_path / "train.csv")
    save(frame[frame["qid"] >= 6].drop(columns="w"), tmp_path / "test.csv")
    parts = open_table(tmp_path, **options)
    name = "positions" if asked == "position" else "document_weights"
    train = parts["train"]
    assert by_x(train, getattr(train, name)) == {x: x + 1 for x in train.features[:, 0].tolist()}
    assert getattr(parts["test"], name) is None
    save(frame[frame["qid"] >= 6], tmp_path / "test.csv")
    test = open_table(tmp_path, **options)["test"]
    assert by_x(test, getattr(test, name)) == {x: x + 1 for x in test.features[:, 0].tolist()}
    save(frame[frame["qid"] < 6].drop(columns="w"), tmp_path / "train.csv")
    message = rf"train.csv: `{asked}` needs a table with a column 'w'"
    with pytest.raises(DataError, match=message):
        open_table(tmp_path, **options)
    with pytest.raises(
        DataError, match=rf"train.csv: `{asked}` needs a table with a column 'labels'; did you mean 'label'\?"
    ):
        open_table(tmp_path / "train.csv", **{**options, asked: "labels"})


def test_columns_of_clicks_that_cannot_be(tmp_path: Path) -> None:
    for change, message in [
        ({"w": ["x"] * 20}, "column 'w' must hold numbers, got 'x' at row 1"),
        ({"w": [1.0] * 19 + [-1]}, "`w` must be finite and at least 0, got -1"),
        ({"w": [0] * 20}, "`w` must be above 0 for some query"),
        ({"p": [1] * 18 + [2.5, 1]}, r"`p` must hold whole numbers from 0 to 65,535, got 2.5 at row 19"),
        ({"p": [1] * 18 + ["", 1]}, r"column 'p' must hold numbers, got '' at row 19 \(from 1\)"),
    ]:
        file = save(clicks().assign(**change), tmp_path / "t.csv")
        with pytest.raises(DataError, match=message):
            open_table(file, weight="w", position="p", cache=False)


def test_a_kind_is_kept_for_every_look_at_the_file(tmp_path: Path) -> None:
    frame = clicks().assign(part=["train"] * 10 + ["test"] * 10)
    frame["qid"] = [row // 2 for row in range(20)]
    file = tmp_path / "table.data"
    frame.to_csv(file, index=False)
    parts = open_table(file, kind="csv", weight="w", position="p", split="part", cache=False)
    assert {name: part.num_documents for name, part in parts.items()} == {"train": 10, "test": 10}
    assert parts["test"].positions is not None


@pytest.mark.parametrize("words", [[" Train", "train "], ["TRAIN", "Train"]])
def test_words_for_parts(tmp_path: Path, words: list[str]) -> None:
    frame = clicks(6).drop(columns=["w", "p"])
    names = {0: words, 1: ["vali", "VALID"], 2: ["validation", "valid"], 3: ["test", "Test"]}
    frame["part"] = [names.get(qid, ["train", "train"])[row // 6] for row, qid in enumerate(frame["qid"])]
    parts = open_table(save(frame, tmp_path / "t.csv"), split="part", cache=False)
    assert {name: part.qids for name, part in parts.items()} == {"train": (0, 4, 5), "valid": (1, 2), "test": (3,)}
    frame.loc[6 + 4, "part"] = "test"
    with pytest.raises(DataError, match=r"column 'part' must be the same for all rows .* several for query 4"):
        open_table(save(frame, tmp_path / "t.csv"), split="part", cache=False)
    frame.loc[3, "part"] = "dev"
    with pytest.raises(DataError, match=r"column 'part' must say train, valid or test, got 'dev' at row 4 \(from 1\)"):
        open_table(save(frame, tmp_path / "t.csv"), split="part", cache=False)


def test_lines_of_names(tmp_path: Path) -> None:
    for lines, names in [
        ("a\nb\n", ("a", "b")),
        ("\n a \n\n\tb\n", ("a", "b")),
        ("0 a\n1 b\n", ("a", "b")),
        ("1 a b\n2 c\n", ("a b", "c")),
        ("2 a\n3 b\n", ("2 a", "3 b")),
        ("0 a\n2 b\n", ("0 a", "2 b")),
        ("1 a\n0 b\n", ("1 a", "0 b")),
        ("1\n2\n", ("1", "2")),
        ("1 a\n2\n", ("1 a", "2")),
        ("1 a\nx b\n", ("1 a", "x b")),
        ("x 0\ny 1\n", ("x 0", "y 1")),
    ]:
        (tmp_path / "train.txt").write_text("1 qid:1 1:1 2:2\n")
        (tmp_path / "features.txt").write_text(lines)
        assert open_dataset(tmp_path, cache=False)["train"].feature_names == names
        asked = open_dataset(tmp_path, cache=False, feature_names=("p", "q"))["train"]
        assert asked.feature_names == ("p", "q")  # what was asked for goes first


def test_the_plain_folder_comes_before_the_gzipped_and_the_first_name_first(tmp_path: Path) -> None:
    for name, label in (("vali.txt", 1), ("valid.txt", 2), ("train.txt", 3), ("train.csv", 4)):
        text = f"qid,label,x\n1,{label},1\n" if name.endswith("csv") else f"{label} qid:1 1:1\n"
        (tmp_path / name).write_text(text)
    parts = open_dataset(tmp_path, cache=False)
    assert {name: part.labels.tolist() for name, part in parts.items()} == {"train": [3], "valid": [1]}


def test_options_reach_the_loader(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("1 qid:1 1:NULL 2:2\n0 qid:1 1:5\n")
    options: dict[str, Any] = {"missing": "query-mean", "absent": "missing", "dtype": torch.float64}
    part = open_dataset(tmp_path, num_features=3, cache=tmp_path / "cache", **options)["train"]
    assert in_order(part)[0].tolist() == [[5, 2, 0], [5, 2, 0]]
    assert part.features.dtype == torch.float64
    assert len(list((tmp_path / "cache").glob("*.lgc"))) == 1
    (tmp_path / "t.csv").write_text("qid,label,x,y\n1,1,NULL,2\n1,0,5,3\n")
    table = load_file(tmp_path / "t.csv", missing="query-min", dtype=torch.float64, feature_names="yx", cache=False)
    assert in_order(table)[0].tolist() == [[2, 5], [3, 5]]
    assert table.features.dtype == torch.float64
    with pytest.raises(DataError, match=r"t.csv:1: `num_features` asks for 3 features, but the header names 2"):
        load_file(tmp_path / "t.csv", num_features=3, missing="zero", cache=False)
    with pytest.raises(DataError, match=r"train.txt:1: the value of feature 1 is missing"):
        load_file(tmp_path / "train.txt", cache=False)
    with pytest.raises(DataError, match=r"t.csv:2: column 'x' is missing"):
        load_file(tmp_path / "t.csv", cache=False)
    zeros = load_file(tmp_path / "train.txt", missing="zero", cache=False)
    assert (in_order(zeros)[0].tolist(), zeros.features.dtype) == ([[0, 2], [5, 0]], torch.float32)


def test_a_table_to_train_on_needs_labels(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("qid,x\n1,2\n")
    with pytest.raises(DataError, match=r"the header names no column 'label', and training needs labels"):
        load_file(tmp_path / "t.csv", cache=False)
    np.savez(tmp_path / "t.npz", X=np.eye(2), qid=[1, 1])
    with pytest.raises(DataError, match=r"there are no labels, and training needs them"):
        load_file(tmp_path / "t.npz")


def test_whatever_changes_a_table_is_part_of_its_key(tmp_path: Path) -> None:
    for first, second in [
        ({}, {"columns": Columns(qid="g")}),
        ({}, {"columns": Columns(label="x")}),
        ({}, {"columns": Columns(doc_id="x")}),
        ({}, {"columns": Columns(drop=("x",))}),
        ({}, {"columns": Columns(weight="x")}),
        ({}, {"columns": Columns(position="x")}),
        ({}, {"feature_names": ("y", "g", "x")}),
        ({}, {"feature_names": ("g", "y", "x"), "num_features": 3}),
        ({}, {"missing": "zero"}),
        ({}, {"dtype": torch.float64}),
        ({}, {"kind": "tsv"}),
        ({"columns": Columns(weight="x")}, {"columns": Columns(weight="y")}),
    ]:
        file, cache = tmp_path / "t.csv", tmp_path / "cache"
        file.write_text("qid,label,g,x,y\n1,1,1,2,3\n1,0,2,3,4\n")
        before = load_file(file, cache=cache, **first)
        if second.get("kind") == "tsv":
            with pytest.raises(DataError, match="must name a column 'qid'"):
                load_file(file, cache=cache, **second)
            shutil.rmtree(cache)
            continue
        found, alone = load_file(file, cache=cache, **second), load_file(file, cache=False, **second)
        assert_same(found, alone)
        assert found.feature_names == alone.feature_names
        assert found.features.dtype == alone.features.dtype
        assert_same(load_file(file, cache=cache, **first), before)
        assert len(list(cache.glob("*.lgc"))) == 2
        shutil.rmtree(cache)


def test_what_is_read_fast_is_not_cached(tmp_path: Path) -> None:
    for name in ("t.parquet", "t.arrow"):
        save_table(random_data(1), tmp_path / name)
        assert load_file(tmp_path / name, cache=tmp_path / "cache").num_queries == 7
    assert not (tmp_path / "cache").exists()
    for number, name in enumerate(("t.csv", "t.tsv"), start=1):
        save_table(random_data(1), tmp_path / name)
        load_file(tmp_path / name, cache=tmp_path / "cache")
        assert len(list((tmp_path / "cache").glob("*.lgc"))) == number


def test_parts_without_names_have_as_many_features_as_the_widest(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 qid:1 1:1\n")
    (tmp_path / "b.txt").write_text("1 qid:2 3:1\n")
    parts = load_parts({"a": tmp_path / "a.txt", "b": tmp_path / "b.txt"}, cache=False)
    assert {part.num_features for part in parts.values()} == {3}
    named = load_parts({"b": tmp_path / "b.txt"}, feature_names="xyz", cache=False)["b"]
    assert named.feature_names == ("x", "y", "z")


def test_a_single_piece_and_other_files_beside(tmp_path: Path) -> None:
    data = random_data(2, queries=8)
    save_table(data, tmp_path / "rows.csv.gz")
    (tmp_path / "README.md").write_text("not data")
    parts = open_table(tmp_path, cache=False, seed=2)
    assert_same(parts["train"], data.split((0.6, 0.2, 0.2), seed=2)[0])


def test_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LGMML_DATA", str(tmp_path))
    data = random_data(0)
    (tmp_path / "mine").mkdir()
    save_letor(data, tmp_path / "mine" / "train.txt")
    assert_same(open_dataset("mine", cache=False)["train"], data)
    assert_same(open_dataset(str(tmp_path / "mine"), cache=False)["train"], data)
    with pytest.raises(DataError, match="no such folder: a/b"):
        open_dataset("a/b")
    with pytest.raises(DataError, match="no such folder: gone"):
        open_dataset(Path("gone"))
    with pytest.raises(DataError, match=r"data set 'gone' not found: looked for .*/gone; .*known names: mq2008"):
        open_dataset("gone")
    with pytest.raises(DataError, match=r"data set 'debian' not found: .*LGMML_DATA$"):
        open_dataset("debian")
    (tmp_path / "mq2008").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no train\.txt, vali\.txt or test\.txt in "):
        open_dataset("mq2008")


def test_a_name_of_the_catalogue_is_no_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "letor").mkdir(parents=True)
    (tmp_path / "here" / "letor").mkdir(parents=True)
    inside, outside = random_data(1), random_data(2)
    save_letor(inside, tmp_path / "data" / "letor" / "train.txt")
    save_letor(outside, tmp_path / "here" / "letor" / "train.txt")
    monkeypatch.chdir(tmp_path / "here")
    assert_same(open_dataset("letor", tmp_path / "data", cache=False)["train"], inside)
    assert_same(open_dataset("./letor", tmp_path / "data", cache=False)["train"], outside)


def test_a_set_with_a_prefix_has_no_folds(tmp_path: Path) -> None:
    folder = tmp_path / "yahoo"
    (folder / "Fold1").mkdir(parents=True)
    data = random_data(1)
    for part in ("train", "valid", "test"):
        save_letor(data, folder / f"set1.{part}.txt")
    assert_same(open_dataset("yahoo1", tmp_path, cache=False)["valid"], data)
    with pytest.raises(DataError, match="`fold` must be None for data without folds, got 1"):
        open_dataset("yahoo1", tmp_path, fold=1)
    (folder / "set1.valid.txt").unlink()
    with pytest.raises(DataError, match=r"set1\.valid\.txt: no such file"):
        open_dataset("yahoo1", tmp_path)


def test_lightgbm_files_beside_others(tmp_path: Path) -> None:
    data = random_data(3, queries=10)
    save_lightgbm(data, tmp_path / "web.train")
    save_lightgbm(data, tmp_path / "web.test")
    (tmp_path / "notes.train").write_text("no sizes beside it")
    (tmp_path / ".query").write_text("")
    parts = open_dataset(tmp_path, cache=False, seed=2)
    whole = load_file(tmp_path / "web.train", cache=False)
    rest, held = whole.split((0.8, 0.2), seed=2)
    assert_same(parts["train"], rest)
    assert_same(parts["valid"], held)
    assert_same(open_dataset(tmp_path, cache=False)["valid"], whole.split((0.8, 0.2), seed=0)[1])
    save_lightgbm(data, tmp_path / "other.valid")
    save_lightgbm(data, tmp_path / "more.vali")
    with pytest.raises(DataError, match=r"holds several validation files: more\.vali, other\.valid"):
        open_dataset(tmp_path)


def test_a_gzipped_copy_is_no_second_file(tmp_path: Path) -> None:
    data = random_data(3, queries=4)
    for name in ("web.train", "web.train.gz", "web.test.gz"):
        save_lightgbm(data, tmp_path / name)
    assert open_dataset(tmp_path, cache=False)["test"].num_documents == data.num_documents


def test_parts_by_name_come_before_files_with_sizes(tmp_path: Path) -> None:
    data = random_data(4)
    save_letor(data, tmp_path / "train.txt")
    save_lightgbm(random_data(5), tmp_path / "web.train")
    assert_same(open_dataset(tmp_path, cache=False)["train"], data)


def test_sizes_without_training_are_not_lightgbm(tmp_path: Path) -> None:
    save_lightgbm(random_data(5), tmp_path / "web.test")
    with pytest.raises(DataError, match=r"no train\.txt, vali\.txt or test\.txt in "):
        open_dataset(tmp_path)
