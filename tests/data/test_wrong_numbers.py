"""What would give wrong numbers in silence: rules for missing values, unknown words, float32, names, labels, caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from lgmml_torch import LGMML, LGMMLRanker, RankingData, load_letor, ndcg, open_source, open_table
from lgmml_torch.app import cli
from lgmml_torch.categories import FEW_ROWS, MOST_UNKNOWN
from lgmml_torch.checks import DataError, DataWarning, LGMMLError
from lgmml_torch.data.cache import Cache
from lgmml_torch.data.catalog import generated_splits, open_dataset
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.shards import open_shards
from lgmml_torch.data.source import DataSource
from lgmml_torch.data.write import write_shards

TINY: dict[str, Any] = {"bank": "boosted", "rounds": 2, "epochs": 0, "random_state": 0}


def table(rows: int = 120, *, gaps: bool = True) -> pd.DataFrame:
    """Lists of six rows, with some cells empty."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, rows))
    found = pd.DataFrame({"query": np.arange(rows) // 6, "title": "x", "a": a, "b": b, "grade": (a + b > 0.5) * 1})
    if gaps:
        found.loc[::7, "a"] = np.nan
    return found


def fitted(missing: str = "query-mean", **params: Any) -> LGMMLRanker:
    rows = table()
    return LGMMLRanker(**TINY, missing=missing, **params).fit(rows[["a", "b"]], rows["grade"], qid=rows["query"])


class TestMissing:
    def test_the_ranker_takes_the_rule_and_its_model_remembers_it(self, tmp_path: Path) -> None:
        rows = table()
        with pytest.raises(DataError, match="`missing=` says what to put there"):
            LGMMLRanker(**TINY).fit(rows[["a", "b"]], rows["grade"], qid=rows["query"])
        ranker = fitted()
        assert ranker.model_.reading["missing"] == "query-mean"
        ranker.save(tmp_path / "m.safetensors")
        again = LGMMLRanker.load(tmp_path / "m.safetensors")
        assert again.missing == "query-mean"
        scores = ranker.predict(rows[["a", "b"]], qid=rows["query"])
        assert np.array_equal(again.predict(rows[["a", "b"]], qid=rows["query"]), scores)
        filled = rows.groupby("query")["a"].transform(lambda own: own.fillna(own.mean()))
        whole = rows[["a", "b"]].assign(a=filled)
        np.testing.assert_allclose(ranker.predict(whole, qid=rows["query"]), scores, rtol=1e-4)

    def test_an_unknown_rule_is_refused(self) -> None:
        with pytest.raises(LGMMLError, match=r"`missing` must be one of 'error', 'zero', .*, got 'mean'"):
            fitted("mean")

    def test_another_rule_is_refused(self) -> None:
        rows, model = table(), fitted().model_
        data = {}
        for rule in ("zero", "query-mean"):
            data[rule] = RankingData.from_arrays(rows[["a", "b"]], rows["grade"], qid=rows["query"], missing=rule)
        assert len(model.score(data["query-mean"])) == len(rows)
        with pytest.raises(DataError, match="`missing` must be 'query-mean', as the model was trained, got 'zero'"):
            model.score(data["zero"])
        full = table(gaps=False)
        whole = RankingData.from_arrays(full[["a", "b"]], full["grade"], qid=full["query"])
        assert len(model.score(whole)) == len(full)  # nothing was missing

    def test_a_model_without_the_record_takes_any_rule(self) -> None:
        rows, model = table(), fitted().model_
        spec = model.spec()
        del spec["table"]
        old = LGMML.from_spec(spec)
        old.load_state_dict(model.state_dict())
        data = RankingData.from_arrays(rows[["a", "b"]], rows["grade"], qid=rows["query"], missing="zero")
        assert old.table is None
        assert torch.equal(old.score(data), model.replace(table=None).score(data))

    def test_scoring_a_table_needs_no_settings_of_training_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = table()
        rows.to_csv(tmp_path / "t.csv", index=False)
        splits = open_table(
            tmp_path / "t.csv", qid="query", label="grade", drop=["title"], missing="query-min", cache=tmp_path / "c"
        )
        again = open_table(
            tmp_path / "t.csv", qid="query", label="grade", drop=["title"], missing="query-min", cache=tmp_path / "c"
        )
        assert again["test"].table == splits["test"].table == {
            "missing": "query-min", "absent": "zero", "qid": "query", "label": "grade", "doc_id": "docid",
            "spare": ["title"],
        }  # fmt: skip
        model = fitted("zero").model_.replace(table=splits["train"].table)
        model.save(tmp_path / "m.safetensors")
        rows.drop(columns=["title", "grade"]).to_csv(tmp_path / "new.csv", index=False)
        words = ["score", str(tmp_path / "m.safetensors")]
        outputs = []
        for file in ("t.csv", "new.csv"):
            assert cli.main([*words, str(tmp_path / file)]) == 0
            outputs.append(capsys.readouterr().out)
        assert outputs[0] == outputs[1]
        assert cli.main([*words, str(tmp_path / "t.csv"), "--missing", "zero"]) == 2
        assert "`missing` must be 'query-min', as the model was trained, got 'zero'" in capsys.readouterr().err

    def test_the_record_goes_through_every_reader(self, tmp_path: Path) -> None:
        (tmp_path / "t.txt").write_text("1 qid:1 1:NULL 2:1\n0 qid:1 1:2 2:3\n")
        for _ in range(2):  # parsed, and from the cache
            data = load_letor(tmp_path / "t.txt", missing="zero", absent="missing", cache=tmp_path / "cache")
            assert data.table == {"missing": "zero", "absent": "missing"}
        write_shards(data, tmp_path / "shards", progress=False)
        assert open_shards(tmp_path / "shards", cache=False, progress=False).table == data.table
        with open_source(data) as source:
            assert source.read().table == data.table
        assert RankingData.merge([data, data.replace(qids=(2,))]).table == data.table
        assert RankingData.merge([data, data.replace(qids=(2,), table=None)]).table is None
        assert Columns.of(None) == Columns()
        assert Columns.of(data.table) == Columns()


def words(rows: int, unknown: int) -> pd.DataFrame:
    colour = ["red", "green", "blue"] * rows
    found = pd.DataFrame({"colour": colour[:rows], "x": np.arange(rows) % 11 * 1.0, "qid": np.arange(rows) // 6})
    found.loc[: unknown - 1, "colour"] = "RED"
    return found


@pytest.fixture(scope="module")
def ranker() -> LGMMLRanker:
    rows = words(120, 0)
    ranker = LGMMLRanker(**TINY, categories=["colour"])
    return ranker.fit(rows[["colour", "x"]], np.arange(120) % 3 == 0, qid=rows["qid"])


class TestWords:
    def test_rows_with_unknown_words_are_counted(
        self, ranker: LGMMLRanker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        known, some = words(FEW_ROWS, 0), words(FEW_ROWS, FEW_ROWS // 2)
        ranker.predict(known[["colour", "x"]], qid=known["qid"])
        with pytest.warns(DataWarning, match="of 100 rows, some have words .* training never saw: 'colour' 50;"):
            ranker.predict(some[["colour", "x"]], qid=some["qid"])
        ranker.save(tmp_path / "m.safetensors")
        model = LGMML.load(tmp_path / "m.safetensors")
        for name in ("t.csv", "t.parquet"):
            some.to_csv(tmp_path / name, index=False) if name == "t.csv" else some.to_parquet(tmp_path / name)
            for what in (tmp_path / name, some):
                with open_source(what, **model.reading) as source:
                    with pytest.warns(DataWarning, match="of 100 rows, .*: 'colour' 50;"):
                        list(source.batches(10))
                    with pytest.warns(DataWarning, match="of 100 rows, .*: 'colour' 50;"):
                        source.read()

    def test_mostly_unknown_words_are_refused(
        self, ranker: LGMMLRanker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = words(FEW_ROWS, int(MOST_UNKNOWN * FEW_ROWS) + 1)
        message = (
            "column 'colour' must have words that training has seen in at least half of the rows, but in 51 of 100"
        )
        with pytest.raises(DataError, match=message):
            ranker.predict(rows[["colour", "x"]], qid=rows["qid"])
        X, y = rows[["colour", "x"]], np.zeros(len(rows))
        own = RankingData.from_arrays(X, y, qid=rows["qid"], categories=["colour"])
        with pytest.raises(DataError, match=message):
            ranker.model_.score(own)
        ranker.save(tmp_path / "m.safetensors")
        rows.to_csv(tmp_path / "t.csv", index=False)
        out = tmp_path / "scores.txt"
        assert cli.main(["score", str(tmp_path / "m.safetensors"), str(tmp_path / "t.csv"), "-o", str(out)]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()

    def test_one_list_may_be_about_something_new(self, ranker: LGMMLRanker) -> None:
        rows = words(FEW_ROWS - 1, FEW_ROWS - 1)
        with pytest.warns(DataWarning, match="of 99 rows, .*: 'colour' 99;"):
            ranker.predict(rows[["colour", "x"]], qid=rows["qid"])

    def test_missing_words_count_as_unknown_ones(self, ranker: LGMMLRanker) -> None:
        rows = words(60, 0)
        rows.loc[:5, "colour"] = None
        known = ranker.model_.reading["categories"]
        X, y = rows[["colour", "x"]], np.zeros(60)
        with pytest.warns(DataWarning, match=r"of 60 rows, .*: 'colour' 6;"):
            RankingData.from_arrays(X, y, qid=rows["qid"], missing="zero", categories=known)


class TestFloat32:
    @pytest.mark.parametrize("kind", ["csv", "parquet", "vectors", "npz", "frame", "array", "txt"])
    def test_values_that_float32_cannot_tell_apart_are_named(self, tmp_path: Path, kind: str) -> None:
        seconds = 1.7e9 + np.arange(60.0)
        other = np.linspace(0, 1, 60)
        rows = pd.DataFrame({"qid": np.arange(60) // 6, "label": np.arange(60) % 2, "x": other, "when": seconds})
        file: Any = tmp_path / f"t.{kind}"
        if kind == "csv":
            rows.to_csv(file, index=False)
        elif kind == "parquet":
            rows.to_parquet(file)
        elif kind == "vectors":
            file = tmp_path / "v.parquet"
            vectors = pa.array(list(np.stack([other, seconds], 1)), pa.list_(pa.float64(), 2))
            parquet.write_table(pa.table({"qid": rows["qid"], "label": rows["label"], "features": vectors}), file)
        elif kind == "npz":
            np.savez(file, X=rows[["x", "when"]].to_numpy(), y=rows["label"], qid=rows["qid"])
        elif kind == "txt":
            lines = [f"{row.label} qid:{row.qid} 1:{row.x!r} 2:{row.when:.0f}\n" for row in rows.itertuples()]
            file.write_text("".join(lines))
        elif kind == "frame":
            file = rows
        given: dict[str, Any] = {}
        if kind == "array":
            file, given = rows[["x", "when"]].to_numpy(), {"y": rows["label"], "qid": rows["qid"]}
        name = "'when'" if kind in ("csv", "parquet", "frame") else "2"
        with open_source(file, **given) as source:
            self.check(source, name)
        with open_source(file, **given, dtype=torch.float64) as source:
            source.read()

    def check(self, source: DataSource, name: str) -> None:
        with pytest.warns(DataWarning, match=rf": float32 cannot tell all values of feature {name} apart: take"):
            source.read()


class TestNames:
    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_a_saved_index_is_no_feature(self, tmp_path: Path, ending: str) -> None:
        rows = table(gaps=False).drop(columns="title")
        file = tmp_path / f"t.{ending}"
        rows.to_csv(file) if ending == "csv" else rows.sample(frac=1, random_state=0).to_parquet(file)
        name = "" if ending == "csv" else "__index_level_0__"
        names = Columns("query", "grade")
        with pytest.raises(DataError, match=rf"column '{name}' is no feature, but the index of a pandas table; save"):
            open_source(file, columns=names)
        with open_source(file, columns=Columns("query", "grade", drop=(name,))) as source:
            assert source.read().feature_names == ("a", "b")
        rows.insert(0, "Unnamed: 0", range(len(rows)))
        with pytest.raises(DataError, match=r"column 'Unnamed: 0' is no feature"):
            open_source(rows, columns=names)
        with open_source(rows, columns=names, feature_names=("Unnamed: 0", "a", "b")) as source:  # of an older model
            assert source.read().num_features == 3

    def test_names_must_differ(self, tmp_path: Path) -> None:
        X, y, qid = np.eye(4), np.arange(4), [1, 1, 2, 2]
        names = ["a", "b", "c", "b"]
        with pytest.raises(DataError, match="column 'b' is named twice"):
            RankingData.from_arrays(X, y, qid=qid, feature_names=names)
        with pytest.raises(DataError, match="column 'b' is named twice"):
            open_source(X, y=y, qid=qid, feature_names=names)
        np.savez(tmp_path / "t.npz", X=X, qid=qid, feature_names=names)
        with pytest.raises(DataError, match=r"t.npz: column 'b' is named twice"):
            open_source(tmp_path / "t.npz")
        vectors = pa.array(X.tolist(), pa.list_(pa.float64(), 4))
        stored = pa.table({"qid": qid, "label": y, "features": vectors})
        stored = stored.replace_schema_metadata({"feature_names": '["a", "b", "c", "b"]'})
        with pytest.raises(DataError, match="column 'b' is named twice"):
            open_source(stored)


class TestLabels:
    def test_counts_of_clicks_are_no_grades(self) -> None:
        scores, offsets = torch.arange(4.0), torch.tensor([0, 4])
        for highest in (31.0, 32.0):
            labels = torch.tensor([0, 1, 2, highest])
            assert float(ndcg(scores, labels, offsets, preset="sklearn")) > 0
            if highest > 31:
                with pytest.warns(DataWarning, match=r"the highest label is 32, and its gain 2\^y - 1 is 4e\+09: .*4"):
                    ndcg(scores, labels, offsets)
            else:
                assert float(ndcg(scores, labels, offsets)) == 1
        X = np.linspace(0, 1, 60)[:, None]
        with pytest.warns(DataWarning, match="make grades of them"):
            LGMMLRanker(**TINY).fit(X, np.round(40 * X[:, 0]), qid=np.arange(60) // 6)


def test_an_empty_list_of_names_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("1 qid:1 1:1\n0 qid:1 1:2\n")
    (tmp_path / "features.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"features.txt: the file must name the features, .* but it is empty"):
        open_dataset(tmp_path, cache=False)


def test_a_part_may_have_no_share(tmp_path: Path) -> None:
    table(gaps=False).drop(columns="title").to_csv(tmp_path / "t.csv", index=False)
    parts = open_table(tmp_path / "t.csv", qid="query", label="grade", fractions=[0.8, 0.2, 0], cache=False)
    assert {name: part.num_queries for name, part in parts.items()} == {"train": 16, "valid": 4}
    parts = generated_splits(10, 4, fractions=(1, 0, 1))
    assert {name: part.num_queries for name, part in parts.items()} == {"train": 5, "test": 5}
    with pytest.raises(DataError, match=r"`fractions` must be three shares, .* got \[1, 1\]"):
        generated_splits(10, 4, fractions=(1, 1))


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "folder")

    def fill(arrays: dict[str, Any]) -> None:
        arrays["x"][...] = 7

    with pytest.warns(DataWarning, match="cannot cache in .*; working without a cache"):
        found = cache.get_or_fill({"a": 1}, {"x": ((2, 3), np.float32)}, fill)
    assert found["x"].tolist() == [[7.0] * 3] * 2
    with pytest.warns(DataWarning, match="cannot cache in .*; working without a cache"):
        built = cache.get_or_build({"a": 1}, lambda: {"x": np.arange(2)})
    assert built["x"].tolist() == [0, 1]
