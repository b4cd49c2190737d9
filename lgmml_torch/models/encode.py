"""Categories as numbers: a column for each word of a small vocabulary, the mean label of each word of a large one.

The encoder is fitted on the training lists and travels with the model as primitives. It stands before preprocessing:
metrics, weights and explanations see its columns, which are called ``colour=red`` or ``brand (mean label)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lgmml_torch.categories import Categories, category_columns, check_words, recoded, unknown_words, vocabularies
from lgmml_torch.checks import DataError, LGMMLError, check_positive
from lgmml_torch.files import as_tuples
from lgmml_torch.ragged import RankingData


@dataclass(frozen=True)
class CategorySettings:
    """How categories become numbers."""

    # up to this many words get a column each; where there are more, a word becomes its mean label
    max_one_hot: int = 12
    smoothing: float = 10.0  # number of documents of the overall mean that are added to the documents of every word
    # parts of the training queries: a query's means come from the other parts, so that no document's own label is in
    # its features
    folds: int = 5

    def __post_init__(self) -> None:
        check_positive("max_one_hot", self.max_one_hot, zero=True)
        check_positive("smoothing", self.smoothing, zero=True)
        if not isinstance(self.folds, int) or self.folds < 2:
            raise LGMMLError(f"`folds` must be a whole number of at least 2, got {self.folds!r}")


# What happens to a raw feature, in primitives. {"codes": …}: a column for each of these codes, 1 where a document has
# it. {"means": …, "prior": …}: the smoothed mean label of each code, the overall mean for others. None: a number stays.
_Step = dict[str, Any] | None


@dataclass(frozen=True)
class CategoryEncoder:
    """A fixed map from lists with categories to lists of numbers."""

    names: tuple[str, ...]  # of the raw features
    categories: Categories  # their vocabularies, None for numbers
    steps: tuple[_Step, ...]  # what happens to each raw feature
    settings: CategorySettings  # how the encoder was fitted

    @classmethod
    def fit(cls, train: RankingData, settings: CategorySettings) -> Self:
        """Look at the training lists: words that no document has are treated as unknown ones.

        Raises:
            DataError: features without names.
        """
        if train.categories is None or train.feature_names is None:
            raise DataError("categories must stand in columns with names, got features without")
        if len(train.all_lists) != len(train):
            raise DataError("categories need all training lists in one process, got several processes that share them")
        steps: list[_Step] = [None] * train.num_features
        for column in category_columns(train.categories):
            codes = train.features[:, column].long()
            words = train.categories[column] or ()
            used = torch.bincount(codes[codes >= 0]).nonzero()[:, 0].tolist()
            if len(used) <= settings.max_one_hot:
                steps[column] = {"codes": used}
            else:
                means, prior = _mean_labels(codes, train.labels, len(words), settings.smoothing)
                steps[column] = {"means": means.tolist(), "prior": prior}
        return cls(train.feature_names, train.categories, tuple(steps), settings)

    @property
    def vocabularies(self) -> dict[str, tuple[str, ...]]:
        """The words of each category, by name: what a reader must know to give the codes meant here."""
        return vocabularies(self.names, self.categories)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that come out."""
        found: list[str] = []
        for name, words, step in zip(self.names, self.categories, self.steps, strict=True):
            if step is None or words is None:
                found.append(name)
            elif "codes" in step:
                found += [f"{name}={words[code]}" for code in step["codes"]]
            else:
                found.append(f"{name} (mean label)")
        return tuple(found)

    @property
    def widths(self) -> list[int]:
        """The number of columns that each raw feature becomes."""
        found = []
        for step in self.steps:
            codes = (step or {}).get("codes")
            found.append(1 if codes is None else len(codes))
        return found

    def encode(self, data: RankingData) -> RankingData:
        """Any lists, by what was learnt from the training lists.

        Raises:
            DataError: other features than those of the training lists, or mostly unknown words.
        """
        found = self.recoded(data)
        if data.categories != self.categories:  # else their reader knew the words
            check_words(unknown_words(found.features, self.categories, self.names), data.num_documents)
        return self._built(found, {})

    def encode_training(self, train: RankingData) -> RankingData:
        """The training lists: the mean labels of each query's words are those of other queries."""
        data = self.recoded(train)
        held: dict[int, Tensor] = {}
        for column, step in enumerate(self.steps):
            if step is not None and "means" in step:
                codes, count = data.features[:, column].long(), len(step["means"])
                held[column] = _out_of_fold(codes, data, count, self.settings)
        return self._built(data, held)

    def recoded(self, data: RankingData) -> RankingData:
        """The same lists with the codes of this encoder's vocabularies; lists of other features are refused."""
        if data.feature_names != self.names or category_columns(data.categories) != category_columns(self.categories):
            asked, got = ", ".join(self.vocabularies), data.feature_names
            raise DataError(f"the lists must have the features {list(self.names)}, with categories {asked}, got {got}")
        features = recoded(data.features, data.categories, self.categories)
        return data.replace(features=features, categories=self.categories)

    def _built(self, data: RankingData, held: Mapping[int, Tensor]) -> RankingData:
        def numbers(rows: slice, _: Tensor) -> Tensor:
            return self.numbers(data.features[rows], {column: values[rows] for column, values in held.items()})

        features = data.all_lists.in_blocks(numbers, data.offsets)
        return data.replace(features=features, feature_names=self.columns, categories=None)

    def numbers(self, features: Tensor, held: Mapping[int, Tensor] | None = None) -> Tensor:
        """The columns that come out of raw features with codes; ``held`` stands for mean labels, by column."""
        parts: list[Tensor] = []
        for column, step in enumerate(self.steps):
            values = features[:, column]
            if step is None:
                parts.append(values[:, None])
            elif "codes" in step:
                parts.append((values[:, None] == values.new_tensor(step["codes"])).to(values.dtype))
            else:
                found = values.new_tensor([*step["means"], step["prior"]])[values.long()]  # −1, unknown: the last
                parts.append((held or {}).get(column, found).to(values)[:, None])
        return torch.cat(parts, dim=1)

    def spec(self) -> dict[str, Any]:
        """All of it in primitives."""
        return {"names": self.names, "words": self.categories, "steps": list(self.steps), **asdict(self.settings)}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """The inverse of `spec`."""
        settings = CategorySettings(spec["max_one_hot"], spec["smoothing"], spec["folds"])
        return cls(as_tuples(spec["names"]), as_tuples(spec["words"]), tuple(spec["steps"]), settings)


def _mean_labels(
    codes: Tensor,  # (N,) −1 for other words
    labels: Tensor,  # (N,)
    count: int,
    smoothing: float,
) -> tuple[Tensor, float]:
    """(Σ labels + smoothing·mean)/(documents + smoothing) of each word, in float64, and the mean of all documents.

    >>> means, prior = _mean_labels(torch.tensor([0, 0, 1]), torch.tensor([2.0, 1.0, 0.0]), 3, 1.0)
    >>> means.tolist(), prior
    ([1.3333333333333333, 0.5, 1.0], 1.0)
    """
    labels = labels.double()
    prior = float(labels.mean()) if len(labels) else 0.0
    known = codes >= 0
    counts = torch.bincount(codes[known], minlength=count).double()
    totals = torch.bincount(codes[known], weights=labels[known], minlength=count)
    means = (totals + smoothing * prior) / (counts + smoothing)
    return torch.where(counts > 0, means, torch.full_like(means, prior)), prior


def _out_of_fold(
    codes: Tensor,  # (N,) −1 for other words
    data: RankingData,
    count: int,
    settings: CategorySettings,
) -> Tensor:  # (N,) float64
    """For each document the mean label of its word over the queries of other folds; with a single query over all."""
    folds = min(settings.folds, data.num_queries)
    # By place among the sorted query ids, mixed: rows in another order get the same folds.
    mixed = torch.randperm(data.num_queries, generator=torch.Generator().manual_seed(0)) % folds
    fold = mixed[data.query_index]
    out = torch.empty(data.num_documents, dtype=torch.float64)
    for number in range(folds):
        own = fold == number
        others = own
        if folds > 1:
            others = ~own
        means, prior = _mean_labels(codes[others], data.labels[others], count, settings.smoothing)
        out[own] = torch.cat([means, means.new_tensor([prior])])[codes[own]]
    return out


def encode_splits(
    splits: Mapping[str, RankingData], settings: CategorySettings, encoder: CategoryEncoder | None = None
) -> tuple[dict[str, RankingData], CategoryEncoder | None]:
    """All parts as numbers, and the encoder that made them so: a given one, or one fitted on ``train``."""
    train = splits["train"]
    if encoder is None:
        if train.categories is None:
            for part in splits.values():
                if part.categories is not None:
                    raise DataError("all parts must have the categories of the training part, which has none")
            return dict(splits), None
        encoder = CategoryEncoder.fit(train, settings)
    encoded = {"train": encoder.encode_training(train)}
    for name, part in splits.items():
        if name != "train":
            encoded[name] = encoder.encode(part)
    return encoded, encoder


def check_same_table(names: tuple[str, ...] | None, table: Mapping[str, Any] | None, data: RankingData) -> None:
    """Refuse features in another order than the training lists', and missing values filled by another rule."""
    if None not in (names, data.feature_names) and names != data.feature_names:
        raise LGMMLError(
            f"`data` must have the features the model was trained on, in their order ({_some(names)}), "
            f"got {_some(data.feature_names)}"
        )
    rules = []
    for each in (table, data.table):
        rules.append((each or {}).get("missing", "error"))
    if "error" not in rules and rules[0] != rules[1]:
        raise DataError(f"`missing` must be {rules[0]!r}, as the model was trained, got {rules[1]!r}")


def _some(names: tuple[str, ...] | None) -> str:
    shown = list(names or ())
    if len(shown) > 3:
        shown[3:] = ["…"]
    return ", ".join(shown)
