"""Size and density of Python packages, one table row for each: ``python -m tools.measure lgmml_torch [folder …]``.

Definitions:

- Code lines hold a token that is neither a comment nor part of a docstring. Docstring lines include their blank lines.
- A function's length is its number of code lines, signature included. Methods and inner functions count.
- Public names are functions and classes of a module without a leading underscore; before the slash, ``__all__``.
- Conditional expressions and comprehensions (generators included) are counted per 1,000 lines that are not blank. A
  nested conditional expression has another one inside.
- The widest signature counts parameters without ``self`` and ``cls``.
- Homonyms are public names, constants included, that two or more modules define. Left out are ``log``, ``main``, and
  ``COMMANDS``, which every file of commands has.
- The median file leaves out files below five lines.
- Tests are ``*_test.py`` and files below ``tests`` or ``testing``, in or beside the package. Test/code compares code.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A module's logger, a program's entry, and the table of a file of commands.
EXPECTED_TWICE = {"log", "main", "COMMANDS"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
HEAD = (
    "package", "files", "lines", "code", "median file", "function: median / p90 / longest", "docstrings",
    "`__all__` / public", "`? :` + comprehensions per 1,000", "nested `? :`", "widest signature", "homonyms",
    "test/code",
)  # fmt: skip


@dataclass(frozen=True)
class Module:
    """What is counted in one file."""

    lines: int
    filled: int  # not blank
    code: int
    docstrings: int
    functions: list[int]  # code lines of each
    names: list[str]  # public functions and classes
    constants: list[str]  # public ones
    conditionals: int
    nested: int
    comprehensions: int
    widest: int


def measure_module(source: str) -> Module:
    r"""Count in the text of one file.

    >>> found = measure_module('"Title."\n\nLIMIT = 1\n\ndef f(a, b):\n    return [a if x else b for x in a]  # why\n')
    >>> found.lines, found.filled, found.code, found.docstrings, found.functions
    (6, 4, 3, 1, [2])
    >>> found.names, found.constants, found.conditionals, found.nested, found.comprehensions, found.widest
    (['f'], ['LIMIT'], 1, 0, 1, 2)
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    documented = _docstring_lines(nodes)
    code = _token_lines(source) - documented
    functions = [node for node in nodes if isinstance(node, Function)]
    conditionals = [node for node in nodes if isinstance(node, ast.IfExp)]
    lines = source.splitlines()
    return Module(
        lines=len(lines),
        filled=sum(1 for line in lines if line.strip()),
        code=len(code),
        docstrings=len(documented),
        functions=[len(code & _span(node)) for node in functions],
        names=list(_definitions(tree)),
        constants=sorted(set(_constants(tree))),
        conditionals=len(conditionals),
        nested=sum(map(_nested, conditionals)),
        comprehensions=sum(isinstance(node, Comprehension) for node in nodes),
        widest=max(map(_width, functions), default=0),
    )


def _token_lines(source: str) -> set[int]:
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def _docstring_lines(nodes: list[ast.AST]) -> set[int]:
    found: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            found |= _span(node.body[0])
    return found


def _span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _definitions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield node.name


def _constants(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not node.id.startswith("_"):
                    yield node.id


def _nested(node: ast.IfExp) -> bool:
    return sum(isinstance(inner, ast.IfExp) for inner in ast.walk(node)) > 1


def _width(node: Function) -> int:
    names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(1 for name in names if name.arg not in ("self", "cls"))


@dataclass(frozen=True)
class Package:
    """A folder of modules, and the code lines of its tests."""

    name: str
    modules: list[Module]
    exported: int | None  # names in ``__all__`` of the package
    test_code: int

    def total(self, field: str) -> int:
        """The sum over all modules."""
        return sum(getattr(module, field) for module in self.modules)

    @property
    def public_names(self) -> int:
        """Functions and classes of all modules."""
        return sum(len(module.names) for module in self.modules)

    @property
    def homonyms(self) -> list[str]:
        """Public names that two or more modules define."""
        times = Counter(name for module in self.modules for name in {*module.names, *module.constants})
        return sorted(name for name, count in times.items() if count > 1 and name not in EXPECTED_TWICE)

    def row(self) -> list[str]:
        """The cells below `HEAD`."""
        code, documented, filled = self.total("code"), self.total("docstrings"), self.total("filled")
        lengths = sorted(length for module in self.modules for length in module.functions) or [0]
        longest = f"{statistics.median(lengths):g} / {lengths[int(0.9 * len(lengths))]} / {lengths[-1]}"
        density = [f"{1000 * self.total(kind) / filled:.0f}" for kind in ("conditionals", "comprehensions")]
        exported = "–" if self.exported is None else str(self.exported)
        ratio = f"{self.test_code / code:.2f}" if self.test_code else "–"
        median = statistics.median([module.lines for module in self.modules if module.lines > 4] or [0])
        widest = max(module.widest for module in self.modules)
        return [
            self.name, f"{len(self.modules)}", f"{self.total('lines'):,}", f"{code:,}", f"{median:.0f}", longest,
            f"{documented / (documented + code):.0%}", f"{exported} / {self.public_names}", " + ".join(density),
            f"{self.total('nested')}", f"{widest}", f"{len(self.homonyms)}", ratio,
        ]  # fmt: skip


def measure(folder: Path) -> Package:
    """Read all Python files below a folder, and its tests."""
    modules, test_code = list[Module](), 0
    for path in (*sorted(folder.rglob("*.py")), *(folder.absolute().parent / "tests").rglob("*.py")):
        module = measure_module(path.read_text(encoding="utf-8"))
        if {"tests", "testing"} & {*path.parts} or path.stem.endswith("_test"):
            test_code += module.code
        else:
            modules.append(module)
    return Package(folder.absolute().name, modules, _exported(folder / "__init__.py"), test_code)


def _exported(file: Path) -> int:
    """Names in ``__all__``, or in the stub that lists them."""
    stub = file.with_suffix(".pyi")
    if stub.is_file():
        return stub.read_text(encoding="utf-8").count(" as ") + 1  # and __version__
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    rows = [measure(folder).row() for folder in parser.parse_args().folders]
    for cells in (HEAD, ["---"] * len(HEAD), *rows):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
