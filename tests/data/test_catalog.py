"""Data sets by name: the real ones against their published counts, every layout from generated files."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data.catalog import CATALOG, data_folder, open_dataset, open_table
from lgmml_torch.data.letor import load_letor, load_lightgbm
from lgmml_torch.data.write import save_letor, save_table
from lgmml_torch.ragged import RankingData
from tests.data.test_letor import assert_same, random_data
from tests.doors import save_lightgbm


def label_counts(parts: list[RankingData]) -> dict[float, int]:
    return dict(Counter(label for part in parts for label in part.labels.tolist()))


def sizes(parts: list[RankingData]) -> tuple[int, int, int]:
    all_sizes = torch.cat([part.sizes for part in parts])
    return int(all_sizes.min()), int(all_sizes.median()), int(all_sizes.max())


def assert_apart(parts: dict[str, RankingData]) -> None:
    seen: set[object] = set()
    for part in parts.values():
        assert not seen & set(part.qids)
        seen |= set(part.qids)


@pytest.mark.realdata
def test_letor_sets(data_dir: Path) -> None:
    for fold in range(1, 6):
        for name, queries, documents, features, labels, spread in [
            ("mq2008", 784, 15211, 46, {0: 12279, 1: 2001, 2: 931}, (5, 8, 121)),
            ("ohsumed", 106, 16140, 45, {0: 11303, 1: 2585, 2: 2252}, (35, 147, 320)),
        ]:
            parts = open_dataset(name, data_dir, fold=fold, cache=False)
            assert list(parts) == ["train", "valid", "test"]
            assert_apart(parts)
            every = list(parts.values())
            assert sum(part.num_queries for part in every) == queries
            assert sum(part.num_documents for part in every) == documents
            assert {part.num_features for part in every} == {features}
            assert label_counts(every) == labels
            assert sizes(every) == spread
            assert all(part.doc_ids is not None and all(part.doc_ids) for part in every)
            constant = RankingData.merge(every).statistics()
            assert constant["constant features"] == {"mq2008": 6, "ohsumed": 9}[name]
            if name == "mq2008":
                assert constant["queries without a relevant document"] == 220


@pytest.mark.realdata
def test_mslr_sample(data_dir: Path) -> None:
    parts = open_dataset("mslr-sample", data_dir, cache=False)
    assert_apart(parts)
    assert [part.num_queries for part in parts.values()] == [53, 18, 18]
    every = list(parts.values())
    assert sum(part.num_documents for part in every) == 9122
    assert {part.num_features for part in every} == {136}
    assert (label_counts(every)[0], label_counts(every)[4]) == (5053, 55)
    assert sizes(every) == (15, 93, 337)
    assert max(float(part.features.max()) for part in every) == pytest.approx(1.6e8, rel=0.05)


@pytest.mark.realdata
def test_lightgbm_sample(data_dir: Path) -> None:
    parts = open_dataset("lgbm-rank", data_dir, seed=3, cache=False)
    assert parts["train"].num_queries + parts["valid"].num_queries == 201
    assert parts["valid"].num_queries == 40
    assert parts["test"].num_queries == 50
    assert not set(parts["train"].qids) & set(parts["valid"].qids)
    every = list(parts.values())
    assert sum(part.num_documents for part in every) == 3773
    assert {part.num_features for part in every} == {300}
    assert set(label_counts(every)) <= {0, 1, 2, 3, 4}
    assert sizes(every) == (1, 15, 27)
    again = open_dataset("lgbm-rank", data_dir, seed=3, cache=False)
    assert_same(again["valid"], parts["valid"])
    assert open_dataset("lgbm-rank", data_dir, seed=4, cache=False)["valid"].qids != parts["valid"].qids


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["rank.train", "rank.test"])
def test_lightgbm_reads_the_same(name: str, data_dir: Path, tmp_path: Path) -> None:
    lgb = pytest.importorskip("lightgbm")
    file = data_dir / "lgbm-rank" / name
    data = load_lightgbm(file, cache=False)
    # LightGBM counts features from 0, and the files from 1.
    values = np.pad(data.in_caller_order(data.features).numpy().astype(np.float64), ((0, 0), (1, 0)))
    params = {"verbosity": -1, "min_data_in_bin": 1, "max_bin": 1000, "enable_bundle": False, "num_threads": 1}
    params |= {"feature_pre_filter": False, "is_enable_sparse": False, "bin_construct_sample_cnt": 10**6}

    def dump(dataset) -> str:
        dataset._dump_text(str(tmp_path / "dump"))
        return (tmp_path / "dump").read_text()

    theirs = lgb.Dataset(str(file), params=params).construct()
    assert np.array_equal(theirs.get_label(), data.in_caller_order(data.labels).numpy())
    assert np.array_equal(theirs.get_group(), data.sizes.numpy())
    ours = dump(lgb.Dataset(values, params=params).construct())
    assert len(np.unique(values)) < 1000  # so that every value has a bin of its own
    assert dump(theirs) == ours
    row, column = np.argwhere(values > 0)[-1]
    values[row, column] = 1 - values[row, column]
    assert dump(lgb.Dataset(values, params=params).construct()) != ours


@pytest.mark.realdata
def test_raw_and_null_ohsumed(data_dir: Path, tmp_path: Path) -> None:
    raw = open_dataset("ohsumed-raw", data_dir, cache=False)["test"]
    assert (raw.num_queries, raw.num_features) == (22, 45)
    assert float(raw.features.min()) < 0
    with pytest.raises(DataError, match=r"ohsumed-null/test\.txt:2: the value of feature 11 is missing, got 'NULL'"):
        open_dataset("ohsumed-null", data_dir, cache=tmp_path)
    null = open_dataset("ohsumed-null", data_dir, missing="zero", cache=tmp_path)["test"]
    assert (null.num_queries, null.num_features, null.num_documents) == (22, 45, raw.num_documents)


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["mq2008/Fold1/vali.txt", "ohsumed/Fold1/test.txt", "mslr-sample/vali.txt"])
def test_real_files_equal_scikit_learn_and_survive_a_round_trip(name: str, data_dir: Path, tmp_path: Path) -> None:
    from sklearn.datasets import load_svmlight_file

    data = load_letor(data_dir / name, cache=False)
    X, y, qid = load_svmlight_file(str(data_dir / name), query_id=True)
    assert np.array_equal(data.in_caller_order(data.features).numpy(), X.toarray().astype(np.float32))
    assert np.array_equal(data.in_caller_order(data.labels).numpy(), y.astype(np.float32))
    ids = torch.tensor(data.qids)[data.query_index]
    assert np.array_equal(data.in_caller_order(ids).numpy(), qid)
    save_letor(data, tmp_path / "copy.txt")
    assert_same(load_letor(tmp_path / "copy.txt", cache=False), data)


def parts_of(seed: int) -> dict[str, RankingData]:
    return dict(zip(("train", "valid", "test"), random_data(seed, queries=12).split((0.5, 0.25, 0.25)), strict=True))


def test_layout_with_folds(tmp_path: Path) -> None:
    for name in ["mq2008", "mslr-web30k"]:
        for ending in ["", ".gz"]:
            folds = {fold: parts_of(fold) for fold in range(1, 6)}
            for fold, parts in folds.items():
                folder = tmp_path / CATALOG[name][-1] / f"Fold{fold}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                for part, data in parts.items():
                    save_letor(data, folder / f"{part}.txt{ending}")
            for fold, parts in folds.items():
                loaded = open_dataset(name, tmp_path, fold=fold, cache=tmp_path / "cache")
                for part, data in parts.items():
                    assert_same(loaded[part], data)
            assert_same(open_dataset(name, tmp_path, cache=False)["train"], folds[1]["train"])
            with pytest.raises(DataError, match=r"`fold` must be one of those in .* \(Fold1, Fold2, .*Fold5\), got 6"):
                open_dataset(name, tmp_path, fold=6)


@pytest.mark.parametrize("name", ["mslr-sample", "letor"])
def test_layout_without_folds(name: str, tmp_path: Path) -> None:
    parts = parts_of(0)
    folder = tmp_path / CATALOG[name][0]
    folder.mkdir()
    for part, data in parts.items():
        save_letor(data, folder / f"{part}.txt", sparse=True)
    for way in (open_dataset(name, tmp_path, cache=False), open_dataset(folder, cache=False)):
        for part, data in parts.items():
            assert_same(way[part], data)
    with pytest.raises(DataError, match="`fold` must be None for data without folds, got 2"):
        open_dataset(name, tmp_path, fold=2)


def test_layout_of_yahoo(tmp_path: Path) -> None:
    folder = tmp_path / "yahoo"
    folder.mkdir()
    sets = {number: parts_of(number) for number in (1, 2)}
    for number, parts in sets.items():
        for part, data in parts.items():
            save_letor(data, folder / f"set{number}.{part}.txt", sparse=True)
    for number, parts in sets.items():
        loaded = open_dataset(f"yahoo{number}", tmp_path, cache=False)
        for part, data in parts.items():
            assert_same(loaded[part], data)
    with pytest.raises(DataError, match="holds set 1 and set 2: ask for 'yahoo1' or 'yahoo2'"):
        open_dataset(folder)
    (folder / "set2.train.txt").unlink()
    assert_same(open_dataset(folder, cache=False)["test"], sets[1]["test"])
    with pytest.raises(DataError, match=r"set2\.train\.txt: no such file"):
        open_dataset("yahoo2", tmp_path)


def test_layout_of_lightgbm(tmp_path: Path) -> None:
    folder = tmp_path / "lgbm-rank"
    folder.mkdir()
    train, test = random_data(0, queries=10), random_data(1, queries=5)
    save_lightgbm(train, folder / "rank.train")
    with pytest.raises(DataError, match=r"rank\.test: no such file"):
        open_dataset("lgbm-rank", tmp_path)
    save_lightgbm(test, folder / "rank.test")
    parts = open_dataset("lgbm-rank", tmp_path, cache=False)
    assert (len(parts["train"]), len(parts["valid"]), len(parts["test"])) == (8, 2, 5)
    back = parts["test"]
    assert torch.equal(back.in_caller_order(back.features), test.in_caller_order(test.features))


def test_where_data_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LGMML_DATA", raising=False)
    with pytest.raises(DataError, match="no data folder: pass `data_dir` or set the environment variable LGMML_DATA"):
        open_dataset("mq2008")
    with pytest.raises(DataError, match=r"`data_dir` must name an existing folder, got .*nowhere"):
        open_dataset("mq2008", tmp_path / "nowhere")
    monkeypatch.setenv("LGMML_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"LGMML_DATA must name an existing folder, got .*nowhere"):
        data_folder()
    monkeypatch.setenv("LGMML_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    with pytest.raises(
        DataError, match=r"data set 'mq2008' not found: looked for .*/mq2008 or .*/MQ2008; set `data_dir`"
    ):
        open_dataset("mq2008")
    with pytest.raises(
        DataError, match=r"data set 'mq2009' not found: .*known names: mq2008, .*did you mean 'mq2008'\?"
    ):
        open_dataset("mq2009")
    with pytest.raises(DataError, match="no such folder: "):
        open_dataset(tmp_path / "missing")


ENDINGS = ["txt", "txt.gz", "csv", "tsv.gz", "npz", "parquet", "arrow", "feather"]


def save(data: RankingData, file: Path) -> None:
    """In the format that the name says."""
    if file.suffix == ".npz":
        X, y = data.in_caller_order(data.features), data.in_caller_order(data.labels)
        np.savez(file, X=X, y=y, qid=[data.qids[query] for query in data.in_caller_order(data.query_index).tolist()])
    elif ".txt" in file.suffixes:
        save_letor(data, file)
    else:
        save_table(data, file)


def test_parts_in_any_format(tmp_path: Path) -> None:
    for ending in ENDINGS:
        for valid in ["vali", "valid", "validation"]:
            parts = parts_of(3)
            for part, data in parts.items():
                save(data, tmp_path / f"{valid if part == 'valid' else part}.{ending}")
            loaded = open_dataset(tmp_path, cache=False)
            assert list(loaded) == ["train", "valid", "test"]
            for part, data in parts.items():
                assert_same(loaded[part], data)
            (tmp_path / f"{valid}.{ending}").unlink()
            assert list(open_dataset(tmp_path, cache=False)) == ["train", "test"]


def test_features_are_named_by_a_file(tmp_path: Path) -> None:
    for lines in ["a\nb\nc\nd\ne\n", "0\ta\n1\tb\n2\tc\n3\td\n4\te\n", "1 a\n2 b\n3 c\n4 d\n5 e\n"]:
        for ending in ["txt", "npz", "parquet"]:
            for part, data in parts_of(3).items():
                save(data, tmp_path / f"{part}.{ending}")
            (tmp_path / "features.txt").write_text(lines)
            assert {part.feature_names for part in open_dataset(tmp_path, cache=False).values()} == {tuple("abcde")}
            (tmp_path / "features.txt").write_text("a\nb\nc\n")
            with pytest.raises(DataError, match=r"train\..*3"):
                open_dataset(tmp_path, cache=False)


def test_parts_agree_on_columns_by_name(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"qid": [1, 1], "label": [0, 1], "a": [1.0, 2.0], "b": [3.0, 4.0]})
    frame.to_csv(tmp_path / "train.csv", index=False)
    frame[["b", "label", "a", "qid"]].to_csv(tmp_path / "test.csv", index=False)
    parts = open_dataset(tmp_path, cache=False)
    assert_same(parts["train"], parts["test"])
    frame.rename(columns={"b": "c"}).to_csv(tmp_path / "test.csv", index=False)
    with pytest.raises(DataError, match=r"test.csv:1: column 'b' is missing, and there should be no column 'c'"):
        open_dataset(tmp_path, cache=False)


def test_lightgbm_files_of_any_name(tmp_path: Path) -> None:
    train, valid, test = (random_data(seed, queries=6) for seed in range(3))
    for data, name in ((train, "web.train"), (valid, "web.valid"), (test, "web.test")):
        save_lightgbm(data, tmp_path / name)
    parts = open_dataset(tmp_path, cache=False)
    assert {name: len(part) for name, part in parts.items()} == {"train": 6, "valid": 6, "test": 6}
    assert sum(map(len, open_table(tmp_path / "web.train", cache=False).values())) == 6
    save_lightgbm(train, tmp_path / "other.train")
    with pytest.raises(DataError, match=r"holds several training files: other\.train, web\.train"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("train", "valid", "test"),
    [
        ("train", None, "test"),
        ("web_train.svm", "web_vali.svm", "web_test.svm"),
        ("A-Train.libsvm", None, "A-Test.libsvm"),
    ],
)
def test_lightgbm_files_of_other_names(tmp_path: Path, train: str, valid: str | None, test: str) -> None:
    data = random_data(3, queries=5)
    save_lightgbm(data, tmp_path / train)
    with pytest.raises(DataError, match=r"(?i)test.*: no such file"):
        open_dataset(tmp_path, cache=False)
    for name in (valid, test):
        if name is not None:
            save_lightgbm(data, tmp_path / name)
    parts = open_dataset(tmp_path, cache=False)
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 5 if valid else 4, "valid": 5 if valid else 1, "test": 5}  # fmt: skip
    save_lightgbm(data, tmp_path / "second.test")
    with pytest.raises(DataError, match=r"holds several test files: .*second\.test"):
        open_dataset(tmp_path, cache=False)


def test_a_folder_without_parts_says_how_to_open_it(tmp_path: Path) -> None:
    save(random_data(0, queries=4), tmp_path / "piece-0.txt")
    with pytest.raises(DataError, match=r"no train.txt, .*; pieces of one table are opened with data=table"):
        open_dataset(tmp_path)
    assert sum(map(len, open_table(tmp_path, cache=False).values())) == 4


def test_one_file_is_cut_by_query(tmp_path: Path) -> None:
    for ending in ENDINGS:
        data = random_data(2, queries=20)
        save(data, tmp_path / f"clicks.{ending}")
        parts = open_table(tmp_path / f"clicks.{ending}", cache=False, seed=4, fractions=(0.5, 0.25, 0.25))
        assert [len(part) for part in parts.values()] == [10, 5, 5]
        assert_apart(parts)
        assert_same(RankingData.merge(data.split((0.5, 0.25, 0.25), seed=4)), RankingData.merge(list(parts.values())))


@pytest.mark.parametrize("ending", ["csv", "parquet", "pieces"])
def test_a_column_says_which_part(tmp_path: Path, ending: str) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "query": list("aabbccdd"),
            "grade": [0, 1, 2, 0, 1, 0, 0, 1],
            "part": ["train", "Train", "vali", "valid", "test", "test", "train", "train"],
            "title": ["x"] * 8,
            "price": range(8),
        }
    )
    path = tmp_path / f"clicks.{ending}"
    if ending == "csv":
        frame.to_csv(path, index=False)
    elif ending == "parquet":
        frame.to_parquet(path)
    else:
        path.mkdir()
        frame[:4].to_parquet(path / "0.parquet")
        frame[4:].to_parquet(path / "1.parquet")
    names = {"qid": "query", "label": "grade", "drop": ["title"], "cache": False}
    parts = open_table(path, split="part", **names)
    assert {name: part.qids for name, part in parts.items()} == {"train": ("a", "d"), "valid": ("b",), "test": ("c",)}
    assert parts["train"].feature_names == ("price",)
    with_words = open_table(path, split="part", categories=["title"], **names | {"drop": []})
    assert with_words["test"].feature_names == ("title", "price")
    with pytest.raises(DataError, match=r"(clicks|0)\.\w+(:1)?: .* must name a column 'parts'; did you mean 'part'\?"):
        open_table(path, split="parts", **names)
    with pytest.raises(DataError, match=r"clicks.*: column 'title' must say train, valid or test, got 'x' at row 1"):
        open_table(path, split="title", **names | {"drop": ["part"]})
    with pytest.raises(DataError, match=r"column 'title' must (hold numbers, got text|be a finite number, got 'x')"):
        open_table(path, split="part", **names | {"drop": []})
    frame["part"] = ["train", "test"] * 4
    frame.to_csv(tmp_path / "mixed.csv", index=False)
    with pytest.raises(DataError, match=r"'part' must be the same for all rows of a query, got several for query 'a'"):
        open_table(tmp_path / "mixed.csv", split="part", **names)


def test_tables_that_cannot_be_cut(tmp_path: Path) -> None:
    save(random_data(0, queries=2), tmp_path / "few.csv")
    with pytest.raises(DataError, match=r"few.csv: 2 queries are too few to cut: none would be left for test"):
        open_table(tmp_path / "few.csv", cache=False)
    with pytest.raises(DataError, match=r"`fractions` must be three shares, of train, valid and test, got \[1, 1\]"):
        open_table(tmp_path / "few.csv", fractions=(1, 1), cache=False)
    save(random_data(0, queries=2), tmp_path / "few.npz")
    with pytest.raises(DataError, match=r"few.npz: `split` needs a table with a column 'part'"):
        open_table(tmp_path / "few.npz", split="part")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: there are no Parquet files"):
        open_table(tmp_path / "empty")
    with pytest.raises(DataError, match=r"none.csv: no such file"):
        open_table(tmp_path / "none.csv")


@pytest.mark.realdata
@pytest.mark.slow
def test_debian(data_dir: Path) -> None:
    from lgmml_torch.data.letor import load_file

    names = (data_dir / "debian" / "features.txt").read_text().split()[1::2]
    test = load_file(data_dir / "debian" / "test.npz", feature_names=names)
    assert (test.num_queries, test.num_documents, test.num_features) == (1133, 113_715, 110)
    assert label_counts([test]) == {0: 113_715 - 1_876, 1: 1_001, 2: 875}
    assert test.feature_names is not None
    assert test.feature_names[:2] == ("bm25.name", "covered.name")


def test_missing_validation_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lgmml_torch.app.compose import load_splits
    from lgmml_torch.app.config import load_config

    for name in ("train", "test"):
        save_letor(random_data(1, queries=4), tmp_path / f"{name}.txt")
    cfg = load_config(["data=letor", f"data.name={tmp_path}", "paths.cache_dir=false"])
    assert set(load_splits(cfg)) == {"train", "test"}
    assert "there are no validation queries (vali.txt): nothing is stopped early" in caplog.text
