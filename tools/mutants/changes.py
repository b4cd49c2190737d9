"""The changes: every place of a file where one operator, constant, condition, argument or statement can be another."""

from __future__ import annotations

import ast
import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
OPPOSITES = (
    ("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum"), ("clamp_min", "clamp_max"),
    ("segment_min", "segment_max"), ("floor", "ceil"), ("any", "all"), ("sum", "mean"), ("sqrt", "square"),
    ("zeros", "ones"), ("zeros_like", "ones_like"), ("new_zeros", "new_ones"), ("startswith", "endswith"),
)  # fmt: skip
OPPOSITE = {**dict(OPPOSITES), **{second: first for first, second in OPPOSITES}}
SHEDDABLE = ("abs", "neg", "exp", "log", "flip", "square", "sqrt", "strip", "lower", "sort", "unique")
# Arguments without an effect that a test on this machine could see: places, wording, speed.
NEUTRAL = (
    "strict",
    "stacklevel",
    "device",
    "encoding",
    "non_blocking",
    "maxsize",
    "pin_memory",
    "mmap",
    "map_location",
)
COMMUTATIVE = (
    "min",
    "max",
    "minimum",
    "maximum",
    "mul",
    "equal",
    "_result_dtype",
    "gcd",
)  # swapped arguments change nothing
# Methods of tensors whose first argument is a dimension.
ALONG = (
    "sum", "mean", "amax", "amin", "argmax", "argmin", "all", "any", "cumsum", "unbind", "index_select", "index_copy",
    "gather", "size", "unsqueeze", "flatten",
)  # fmt: skip
TALK = ("log", "warnings", "logging")  # what is said is compared by `match=` where it matters


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: of the file, from the root of the tree.
        line: where the changed statement or expression begins.
        span: first and last byte of what is replaced.
        kind: what sort of change.
        before: what stands there.
        after: what would stand there.
        syntax: what stands there, as its syntax tree is written.
        scope: the class and function around it, "" for none.
        number: which of the equal pieces of syntax in that scope it is.
    """

    path: str
    line: int
    span: tuple[int, int]
    kind: str
    before: str
    after: str
    syntax: str = ""
    scope: str = ""
    number: int = 0

    @property
    def package(self) -> str:
        """The folder of the package the file is in."""
        return self.path.split("/")[1]

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What the change is by syntax: lines, spaces and comments do not count."""
        return self.path, self.scope, self.syntax, self.after, self.number

    def apply(self, source: str) -> str:
        """The file with the change."""
        raw = source.encode()
        return (raw[: self.span[0]] + self.after.encode() + raw[self.span[1] :]).decode()

    def undo(self, changed: str) -> str:
        """The file without it."""
        raw, end = changed.encode(), self.span[0] + len(self.after.encode())
        return (raw[: self.span[0]] + self.before.encode() + raw[end:]).decode()


def mutants_of(path: str, source: str) -> list[Mutant]:
    r"""Every change of a file that still parses, in the order of the file.

    >>> [(m.before, m.after) for m in mutants_of("lgmml_torch/data/x.py", "def f(a, b):\n    return a < b")]
    [('a < b', '(a <= b)'), ('a < b', '(a > b)')]
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = list[Mutant]()
    seen: Counter[tuple[str, str, str, str, int]] = Counter()
    tree = ast.parse(source)
    scopes = dict(_scopes(tree))
    for kind, node, after in _changes(tree):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = source.encode()[slice(*span)].decode()
        mutant = Mutant(path, node.lineno, span, kind, before, after, ast.unparse(node), scopes.get(node, ""))
        if mutant.before != mutant.after:
            found.append(replace(mutant, number=seen[mutant.key]))
            seen[mutant.key] += 1
    return found


def _scopes(node: ast.AST, scope: str = "") -> Iterator[tuple[ast.AST, str]]:
    """The class and function around each node."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inner = f"{scope}.{child.name}".lstrip(".")
        yield child, inner
        yield from _scopes(child, inner)


def sample(mutants: list[Mutant], count: int, rng: random.Random) -> list[Mutant]:
    """Some of the changes: places first, then one of the changes of each place, so that none is tried twice."""
    places: dict[tuple[str, tuple[int, int]], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault((mutant.path, mutant.span), []).append(mutant)
    chosen = rng.sample(list(places.values()), min(count, len(places)))
    return [rng.choice(options) for options in chosen]


Change = tuple[str, "ast.expr | ast.stmt", str]


def _axes(tree: ast.Module) -> set[ast.expr]:
    """Numbers of dimensions: counted from the front or from the back, they are two names of one axis."""
    axes = set[ast.expr]()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("dim", "dims", "axis"):
            axes.add(node.value)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            axes.add(node.slice)
        elif isinstance(node, ast.Call) and _callee(node) in ALONG and isinstance(node.func, ast.Attribute):
            axes |= set(node.args[:1])
    return axes | {node.operand for node in axes if isinstance(node, ast.UnaryOp)}


def _changes(tree: ast.Module) -> Iterator[Change]:
    axes = _axes(tree)
    for node in _walk(tree):
        for rule in RULES:
            for change in rule(node):
                if change[0] != "sign" or node not in axes:
                    yield change


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are behaviour: no annotations, docstrings, messages, decorators or assertions of types."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom) or _talks(node):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.keyword) and node.arg in NEUTRAL:
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "posonlyargs", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _talks(node: ast.AST) -> bool:
    """Whether a statement or call only says something."""
    if isinstance(node, ast.Expr):
        return _talks(node.value)
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in TALK


def _compare(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return
    for other in COMPARE[type(node.ops[0])]:
        yield "comparison", node, f"({ast.unparse(ast.Compare(node.left, [other()], node.comparators))})"


def _arithmetic(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _text(node):
        other = ARITHMETIC[type(node.op)]()
        yield "arithmetic", node, f"({ast.unparse(ast.BinOp(node.left, other, node.right))})"
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", node, ast.unparse(ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value))


def _text(node: ast.BinOp) -> bool:
    """Whether it joins text or paths: any other operator there is no program at all."""
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", 0), str | bytes) for side in sides)


def _constant(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node.value, int | float):
        yield "constant", node, "0" if node.value else "1"
        if node.value:
            yield "sign", node, f"(-{node.value})"


def _logic(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "logic", node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
    if isinstance(node, ast.UnaryOp):
        kind = "sign" if isinstance(node.op, ast.USub) else "logic"
        yield kind, node, f"({ast.unparse(node.operand)})"
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else getattr(node, "ifs", [])
    for test in tests:
        if not isinstance(test, ast.Compare | ast.UnaryOp):  # those have a change of their own that says the same
            yield "logic", test, f"(not ({ast.unparse(test)}))"


def _name(node: ast.AST) -> Iterator[Change]:
    """A function and its opposite, and a step of a chain left out."""
    if not isinstance(node, ast.Call):
        return
    func, name = node.func, _callee(node)
    if name in OPPOSITE:
        swapped = copy.deepcopy(node)
        if isinstance(swapped.func, ast.Name):
            swapped.func.id = OPPOSITE[name]
        elif isinstance(swapped.func, ast.Attribute):
            swapped.func.attr = OPPOSITE[name]
        yield "opposite", node, ast.unparse(swapped)
    if name in SHEDDABLE and isinstance(func, ast.Attribute) and not node.args and not node.keywords:
        yield "step left out", node, f"({ast.unparse(func.value)})"


def _callee(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _argument(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in NEUTRAL:
            fewer = ast.Call(node.func, node.args, [*node.keywords[:place], *node.keywords[place + 1 :]])
            yield "argument left out", node, ast.unparse(fewer)
    if _callee(node) in COMMUTATIVE:
        return
    if len(node.args) > 1 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
        swapped = ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
        yield "arguments swapped", node, ast.unparse(swapped)


def _statement(node: ast.AST) -> Iterator[Change]:
    """A statement left out, where the names it sets are set without it."""
    left_out = isinstance(node, ast.Continue | ast.Break | ast.AugAssign)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        left_out = True
    if isinstance(node, ast.Assign):
        read = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        written = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        left_out = written <= read or isinstance(node.targets[0], ast.Subscript)
    if left_out:
        assert isinstance(node, ast.stmt)
        yield "statement left out", node, "pass"


RULES = (_compare, _arithmetic, _constant, _logic, _name, _argument, _statement)
