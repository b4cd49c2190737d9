"""How a command walks through the package: ``python -m tools.trace train.py data=generated_small``.

The command runs in this process; ``lgmml score MODEL FILE`` works, too. ``sys.setprofile`` sees the calls of its main
thread. Definitions:

- A module is entered by a call of one of its functions, comprehensions (before Python 3.12) and lambdas included.
- A change of module is a call in another module than the call before.
- Before data: modules entered before the first call of a reader. A reader is a function of ``lgmml_torch/data`` whose
  annotated result names `RankingData`. Documents are those in the results of readers, without readers that these call.
- Preprocessed are the rows given to `Preprocess.forward` or to `Chain.fit_transform`, without calls from
  inside another one.
- Scored are the documents given to `LGMML.score`, and in evaluation to `Trained.score`. A call is for the page if a
  file or folder called page, page_data, charts or look is on the stack, for evaluation if one called evaluation is,
  else for the rest.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections import Counter
from importlib.util import find_spec
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

PAGE = {"page", "page_data", "charts", "look"}
PREPROCESSING = {"Preprocess.forward", "Chain.fit_transform"}


class Trace:
    """A profile function that counts."""

    def __init__(self, package: Path) -> None:
        self.root = f"{package}/"
        self.readers = _readers(package)
        self.modules: dict[str, None] = {}  # in the order of their first call
        self.before_data: int | None = None
        self.functions: set[tuple[str, str, int]] = set()
        self.calls = self.changes = 0
        self.preprocessed: Counter[str] = Counter()
        self.documents: Counter[int] = Counter()  # by the identity of the data that was read
        self.kept: list[Any] = []  # so that no identity is used twice
        self.scored: Counter[str] = Counter()
        self.last = ""
        self.inside: dict[str, FrameType | None] = {"reader": None, "forward": None}

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """Called by Python at every call and return."""
        file = frame.f_code.co_filename
        if not file.startswith(self.root) or not frame.f_code.co_flags & CO_OPTIMIZED:
            return  # of another package, or the body of a module or class
        if event == "call":
            self.enter(frame, file.removeprefix(self.root))
        elif event == "return":
            self.leave(frame, result)

    def enter(self, frame: FrameType, module: str) -> None:
        """Count a call."""
        code = frame.f_code
        if (module, code.co_name) in self.readers:
            if self.before_data is None:
                self.before_data = len(self.modules)
            self.inside["reader"] = self.inside["reader"] or frame
        self.modules[module] = None
        self.functions.add((module, code.co_qualname, code.co_firstlineno))
        self.calls += 1
        self.changes += module != self.last
        self.last = module
        if code.co_qualname in PREPROCESSING and self.inside["forward"] is None:
            self.inside["forward"] = frame
            self.preprocessed[self.purpose(frame)] += len(frame.f_locals["features"])
        if code.co_qualname == "Trained.score":
            data = frame.f_locals["self"].module.data_of(frame.f_locals["split"])
            self.scored["evaluation"] += data.num_documents
        if code.co_qualname == "LGMML.score":
            self.scored[self.purpose(frame)] += frame.f_locals["data"].num_documents

    def leave(self, frame: FrameType, result: Any) -> None:
        """Note what an outermost reader gives back."""
        if frame is self.inside["reader"]:
            self.inside["reader"] = None
            parts = result.values() if isinstance(result, dict) else [result]
            for part in parts:
                if hasattr(part, "num_documents"):
                    self.kept.append(part)
                    self.documents[id(part)] = part.num_documents
        if frame is self.inside["forward"]:
            self.inside["forward"] = None

    def purpose(self, frame: FrameType) -> str:
        """What a call is for."""
        names: set[str] = set()
        caller: FrameType | None = frame.f_back
        while caller is not None:
            file = caller.f_code.co_filename
            if file.startswith(self.root):
                names.update(Path(file.removeprefix(self.root)).with_suffix("").parts)
            caller = caller.f_back
        if names & PAGE:
            return "page"
        return "evaluation" if "evaluation" in names else "rest"

    def report(self) -> str:
        """The figures, a line each."""
        documents = self.documents.total()
        rows = self.preprocessed.total()
        times = f"{(rows - self.preprocessed['page']) / max(documents, 1):.2f}"
        lines = {
            "modules entered": len(self.modules), "modules entered before data": self.before_data,
            "functions": len(self.functions), "calls": self.calls, "changes of module": self.changes,
            "documents read": documents, "rows preprocessed": rows,
            "… times each document, without the page": times,
            "documents scored": self.scored.total(), "… in evaluation": self.scored["evaluation"],
            "… for the page": self.scored["page"], "… for the rest": self.scored["rest"],
        }  # fmt: skip
        figures = [
            f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in lines.items()
        ]
        return "\n".join([*figures, f"order of first entry: {' '.join(self.modules)}"])


def _readers(package: Path) -> set[tuple[str, str]]:
    """Module and name of the functions below ``data`` whose result is, or holds, `RankingData`."""
    found = set()
    for file in (package / "data").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.returns and "RankingData" in ast.unparse(node.returns):
                found.add((file.relative_to(package).as_posix(), node.name))
    return found


def run(words: list[str]) -> Trace:
    """Run a command and count."""
    spec = find_spec("lgmml_torch")
    assert spec is not None
    trace = Trace(Path(spec.origin or "").parent)
    sys.argv = words
    sys.setprofile(trace)
    try:
        if words[0] == "lgmml":
            runpy.run_module("lgmml_torch.app.cli", run_name="__main__")
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    return trace


if __name__ == "__main__":
    print(run(sys.argv[1:]).report())
