"""Banks of geometric means against pyRiemann on torch arrays and against one `torch.linalg.eigh` of the same stack.

Run with ``python -m benchmarks.means``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pyriemann.geometry.geodesic import geodesic_riemann
from torch import Tensor

from benchmarks.harness import print_table, save_result, time_interleaved, verdict
from lgmml_torch.functional.spd import geometric_mean, geometric_mean_factor

SIZES = ((46, 500), (136, 100), (519, 6))  # D and how many matrices
FASTER_THAN_PYRIEMANN = 2.0
SLOWER_THAN_EIGH = 1.9  # for D of 136 and more


def random_bank(dim: int, count: int, generator: torch.Generator) -> Tensor:  # (count, dim, dim)
    X = torch.randn(count, 2 * dim, dim, dtype=torch.float64, generator=generator)
    return X.mT @ X / dim


def run(rounds: int = 9) -> dict[str, Any]:
    """Time all sizes, print the table and return the figures."""
    generator = torch.Generator().manual_seed(0)
    figures, rows = [], []
    for dim, count in SIZES:
        A, B = (random_bank(dim, count, generator) for _ in "AB")
        difference = torch.linalg.matrix_norm(geometric_mean(A, B) - geodesic_riemann(A, B, 0.5)).max()
        calls: dict[str, Callable[[], object]] = {
            "mean": partial(geometric_mean, A, B),
            "pyriemann": partial(geodesic_riemann, A, B, 0.5),
            "factor": partial(geometric_mean_factor, A, B, invert_first=True),
            "eigh": partial(torch.linalg.eigh, A),
        }
        times = time_interleaved(calls, rounds=rounds)
        faster, slower = times["pyriemann"].ratio(times["mean"]), times["factor"].ratio(times["eigh"])
        met = faster >= FASTER_THAN_PYRIEMANN and (dim < 136 or slower <= SLOWER_THAN_EIGH)
        milliseconds = {name: 1000 * time.median for name, time in times.items()}
        figures.append(
            {
                "dim": dim,
                "count": count,
                "milliseconds": milliseconds,
                "pyriemann_over_mean": faster,
                "factor_over_eigh": slower,
                "largest_difference": float(difference),
                "met": met,
            }
        )
        rows.append((f"{count}x{dim}", *milliseconds.values(), faster, slower, verdict(met)))
    columns = ("K x D, ms", "mean", "pyRiemann", "factor", "eigh", "pyR/mean", "fac/eigh", "target")
    print_table(
        f"Geometric means (targets: pyR/mean >= {FASTER_THAN_PYRIEMANN:g}, "
        f"fac/eigh <= {SLOWER_THAN_EIGH:g} from D=136)",
        columns,
        rows,
    )
    return {"figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="how often each call is timed (default: %(default)s)")
    print(f"saved {save_result('means', run(parser.parse_args().rounds)).name}")


if __name__ == "__main__":
    main()
