"""Every experiment at toy size, end to end, as the command line runs it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from research.paper.__main__ import CONF, FIGURES, main, run_figure
from research.paper.outcome import VERDICTS

EXPECTED = {
    "framework": (["framework"], ["framework"]),
    "datasets": (["datasets_ranking", "datasets_examples"], ["datasets"]),
    "global_local": (["global_local", "global_local_condition"], ["global_local", "global_local_condition"]),
    "num_metrics": (["num_metrics"], ["num_metrics"]),
    "dimension": (["dimension"], ["dimension"]),
    "by_example": (["by_example", "by_example_gains"], ["by_example", "by_example_time"]),
    "large_scale": (["large_scale", "large_scale_gains"], ["large_scale", "large_scale_time"]),
    "scoring_time": (["scoring_time"], ["scoring_time"]),
    "robustness": (["robustness"], ["robustness"]),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def toy(results: Path) -> list[str]:
    return ["size=toy", f"results_dir='{results}'", f"page='{results}/docs/results.md'", "data_dir=null"]


def test_all_figures_are_listed() -> None:
    assert list(FIGURES) == list(EXPECTED)
    assert {path.stem for path in (CONF / "figure").glob("*.yaml")} == set(FIGURES)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_experiment_leaves_its_files(name: str, results: Path) -> None:
    run_figure(name, toy(results))
    folder = results / "toy" / name
    tables, pictures = EXPECTED[name]
    files = {f"{table}.{end}" for table in tables for end in ("md", "csv")}
    files |= {f"{picture}.{end}" for picture in pictures for end in ("png", "svg")}
    assert {file.name for file in folder.iterdir()} == files | {"outcome.json"}
    for picture in pictures:
        assert (folder / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{picture}.svg").read_text()[:2000]
    for table in tables:
        header, *rows = csv.reader((folder / f"{table}.csv").read_text().splitlines())
        assert rows
        assert all(len(row) == len(header) for row in rows)
        assert not any(cell in ("nan", "None") for row in rows for cell in row)
    content = json.loads((folder / "outcome.json").read_text())
    assert all(claim["verdict"] in VERDICTS for claim in content["claims"])
    assert (name == "framework") == (not content["claims"])


def test_second_run_computes_nothing_and_the_page_needs_no_more(results: Path) -> None:
    run_figure("global_local", toy(results))
    stored = {file: file.stat().st_mtime_ns for file in (results / "raw").rglob("*.json")}
    first = (results / "toy" / "global_local" / "global_local.md").read_text()
    run_figure("global_local", toy(results))
    assert {file: file.stat().st_mtime_ns for file in (results / "raw").rglob("*.json")} == stored
    assert (results / "toy" / "global_local" / "global_local.md").read_text() == first
    assert main(["page", *toy(results)]) == 0
    assert "Synthetic-10: local metrics gain over one global metric" in (results / "docs" / "results.md").read_text()


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["globl_local"]) == 2
    assert "global_local" in capsys.readouterr().err
    assert main(["dimension", "dimz=[10]"]) == 2
    assert "unknown setting 'dimz'; did you mean 'dims'?" in capsys.readouterr().err
