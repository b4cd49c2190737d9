"""The framework figure, as a drawing of this package's own pipeline (the paper's first figure)."""

from __future__ import annotations

from typing import Any

from research.paper.outcome import Outcome, Table
from research.plots import Box, pipeline_picture
from research.store import Store

GREEN, YELLOW = "#dff0dc", "#fbf0d5"
BOXES = (
    Box(0, 0, "Lists", "documents of each query,\nragged, graded labels"),
    Box(1, 0, "Preprocessing", "fitted on training lists:\nquantiles, ranks in the list"),
    Box(2, 0, "Regions", "sampled queries, or chosen\nby ranking gradients", GREEN),
    Box(3, 0, "Local metrics", "M = S⁻¹ ♯ D per region,\nclosed form", GREEN),
    Box(3, 1, "Anchors", "ideal documents:\nbest NDCG in the region", GREEN),
    Box(2, 1, "Distances", "d(p) = ‖p − anchor‖ in M,\nover its training median", GREEN),
    Box(1, 1, "Weights Φ ≥ 0", "sampled WARP; a policy\nfor new queries", YELLOW),
    Box(0, 1, "Ranking", "f(p) = −Σ Φ·κ(d(p)),\nκ(d) = d·exp(−d)", YELLOW),
)
ARROWS = (
    (0, 1, "raw"),
    (1, 2, "features"),
    (2, 3, "S, D"),
    (3, 4, "M = F Fᵀ"),
    (4, 5, "anchors"),
    (5, 6, "κ(d)"),
    (6, 7, "Φ"),
)
MODULES = (
    ("Lists", "ragged.py, data/", "arrays or LETOR text → RankingData"),
    ("Preprocessing", "models/preprocess/", "(N, D) raw → (N, D′)"),
    ("Regions", "functional/regions.py, fitting/boosted/", "queries → X₊ and X₋ per region"),
    ("Local metrics", "functional/gmml.py", "S, D (K, D, D) → factors F (K, D, R)"),
    ("Anchors", "functional/regions.py", "candidates → anchors (K, D)"),
    ("Distances", "models/local_metrics.py", "features (N, D) → distances (N, K)"),
    ("Weights Φ", "models/phi.py, training/", "tuples of documents → Φ (Q, K)"),
    ("Ranking", "models/ranker.py", "distances and Φ → scores (N,)"),
)


def run(cfg: Any, store: Store) -> Outcome:
    """Nothing to compute: the stages, what passes between them, and where their code is."""
    picture = pipeline_picture(BOXES, ARROWS, title="From lists to a ranking (green: closed form, yellow: trained)")
    table = Table("framework", "Stages of the pipeline", ["stage", "module", "takes → gives"], MODULES)
    return Outcome(cfg.name, "The framework", [table], {"framework": picture})
