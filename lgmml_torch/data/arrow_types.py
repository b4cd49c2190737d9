"""Types of Arrow columns: which of them hold numbers, lists or categories, and their values as numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.categories import word_of

if TYPE_CHECKING:
    import pyarrow as pa


def is_list(dtype: pa.DataType) -> bool:
    """Whether the entries of a column are lists."""
    from pyarrow import types

    return bool(types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype))


def inner(dtype: Any) -> Any:
    """The type of the entries of lists, or the type itself."""
    return dtype.value_type if is_list(dtype) else dtype


def no_number(dtype: pa.DataType) -> str | None:
    """What a column holds if not numbers; None for numbers, for true and false, and for nothing at all."""
    from pyarrow import types

    numeric = (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, types.is_null)
    if any(matches(dtype) for matches in numeric):
        return None
    if types.is_temporal(dtype):
        return "dates"
    return "categories" if types.is_dictionary(dtype) else "text"


def numbers(column: Any) -> NDArray[Any]:
    """The numbers of a column; true and false are 1 and 0, missing values are NaN."""
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    elif pa.types.is_decimal(column.type) or pa.types.is_null(column.type):
        column = column.cast(pa.float64())
    out: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return out


def distinct(column: Any) -> tuple[list[str | None], NDArray[np.int64]]:
    """The words that occur in a column, and for each row the place of its word among them."""
    coded = column if hasattr(column, "dictionary") else column.dictionary_encode()
    used, places = np.unique(coded.indices.fill_null(-1).to_numpy(zero_copy_only=False), return_inverse=True)
    entries = [*coded.dictionary.to_pylist(), None]  # the last is for −1, missing
    return [word_of(entries[place]) for place in used.tolist()], places.astype(np.int64)
