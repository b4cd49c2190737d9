"""Columns of words: a vocabulary for each, and a number for each of its words.

A category column stands in the features as codes, its words' places in a sorted vocabulary; `OTHER` stands for words
that are not in it. What a model makes of the codes is decided by `lgmml_torch.models.encode`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError, DataWarning
from lgmml_torch.inputs import as_frame, dense_features, is_missing, numeric_column

OTHER = -1.0  # the code of a word that the vocabulary does not hold
_MOST_WORDS = 100_000  # in a vocabulary: the model file holds it
MOST_UNKNOWN = 0.5  # share of the rows of a column with missing or unknown words; with more, the rows are refused
FEW_ROWS = 100  # with fewer rows nothing is refused: all documents of one query may have a new word
_GAPS = ("", "null", "nan")

Vocabulary = tuple[str, ...]
Categories = tuple[Vocabulary | None, ...]  # one entry per feature, None for numbers
Asked = Mapping[str, Sequence[str]] | Sequence[str] | None


@dataclass(frozen=True)
class WordColumns:
    """Which columns hold categories."""

    known: Mapping[str, Vocabulary | None] = field(default_factory=dict)  # None: the words are still to be found
    closed: bool = False  # whether there are no others; otherwise columns whose type says so are categories too

    @classmethod
    def of(cls, asked: Asked) -> WordColumns:
        """From names, or from names with their vocabularies, which are then all there are.

        >>> WordColumns.of(["colour"]).holds("colour", typed=False), WordColumns.of({}).holds("colour", typed=True)
        (True, False)
        """
        if isinstance(asked, str):
            raise DataError(f"`categories` must be a list of names, got the text {asked!r}")
        if isinstance(asked, Mapping):
            return cls(dict(zip(asked, map(tuple, asked.values()), strict=True)), closed=True)
        return cls(dict.fromkeys(asked or ()))

    def holds(self, name: object, *, typed: bool) -> bool:
        """Whether a column is one of them; ``typed`` says that its type is that of a category."""
        return name in self.known or (typed and not self.closed)

    def vocabulary(self, name: object) -> Vocabulary | None:
        """The words of a column, where they are known."""
        return self.known.get(str(name))

    @staticmethod
    def found(words: Iterable[str | None], name: object) -> Vocabulary:
        """The words of a column in one order, whatever order they came in.

        Raises:
            DataError: for more than a model file should hold.
        """
        vocabulary = tuple(sorted(filter(None, set(words))))
        if len(vocabulary) > _MOST_WORDS:
            rule = f"must have at most {_MOST_WORDS:,} different words to be a category"
            raise DataError(f"column {name!r} {rule}, got {len(vocabulary):,} words; leave it out or group them")
        return vocabulary

    def applied(
        self, features: torch.Tensor, categories: Categories | None, names: Sequence[str] | None
    ) -> tuple[torch.Tensor, Categories | None]:
        """The same rows as codes of the vocabularies asked for, where all of them are known.

        Raises:
            DataError: where other columns are categories than asked for.
        """
        if not self.closed:
            return features, categories
        target, there = None, category_columns(categories)
        got: Sequence[object] = there
        if names is not None:
            target = gathered(list(map(self.vocabulary, names)))
            got = [names[column] for column in there]
        asked = category_columns(target)
        if asked != there or len(asked) != len(self.known):
            among = f"among {features.shape[1]} features"
            raise DataError(f"the data must have the categories {list(self.known)}, got {got} {among}")
        return recoded(features, categories, target), target

    def check_present(self, names: Iterable[str], where: str) -> None:
        """Require every category to be among the features."""
        there = set(names)
        for name in self.known:
            if name not in there:
                raise DataError(f"{where}: there must be a column {name!r}, which `categories` names")


def word_of(value: object) -> str | None:
    """A value as a word; None where it is missing. Whole numbers are written without a point.

    >>> word_of(" red "), word_of(3.0), word_of("NULL")
    ('red', '3', None)
    """
    if is_missing(value):
        return None
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        value = int(value)
    word = str(value).strip()
    return None if word.lower() in _GAPS else word


def _distinct(values: Sequence[object]) -> tuple[list[str | None], NDArray[np.int64]]:
    """The words that occur in a list of values, and for each value the place of its word among them."""
    seen: dict[object, int] = {}
    places = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        places[row] = seen.setdefault(value, len(seen))
    return list(map(word_of, seen)), places


def codes_of(
    words: Sequence[str | None], places: NDArray[np.int64], vocabulary: Vocabulary
) -> NDArray[np.float64]:  # places (N,) -> (N,)
    """The code of each row: a place in the vocabulary, `OTHER` for a word it does not hold, NaN for none at all.

    >>> codes_of(["b", None, "z"], np.array([2, 0, 1]), ("a", "b")).tolist()
    [-1.0, 1.0, nan]
    """
    code: dict[str | None, float] = {word: float(place) for place, word in enumerate(vocabulary)}
    code[None] = np.nan
    known = [code.get(word, OTHER) for word in words]
    return np.array(known, dtype=np.float64)[places]


def coded_features(X: Any, dtype: torch.dtype, columns: WordColumns) -> tuple[NDArray[Any], Categories | None]:
    """Features as a C-contiguous array, and the vocabularies of those that are categories, if any are.

    Raises:
        DataError: for what is no matrix of numbers and no frame, or categories that it cannot hold; for dates, and for
            text that is not named as a category.
    """
    frame = as_frame(X)
    if frame is None:
        if columns.known:
            raise DataError(f"`X` must be a frame to hold the categories {list(columns.known)}, got {type(X).__name__}")
        return dense_features(X, dtype), None
    import narwhals as nw

    columns.check_present(frame.columns, "`X`")
    out = np.empty(frame.shape, np.float64 if dtype == torch.float64 else np.float32)
    found: list[Vocabulary | None] = []
    with np.errstate(over="ignore"):  # a number too large becomes infinite, which is refused by row and column
        for place, name in enumerate(frame.columns):
            values, vocabulary = frame[:, place], columns.vocabulary(name)
            if columns.holds(name, typed=values.dtype in (nw.Categorical, nw.Enum)):
                words, places = _distinct(values.to_list())
                if vocabulary is None:
                    vocabulary = columns.found(words, name)
                out[:, place] = codes_of(words, places, vocabulary)
            else:
                out[:, place] = numeric_column(values, name)
            found.append(vocabulary)
    return out, gathered(found)


def gathered(found: Sequence[Vocabulary | None]) -> Categories | None:
    """The vocabularies of all features; None where none is a category."""
    if set(found) <= {None}:
        return None
    return tuple(found)


def vocabularies(names: Sequence[str] | None, categories: Categories | None) -> dict[str, Vocabulary]:
    """The words of each category, by name."""
    return {name: words for name, words in zip(names or (), categories or (), strict=False) if words is not None}


def category_columns(categories: Categories | None) -> list[int]:
    """The features that are categories."""
    return [column for column, words in enumerate(categories or ()) if words is not None]


def fill_words(features: NDArray[Any], categories: Categories | None) -> None:
    """Put `OTHER`, in place, where a word is missing: stand-ins for numbers mean nothing among codes."""
    for column in category_columns(categories):
        values = features[:, column]
        values[np.isnan(values)] = OTHER


def unknown_words(features: Any, categories: Categories | None, names: Sequence[str] | None) -> Counter[str]:
    """The number of rows with the code `OTHER` in each category, by its name."""
    found: Counter[str] = Counter()
    for column in category_columns(categories):
        name = f"feature {column + 1}" if names is None else names[column]
        found[name] = int((features[:, column] == OTHER).sum())
    return found


def check_words(unknown: Mapping[str, int], rows: int, where: str = "") -> None:
    """Warn of rows whose word is missing or not in the vocabulary of the training data.

    Raises:
        DataError: a column in which more than `MOST_UNKNOWN` of at least `FEW_ROWS` rows are like that.
    """
    told = []
    for name, count in unknown.items():
        if rows >= FEW_ROWS and count > MOST_UNKNOWN * rows:
            raise DataError(
                f"{where}column {name!r} must have words that training has seen in at least half of the rows, but in "
                f"{count:,} of {rows:,} the word is missing or unknown; are they spelt in another way?"
            )
        if count:
            told.append(f"{name!r} {count:,}")
    if told:
        warnings.warn(
            f"{where}of {rows:,} rows, some have words that are missing or that training never saw: {', '.join(told)}; "
            "they are treated as a word without meaning",
            DataWarning,
            stacklevel=3,
        )


def recoded(features: torch.Tensor, categories: Categories | None, target: Categories | None) -> torch.Tensor:
    """The same words as codes of other vocabularies, for the same columns."""
    if categories == target or categories is None or target is None:
        return features
    out = features.clone()
    for column in category_columns(categories):
        old, new = categories[column] or (), target[column] or ()
        codes = codes_of([*old, ""], np.arange(len(old) + 1), new)
        codes[-1] = OTHER
        table = torch.from_numpy(codes).to(features.dtype)
        out[:, column] = table[features[:, column].long()]  # −1, the other words, is the last entry
    return out


def united(parts: Sequence[Categories | None]) -> Categories | None:
    """Vocabularies that hold the words of all parts.

    Raises:
        DataError: where a feature is a category in some parts and a number in others.
    """
    kinds = set(map(tuple, map(category_columns, parts)))
    if len(kinds) > 1:
        raise DataError(f"`parts` must have the same categories, got them in columns {sorted(kinds)} (from 0)")
    if not any(kinds):
        return None
    vocabularies: list[Vocabulary | None] = []
    for column in zip(*filter(None, parts), strict=True):
        if column[0] is None:
            vocabularies.append(None)
        else:
            vocabularies.append(tuple(sorted(set().union(*column))))
    return tuple(vocabularies)
