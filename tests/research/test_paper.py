"""Every experiment at toy size, end to end, as the command line runs it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lgmml_torch.checks import ConfigError
from research.compare import NAMES
from research.paper.__main__ import CONF, FIGURES, SIZES, figure_settings, main, run_figure
from research.paper.framework import MODULES
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


@pytest.mark.parametrize(("name", "size"), [(name, SIZES[1 + i % 2]) for i, name in enumerate(EXPECTED)])
def test_settings_resolve(name: str, size: str) -> None:
    cfg = figure_settings(name, [f"size={size}"])
    assert cfg.name == name
    for system in getattr(cfg, "systems", {}):
        assert system in NAMES


def test_stages_of_the_framework_have_their_code_where_it_says() -> None:
    for _, places, _ in MODULES:
        for place in places.split(", "):
            assert (CONF.parents[1] / "lgmml_torch" / place).exists(), place


@pytest.mark.slow
@pytest.mark.xdist_group("experiments")
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


@pytest.mark.slow
@pytest.mark.xdist_group("experiments")
def test_second_run_computes_nothing_and_the_page_needs_no_more(results: Path) -> None:
    run_figure("global_local", toy(results))
    stored = {file: file.stat().st_mtime_ns for file in (results / "raw").rglob("*.json")}
    first = (results / "toy" / "global_local" / "global_local.md").read_text()
    run_figure("global_local", toy(results))
    assert {file: file.stat().st_mtime_ns for file in (results / "raw").rglob("*.json")} == stored
    assert (results / "toy" / "global_local" / "global_local.md").read_text() == first
    assert main(["page", *toy(results)]) == 0
    assert "Synthetic-10: local metrics gain over one global metric" in (results / "docs" / "results.md").read_text()


@pytest.mark.slow
@pytest.mark.xdist_group("experiments")
def test_the_gain_stands_beside_the_condition_number_that_sets_it(results: Path) -> None:
    outcome, _ = run_figure("global_local", [*toy(results), "conditions=[3000,10,300]"])
    table = outcome.tables[1]
    assert [row[0] for row in table.rows] == ["10", "300", "3,000"]
    gains = [float(row[4].split()[0]) for row in table.rows]
    assert gains[0] < 0.01 < gains[1]  # round classes: nothing to gain
    assert {row[1] for row in table.rows} <= {1, 10}
    default = next(row for row in outcome.tables[0].rows if row[:2] == ["synthetic-10", table.rows[-1][1]])
    assert default[2:] == list(table.rows[-1][2:])  # the same work, counted once
    axis = outcome.pictures["global_local_condition"].axes[0]
    assert axis.get_xlabel() == "condition number of the classes' covariances"
    assert axis.get_ylabel() == "MAP, test queries"
    curves = [line for line in axis.get_lines() if len(line.get_xdata()) == 3]
    assert len(curves) == len(axis.collections) == 2  # each with its band
    for claim in outcome.claims[::2]:
        assert "condition number 3,000, a number that sets the size of the gain" in claim.why


@pytest.mark.slow
@pytest.mark.xdist_group("experiments")
def test_raw_results_hold_a_value_for_every_query(results: Path) -> None:
    run_figure("large_scale", toy(results))
    records = [json.loads(file.read_text()) for file in (results / "raw" / "ranking").glob("*boosted*.json")]
    for record in records:
        assert set(record["values"]) == {"ndcg@5", "ndcg@10", "ndcg@20", "map"}
        assert all(len(row) == len(record["info"]["queries"]) == 8 for row in record["values"].values())


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["globl_local"]) == 2
    assert "global_local" in capsys.readouterr().err
    assert main(["dimension", "dimz=[10]"]) == 2
    assert "unknown setting 'dimz'; did you mean 'dims'?" in capsys.readouterr().err
    assert main(["list"]) == 0
    assert capsys.readouterr().out.split() == list(FIGURES)
    with pytest.raises(ConfigError, match="size"):
        figure_settings("framework", ["sise=toy"])
