"""The measurement behind docs/calibration.md, on a small set."""

from __future__ import annotations

from research.calibration import TOY, as_chances, line_or_steps, measure, tables
from tests.doors import small_data


def test_every_figure_of_the_page_is_there_and_ndcg_stays() -> None:
    found = {"toy": measure("toy", TOY["toy"](), seed=0, budget="fast")}
    before, after = found["toy"]["ndcg@10"]
    assert before == after == found["toy"]["ndcg@10 by expected label"]
    for row in found["toy"]["rows"].values():
        assert 0 <= row["ece"] <= 1
        assert 0 <= row["brier"] <= 1
    text = tables(found)
    for word in ("logistic of the score", "the map", "LightGBM, the map", f"{before:.6f}"):
        assert word in text


def test_what_is_compared() -> None:
    """Chances lie in [0, 1] and do not turn documents around; validation queries are judged by other queries."""
    data = small_data(40)
    scores = data.features[:, 0]
    for name, chances in as_chances(data, scores, scores).items():
        assert ((chances >= 0) & (chances <= 1)).all(), name
        assert (chances[scores.argsort()].diff() >= 0).all(), name
    judged = line_or_steps(data, scores, seed=0)
    share = (data.labels >= 1).double().mean()
    assert max(judged.values()) < float(share * (1 - share))  # which one chance for all has
