"""A change put into functions that are loaded already: their code is exchanged, and nothing is imported again."""

from __future__ import annotations

import gc
import inspect
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType, FunctionType

Live = dict[tuple[str, str, int], list[FunctionType]]
"""By file, qualified name and first line: the functions there are."""


def live_functions(folder: str) -> Live:
    """Every function there is whose code stands below a folder, whatever holds it."""
    found: Live = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(folder):
            found[_place(thing.__code__)].append(thing)
    return found


def exchange(file: str, before: str, after: str, live: Live) -> bool:
    """Give functions of a file their changed code; False where that is not all of the change, and nothing was done.

    Defaults, constants, class bodies and tables are made when a file is imported: such changes need a new import.
    """
    try:
        pairs = list(_changed(compile(before, file, "exec"), compile(after, file, "exec")))
    except LookupError:
        return False
    todo = []
    for old, new in pairs:
        if not live.get(_place(old)):
            return False
        # Functions within are made anew whenever the outer one is called; some were, when files were imported.
        todo += [
            (function, b)
            for a, b in zip(_within(old), _within(new), strict=False)
            if a.co_name == b.co_name
            for function in live.get(_place(a), ())
        ]
    if any(len(function.__code__.co_freevars) != len(code.co_freevars) for function, code in todo):
        return False
    for function, code in todo:
        function.__code__ = code
    return bool(todo)


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _changed(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Outermost functions that differ.

    Raises:
        LookupError: what differs is in no function.
    """
    if old.co_flags & inspect.CO_OPTIMIZED:
        if _differ(old, new):
            yield old, new
        return
    if _shell(old) != _shell(new):
        raise LookupError(old.co_qualname)
    for pair in zip(_inner(old), _inner(new), strict=True):
        yield from _changed(*pair)


def _differ(old: CodeType, new: CodeType) -> bool:
    if _shell(old) != _shell(new):
        return True
    return any(_differ(a, b) for a, b in zip(_inner(old), _inner(new), strict=True))


def _shell(code: CodeType) -> tuple[object, ...]:
    """What a piece of code does, without its lines' numbers and the functions within."""
    plain = tuple(repr(value) for value in code.co_consts if not isinstance(value, CodeType))
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_exceptiontable, code.co_flags, plain, names, len(_inner(code))


def _inner(code: CodeType) -> list[CodeType]:
    return [value for value in code.co_consts if isinstance(value, CodeType)]


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in _inner(code):
        yield from _within(inner)
