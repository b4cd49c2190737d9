"""Categories: the same codes from every format, naive references for the encoder, and the way through both doors."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.app import cli
from lgmml_torch.app.config import load_config
from lgmml_torch.app.page_data import PageData
from lgmml_torch.app.train import train
from lgmml_torch.categories import OTHER, WordColumns, _distinct, codes_of, word_of
from lgmml_torch.checks import ConfigError, DataError, DataWarning, LGMMLError
from lgmml_torch.data.catalog import open_table
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.letor import load_file
from lgmml_torch.data.source import open_source
from lgmml_torch.data.write import save_letor, save_table
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.evaluation.tables import model_card
from lgmml_torch.models.combine import merge_models
from lgmml_torch.models.encode import CategoryEncoder, CategorySettings
from lgmml_torch.models.explain import explain
from lgmml_torch.models.importance import pair_importance, structural_importance
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")
COLOURS = ("blue", "green", "red")


def frame(queries: int = 24, seed: int = 0, brands: int = 20) -> Any:
    """Lists in which colour and brand decide the grade."""
    rng = np.random.default_rng(seed)
    rows = queries * 8
    colour, brand = rng.integers(0, 3, rows), rng.integers(0, brands, rows)
    x = rng.normal(size=rows)
    grade = np.clip(np.round(colour + brand / brands + 0.3 * x), 0, 3)
    words = {"colour": np.array(COLOURS)[colour], "x": x, "brand": [f"b{number:02d}" for number in brand]}
    return pd.DataFrame({"qid": np.arange(rows) // 8, "grade": grade, **words, "new": rng.integers(0, 2, rows) == 1})


def typed(lists: Any) -> Any:
    return lists.astype({"colour": "category", "brand": "category"})


def lists_of(lists: Any, **options: Any) -> RankingData:
    return RankingData.from_arrays(
        typed(lists[["colour", "x", "brand", "new"]]), lists["grade"], qid=lists["qid"], **options
    )


COLUMNS = Columns("qid", "grade", "docid")


def write(lists: Any, path: Path) -> Path:
    if path.suffix == ".csv":
        lists.to_csv(path, index=False)
    elif path.name.endswith(".csv.gz"):
        path.write_bytes(gzip.compress(lists.to_csv(index=False).encode()))
    elif path.name == "nested.parquet":
        save_table(lists_of(lists), path)
    elif path.suffix == ".feather":
        typed(lists).to_feather(path)
    else:
        (typed(lists) if path.name == "typed.parquet" else lists).to_parquet(path)
    return path


def test_every_format_gives_the_same_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        "a.csv",
        "a.csv.gz",
        "a.parquet",
        "typed.parquet",
        "nested.parquet",
        "a.feather",
        "pandas",
        "polars",
        "pyarrow",
    ]:
        lists = frame(6)
        want = lists_of(lists)
        assert want.categories == (COLOURS, None, tuple(sorted(set(lists["brand"]))), None)
        what: Any = lists
        if name == "polars":
            pl = pytest.importorskip("polars")
            what = pl.from_pandas(lists).with_columns(pl.col("colour").cast(pl.Enum(["red", "green", "blue", "never"])))
        elif name == "pyarrow":
            what = pa.Table.from_pandas(lists)
        elif "." in name:
            what = write(lists, tmp_path / name)
        nested = name == "nested.parquet"
        columns = Columns() if nested else COLUMNS
        with open_source(what, columns=columns, categories=["colour", "brand"]) as source:
            whole = source.read()
            streamed = [batch.data for batch in source.batches(8)]
        assert whole.categories == want.categories
        assert torch.equal(whole.features, want.features)
        assert torch.equal(torch.cat([part.features for part in streamed]), want.features)
        assert {part.categories for part in streamed} == {want.categories}
        known = {"colour": ["blue", "red"], "brand": []}
        with (
            open_source(
                what, columns=columns, categories=known, feature_names=["brand", "new", "x", "colour"]
            ) as source,
            pytest.warns(DataWarning, match="'brand' 48, 'colour' 16"),
        ):
            data = source.read()
        green = want.features[:, 0] == 1
        assert data.feature_names == ("brand", "new", "x", "colour")
        assert (data.features[:, 0] == OTHER).all()
        assert torch.equal(data.in_caller_order(data.features[:, 3]) == OTHER, want.in_caller_order(green))


def test_text_has_to_be_named(tmp_path: Path) -> None:
    lists = frame(2)
    for name in ("a.csv", "a.parquet"):
        file = write(lists, tmp_path / name)
        message = r"column 'colour' must .*name it in `categories`.*\(data.categories=\[colour\]"
        with pytest.raises(DataError, match=message), open_source(file, columns=COLUMNS) as source:
            source.read()
        with pytest.raises(DataError, match=r"there must be a column 'price', which `categories` names"):
            open_source(file, columns=COLUMNS, categories=["price"])
    with pytest.raises(DataError, match=r"`X` must be a frame to hold the categories \['colour'\], got ndarray"):
        RankingData.from_arrays(np.eye(2), [0, 1], qid=[1, 1], categories=["colour"])
    with pytest.raises(DataError, match=r"`categories` must be a list of names, got the text 'colour'"):
        WordColumns.of("colour")
    (tmp_path / "a.txt").write_text("1 qid:1 1:1\n")
    with pytest.raises(DataError, match=r"a.txt: LETOR lines hold numbers only, but these columns are categories: a"):
        load_file(tmp_path / "a.txt", categories=["a"])
    with pytest.raises(DataError, match="save it as a table"):
        save_letor(lists_of(lists), tmp_path / "b.txt")
    dated = pd.DataFrame({"qid": [1], "day": [pd.Timestamp("2020-01-01")]})
    with pytest.raises(DataError, match=r"column 'day' must hold numbers, got dates .*number such as an age in days"):
        open_source(dated)


@pytest.mark.parametrize("name", ["a.csv", "typed.parquet", "pandas"])
def test_missing_words(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = frame(2)
    lists.loc[3, "colour"] = None
    what = typed(lists) if name == "pandas" else write(lists, tmp_path / name)
    options: dict[str, Any] = {"columns": COLUMNS, "categories": ["colour", "brand"]}
    message = r"(row 4 \(from 1\)|csv:5): column 'colour' is missing; `missing=` says"
    with pytest.raises(DataError, match=message), open_source(what, **options) as source:
        source.read()
    for policy in ("zero", "query-min", "query-mean"):
        with open_source(what, missing=policy, **options) as source:
            data = source.read()
        assert data.in_caller_order(data.features)[3, 0] == OTHER
        assert int((data.features == OTHER).sum()) == 1


def test_words_of_a_text_file(tmp_path: Path) -> None:
    for seed in range(5):
        rng = random.Random(seed)
        words = [" a", "a", "b ", "ü", "007", "7", "1e3", "x;y", "_", "NaN", "null", "", "True", '"q,r"', "'"]
        rows = [f"{rng.choice('12')},{rng.choice(words)},{rng.random()}" for _ in range(rng.randint(1, 12))]
        file = tmp_path / "a.csv"
        file.write_bytes(("qid,word,x\n" + rng.choice(("\n", "\r\n")).join(rows) + "\n").encode())
        with open_source(file, categories=["word"], missing="zero") as source:
            data = source.read()
            assert torch.equal(torch.cat([b.data.features for b in source.batches()]), data.features)
        text = [word_of(row.split(",", 1)[1].rsplit(",", 1)[0].strip('"')) for row in rows]
        known = sorted({word for word in text if word})
        assert data.categories == (tuple(known), None)
        codes = data.in_caller_order(data.features)[:, 0].tolist()
        assert codes == [known.index(word) if word else OTHER for word in text]


def test_words_of_values() -> None:
    values = [1, 1.0, "1", None, math.nan, True, "nan", np.float64(2.0), 2.5]
    assert [word_of(value) for value in values] == ["1", "1", "1", None, None, "True", None, "2", "2.5"]
    words, places = _distinct(["a", None, "b"])
    assert codes_of(words, places, ("b",)).tolist()[::2] == [OTHER, 0.0]
    chunks = pa.chunked_array([pa.array(["a", "c"]).dictionary_encode(), pa.array(["b"]).dictionary_encode()])
    unused = pd.Series(pd.Categorical(["a", "c", "b"], categories=["never", "c", "b", "a"]))
    for frame in (pa.table({"x": chunks}), pd.DataFrame({"x": unused})):
        data = RankingData.from_arrays(frame, [0, 1, 2], qid=[1, 1, 1])
        assert data.categories == (("a", "b", "c"),)
        assert data.in_caller_order(data.features)[:, 0].tolist() == [0, 2, 1]


def test_merged_pieces_share_a_vocabulary(tmp_path: Path) -> None:
    lists = frame(8)
    for number in range(4):
        lists[lists["qid"] // 2 == number].to_csv(tmp_path / f"{number}.csv", index=False)
    options: dict[str, Any] = {"label": "grade", "categories": ["colour", "brand"]}
    cache = tmp_path / "cache"
    parts = [open_table(tmp_path, cache=cache, **options) for _ in range(2)]
    merged = RankingData.merge(list(parts[1].values()))
    want = lists_of(lists)
    assert merged.categories == want.categories
    assert torch.equal(merged.features, want.features)
    assert parts[0]["train"].categories == parts[1]["train"].categories
    with pytest.raises(DataError, match="`parts` must have the same categories"):
        RankingData.merge([parts[0]["train"], parts[0]["test"].replace(categories=None)])


def test_other_parts_are_read_with_the_words_of_training(tmp_path: Path) -> None:
    lists = frame(6)
    lists.loc[lists["qid"] == 5, "colour"] = "violet"
    lists[lists["qid"] < 4].to_csv(tmp_path / "train.csv", index=False)
    lists[lists["qid"] >= 4].to_csv(tmp_path / "test.csv", index=False)
    with pytest.warns(DataWarning, match=r"test.csv: of 16 rows, .* never saw: 'colour' 8, 'brand' \d"):
        parts = open_table(tmp_path, label="grade", categories=["colour", "brand"], cache=False)
    assert parts["test"].categories == parts["train"].categories
    assert (parts["test"].features[parts["test"].query_index == 1, 0] == OTHER).all()


def test_the_encoder_is_what_it_says() -> None:
    train = lists_of(frame(12))
    encoder = CategoryEncoder.fit(train, CategorySettings(max_one_hot=3, smoothing=2.0, folds=4))
    assert encoder.widths == [3, 1, 1, 1]
    assert encoder.columns == ("colour=blue", "colour=green", "colour=red", "x", "brand (mean label)", "new")
    seen = encoder.encode(train)
    assert torch.equal(seen.features[:, :3].argmax(1).float(), train.features[:, 0])
    prior = float(train.labels.mean())
    for row in range(train.num_documents):
        same = train.features[:, 2] == train.features[row, 2]
        mean = (float(train.labels[same].sum()) + 2 * prior) / (int(same.sum()) + 2)
        assert seen.features[row, 4] == pytest.approx(mean, rel=1e-6)
    again = CategoryEncoder.from_spec(json.loads(json.dumps(encoder.spec())))
    assert again == encoder
    assert CategorySettings(0).max_one_hot == 0
    for settings, message in (({"max_one_hot": -1}, "`max_one_hot`"), ({"folds": 1}, "`folds` must be a whole number")):
        with pytest.raises(LGMMLError, match=message):
            CategorySettings(**settings)


def test_means_of_training_lists_never_see_their_own_query() -> None:
    train = lists_of(frame(12))
    encoder = CategoryEncoder.fit(train, CategorySettings(max_one_hot=3))
    before = encoder.encode_training(train).features
    for query in range(train.num_queries):
        labels = train.labels.clone()
        labels[train.offsets[query] : train.offsets[query + 1]] = 50.0
        after = encoder.encode_training(train.replace(labels=labels)).features
        own = train.query_index == query
        assert torch.equal(after[own], before[own])
        assert not torch.equal(after[~own], before[~own])
    shuffled = frame(12).sample(frac=1, random_state=3)
    assert torch.equal(encoder.encode_training(lists_of(shuffled)).features, before)
    assert encoder.encode_training(train.select([0])).features.isfinite().all()


def test_unknown_words_get_the_mean() -> None:
    train = lists_of(frame(12))
    encoder = CategoryEncoder.fit(train, CategorySettings(max_one_hot=3))
    lists = frame(2)
    lists["colour"], lists["brand"] = "violet", "unheard"
    with pytest.warns(DataWarning, match=r"of 16 rows, .* never saw: 'colour' 16, 'brand' 16"):
        got = encoder.encode(lists_of(lists)).features
    assert (got[:, :3] == 0).all()
    (mean,) = got[:, 4].unique().tolist()
    assert mean == pytest.approx(float(train.labels.mean()), rel=1e-6)
    with pytest.raises(DataError, match="the lists must have the features"):
        encoder.encode(train.select([0]).replace(categories=None))


TINY: dict[str, Any] = {
    "bank": "boosted",
    "rounds": 6,
    "epochs": 1,
    "random_state": 0,
    "bank_options": {"candidates": 6},
}


@pytest.fixture(scope="module")
def ranker() -> LGMMLRanker:
    lists = frame()
    return LGMMLRanker(**TINY).fit(typed(lists[["colour", "x", "brand", "new"]]), lists["grade"], qid=lists["qid"])


def test_the_estimator_learns_from_words(ranker: LGMMLRanker, tmp_path: Path) -> None:
    lists = frame(10, seed=7)
    X = lists[["colour", "x", "brand", "new"]]
    assert ranker.n_features_in_ == 4
    scores = ranker.predict(typed(X), qid=lists["qid"])
    assert ranker.score(typed(X), lists["grade"], qid=lists["qid"]) > 0.9
    np.testing.assert_array_equal(ranker.predict(X, qid=lists["qid"]), scores)  # the model knows which are words
    named = LGMMLRanker(**TINY, categories=["colour", "brand"])
    whole = frame()
    named.fit(whole[["colour", "x", "brand", "new"]], whole["grade"], qid=whole["qid"])
    np.testing.assert_array_equal(named.predict(X, qid=lists["qid"]), scores)
    ranker.save(tmp_path / "m.safetensors")
    loaded = LGMMLRanker.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(loaded.predict(X, qid=lists["qid"]), scores)
    assert loaded.n_features_in_ == 4
    with pytest.raises(DataError, match="must be a frame to hold the categories"):
        loaded.predict(np.zeros((2, 4)), qid=[0, 0])
    with pytest.raises(LGMMLError, match="`max_one_hot`"):
        LGMMLRanker(max_one_hot=-1).fit(X, lists["grade"], qid=lists["qid"])


def test_models_with_words(ranker: LGMMLRanker, tmp_path: Path) -> None:
    model, data = ranker.model_, lists_of(frame(6, seed=5))
    scores = model.score(data)
    torch.testing.assert_close(merge_models([model, model], [0.5, 0.5]).score(data), scores)
    found = explain(model, data, qid=0, document=0, over=1)
    named = {found.called(column) for column in range(len(found.columns))}
    assert any(name.startswith("colour=red") for name in named)
    assert any(name.startswith("brand (mean label)") for name in named)
    assert found.difference == pytest.approx(float(found.features.sum()), abs=1e-9)
    pytest.importorskip("onnx")
    from lgmml_torch.models.export import compare_exported, export_onnx

    export_onnx(model, tmp_path / "m.onnx", batch=True)
    assert compare_exported(tmp_path / "m.onnx", model, data, batch=True).largest < 1e-4
    torch.testing.assert_close(model.replace(encoder=None).score(model.encoded(data)), scores)
    numbers = LGMMLRanker(**TINY).fit(frame()[["x", "new"]], frame()["grade"], qid=frame()["qid"])
    with pytest.raises(LGMMLError, match="must hold numbers only, as the model was trained on, got categories"):
        numbers.model_.score(data)
    assert "categories" not in numbers.model_.spec()


def test_importance_by_columns_and_by_features(ranker: LGMMLRanker) -> None:
    """A model has a share for each column that words became; the ranker has one for each feature of its frame."""
    model, data = ranker.model_, lists_of(frame(6, seed=5))
    found, encoded = pair_importance(model, data), pair_importance(model, model.encoded(data))
    assert model.feature_names is not None
    assert len(found.features) == len(model.feature_names)
    assert torch.equal(found.features, encoded.features)
    columns = dict(zip(model.feature_names, structural_importance(model).features.tolist(), strict=True))
    expected = [
        sum(share for name, share in columns.items() if name.startswith("colour=")),
        columns["x"],
        columns["brand (mean label)"],
        columns["new"],
    ]
    assert ranker.feature_names_in_.tolist() == ["colour", "x", "brand", "new"]
    np.testing.assert_allclose(ranker.feature_importances_, expected, rtol=1e-12)


def test_cards_and_pages_of_models_with_words(ranker: LGMMLRanker) -> None:
    """A card names the features that the model is given; a page names the columns that they become."""
    model, data = ranker.model_, lists_of(frame(6, seed=5))
    card = model_card(model)
    assert "- features: 4, `colour`, `x`, `brand`, `new`" in card
    assert "local metrics on 4 features" in card
    assert "# X: (documents, 4)" in card
    report = {"config": {"seed": 0, "evaluation": {"metrics": ["ndcg@10"], "preset": "default"}}}
    page = PageData(report, model, data, "test", importance=True)
    assert page.names == model.feature_names
    assert page.effects


def test_models_of_different_columns_are_compared_by_name(
    ranker: LGMMLRanker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lists, new = frame(), frame(8, seed=3)
    other = LGMMLRanker(**TINY, categories=["brand"]).fit(lists[["brand", "x"]], lists["grade"], qid=lists["qid"])
    file = str(write(new, tmp_path / "new.csv"))
    expected = []
    for name, each in (("a", ranker), ("b", other)):
        each.save(tmp_path / f"{name}.safetensors")
        expected.append(each.score(new[list(each.feature_names_in_)], new["grade"], qid=new["qid"]))
    for one, two, want in (("a", "b", expected), ("b", "a", expected[::-1])):
        files = [str(tmp_path / f"{name}.safetensors") for name in (one, two)]
        assert cli.main(["compare", *files, file, "--label-column", "grade", "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["means"] == pytest.approx(want, abs=1e-6)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Train from a table, then score and evaluate tables with their columns in another order."""
    monkeypatch.setenv("LGMML_CACHE", str(tmp_path / "cache"))
    lists = frame(30)
    write(lists, tmp_path / "a.csv")
    asked = [
        "data=table", f"data.path={tmp_path / 'a.csv'}", "data.label=grade", "data.categories=[colour,brand]",
        "local_metrics.rounds=4", "trainer.max_epochs=1", "logger=none",
        "trainer.accelerator=cpu", "loader.num_workers=0", f"paths.output_dir={tmp_path / 'run'}",
        "trainer.enable_progress_bar=false", "callbacks=quiet", "name=t",
    ]  # fmt: skip
    result = train(load_config(asked), asked)
    assert result is not None
    file = str(tmp_path / "run" / "model.safetensors")
    best = LGMML.load(tmp_path / "run" / "checkpoints" / "best.ckpt")
    assert best.encoder == LGMML.load(file).encoder == result.model.encoder
    again = train(load_config([*asked, f"resume={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}"]), None)
    assert again is not None
    new = frame(5, seed=9)
    mixed = new[["new", "brand", "grade", "x", "qid", "colour"]]
    outputs = []
    for number, (what, name) in enumerate(
        ((new, "n.csv"), (mixed, "m.csv"), (mixed, "m.parquet"), (new, "typed.parquet"))
    ):
        out = tmp_path / f"{number}.npy"
        cli.main(["score", file, str(write(what, tmp_path / name)), "--label-column", "grade", "-o", str(out)])
        outputs.append(np.load(out).tolist())
    assert outputs[1:] == outputs[:-1]
    cli.main(["info", file])
    assert "colour (3 words, a column each), brand (20 words, mean label)" in capsys.readouterr().out
    gone = write(new.drop(columns="brand").assign(maker="z"), tmp_path / "gone.csv")
    assert cli.main(["evaluate", file, str(gone), "--label-column", "grade"]) == 2
    assert "column 'brand' is missing, and the model was trained on no column 'maker'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="`base` needs data of numbers only"):
        train(load_config([*asked, "base=trees.txt"]), asked)
