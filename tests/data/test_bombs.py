"""Files that unpack to a large multiple of their size, and lists of very many documents: refused, or bounded memory."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lgmml_torch import files
from lgmml_torch.checks import DataError
from lgmml_torch.data import svmlight
from lgmml_torch.data.source import open_source
from lgmml_torch.files import check_memory
from tests.doors import small_model

MEGABYTE = 1 << 20
REFUSED = r"bytes unpack to more than 100 times as many; unpack it yourself if it is meant to be so"

# Peak memory is that of the process's own address space: what `getrusage` says would include its parent's.
MEASURED = """
import json, re, sys
from pathlib import Path
import numpy as np
import pyarrow.parquet
from lgmml_torch.checks import DataError
from lgmml_torch.data.source import open_source
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

folder, found = Path(sys.argv[1]), {}
for name in ("zeros.txt.gz", "lines.csv.gz", "zeros.npz", "zeros.parquet", "one_group.parquet"):
    before = peak()
    try:
        with open_source(folder / name) as source:
            sum(batch.data.num_documents for batch in source.batches(2_000))
            said = "read"
    except DataError as error:
        said = str(error)
    found[name] = [said, peak() - before]
model = LGMML.load(folder / "model.safetensors")
for rows in (100, 20_000, 40_000):
    X = np.random.default_rng(0).random((rows, model.num_features), dtype=np.float32)
    data = RankingData.from_arrays(X, np.zeros(rows), group=[rows])
    before = peak()
    model.score(data)
    found[str(rows)] = ["scored", peak() - before]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """What was said of each file, and by how many MB the peak of memory rose."""
    if not Path("/proc/self/status").is_file():
        pytest.skip("peak memory is read from /proc")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("bombs")
    with gzip.open(folder / "zeros.txt.gz", "wb", 1) as stream:
        for _ in range(96):
            stream.write(b"\0" * MEGABYTE)
    with gzip.open(folder / "lines.csv.gz", "wb", 6) as stream:
        stream.write(b"qid," + b",".join(b"f%d" % column for column in range(100)) + b"\n")
        for query in range(96):
            stream.write((b"%d" % query + b",0" * 100 + b"\n") * (MEGABYTE // 203))
    np.savez_compressed(folder / "zeros.npz", X=np.zeros((240_000, 100), np.float32), qid=np.arange(240_000) // 50)
    rows = 40_000
    part = {f"f{column}": np.zeros(rows, np.float32) for column in range(100)}
    with pq.ParquetWriter(folder / "zeros.parquet", pa.table({"qid": np.arange(rows), **part}).schema) as writer:
        for number in range(15):
            writer.write_table(pa.table({"qid": np.arange(rows) // 50 + number * rows, **part}))
    whole = {"qid": np.arange(15 * rows) // 50} | {name: np.zeros(15 * rows, np.float32) for name in part}
    pq.write_table(pa.table(whole), folder / "one_group.parquet", row_group_size=15 * rows)
    small_model().save(folder / "model.safetensors")
    out = subprocess.run([sys.executable, "-c", MEASURED, str(folder)], capture_output=True, text=True, timeout=600)
    assert out.returncode == 0, out.stderr
    found: dict[str, tuple[str, float]] = json.loads(out.stdout)
    return found


def test_bombs_are_refused_or_streamed(measured: dict[str, tuple[str, float]]) -> None:
    """Each holds 96 MB or more, Parquet 240 MB; none takes as much memory as that."""
    said = {name: words for name, (words, _) in measured.items()}
    assert "zeros.txt.gz:1: a line must have at most 16,777,216 bytes, got a longer one" in said["zeros.txt.gz"]
    for name in ("lines.csv.gz", "zeros.npz"):
        assert said[name].endswith(REFUSED)
    assert said["zeros.parquet"] == said["one_group.parquet"] == "read"
    rises = {name: rise for name, (_, rise) in measured.items()}
    assert max(rises["zeros.txt.gz"], rises["lines.csv.gz"]) < 64
    assert rises["zeros.npz"] < 16
    assert rises["zeros.parquet"] < 120
    assert rises["one_group.parquet"] < 120  # a group is streamed, too, however many rows it says it has


def test_long_lists_take_memory_by_their_length(measured: dict[str, tuple[str, float]]) -> None:
    """A matrix of all pairs of 40,000 documents would take 6 GB."""
    once, twice = measured["20000"][1], measured["40000"][1]
    assert once < 100
    assert twice < 100


def test_limits_stand_where_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_UNPACKED", 1 << 16)
    plain = b"1 qid:1 1:0\n" * 20_000
    (tmp_path / "a.txt").write_bytes(plain)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(plain))
    for streamed in (True, False):
        with open_source(tmp_path / "a.txt") as source:
            assert (next(source.batches()).data if streamed else source.read()).num_documents == 20_000
        with pytest.raises(DataError, match=REFUSED), open_source(tmp_path / "a.txt.gz") as source:
            list(source.batches()) if streamed else source.read()
    rng = np.random.default_rng(0)
    np.savez_compressed(tmp_path / "good.npz", X=rng.random((5_000, 4)), qid=np.zeros(5_000, int))
    with open_source(tmp_path / "good.npz") as source:  # one array alone is above the multiple
        assert source.read().num_documents == 5_000
    monkeypatch.setattr(svmlight, "_MOST_LINE", 1 << 10)
    (tmp_path / "long.txt").write_bytes(b"1 qid:1 1:0\n1 qid:1 " + b"1:0 " * 100_000 + b"\n")
    message = r"long.txt:2: a line must have at most 1,024 bytes, got a longer one"
    with pytest.raises(DataError, match=message), open_source(tmp_path / "long.txt") as source:
        source.read()
    with pytest.raises(DataError, match=r"t: 1,000,000,000,000 documents of 1,000 features need 3725290.3 GiB of mem"):
        check_memory("t", 10**12, 1_000, 4)
