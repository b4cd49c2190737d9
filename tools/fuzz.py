"""Coverage-guided fuzzing of everything that reads files: ``python -m tools.fuzz --minutes 10``.

atheris (libFuzzer) changes small valid files and keeps what reaches new code of the package. A reader may take a file
or refuse it with an error of this package. Anything else is a finding: another exception, a crash, a minute on one
file, or more than 2 GiB of memory. What the LETOR reader takes must be what the naive reader of the tests takes, number
for number. Models and checkpoints are begun from files without a digest, as release 0.1 wrote them: else hardly any
change would get past it. ``pip install 'lgmml-torch[fuzz]'`` brings atheris.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lgmml_torch.checks import LGMMLError, require

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"
LIMITS = ("-timeout=60", "-rss_limit_mb=2048", "-max_len=8192", "-print_final_stats=1", "-seed=1")
LETOR = b"2 qid:1 1:0.5 2:0.25 #docid = a\n0 qid:1 1:-3 2:.5 #docid = b\n1 qid:2 1:1e2 2:7 #docid = c\n"
CSV = b'qid,label,a,"b"\n1,2,0.5,1\n1,0,-3,0\n2,1,1e2,"7"\n'


def npz_seed() -> bytes:
    import numpy as np

    out = io.BytesIO()
    np.savez_compressed(out, X=np.eye(3, 2, dtype=np.float32), y=np.array([2.0, 0, 1]), qid=np.array([1, 1, 2]))
    return out.getvalue()


def table_seed(ending: str) -> bytes:
    from lgmml_torch.data.write import save_table

    with tempfile.TemporaryDirectory() as folder:
        save_table(_rows(), Path(folder) / f"a.{ending}")
        return (Path(folder) / f"a.{ending}").read_bytes()


def _rows() -> Any:
    from lgmml_torch.ragged import RankingData

    return RankingData.from_arrays([[0.5, 1.0], [-3.0, 2.0], [100.0, 7.0]], [2, 0, 1], qid=[1, 1, 2])


def model_seed() -> bytes:
    """A small model, without the digest."""
    import torch
    from safetensors.torch import save

    from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
    from lgmml_torch.models.phi import Phi
    from lgmml_torch.models.preprocess.compose import list_rank_features
    from lgmml_torch.models.ranker import LGMML
    from lgmml_torch.models.storage import FORMAT, read_model

    data, chain = _rows(), list_rank_features()
    width = chain.fit_transform(data.features, data.offsets).shape[1]
    metrics = LocalMetrics([MetricBlock(torch.zeros(1, width), torch.ones(1, width, 1))], num_features=width)
    with tempfile.TemporaryDirectory() as folder:
        LGMML(chain, metrics, Phi(2, 1), qids=data.qids).save(Path(folder) / "m")
        spec, tensors = read_model(Path(folder) / "m")
    return bytes(save(tensors, metadata={"format": FORMAT, "version": "1", "spec": json.dumps(spec)}))


def checkpoint_seed() -> bytes:
    import torch

    from lgmml_torch.models.storage import FORMAT, VERSION

    out = io.BytesIO()
    torch.save(
        {FORMAT: {"version": VERSION, "spec": {"kernel": "paper"}}, "state_dict": {"model.x": torch.ones(3)}}, out
    )
    return out.getvalue()


def read_letor(file: Path) -> None:
    """By both readers."""
    import numpy as np

    from lgmml_torch.data.source import open_source
    from tests.reference import letor as naive

    try:
        want = naive.read(file.read_bytes())
    except ValueError:
        want = None
    try:
        with open_source(file, kind="letor") as source:
            data = source.read(labelled=True)
    except LGMMLError:
        if want is not None:
            raise AssertionError("the naive reader takes it, the reader does not") from None
        raise
    if want is None:
        raise AssertionError("the reader takes it, the naive reader does not")
    dense = np.zeros((len(want.labels), max(max(row, default=0) for row in want.features)), dtype=np.float32)
    for row, features in enumerate(want.features):
        for index, value in features.items():
            dense[row, index - 1] = value
    found = data.in_caller_order(data.features).numpy()
    assert found.tobytes() == dense.tobytes(), "the readers see different numbers"
    assert data.in_caller_order(data.labels).tolist() == want.labels, "the readers see different labels"


def read_rows(kind: str) -> Callable[[Path], None]:
    def read(file: Path) -> None:
        from lgmml_torch.data.source import open_source

        with open_source(file, kind=kind) as source:
            source.read()

    return read


def read_model(file: Path) -> None:
    from lgmml_torch.models.ranker import LGMML

    model = LGMML.load(file)
    if model.num_features == 2:
        model.score(_rows())


def read_checkpoint(file: Path) -> None:
    from lgmml_torch.models import storage

    storage.read_model(file)


TARGETS: dict[str, tuple[Callable[[], bytes], Callable[[Path], None], str]] = {
    "letor": (lambda: LETOR, read_letor, "txt"),
    "csv": (lambda: CSV, read_rows("csv"), "csv"),
    "npz": (npz_seed, read_rows("npz"), "npz"),
    "parquet": (partial(table_seed, "parquet"), read_rows("parquet"), "parquet"),
    "arrow": (partial(table_seed, "arrow"), read_rows("arrow"), "arrow"),
    "model": (model_seed, read_model, "safetensors"),
    "checkpoint": (checkpoint_seed, read_checkpoint, "ckpt"),
}


def fuzz(name: str, folder: Path, seconds: int) -> None:
    """Be the process that is fuzzed: libFuzzer ends it."""
    atheris = require("atheris", "for fuzzing", "fuzz")
    with atheris.instrument_imports(include=["lgmml_torch"], enable_loader_override=False):
        import lgmml_torch.data.arrow
        import lgmml_torch.data.letor
        import lgmml_torch.data.source
        import lgmml_torch.models.ranker  # noqa: F401
    make, read, ending = TARGETS[name]
    (folder / "corpus").mkdir()
    (folder / "corpus" / "seed").write_bytes(make())
    file = folder / f"file.{ending}"
    warnings.simplefilter("ignore")

    def once(content: bytes) -> None:
        file.unlink(missing_ok=True)
        file.write_bytes(content)
        with suppress(LGMMLError):
            read(file)

    for content in ((folder / "corpus" / "seed").read_bytes(), b"\0"):
        once(content)  # what is imported at first use is no hang
    words = [sys.argv[0], f"-max_total_time={seconds}", *LIMITS, f"-artifact_prefix={folder}/", f"{folder}/corpus"]
    atheris.Setup(words, once)
    atheris.Fuzz()


def campaign(name: str, seconds: int, keep: Path | None) -> tuple[str, ...]:
    """Fuzz one reader in a process of its own; the row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tools.fuzz", "--child", name, folder, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=ROOT, check=False)
        stats = dict(re.findall(r"stat::(\w+):\s+(\d+)", done.stderr))
        coverage = re.findall(r" cov: (\d+)", done.stderr)
        found = [path for path in Path(folder).glob("*-*") if path.name.startswith(("crash", "timeout", "oom", "leak"))]
        for path in found:
            print(f"{name}: {path.name}: {path.read_bytes()[:300]!r}\n{done.stderr[-3000:]}", flush=True)
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{name}-{path.name}").write_bytes(path.read_bytes())
        if done.returncode and not found:
            raise SystemExit(f"{name}: fuzzing did not run:\n{done.stderr[-3000:]}")
    first, last = (coverage[0], coverage[-1]) if coverage else ("0", "0")
    files = int(stats.get("number_of_executed_units", 0))
    return name, f"{seconds}", f"{files:,}", f"{first} → {last}", stats.get("peak_rss_mb", "?"), str(len(found))


def main() -> None:
    """Fuzz reader after reader, and put the table into the page."""
    from research.stats import markdown

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="in all (default: 10)")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes")
    parser.add_argument("--keep", type=Path, help="folder for files that were findings")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        fuzz(options.child[0], Path(options.child[1]), int(options.child[2]))
        return
    require("atheris", "for fuzzing", "fuzz")
    rows, each = [], max(1, round(60 * options.minutes / len(options.targets)))
    for name in options.targets:
        rows.append(campaign(name, each, options.keep))
        print(*rows[-1], flush=True)
    table = markdown(["reader", "seconds", "files", "code reached", "peak MiB", "findings"], rows)
    before, after = re.split(r"(?s)(?<=<!-- fuzz -->\n).*?(?=<!-- /fuzz -->)", options.page.read_text(encoding="utf-8"))
    options.page.write_text(f"{before}{table}\n{after}", encoding="utf-8")
    sys.exit(1 if any(row[-1] != "0" for row in rows) else 0)


if __name__ == "__main__":
    main()
