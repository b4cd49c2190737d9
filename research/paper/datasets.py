"""The two tables of data sets, counted from whatever folders are configured (the paper's first and second table)."""

from __future__ import annotations

from typing import Any

from lgmml_torch.ragged import RankingData
from research.by_example.data import open_examples
from research.paper.outcome import Claim, Outcome, Table
from research.plots import bars_picture
from research.protocol import example_fold, present, ranking_fold, split_name
from research.store import Job, Record, Store

PARTS = ("train", "valid", "test")
# The paper's: queries and documents of train, validation and test part; relevance levels; features.
LARGE_SETS: dict[str, tuple[int | str, ...]] = {
    "yahoo1": (19_944, 2_994, 6_983, 473_134, 71_083, 165_660, 5, 519),
    "yahoo2": (1_266, 1_266, 3_798, 34_815, 34_881, 103_174, 5, 596),
    "mslr-web10k": (6_000, 2_000, 2_000, 723_412, 235_259, 235_259, 5, 136),
    "mslr-web30k": (31_531, 6_306, 6_306, "3,771k", 6_306, "753k", 5, 136),
}
# The paper's: features and songs.
SONGS = {"Audio": (1_024, 5_419), "Lyrics-128": (128, 2_000), "Lyrics-256": (256, 2_000)}


def run(cfg: Any, store: Store) -> Outcome:
    """Count every set that is there; the paper's rows stand beside the sets it used."""
    large, missing = present(cfg.large, cfg.data_dir)
    ranking = [*cfg.ranking, *large]
    counted = {
        name: record.info
        for name, record in zip(ranking, store.all([_ranking_job(cfg, name) for name in ranking], "sets"), strict=True)
    }
    songs, no_songs = present(cfg.songs, cfg.data_dir)
    examples = [*cfg.examples, *songs]
    items = {
        name: record.info
        for name, record in zip(
            examples, store.all([_example_job(cfg, name) for name in examples], "examples"), strict=True
        )
    }
    tables = [_ranking_table(counted, missing), _song_table(items, no_songs)]
    picture = bars_picture(
        list(counted),
        {part: [(float(info[part]["queries"]), 0.0, 0.0) for info in counted.values()] for part in PARTS},
        y="queries (log scale)", title="Queries of each part", log_y=True, digits=0,
    )  # fmt: skip
    claims = _claims(counted, missing, no_songs)
    return Outcome(cfg.name, "Data sets", tables, {"datasets": picture}, claims)


def _ranking_job(cfg: Any, name: str) -> Job:
    def make() -> Record:
        fold = ranking_fold(name, 0, cfg.data_dir)
        return Record(info={part: _facts(data) for part, data in vars(fold).items()})

    return Job("datasets", {"data": name, "fold": 0, "seed": 0}, make)


def _facts(data: RankingData) -> dict[str, Any]:
    found = data.statistics()
    return {
        "queries": found["queries"], "documents": found["documents"], "features": found["features"],
        "levels": len(found["labels"]), "empty": found["queries without a relevant document"],
        "sizes": list(found["documents per query (min, median, max)"]), "constant": found["constant features"],
    }  # fmt: skip


def _ranking_table(counted: dict[str, Any], missing: list[str]) -> Table:
    columns = [
        "data", "counted by", "train queries", "validation", "test", "train documents", "validation", "test",
        "relevance levels", "features", "constant features", "queries without a relevant document", "split",
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for name, info in counted.items():
        numbers = [f"{info[part][key]:,}" for key in ("queries", "documents") for part in PARTS]
        empty = sum(info[part]["empty"] for part in PARTS)
        levels = max(info[part]["levels"] for part in PARTS)
        train = info["train"]
        rows.append([name, "us", *numbers, levels, train["features"], train["constant"], empty, split_name(name)])
    for name, paper in LARGE_SETS.items():
        shown = [f"{value:,}" if isinstance(value, int) else value for value in paper]
        rows.append([name, "the paper", *shown, "", "", ""])
    notes = [
        "first fold; constant features are counted in the training part",
        "the paper's 31,531 training queries of WEB30K are the whole set; an official training fold has 18,919",
        *(f"{name}: no folder is configured, only the paper's row is shown" for name in missing),
    ]
    return Table("datasets_ranking", "Ranking sets", columns, rows, notes)


def _example_job(cfg: Any, name: str) -> Job:
    def make() -> Record:
        fold = example_fold(name, 0, cfg.data_dir)
        queries = {part: data.num_queries for part, data in vars(fold).items()}
        relevant = float(fold.test.offsets.diff().double().mean())
        total = sum(queries.values())
        if not name.startswith(("digits", "synthetic")):
            total = len(open_examples(name, cfg.data_dir))
        return Record(info={**queries, "features": fold.train.database.shape[1], "items": total, "relevant": relevant})

    return Job("datasets", {"data": name, "fold": 0, "seed": 0}, make)


def _song_table(items: dict[str, Any], missing: list[str]) -> Table:
    columns = ["data", "counted by", "features", "items", "database", "validation", "test", "relevant per test query"]
    rows: list[list[Any]] = [
        [name, "us", info["features"], info["items"], info["train"], info["valid"], info["test"],
         f"{info['relevant']:.1f}"]
        for name, info in items.items()
    ]  # fmt: skip
    rows += [[name, "the paper", features, count, "40%", "30%", "30%", ""] for name, (features, count) in SONGS.items()]
    notes = [f"{name}: no folder is configured, only the paper's rows are shown" for name in missing]
    return Table("datasets_examples", "Query-by-example sets", columns, rows, ["first fold", *notes])


def _claims(counted: dict[str, Any], missing: list[str], no_songs: list[str]) -> list[Claim]:
    claims = []
    for name, paper in LARGE_SETS.items():
        text = ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in paper)
        if name not in counted:
            claims.append(Claim(f"{name}: counts", text, "–", "not tested", "its folder is not configured"))
            continue
        info = counted[name]
        ours = [info[part][key] for key in ("queries", "documents") for part in PARTS]
        ours += [max(info[part]["levels"] for part in PARTS), info["train"]["features"]]
        same = all(a == b for a, b in zip(ours, paper, strict=True) if isinstance(b, int))
        listed = ", ".join(f"{value:,}" for value in ours)
        claims.append(Claim(f"{name}: counts", text, listed, "holds" if same else "does not hold", "counted by us"))
    if no_songs:
        songs = "; ".join(f"{name} {features:,} features, {n:,} songs" for name, (features, n) in SONGS.items())
        claims.append(Claim("CAL10K: counts", songs, "–", "not tested", "its folder is not configured"))
    return claims
