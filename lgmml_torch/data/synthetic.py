"""Query-by-example sets that need no download: Gaussian classes in any dimension, and scikit-learn's digits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from lgmml_torch.checks import LGMMLError, check_unit_interval
from lgmml_torch.functional.examples import ExampleSet


def synthetic_classes(
    classes: int,
    dim: int = 20,
    points: int = 40,
    *,
    seed: int = 0,
    condition: float = 3e3,
    dtype: torch.dtype = torch.float32,
) -> ExampleSet:
    """Synthetic-C: Gaussian classes, each with a covariance of its own, close enough to overlap.

    Covariances are random rotations of spectra drawn log-uniformly from [condition^−½, condition^½]. Centres are
    normal, scaled so that at the median class the 95% ellipsoid touches that of its nearest neighbour, measured on the
    line through the centres. In 20 dimensions long axes then reach far into other classes: only a metric that knows
    the local covariance tells them apart. ``condition=1`` gives separate balls, which any metric ranks perfectly.

    Args:
        classes: C; the paper has 2, 10, 50 and 100.
        dim: dimension; the paper's series runs from 10 to 1000.
        points: per class; half of them, rounded down, become the database, the others the queries.
        seed: the same seed gives the same set.
        condition: largest over smallest possible eigenvalue of a covariance.
        dtype: of the vectors, which are drawn in float64.

    Returns:
        Database and queries, relevant meaning: of the same class.

    Raises:
        LGMMLError: for fewer than two classes or points, no dimension, or a condition below 1.

    >>> data = synthetic_classes(2, seed=1)
    >>> tuple(data.database.shape), tuple(data.queries.shape), data.offsets.diff().unique().tolist()
    ((40, 20), (40, 20), [20])
    """
    for name, value, least in (("classes", classes, 2), ("dim", dim, 1), ("points", points, 2)):
        if value < least:
            raise LGMMLError(f"`{name}` must be at least {least}, got {value}")
    if not condition >= 1:
        raise LGMMLError(f"`condition` must be at least 1, got {condition}")
    rng = np.random.default_rng(np.random.SeedSequence([seed, classes, dim, points]))
    spread = condition ** (rng.uniform(-0.25, 0.25, (classes, dim)))  # roots of the eigenvalues
    axes = np.stack([_rotation(rng, dim) for _ in range(classes)])
    centres = rng.normal(size=(classes, dim))
    centres *= _touching_scale(centres, axes, spread)
    drawn = rng.normal(size=(classes, points, dim)) * spread[:, None]
    vectors = centres[:, None] + drawn @ axes.transpose(0, 2, 1)
    return _halves(vectors, points // 2, dtype)


def _rotation(rng: np.random.Generator, dim: int) -> NDArray[np.float64]:
    """A random orthogonal matrix; the columns are the axes."""
    q, r = np.linalg.qr(rng.normal(size=(dim, dim)))
    return np.asarray(q * np.sign(np.diag(r)))


def _touching_scale(
    centres: NDArray[np.float64],  # (C, D)
    axes: NDArray[np.float64],  # (C, D, D)
    spread: NDArray[np.float64],  # (C, D)
) -> float:
    """The factor on the centres at which the median class touches its nearest neighbour.

    From class i towards j the ellipsoid ends at r/√(uᵀΣᵢ⁻¹u), u the unit vector and r² the 95% point of χ² with D
    degrees of freedom.
    """
    difference = centres[:, None] - centres  # (C, C, D)
    length = np.linalg.norm(difference, axis=2) + np.eye(len(centres))
    along = np.stack([np.linalg.norm(d @ a / s, axis=1) for d, a, s in zip(difference, axes, spread, strict=True)])
    radius = np.sqrt(chi2.ppf(0.95, centres.shape[1])) * length / (along + np.eye(len(centres)))
    touching = (radius + radius.T) / length
    np.fill_diagonal(touching, 0)
    return float(np.median(touching.max(axis=1)))


def _halves(
    vectors: NDArray[np.float64],  # (C, P, D)
    database: int,
    dtype: torch.dtype,
) -> ExampleSet:
    x = torch.from_numpy(vectors).to(dtype)
    labels = torch.arange(len(x))
    left, right = x[:, :database].flatten(0, 1), x[:, database:].flatten(0, 1)
    return ExampleSet.from_labels(
        left, labels.repeat_interleave(database), right, labels.repeat_interleave(x.shape[1] - database)
    )


def digits_examples(
    *,
    queries: float = 0.5,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> ExampleSet:
    """Scikit-learn's 1797 handwritten digits (8×8 pixels in [0, 1]): relevant are images of the same digit.

    Args:
        queries: share of each digit's images that become queries; the others are the database.
        seed: decides which.
        dtype: of the vectors.

    >>> data = digits_examples(seed=1)
    >>> tuple(data.database.shape), tuple(data.queries.shape)
    ((901, 64), (896, 64))
    """
    from sklearn.datasets import load_digits

    check_unit_interval("queries", queries)
    if queries in (0, 1):
        raise LGMMLError(f"`queries` must be strictly between 0 and 1, got {queries:g}")
    images, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    asked = np.zeros(len(digits), dtype=bool)
    for digit in range(10):
        rows = rng.permutation(np.flatnonzero(digits == digit))
        asked[rows[: int(queries * len(rows))]] = True
    x, labels = torch.from_numpy(images / 16.0).to(dtype), torch.from_numpy(digits).long()
    chosen = torch.from_numpy(asked)
    return ExampleSet.from_labels(x[~chosen], labels[~chosen], x[chosen], labels[chosen])
