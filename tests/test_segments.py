from __future__ import annotations

import itertools

import pytest
import torch

from lgmml_torch import segments


def random_offsets(seed: int) -> torch.Tensor:
    sizes = torch.randint(0, 5, (7,), generator=torch.Generator().manual_seed(seed))
    return segments.offsets_from_sizes(sizes)


@pytest.mark.parametrize("seed", range(2))
def test_reductions_equal_loops(seed: int) -> None:
    offsets = random_offsets(seed)
    values = torch.randn(int(offsets[-1]), generator=torch.Generator().manual_seed(seed))
    parts = [values[a:b] for a, b in itertools.pairwise(offsets)]
    assert torch.allclose(segments.segment_sum(values, offsets), torch.stack([part.sum() for part in parts]))
    for function, name, empty in ((segments.segment_max, "amax", -9.0), (segments.segment_min, "amin", 9.0)):
        expected = [getattr(part, name)() if len(part) else torch.tensor(empty) for part in parts]
        assert torch.equal(function(values, offsets, empty=empty), torch.stack(expected))
    assert segments.positions(offsets).tolist() == [i for part in parts for i in range(len(part))]
    assert segments.segment_ids(offsets).tolist() == [q for q, part in enumerate(parts) for _ in part]


@pytest.mark.parametrize(("seed", "descending"), [(0, False), (1, True)])
def test_sorting_within_segments_breaks_ties_in_the_given_order(seed: int, descending: bool) -> None:
    offsets = random_offsets(seed)
    generator = torch.Generator().manual_seed(seed)
    total = int(offsets[-1])
    values = torch.randint(0, 2, (total,), generator=generator).float()
    ties = torch.randperm(total, generator=generator)
    order = segments.argsort_segments(values, offsets, descending=descending, tie_order=ties)
    sign = -1 if descending else 1
    expected = [
        row
        for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        for row in sorted(range(a, b), key=lambda i: (sign * float(values[i]), int(ties[i])))
    ]
    assert order.tolist() == expected


def test_list_blocks_cover_every_list_once() -> None:
    offsets = random_offsets(1)
    for documents in (1, 3, 100):
        blocks = list(segments.list_blocks(offsets, documents))
        assert [q for first, last in blocks for q in range(first, last)] == list(range(7))
    assert list(segments.list_blocks(torch.tensor([0]), 5)) == []
    assert len(list(segments.list_blocks(torch.arange(9), 100, at_least=4))) >= 4
