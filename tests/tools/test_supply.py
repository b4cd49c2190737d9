"""Where everything installed comes from: locks that agree with the constraints, licences, a bill of materials."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tools import supply
from tools.supply import LOCKS, ROOT, Locked, bill, licences, locked_of, misfit, plain, read_lock, write_locks


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {plain(name): version for name, version in pairs}


def test_locks_and_constraints_agree() -> None:
    known = constraints()
    locked = [item for file in sorted(LOCKS.glob("*.txt")) for item in read_lock(file)]
    assert len(locked) > 150
    assert len({item.name for item in locked}) == len(locked)
    assert [item for item in locked if known.get(item.name) != item.version.partition("+")[0]] == []
    assert [item.name for item in read_lock(LOCKS / "torch.txt")] == ["torch"]


def test_what_the_project_asks_for_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    todo, asked = [*project["project"]["dependencies"], *extras["dev"], *project["build-system"]["requires"]], set()
    for text in todo:
        requirement = Requirement(text)
        if requirement.name == supply.PROJECT:
            todo.extend(line for extra in requirement.extras for line in extras[extra])
        else:
            asked.add(plain(requirement.name))
    assert asked - {item.name for file in LOCKS.glob("*.txt") for item in read_lock(file)} == set()


def item(name: str, version: str, *, direct: bool = False) -> dict[str, Any]:
    archive = {} if direct else {"archive_info": {"hashes": {"sha256": "ab" * 32}}}
    return {"metadata": {"name": name, "version": version}, "is_direct": direct, "download_info": archive}


def test_a_report_of_pip_becomes_three_files(tmp_path: Path) -> None:
    report = {
        "install": [item("Jinja_2", "3"), item("torch", "2.0+cpu"), item("hatchling", "1"), item("x", "1", direct=True)]
    }
    found = locked_of(report)
    assert found[0] == Locked("hatchling", "1", "ab" * 32)
    write_locks([found[0]], found, tmp_path)
    assert {path.name: [i.name for i in read_lock(path)] for path in tmp_path.iterdir()} == {
        "build.txt": ["hatchling"], "all.txt": ["jinja-2"], "torch.txt": ["torch"],
    }  # fmt: skip
    assert misfit(tmp_path) is None


def test_licences_are_known() -> None:
    rows = {name: said for name, _, said in licences()}
    assert rows["numpy"] != "unknown"
    assert "Apache" in rows["lgmml-torch"]
    assert not [name for name, said in rows.items() if "AGPL" in said or "Affero" in said]


def test_the_bill_has_what_the_schema_requires() -> None:
    """Required and constrained fields of CycloneDX 1.5, by hand."""
    found = json.loads(json.dumps(bill()))
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found["serialNumber"])
    parts = [found["metadata"]["component"], *found["components"]]
    for part in parts:
        assert part["type"] in ("application", "library")
        assert part["name"]
        assert part["purl"] == part["bom-ref"]
        assert all(re.fullmatch("[0-9a-f]{64}", each["content"]) for each in part.get("hashes", ()))
        for said in part.get("licenses", ()):
            assert set(said) == {"expression"} or set(said["license"]) == {"name"}
    refs = [part["bom-ref"] for part in parts]
    assert len(set(refs)) == len(refs) == len(found["dependencies"])
    assert {ref for entry in found["dependencies"] for ref in (entry["ref"], *entry["dependsOn"])} == set(refs)
    names = {part["name"] for part in parts}
    assert {"lgmml-torch", "torch", "numpy", "pytorch-lightning"} <= names
    assert "pytest" not in names
