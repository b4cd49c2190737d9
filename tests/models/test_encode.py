"""Categories as numbers: columns of words, mean labels, and what training lists may see of their own labels."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lgmml_torch.checks import DataError, DataWarning, LGMMLError
from lgmml_torch.models.encode import CategoryEncoder, CategorySettings, encode_splits
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.doors import plain_chain, small_model

COLOURS = ("blue", "green", "red", "white")
BRANDS = ("a", "b", "c", "d", "e", "f")
NAMES = ("colour", "x", "brand")


def lists(queries: int = 7, seed: int = 0, dtype: torch.dtype = torch.float32) -> RankingData:
    """Colours without white, brands without the last, some words unknown."""
    g = torch.Generator().manual_seed(seed)
    rows = 6 * queries
    colour, brand = torch.randint(-1, 3, (rows,), generator=g), torch.randint(-1, 5, (rows,), generator=g)
    features = torch.stack([colour.float(), torch.randn(rows, generator=g), brand.float()], dim=1)
    labels = torch.randint(0, 4, (rows,), generator=g)
    data = RankingData.from_arrays(features, labels, group=[6] * queries, dtype=dtype)
    return data.replace(feature_names=NAMES, categories=(COLOURS, None, BRANDS))


def fitted(data: RankingData, **settings: Any) -> CategoryEncoder:
    return CategoryEncoder.fit(data, CategorySettings(**{"max_one_hot": 3, "smoothing": 2.0, "folds": 3, **settings}))


def smoothed(labels: list[float], prior: float, smoothing: float) -> float:
    return (sum(labels) + smoothing * prior) / (len(labels) + smoothing) if labels else prior


class TestSettings:
    def test_bounds(self) -> None:
        assert CategorySettings(max_one_hot=0, smoothing=0.0, folds=2).folds == 2
        with pytest.raises(LGMMLError, match="`max_one_hot` must be at least 0, got -1"):
            CategorySettings(max_one_hot=-1)
        with pytest.raises(LGMMLError, match=r"`smoothing` must be at least 0, got -0\.1"):
            CategorySettings(smoothing=-0.1)
        for folds in (1, 2.5, "3"):
            with pytest.raises(LGMMLError, match="`folds` must be a whole number of at least 2, got "):
                CategorySettings(folds=folds)  # type: ignore[arg-type]


class TestFit:
    def test_few_words_get_columns_and_many_become_mean_labels(self) -> None:
        data = lists()
        encoder = fitted(data)
        assert encoder.steps[:2] == ({"codes": [0, 1, 2]}, None)
        assert encoder.widths == [3, 1, 1]
        assert encoder.columns == ("colour=blue", "colour=green", "colour=red", "x", "brand (mean label)")
        assert encoder.vocabularies == {"colour": COLOURS, "brand": BRANDS}

    def test_the_words_that_occur_are_counted(self) -> None:
        for most, width in [(2, 1), (3, 3), (4, 3)]:
            assert fitted(lists(), max_one_hot=most).widths[0] == width

    def test_means_are_one_for_each_word_of_the_vocabulary(self) -> None:
        step = fitted(lists(), max_one_hot=0).steps[0]
        assert step is not None
        assert len(step["means"]) == len(COLOURS)
        assert step["means"][3] == step["prior"]  # no document is white

    def test_names_and_categories_are_needed(self) -> None:
        data = lists()
        for other in (data.replace(categories=None), data.replace(feature_names=None)):
            with pytest.raises(DataError, match="categories must stand in columns with names, got features without"):
                fitted(other)


def words_of(codes: list[int], labels: list[float], words: str, group: list[int]) -> RankingData:
    """Lists of one feature, a word; codes of −1 are unknown words."""
    features = torch.tensor(codes, dtype=torch.float64)[:, None]
    data = RankingData.from_arrays(features, labels, group=group, dtype=torch.float64)
    return data.replace(feature_names=("word",), categories=(tuple(words),))


class TestMeanLabels:
    def test_they_are_the_smoothed_means(self) -> None:
        values = [0.5, 0.75, 2.0, 3.0, 1.0, 0.0]
        step = fitted(words_of([0, 0, 1, -1, 3, 3], values, "abcde", [6]), max_one_hot=0, smoothing=1.5).steps[0]
        assert step is not None
        assert step["prior"] == pytest.approx(sum(values) / 6, rel=1e-15)
        by_word: list[list[float]] = [values[:2], values[2:3], [], values[4:], []]
        expected = [smoothed(own, step["prior"], 1.5) for own in by_word]
        assert step["means"] == pytest.approx(expected, rel=1e-14)

    def test_without_smoothing_words_without_documents_get_the_mean_of_all(self) -> None:
        data = words_of([1, 1], [1.0, 2.0], "abc", [2])
        step = fitted(data, max_one_hot=0, smoothing=0.0).steps[0]
        assert step == {"means": [1.5, 1.5, 1.5], "prior": 1.5}

    def test_without_documents_of_other_folds_the_mean_is_zero(self) -> None:
        data = words_of([0, 1], [1.0, 2.0], "ab", [2, 0])
        encoder = fitted(data, max_one_hot=0, folds=2)
        assert encoder.encode_training(data).features.tolist() == [[0.0], [0.0]]


class TestOutOfFold:
    def test_means_come_from_the_queries_of_other_folds(self) -> None:
        for queries, folds in [(7, 3), (7, 2), (3, 5), (2, 2), (1, 5)]:
            data = lists(queries, dtype=torch.float64)
            codes = data.features[:, 2].long()
            encoder = CategoryEncoder.fit(data, CategorySettings(max_one_hot=0, smoothing=2.0, folds=folds))
            found = encoder.encode_training(data).features[:, 2]
            parts = min(folds, queries)
            fold = torch.randperm(queries, generator=torch.Generator().manual_seed(0)) % parts
            for row in range(data.num_documents):
                own = fold[data.query_index[row]]
                seen = (fold != own if parts > 1 else fold == own)[data.query_index]
                labels = data.labels.double()[seen]
                prior = float(labels.mean())
                word = int(codes[row])
                same = labels[codes[seen] == word].tolist() if word >= 0 else []
                assert float(found[row]) == pytest.approx(smoothed(same, prior, 2.0), rel=1e-12)


class TestEncode:
    def test_each_column_is_what_its_step_says(self) -> None:
        data, new = lists(), lists(3, seed=1)
        encoder = fitted(data)
        found = encoder.encode(new)
        colour, x, brand = new.features.unbind(1)
        for code in range(3):
            assert torch.equal(found.features[:, code], (colour == code).float())
        assert torch.equal(found.features[:, 3], x)
        step = encoder.steps[2]
        assert step is not None
        expected = [step["means"][int(code)] if code >= 0 else step["prior"] for code in brand]
        torch.testing.assert_close(found.features[:, 4], torch.tensor(expected))
        assert (found.feature_names, found.categories) == (encoder.columns, None)
        assert torch.equal(found.labels, new.labels)

    def test_as_many_columns_as_before_are_numbers_all_the_same(self) -> None:
        data = lists()
        encoder = fitted(data.replace(categories=(None, None, BRANDS)), max_one_hot=1)
        found = encoder.encode(data.replace(categories=(None, None, BRANDS)))
        assert found.num_features == 3
        assert (found.feature_names, found.categories) == (("colour", "x", "brand (mean label)"), None)

    def test_means_keep_the_precision_of_the_features(self) -> None:
        data = lists(dtype=torch.float64)
        encoder = fitted(data)
        step = encoder.steps[2]
        assert step is not None
        found = encoder.encode(data).features
        assert found.dtype == torch.float64
        assert set(found[:, 4].tolist()) <= {*step["means"], step["prior"]}

    def test_training_lists_get_means_of_other_folds_and_all_else_alike(self) -> None:
        data = lists()
        encoder = fitted(data)
        found, plain = encoder.encode_training(data), encoder.encode(data)
        assert not torch.equal(found.features[:, 4], plain.features[:, 4])
        assert torch.equal(found.features[:, :4], plain.features[:, :4])
        assert (found.feature_names, found.categories) == (encoder.columns, None)

    def test_words_are_found_by_name_in_other_vocabularies(self) -> None:
        data = lists()
        encoder = fitted(data)
        new = lists(3, seed=1)
        turned = new.features.clone()
        turned[:, 0] = torch.where(turned[:, 0] >= 0, 3 - turned[:, 0], -1)
        other = new.replace(features=turned, categories=(COLOURS[::-1], None, BRANDS))
        with pytest.warns(DataWarning, match="missing or that training never saw"):
            assert torch.equal(encoder.encode(other).features, encoder.encode(new).features)
        assert torch.equal(encoder.encode_training(other).features, encoder.encode_training(new).features)

    def test_other_features_are_refused(self) -> None:
        data = lists()
        encoder = fitted(data)
        message = r"the lists must have the features \['colour', 'x', 'brand'\], with categories colour, brand, got "
        renamed = data.replace(feature_names=("colour", "y", "brand"))
        for other in (renamed, data.replace(categories=(COLOURS, None, None)), data.replace(categories=None)):
            with pytest.raises(DataError, match=message):
                encoder.encode(other)

    def test_the_description_restores_the_encoder(self) -> None:
        encoder = fitted(lists(), smoothing=2.5, folds=4)
        spec = json.loads(json.dumps(encoder.spec()))
        assert spec["words"] == [list(COLOURS), None, list(BRANDS)]
        assert (spec["max_one_hot"], spec["smoothing"], spec["folds"]) == (3, 2.5, 4)
        assert CategoryEncoder.from_spec(spec) == encoder


class TestSplits:
    def test_the_training_part_is_encoded_as_such_and_the_others_by_what_was_learnt(self) -> None:
        train, test = lists(), lists(3, seed=1)
        settings = CategorySettings(max_one_hot=3, folds=3)
        found, encoder = encode_splits({"test": test, "train": train}, settings)
        assert encoder == CategoryEncoder.fit(train, settings)
        assert encoder is not None
        assert set(found) == {"train", "test"}
        assert torch.equal(found["train"].features, encoder.encode_training(train).features)
        assert torch.equal(found["test"].features, encoder.encode(test).features)

    def test_a_given_encoder_is_kept(self) -> None:
        given = fitted(lists(seed=5))
        found, encoder = encode_splits({"train": lists()}, CategorySettings(), given)
        assert encoder is given
        assert torch.equal(found["train"].features, given.encode_training(lists()).features)

    def test_parts_of_numbers_stay_as_they_are(self) -> None:
        plain = lists().replace(categories=None)
        found, encoder = encode_splits({"train": plain, "test": plain}, CategorySettings())
        assert encoder is None
        assert found["train"] is plain
        with pytest.raises(DataError, match="all parts must have the categories of the training part, which has none"):
            encode_splits({"train": plain, "valid": plain, "test": lists()}, CategorySettings())


def words_model(data: RankingData) -> LGMML:
    encoder = fitted(data)
    numbers = encoder.encode(data)
    model = small_model(preprocess=plain_chain(), data=numbers)
    bank, phi = model.metrics, Phi(data.num_queries, 7, init=torch.linspace(0.1, 1, 7))
    return LGMML(model.preprocess, bank, phi, feature_names=encoder.columns, encoder=encoder).eval()


class TestModels:
    """A model with an encoder takes words, and its own numbers where that has been done."""

    def test_words_and_their_numbers_score_alike(self) -> None:
        data = lists()
        model = words_model(data)
        assert model.encoder is not None
        numbers = model.encoder.encode(data)
        assert model.encoded(numbers) is numbers
        assert torch.equal(model.encoded(data).features, numbers.features)
        assert torch.equal(model.score(data), model.score(numbers))
        with pytest.raises(DataError, match="the lists must have the features"):
            model.score(numbers.replace(feature_names=None))

    def test_a_model_of_numbers_refuses_words(self) -> None:
        data = lists()
        model = words_model(data)
        plain = LGMML(model.preprocess, model.metrics, model.phi)
        with pytest.raises(LGMMLError, match="`data` must hold numbers only, as the model was trained on, got categ"):
            plain.encoded(data)
        numbers = data.replace(categories=None)
        assert plain.encoded(numbers) is numbers

    def test_readers_are_told_what_to_read(self) -> None:
        data = lists()
        model = words_model(data)
        expected = {"num_features": 3, "feature_names": NAMES, "categories": {"colour": COLOURS, "brand": BRANDS}}
        unsaid = {"missing": "error", "absent": "zero"}
        assert model.reading == {**expected, **unsaid}
        plain = LGMML(model.preprocess, model.metrics, model.phi)
        assert plain.reading == {"num_features": 5, "feature_names": None, "categories": {}, **unsaid}
        told = plain.replace(table={"missing": "zero", "absent": "missing"}).reading
        assert (told["missing"], told["absent"]) == ("zero", "missing")

    def test_names_must_be_the_columns_of_the_encoder(self) -> None:
        model = words_model(lists())
        for names in (None, ("a", "b", "c", "d", "e")):
            with pytest.raises(LGMMLError, match="`feature_names` must be the columns of the encoder, got others"):
                LGMML(model.preprocess, model.metrics, model.phi, feature_names=names, encoder=model.encoder)

    def test_the_encoder_is_saved_with_the_model(self, tmp_path: Any) -> None:
        data = lists()
        model = words_model(data)
        model.save(tmp_path / "m.safetensors")
        again = LGMML.load(tmp_path / "m.safetensors")
        assert again.encoder == model.encoder
        assert torch.equal(again.score(data), model.score(data))

    def test_a_model_without_idle_metrics_keeps_the_encoder(self) -> None:
        model = words_model(lists())
        with torch.no_grad():
            model.phi.table.weight[:, 2] = 0
        small = model.without_idle("shared")
        assert small is not model
        assert (small.encoder, small.feature_names) == (model.encoder, model.feature_names)
