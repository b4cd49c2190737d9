"""The page of a run: one HTML file without scripts, fonts or pictures from elsewhere, for light and dark screens."""

from __future__ import annotations

from pathlib import Path

from lgmml_torch.app.page.look import Look
from lgmml_torch.app.page.markup import Markup, tag
from lgmml_torch.app.page.sections import (
    Report,
    comparison_section,
    data_section,
    header,
    importance_section,
    queries_section,
    results_section,
    settings_section,
    validation_section,
)
from lgmml_torch.evaluation.paired import Paired

STYLE = Path(__file__).with_name("page.css")
# Whatever a name in the data might try, a browser loads and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def make_page(report: Report, look: Look, paired: Paired | None = None) -> str:
    """The whole page, from what ``report.json`` holds and what was seen in the lists."""
    title = str(report["config"].get("name") or "run")
    sections = [
        data_section(report),
        results_section(report),
        *([] if paired is None else [comparison_section(paired)]),
        validation_section(report),
        queries_section(look),
        importance_section(look),
        settings_section(report),
    ]
    links = tag("nav", [tag("a", name, href=f"#{anchor}") for anchor, name, _ in sections])
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title}: a run of lgmml"),
        tag("style", Markup(STYLE.read_text(encoding="utf-8"))),
    )
    body = tag("body", header(report, look, title), links, tag("main", [content for _, _, content in sections]))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"
