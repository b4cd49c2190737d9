"""The map from scores to chances of grades, against loops and against scikit-learn's logistic regression."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.functional.calibration import GradeMap, fit_grade_map, reliability
from lgmml_torch.functional.measures import ndcg
from lgmml_torch.segments import offsets_from_sizes
from tests.reference import calibration as naive


def problem(seed: int, documents: int = 400, grades: int = 3, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scores far from 0, and labels that rise with them."""
    g = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(documents, generator=g, dtype=torch.float64) - 50
    hidden = (scores + 50) / 3 + noise * torch.randn(documents, generator=g, dtype=torch.float64)
    return scores, (hidden + grades / 2).clamp(0, grades - 1).floor()


def standardised(scores: Tensor) -> Tensor:
    return (scores - scores.mean()) / scores.std()


class TestFit:
    def test_two_grades_are_logistic_regression(self) -> None:
        for seed in range(3):
            scores, labels = problem(seed, grades=2)
            found = fit_grade_map(scores, labels)
            oracle = LogisticRegression(C=1.0, tol=1e-10, max_iter=1000)
            oracle.fit(standardised(scores)[:, None].numpy(), labels.numpy())
            expected = oracle.predict_proba(standardised(scores)[:, None].numpy())
            np.testing.assert_allclose(found.chances(scores).numpy(), expected, atol=1e-6)
            assert found.grades == (0.0, 1.0)

    def test_no_other_slope_or_cut_has_a_lower_loss(self) -> None:
        for seed, grades in ((0, 2), (1, 3), (2, 5)):
            scores, labels = problem(seed, 150, grades)
            found = fit_grade_map(scores, labels)
            assert len(found.grades) == grades
            z, y = standardised(scores).tolist(), labels.tolist()
            best = [found.slope * float(scores.std()), *found.cuts]
            assert found.centre == pytest.approx(float(scores.mean()))
            least = naive.loss(z, y, best[0], best[1:])
            for place in range(len(best)):
                for step in (-1e-3, 1e-3):
                    other = list(best)
                    other[place] += step
                    assert naive.loss(z, y, other[0], other[1:]) > least

    def test_chances_add_up_to_the_documents_of_each_grade(self) -> None:
        """The normal equations of the cuts."""
        scores, labels = problem(4, 500, 4)
        found = fit_grade_map(scores, labels)
        counts = torch.bincount(labels.long()).double()
        torch.testing.assert_close(found.chances(scores).sum(0), counts, rtol=1e-7, atol=1e-6)
        torch.testing.assert_close(found.expected(scores).mean(), labels.mean(), rtol=1e-9, atol=0)

    def test_rare_grades_at_one_end_are_fitted_as_well(self) -> None:
        """The best cut moves a lot with the slope there: a step in one of them alone is not enough."""
        for scores, rare in ((torch.arange(1000.0), 10), (2.0 ** torch.arange(30.0), 1)):  # the second far apart
            labels = (scores >= scores[-rare]).float()
            found = fit_grade_map(scores, labels)
            assert float(found.chances(scores)[:, 1].sum()) == pytest.approx(rare, rel=1e-6)
            z = standardised(scores.double())
            excess = found.chances(scores)[:, 1] - labels
            assert float(z @ excess) == pytest.approx(-found.slope * float(scores.double().std()), rel=1e-6)

    def test_true_chances_are_found(self) -> None:
        g = torch.Generator().manual_seed(0)
        scores = torch.randn(100_000, generator=g, dtype=torch.float64)
        true = GradeMap((0.0, 1.0, 4.0), 0.0, 1.5, (-1.0, -3.0))
        draws = torch.rand(len(scores), generator=g, dtype=torch.float64)
        labels = torch.zeros_like(scores)
        labels[draws < true.at_least(scores)] = 1.0
        labels[draws < true.at_least(scores, 4.0)] = 4.0
        torch.testing.assert_close(
            fit_grade_map(scores, labels).chances(scores), true.chances(scores), atol=0.01, rtol=0
        )

    def test_scale_and_place_of_the_scores_do_not_matter(self) -> None:
        scores, labels = problem(5)
        expected = fit_grade_map(scores, labels).chances(scores)
        for factor, shift in ((1e-30, 0.0), (1e30, 0.0), (2.0, 1e6)):
            moved = scores * factor + shift
            torch.testing.assert_close(fit_grade_map(moved, labels).chances(moved), expected, atol=1e-6, rtol=0)

    def test_scores_without_a_mistake_get_a_finite_slope(self) -> None:
        for labels in ([0.0, 1.0], [0.0, 0.0, 1.0, 1.0, 2.0], [0.0] * 999 + [1.0]):
            scores = torch.arange(len(labels), dtype=torch.float32)
            found = fit_grade_map(scores, torch.tensor(labels))
            assert math.isfinite(found.slope)
            assert (found.chances(scores) > 0).all()

    def test_an_outlier_does_not_stop_the_fit(self) -> None:
        scores, labels = problem(6)
        scores[0] = 1e12
        found = fit_grade_map(scores, labels)
        assert found.chances(scores).isfinite().all()

    def test_more_documents_than_are_fitted_to(self) -> None:
        scores, labels = problem(7, 600_000)
        found, few = fit_grade_map(scores, labels), fit_grade_map(scores[:200_000], labels[:200_000])
        torch.testing.assert_close(found.chances(scores[:99]), few.chances(scores[:99]), atol=0.01, rtol=0)

    @pytest.mark.parametrize(
        ("scores", "labels", "message"),
        [
            ([1.0, 2.0], [1.0, 1.0], "`labels` must have 2 to 32 different values, got 1"),
            ([], [], "`labels` must have 2 to 32 different values, got 0"),
            (list(range(40)), list(range(40)), "`labels` must have 2 to 32 different values, got 40"),
            ([3.0, 3.0, 3.0], [0.0, 1.0, 0.0], "`scores` must differ between documents, got equal ones"),
            ([1.0, 2.0, 3.0], [1.0, 1.0, 0.0], "`scores` must rise with the labels over all queries, got scores"),
        ],
    )
    def test_what_no_map_fits_is_refused(self, scores: list[float], labels: list[float], message: str) -> None:
        with pytest.raises(DataError, match=message):
            fit_grade_map(torch.tensor(scores, dtype=torch.float64), torch.tensor(labels, dtype=torch.float64))

    def test_scores_must_be_finite_and_as_many_as_labels(self) -> None:
        with pytest.raises(LGMMLError, match="`scores` must be finite"):
            fit_grade_map(torch.tensor([0.0, math.inf]), torch.tensor([0.0, 1.0]))
        with pytest.raises(LGMMLError, match=r"`labels` must have shape \(2,\), got \(3,\)"):
            fit_grade_map(torch.zeros(2), torch.zeros(3))


class TestMap:
    MAP = GradeMap((0.0, 1.0, 3.0), centre=-2.0, slope=0.7, cuts=(0.5, -1.5))

    def test_agrees_with_loops(self) -> None:
        scores = torch.tensor([-1000.0, -5.0, -2.0, 0.0, 3.5, 1000.0])
        expected = [naive.chances(score, -2.0, 0.7, (0.5, -1.5)) for score in scores.tolist()]
        torch.testing.assert_close(self.MAP.chances(scores), torch.tensor(expected, dtype=torch.float64))
        means = [row[1] + 3 * row[2] for row in expected]
        torch.testing.assert_close(self.MAP.expected(scores), torch.tensor(means, dtype=torch.float64))
        for threshold, columns in ((0.5, slice(1, 3)), (1.0, slice(1, 3)), (2.0, slice(2, 3)), (3.0, slice(2, 3))):
            sums = [sum(row[columns]) for row in expected]
            found = self.MAP.at_least(scores, threshold)
            torch.testing.assert_close(found, torch.tensor(sums, dtype=torch.float64))

    def test_the_order_and_ndcg_stay(self) -> None:
        """Every list in the same order, ties and all, for scores of a model's precision."""
        for seed in range(5):
            g = torch.Generator().manual_seed(seed)
            sizes = torch.randint(1, 60, (40,), generator=g)
            offsets = offsets_from_sizes(sizes)
            scores = (torch.randn(int(sizes.sum()), generator=g) * 4).round(decimals=seed)
            labels = torch.randint(0, 3, (len(scores),), generator=g).float()
            for values in (self.MAP.at_least(scores), self.MAP.at_least(scores, 3), self.MAP.expected(scores)):
                assert torch.equal(values.argsort(stable=True), scores.argsort(stable=True))
                assert torch.equal(values[:, None] == values, scores[:, None] == scores)
                assert ndcg(values, labels, offsets, k=10) == ndcg(scores, labels, offsets, k=10)

    def test_never_falls_and_equal_scores_have_equal_chances(self) -> None:
        """Neighbours among numbers, where rounding shows, and the ends, where chances are 0 and 1."""
        near = [1.0]
        for _ in range(2000):
            near.append(math.nextafter(near[-1], 2.0))
        scores = torch.tensor([*near, -1e308, 1e308, 700.0, -700.0, 1.0, 0.0, -0.0], dtype=torch.float64)
        order = scores.argsort(stable=True)
        for values in (self.MAP.at_least(scores), self.MAP.expected(scores)):
            assert values.isfinite().all()
            assert (values[order].diff() >= 0).all()
        chances = self.MAP.chances(scores)
        assert (chances >= 0).all()
        torch.testing.assert_close(chances.sum(1), torch.ones_like(scores))
        for place in range(1, 20):  # alone, and among others
            found = float(self.MAP.at_least(scores[[0] * place])[-1])
            assert float(self.MAP.at_least(scores[:place])[0]) == pytest.approx(found, rel=1e-12)

    def test_labels_keep_their_digits(self) -> None:
        found = GradeMap((0.1, 0.3), 0.0, 1.0, (0.0,)).expected(torch.zeros(1))
        assert found.item() == pytest.approx(0.2, rel=1e-12)

    def test_arrays_and_no_documents(self) -> None:
        assert self.MAP.chances(np.zeros(0, np.float32)).shape == (0, 3)
        assert float(self.MAP.expected(np.array([0.5], np.float32))) == float(self.MAP.expected(torch.tensor([0.5])))

    @pytest.mark.parametrize("threshold", [0.0, -1.0, 3.5])
    def test_a_threshold_must_part_the_grades(self, threshold: float) -> None:
        with pytest.raises(LGMMLError, match=r"`threshold` must part the grades \[0.0, 1.0, 3.0\], got"):
            self.MAP.at_least(torch.zeros(1), threshold)

    @pytest.mark.parametrize(
        ("grades", "centre", "slope", "cuts", "message"),
        [
            ((0.0, 1.0), 0.0, 0.0, (0.0,), "`slope` must be positive, got 0"),
            ((0.0, 1.0), 0.0, math.nan, (0.0,), "`slope` must be"),
            ((0.0, 1.0), 0.0, 1.0, (), "`grades` must rise and `cuts` fall, one less"),
            ((0.0,), 0.0, 1.0, (), "`grades` must rise and `cuts` fall, one less"),
            ((0.0, 1.0), math.inf, 1.0, (0.0,), "`grades` must rise and `cuts` fall"),
            ((1.0, 0.0), 0.0, 1.0, (0.0,), "`grades` must rise and `cuts` fall"),
            ((0.0, 1.0, 2.0), 0.0, 1.0, (0.0, 0.0), "`grades` must rise and `cuts` fall"),
        ],
    )
    def test_numbers_that_are_no_map_are_refused(
        self, grades: tuple[float, ...], centre: float, slope: float, cuts: tuple[float, ...], message: str
    ) -> None:
        with pytest.raises(LGMMLError, match=message):
            GradeMap(grades, centre, slope, cuts)


class TestReliability:
    def test_agrees_with_loops(self) -> None:
        for seed, documents, groups in ((0, 1, 10), (1, 7, 3), (2, 200, 10), (3, 205, 4), (4, 50, 200)):
            g = torch.Generator().manual_seed(seed)
            chances = torch.rand(documents, generator=g, dtype=torch.float64).round(decimals=2)
            outcomes = torch.rand(documents, generator=g) < chances
            found = reliability(chances, outcomes, groups=groups)
            error, brier, sizes = naive.reliability(chances.tolist(), outcomes.tolist(), groups)
            assert found.error == pytest.approx(error, abs=1e-12)
            assert found.brier == pytest.approx(brier, abs=1e-12)
            assert list(found.documents) == sizes

    def test_the_order_of_documents_of_equal_chance_does_not_matter(self) -> None:
        """One chance for all is exact if it is their share, whatever the order of the labels."""
        outcomes = torch.tensor([False] * 70 + [True] * 30)
        found = reliability(torch.full((100,), 0.3), outcomes)
        assert found.documents == (100,)
        assert found.error == pytest.approx(0.0, abs=1e-7)

    def test_ten_groups_come_lowest_chances_first(self) -> None:
        chances = torch.arange(20) / 20
        found = reliability(chances.flip(0), chances > 2)
        assert found.documents == (2,) * 10
        assert found.chances == pytest.approx([0.025 + 0.1 * group for group in range(10)])

    def test_sure_and_wrong_is_the_worst(self) -> None:
        found = reliability(torch.tensor([0.0, 1.0]), torch.tensor([True, False]))
        assert (found.error, found.brier) == (1.0, 1.0)

    def test_bad_use_is_named(self) -> None:
        with pytest.raises(LGMMLError, match="`documents` must be positive, got 0"):
            reliability(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
        with pytest.raises(LGMMLError, match=r"`outcomes` must have shape \(2,\)"):
            reliability(torch.zeros(2), torch.zeros(3, dtype=torch.bool))
