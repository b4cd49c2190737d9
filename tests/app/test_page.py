"""The page of a run: all sections, everything escaped, nothing loaded from elsewhere, small whatever the data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import Markup

from lgmml_torch.app import cli
from lgmml_torch.app import page_data as data_of_page
from lgmml_torch.app.charts import Bar, Chart, Point, figure
from lgmml_torch.app.page import make_page
from lgmml_torch.app.page_data import PageData
from lgmml_torch.app.rankers import Ranker
from lgmml_torch.app.report import RunResult, _run_markdown, reported_part
from lgmml_torch.data.catalog import generated_splits
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.functional.measures import rank_data
from lgmml_torch.models.explain import explain
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.resume import KeepCheckpoints
from tests.doors import FEATURES, small_data, small_model

EVIL = '<script>alert("x")</script>'
SECTIONS = ["Data and model", "Results", "Validation", "Queries", "What matters", "Settings and versions"]
SETTINGS: dict[str, Any] = {
    "name": f"run {EVIL}", "chosen": f"as configured & {EVIL}", "seed": 0, "budget": "normal", "compare": None,
    "evaluation": {"metrics": ["ndcg@1", "ndcg@10", "map"], "preset": "default"},
}  # fmt: skip
BANK = {"rounds": [5, 10, 15], "train_ndcg": [0.5, 0.6, 0.7], "valid_ndcg": [0.4, 0.6, 0.5], "best_round": 10}


def evil_data(queries: int = 12, seed: int = 0) -> RankingData:
    """Names that would run as a program, where a page let them."""
    data = small_data(queries, seed)
    return data.replace(
        qids=tuple(f"{EVIL}{qid}" for qid in data.qids),
        doc_ids=tuple(f"{EVIL}{name}" for name in data.doc_ids or ()),
        feature_names=tuple(f"{EVIL}'{number}\"" for number in range(FEATURES)),
    )


def evil_model() -> LGMML:
    model = small_model()
    model.feature_names = evil_data().feature_names
    return model


def outcome_of(
    model: LGMML, splits: dict[str, RankingData], folder: Path, settings: dict[str, Any] = SETTINGS
) -> RunResult:
    keeper = KeepCheckpoints(folder, monitor="val/ndcg@10", every_n_steps=500, seed=0)
    keeper.curve, keeper.best_epoch, keeper.best = {0: 0.5, 1: 0.625, 2: 0.61}, 1, 0.625
    found = [evaluate(model, part, split=f"{name}: unseen queries") for name, part in splits.items()]
    return RunResult(folder, model, splits, found, keeper, BANK, {"data": 0.1, "training": 2.5}, settings)


def content_of(model: LGMML, data: RankingData, folder: Path, **changes: Any) -> dict[str, Any]:
    outcome = outcome_of(model, {"train": data, "test": data}, folder)
    outcome.keeper.curve = changes.pop("curve", outcome.keeper.curve)
    return {**json.loads(json.dumps(outcome.content())), **changes}


class Elements(HTMLParser):
    """Every element with its attributes; what is opened must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, data, folder = evil_model(), evil_data(), tmp_path_factory.mktemp("page")
    content = content_of(model, data, folder)
    other = small_model(seed=5)
    other.save(folder / f"{EVIL.replace('/', '')}.safetensors")
    ranker = Ranker.open(folder / f"{EVIL.replace('/', '')}.safetensors")
    paired = ranker.beside(model, data, "test", SETTINGS)
    return make_page(content, PageData(content, model, data, "test", importance=True), [paired])


def test_the_spread_of_the_measure_is_told_in_words_that_hold_at_its_bounds(page: str) -> None:
    assert re.search(r"a tenth are at most [01]\.\d{3}, a tenth at least [01]\.\d{3}\.", page)


def test_all_sections_are_there_and_linked(page: str) -> None:
    elements = Elements(page)
    anchors = [attributes["id"] for attributes in elements.named("h2")]
    assert [attributes["href"] for attributes in elements.named("a")] == [f"#{anchor}" for anchor in anchors]
    for title in SECTIONS:
        assert f">{title}</h2>" in page
    assert ">Against " in page
    for word in (
        "NDCG@10", "kept: 10", "kept: 1", "95% bootstrap interval", "gain 2^y-1", "Ranked best", "Ranked worst",
        "Mean label by score", "Cost of shuffling a feature", "Features in score differences", "Local metrics",
        "Which values are good", "All 12 queries of test", "2.5 s", "lgmml-torch", "boosting round",
    ):  # fmt: skip
        assert word in elements.text, word


def test_names_are_shown_and_never_run(page: str) -> None:
    elements = Elements(page)
    assert elements.named("script") == []
    assert page.count("<script") == 0
    assert elements.text.count(EVIL) > 30
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert "default-src 'none'" in (elements.named("meta")[1]["content"] or "")


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    assert not re.search(r"https?://|url\(|@import|//", page.replace("</", ""))
    elements = Elements(page)
    assert {name for name, _ in elements.found}.isdisjoint({"link", "img", "iframe", "object", "embed", "script"})
    assert not any({"src", "srcset", "data"} & set(attributes) for _, attributes in elements.found)
    assert "prefers-color-scheme: dark" in page
    assert all(attributes.get("aria-label") for attributes in elements.named("svg"))


def test_headless_chromium_has_nothing_to_complain_of(page: str, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium on this machine")
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    quiet = "--disable-component-update --enable-logging=stderr --dump-dom --virtual-time-budget=2000"
    done = subprocess.run(
        [browser, *options.split(), *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Settings and versions</h2>" in done.stdout, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr


def test_counts_are_told_in_whole_numbers() -> None:
    for most, wanted in ((1, [0, 1]), (11, [0, 3, 6, 9, 12]), (40, [0, 10, 20, 30, 40])):
        chart = Chart.histogram([0.55] * most, high=1.0, mean=0.55, x="value", y="queries", title="counts", note="")
        labels = re.findall(r'text-anchor="end">([^<]*)<', str(chart))
        assert [float(label) for label in labels] == wanted


def test_the_figures_are_those_of_the_lists(tmp_path: Path) -> None:
    model, data = small_model(), small_data()
    found = PageData(content_of(model, data, tmp_path), model, data, "test")
    values = rank_data(model.score(data), data, metrics=["ndcg@10"])["ndcg@10"]
    known = values[~values.isnan()]
    assert found.values == tuple(known.tolist())
    assert found.mean is not None
    assert found.mean.mean == pytest.approx(float(known.mean()))
    assert found.best[0].value == float(known.max())
    assert found.worst[0].value == float(known.min())
    assert {query.qid for query in found.best}.isdisjoint(query.qid for query in found.worst)
    for query in (*found.best, *found.worst):
        part = data.select([data.qids.index(int(query.qid))])
        scores = model.score(part)
        assert [row.score for row in query.rows] == sorted((row.score for row in query.rows), reverse=True)
        shown = min(len(scores), data_of_page._ROWS)
        assert [row.rank for row in query.rows][:shown] == list(range(1, shown + 1))
        names = list(part.doc_ids or ())
        middle = scores.argsort(descending=True, stable=True)[(len(scores) - 1) // 2]
        for row in query.rows:
            assert row.label == float(part.labels[names.index(row.name)])
            one = explain(model, part, qid=part.qids[0], document=row.name, over=names[int(middle)])
            parts = one.features.sum(0) @ model.preprocess.origins()
            for name, value in row.parts:
                assert value == pytest.approx(float(parts[int(name.split()[1]) - 1]), abs=1e-9)


def test_the_page_of_a_run_scores_the_lists_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, scored = small_model(), small_data(), []
    content, score = content_of(model, data, tmp_path), model.score
    monkeypatch.setattr(model, "score", lambda part, **options: scored.append(part) or score(part, **options))
    page = make_page(content, PageData(content, model, data, "test"))
    assert len(scored) == 1
    assert "Cost of shuffling" not in page
    assert "lgmml report RUN --importance" in page


def test_large_sets_are_sampled_and_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_of_page, "LISTS", 20)
    model, data = small_model(), small_data(60)
    content = content_of(model, data, tmp_path)
    pages = [make_page(content, PageData(content, model, data, "test")) for _ in range(2)]
    assert pages[0] == pages[1]
    text = Elements(pages[0]).text
    assert "20 of the 60 queries of test, drawn with seed 0" in text
    mean = content["evaluations"][1]["metrics"]["ndcg@10"]["mean"]
    assert f"<b>{mean:.4f}</b>" in pages[0]  # of all queries
    assert len(pages[0]) < 300_000


@pytest.mark.parametrize("case", ["nothing relevant", "single documents", "one query", "no validation", "old report"])
def test_odd_runs_have_a_page_too(case: str, tmp_path: Path) -> None:
    model, data = small_model(), small_data()
    if case == "nothing relevant":
        data = data.replace(labels=torch.zeros_like(data.labels))
    if case == "single documents":
        data = data.select((data.sizes == 1).nonzero()[:, 0])
    if case == "one query":
        data = data.select([int(data.sizes.argmax())])
    changes: dict[str, Any] = {"curve": {}, "bank": {}} if case == "no validation" else {}
    content = content_of(model, data, tmp_path, **changes)
    if case == "old report":
        for key in ("data", "model", "seconds", "versions", "written"):
            del content[key]
        for item in content["evaluations"]:
            for entry in item["metrics"].values():
                del entry["interval"]
    text = Elements(make_page(content, PageData(content, model, data, "test"))).text
    expected = {
        "nothing relevant": "none has a relevant document",
        "single documents": "No list has two documents",
        "one query": "All 1 queries of test",
        "no validation": "No validation queries: the last epoch (1) was kept",
        "old report": "The report does not say",
    }
    assert expected[case] in text


def test_charts_take_what_comes() -> None:
    flat = Chart.lines({"a": [Point(1, 0.5)]}, x="x", y="y", title="one point")
    assert flat.count("<circle") == 1
    many = Chart.lines({"a": [Point(i, i) for i in range(500)]}, x="x", y="y", title="many")
    assert "<circle" not in many
    assert Chart.bars([], x="x", title="none").startswith("<figure><figcaption>none</figcaption><svg")
    long = Chart.bars([Bar("n" * 60, -1.0, -2.0, 0.5)], x="x", title="long")
    assert "n" * 23 + "…" in long
    assert "n" * 60 in long  # on hovering
    assert len(Chart.lines({"a": [Point(i, i / 1e5) for i in range(100_000)]}, x="x", y="y", title="many")) < 30_000
    escaped = '<figure><figcaption>&lt;</figcaption><i>1</i><p class="note">&amp;</p></figure>'
    assert figure("<", Markup("<i>1</i>"), "&") == escaped


def test_no_label_of_an_axis_is_cut_at_an_edge() -> None:
    """A letter is about 6 units wide, and a chart 440."""
    wide = Chart.lines({"a": [Point(0, 0.5), Point(123_456_789, 0.6)]}, x="x", y="y", title="wide", kept=0)
    bars = Chart.bars([Bar("a", 123_456.0, 0.0, 123_456.0)], x="x", title="bars", form="{:.2f}".format)
    for chart in (wide, bars):
        for place, label in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]*)<', chart):
            assert 3 * len(label) <= float(place) <= 440 - 3 * len(label), label


def test_names_stand_apart_where_a_table_is_narrow(page: str) -> None:
    assert '<span class="part"' in page
    assert '</span><span class="part"' not in page  # without a space a line could not break between them


def test_the_best_part_is_reported_part() -> None:
    data = small_data()
    assert reported_part({"train": data, "valid": data})[0] == "valid"
    assert reported_part({"train": data})[0] == "train"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What a finished run leaves, without the run."""
    folder = tmp_path / "run"
    data = generated_splits(16, FEATURES, num_documents=160)
    model = small_model(data=data["train"])
    settings = {"_target_": "lgmml_torch.data.catalog.generated_splits", "num_queries": 16, "num_features": FEATURES,
                "num_documents": 160}  # fmt: skip
    outcome_of(model, data, folder, {**SETTINGS, "data": settings}).write()
    return folder


def test_the_page_is_made_again(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_folder)]) == 0
    assert capsys.readouterr().out == f"{run_folder / 'report.html'}\n"
    page = (run_folder / "report.html").read_text()
    assert "All 3 queries of test" in Elements(page).text
    (tmp_path / "new.csv").write_text(
        "qid,label," + ",".join(f"f{i}" for i in range(FEATURES)) + "\n"
        + "".join(f"q<{row % 3}>,{row % 2},{row},{row % 5},{row % 7},{row % 4},1\n" for row in range(30))
    )  # fmt: skip
    words = ["report", run_folder, "--data", tmp_path / "new.csv", "--compare", run_folder, "-o", tmp_path / "n.html"]
    assert cli.main([str(word) for word in words]) == 0
    text = Elements((tmp_path / "n.html").read_text()).text
    assert "All 3 queries of " in text
    assert "this model against run on".lower() in text.lower()
    assert "0 won, 3 tied, 0 lost" in text


def test_a_report_is_data_not_a_program(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_folder / "report.json"
    content = json.loads(file.read_text())
    content["config"]["data"] = {"parts": [{"_target_": "os.system", "command": "true"}]}
    file.write_text(json.dumps(content))
    assert cli.main(["report", str(run_folder)]) == 2
    assert "`_target_` must lie in one of lgmml_torch.data, got 'os.system'" in capsys.readouterr().err
    file.write_text("[]")
    assert cli.main(["report", str(run_folder)]) == 2
    assert "must be the report.json of a training run" in capsys.readouterr().err
    file.unlink()
    assert cli.main(["report", str(run_folder)]) == 2
    assert "is not the folder of a finished run" in capsys.readouterr().err


def test_the_model_file_says_where_it_comes_from(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = LGMML.load(run_folder / "model.safetensors")
    assert again.about is not None
    assert again.about["version"] == 1
    assert again.about["trained on"]["queries"] == 10
    assert cli.main(["info", str(run_folder / "model.safetensors")]) == 0
    printed = capsys.readouterr().out
    for piece in ("written by", "lgmml-torch 0.", "documents", "seed 0", "ndcg@10 0.", "features that count most"):
        assert piece in printed
    again.about = None
    assert "about" not in again.spec()


def test_labels_that_are_all_different_do_not_fill_the_report(tmp_path: Path) -> None:
    data = small_data(60)
    labels = torch.arange(data.num_documents) / 1000
    labels[:5] = 0.5
    content = content_of(small_model(), data.replace(labels=labels), tmp_path)
    found = content["data"]["train"]["labels"]
    assert len(found) == 20
    assert found["0.5"] >= 5


def test_the_report_in_words_says_how_it_went(run_folder: Path) -> None:
    text = (run_folder / "report.md").read_text()
    assert text.startswith("# run <script>")
    for piece in (
        "\n\n| data | weights |",
        "| 1 | 0.6250 (kept) |",
        "| 2 | 0.6100 |",
        "2.6 s: data 0.1 s, training 2.5 s.",
    ):
        assert piece in text
    assert "## What was fitted\n\nAs configured &" in text
    assert "\nevaluation.preset: default\n" in text


def test_of_many_rounds_a_report_lists_some(tmp_path: Path) -> None:
    data, rounds = small_data(), list(range(5, 505, 5))
    bank = {"rounds": rounds, "valid_ndcg": [0.5 + r / 1e4 for r in rounds], "best_round": 485}
    text = _run_markdown(content_of(small_model(), data, tmp_path, bank=bank), ["a against b"])
    assert "| 485 | 0.5485 (kept) |" in text
    assert text.count("\n| ") < 40
    assert "- a against b.\n" in text
    nothing = _run_markdown(content_of(small_model(), data, tmp_path, bank={"best_round": 4}, curve={}), [])
    assert "Rounds of boosting" not in nothing
    assert "No validation queries: the weights of the last epoch (1) were kept." in nothing
