"""What is installed, where it comes from and under which licence: ``python -m tools.supply COMMAND``.

    lock       resolve the development environment and write its files with their SHA-256 to locks/
    fits       whether the locks are for this Python and this kind of machine; a sentence and exit code 1 where not
    licences   a line for every installed distribution
    sbom       a software bill of materials (CycloneDX 1.5, JSON) of a release: the package and all that it needs

``locks/`` has three files. ``build.txt`` holds the tools that build, ``all.txt`` everything else but torch, and
``torch.txt`` the processor build of torch that the project is tested with. torch stands apart because one version is
another file for every kind of machine: where its hash is not met, `make setup` says so and installs the version of
``constraints.txt``. Only standard modules are imported before they are needed: ``fits`` runs in an empty environment.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "locks"
PROJECT = "lgmml-torch"
BUILD = ("hatchling", "editables", "setuptools", "wheel")
CYCLONE = "1.5"


class Locked(NamedTuple):
    """A file that may be installed."""

    name: str
    version: str
    sha256: str


def plain(name: str) -> str:
    """A distribution's name as indexes spell it.

    >>> plain("Jinja2"), plain("typing_extensions")
    ('jinja2', 'typing-extensions')
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def kind_of_machine() -> str:
    """What a lock is made for."""
    return f"Python {'.'.join(platform.python_version_tuple()[:2])}, {platform.system()} {platform.machine()}"


def resolve(words: Sequence[str]) -> list[Locked]:
    """What pip would install in an empty environment of this Python."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), "-c", "constraints.txt", *words], check=True, cwd=ROOT)
        return locked_of(json.loads(report.read_text(encoding="utf-8")))


def locked_of(report: Mapping[str, Any]) -> list[Locked]:
    """The files of pip's report; the project itself, which is no file, is left out."""
    found = []
    for item in report["install"]:
        if not item["is_direct"]:
            facts, hashes = item["metadata"], item["download_info"]["archive_info"]["hashes"]
            found.append(Locked(plain(facts["name"]), facts["version"], hashes["sha256"]))
    return sorted(found)


def write_locks(build: Iterable[Locked], everything: Iterable[Locked], folder: Path = LOCKS) -> None:
    """The three files."""
    tools = list(build)
    known = {item.name for item in tools}
    rest = [item for item in everything if item.name not in known]
    parts = {
        "build.txt": tools,
        "all.txt": [item for item in rest if item.name != "torch"],
        "torch.txt": [item for item in rest if item.name == "torch"],
    }
    folder.mkdir(exist_ok=True)
    for name, items in parts.items():
        lines = [f"{item.name}=={item.version} --hash=sha256:{item.sha256}\n" for item in items]
        head = f"# {kind_of_machine()}; written by `python -m tools.supply lock`.\n"
        (folder / name).write_text(head + "".join(lines), encoding="utf-8")


def read_lock(path: Path) -> list[Locked]:
    """What a lock file lists."""
    lines = re.findall(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [Locked(*line) for line in lines]


def misfit(folder: Path = LOCKS) -> str | None:
    """Why the locks are not for this machine, or None."""
    made_for = (folder / "all.txt").read_text(encoding="utf-8")[2:].partition(";")[0]
    here = kind_of_machine()
    if made_for == here:
        return None
    return f"locks/ is for {made_for}, this is {here}: installing by the versions of constraints.txt, without hashes"


def licence(facts: Any) -> str:
    """The licence a distribution names: its expression, or its classifiers, or what it says in a few words."""
    if expression := facts.get("License-Expression"):
        return str(expression)
    classifiers = [line for line in facts.get_all("Classifier") or () if line.startswith("License ::")]
    names = [line.rpartition(" :: ")[2] for line in classifiers if line != "License :: OSI Approved"]
    if names:
        return " or ".join(names)
    text = (facts.get("License") or "").strip()
    return text if 0 < len(text) <= 60 and "\n" not in text else "unknown"


def licences() -> list[tuple[str, str, str]]:
    """Name, version and licence of everything installed here."""
    found = {plain(item.name): (item.version, licence(item.metadata)) for item in distributions()}
    return [(name, *facts) for name, facts in sorted(found.items())]


def needed(name: str, extras: Iterable[str] = ()) -> dict[str, tuple[Distribution, list[str]]]:
    """A distribution and all that it needs here, each with the names it needs itself."""
    from packaging.requirements import Requirement

    found: dict[str, tuple[Distribution, list[str]]] = {}
    seen: dict[str, set[str]] = {}
    todo = [(plain(name), frozenset({"", *extras}))]
    while todo:
        current, wanted = todo.pop()
        fresh = wanted - seen.setdefault(current, set())
        if not fresh:
            continue
        seen[current] |= fresh
        item, direct = found.setdefault(current, (distribution(current), []))
        for requirement in map(Requirement, item.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in seen[current]):
                other = plain(requirement.name)
                if other not in direct and other != current:
                    direct.append(other)
                todo.append((other, frozenset({"", *requirement.extras})))
    return found


def bill(extras: Iterable[str] = ()) -> dict[str, Any]:
    """The bill of materials: components with their licences and, where the locks have them, hashes."""
    parts = needed(PROJECT, extras)
    hashes = {item.name: item.sha256 for file in sorted(LOCKS.glob("*.txt")) for item in read_lock(file)}
    described = {name: _component(name, item, hashes.get(name)) for name, (item, _) in sorted(parts.items())}
    main = {**described.pop(PROJECT), "type": "application"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": CYCLONE,
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {"timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "component": main},
        "components": list(described.values()),
        "dependencies": [
            {"ref": _ref(name, item.version), "dependsOn": [_ref(other, parts[other][0].version) for other in direct]}
            for name, (item, direct) in sorted(parts.items())
        ],
    }


def _ref(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def _component(name: str, item: Distribution, sha256: str | None) -> dict[str, Any]:
    said = licence(item.metadata)
    is_expression = "License-Expression" in item.metadata
    place = _ref(name, item.version)
    found: dict[str, Any] = {"type": "library", "bom-ref": place, "name": name, "version": item.version, "purl": place}
    if said != "unknown":
        found["licenses"] = [{"expression": said} if is_expression else {"license": {"name": said}}]
    if sha256 is not None:
        found["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    return found


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("command", choices=("lock", "fits", "licences", "sbom"))
    parser.add_argument("--extras", nargs="*", default=[], help="of the package, for sbom")
    parser.add_argument("--output", type=Path, help="where the bill goes; standard output by default")
    options = parser.parse_args()
    if options.command == "lock":
        write_locks(resolve(BUILD), resolve(["-e", ".[dev]"]))
    elif options.command == "fits":
        if why := misfit():
            print(why)
            return 1
    elif options.command == "licences":
        rows = licences()
        print("".join(f"{name}=={version}\t{said}\n" for name, version, said in rows), end="")
        print(f"{len(rows)} distributions, {sum(said == 'unknown' for *_, said in rows)} of unknown licence")
    else:
        try:
            text = json.dumps(bill(options.extras), indent=1) + "\n"
        except PackageNotFoundError as missing:
            print(f"{missing} is not installed; run `make setup` first", file=sys.stderr)
            return 1
        if options.output is None:
            print(text, end="")
        else:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
