"""Measures of one's own beside the built-in ones: a function of scores, labels and offsets, with a name.

Wherever a measure is named, a function may stand instead. It gets the scores ``(N,)``, labels ``(N,)`` and offsets
``(Q+1,)`` of whole lists, rows in the order of their `RankingData`. It returns a value for each query: higher is
better, NaN for a query that does not count. It decides itself how equal scores rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.ranking.presets import Preset, describe, parse_metric

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measure:
    """A measure by its name, and the function behind it where it is not a built-in one.

    >>> Measure.of("ndcg@10").function is None
    True
    >>> def first_label(scores, labels, offsets):
    ...     '''Label of the best-scored document.'''
    ...     lists = zip(offsets[:-1].tolist(), offsets[1:].tolist())
    ...     return torch.stack([labels[a:b][scores[a:b].argmax()] for a, b in lists])
    >>> own = Measure.of(first_label)
    >>> own.per_query(torch.tensor([0.5, 0.1]), torch.tensor([2.0, 0.0]), torch.tensor([0, 2]))
    tensor([2.], dtype=torch.float64)
    >>> own.definition()
    'first_label (own): Label of the best-scored document.'
    """

    name: str
    function: Function | None = field(default=None, repr=False)

    @classmethod
    def of(cls, given: str | Function | Measure) -> Measure:
        """The measure of that name, or the function under its own name.

        Raises:
            LGMMLError: an unknown name, or something that is neither.
        """
        if isinstance(given, Measure):
            return given
        if isinstance(given, str):
            parse_metric(given)
            return cls(given)
        name = getattr(given, "__name__", None)
        if not callable(given) or not isinstance(name, str):
            raise LGMMLError(
                f"a measure must be a name or a function with a name, got {type(given).__name__}; a partial call needs "
                "a `__name__`"
            )
        return cls(name, given)

    def per_query(
        self,
        scores: Tensor,  # (N,)
        labels: Tensor,  # (N,)
        offsets: Tensor,  # (Q+1,)
    ) -> Tensor:  # (Q,)
        """What the function says of each query, as float64.

        Raises:
            LGMMLError: it gives something else than one number, or NaN, for each query.
        """
        assert self.function is not None
        if len(offsets) == 1:  # no lists, which a function need not be ready for
            return scores.new_empty(0, dtype=torch.float64)
        found: Any = self.function(scores, labels, offsets)
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        want = (len(offsets) - 1,)
        if not isinstance(found, Tensor) or shape != want:
            raise LGMMLError(f"the measure {self.name!r} must give a tensor of shape {want}, got {shape}")
        if bool(found.isinf().any()):
            raise LGMMLError(f"the measure {self.name!r} must give finite numbers or NaN, got an infinite one")
        return found.detach().to(device=scores.device, dtype=torch.float64)

    def definition(self, preset: str | Preset = "default", *, threshold: float | None = None) -> str:
        """One line that says what the figure is, see `describe`; of a function, the first line of its docstring."""
        if self.function is None:
            return describe(self.name, preset, threshold=threshold)
        lines = (getattr(self.function, "__doc__", None) or "").strip().splitlines()
        if not lines:
            lines = ["a function without a docstring"]
        return f"{self.name} (own): {lines[0]}"


def measures_of(given: str | Function | Iterable[str | Function | Measure]) -> list[Measure]:
    """Each measure once, in the order asked for.

    Raises:
        LGMMLError: two functions of one name.
    """
    found: dict[str, Measure] = {}
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = [given]
    for item in given:
        measure = Measure.of(item)
        if found.setdefault(measure.name, measure) != measure:
            raise LGMMLError(f"measures must have names of their own, got two called {measure.name!r}")
    return list(found.values())
