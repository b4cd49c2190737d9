"""The device that is not there behaves as one that is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.pretend import DEVICE, MOVED, PretendTensor, pretend


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with pretend():
        yield


def here(x: Tensor) -> bool:
    return isinstance(x, PretendTensor) and x.device == DEVICE and not x.is_cpu and not x.is_meta


MIXTURES: list[Callable[[Tensor], object]] = [
    lambda x: x + torch.ones(2),
    lambda x: torch.ones(2) * x,
    lambda x: x.add_(torch.ones(3, 2)),
    lambda x: x @ torch.ones(2),
    lambda x: torch.cat([x, torch.ones(1, 2)]),
    lambda x: torch.where(x > 1, x, torch.ones(3, 2)),
    lambda x: torch.ones(3)[x[:, 0].long()],
    lambda x: x.index_select(0, torch.tensor([0])),
    lambda x: x.gather(0, torch.zeros(1, 2, dtype=torch.long)),
    lambda x: x.index_put_((torch.tensor([0]),), torch.ones(1, 2)),
    lambda x: torch.maximum(x, x, out=torch.empty(3, 2)),
    lambda x: nn.functional.embedding(torch.tensor([1]), x),
]


@pytest.mark.parametrize("mix", MIXTURES)
def test_it_does_not_mix_with_the_cpu(mix: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match=r"same device, got fpga:0 and cpu"):
        mix(torch.arange(6.0).view(3, 2).to(DEVICE))


def test_numbers_and_indices_may_come_from_the_cpu() -> None:
    x = torch.arange(6.0).view(3, 2).to(DEVICE)
    assert (x + torch.tensor(1.0)).tolist() == [[1, 2], [3, 4], [5, 6]]
    for index in (torch.tensor([2, 0]), [2, 0], torch.tensor([2, 0], device=DEVICE)):
        assert here(x[index])
        assert x[index].tolist() == [[4, 5], [0, 1]]
    x[torch.tensor([1])] = 7.0
    x[0] = torch.tensor([8.0, 9.0])  # a copy, which may cross
    assert x.tolist() == [[8, 9], [7, 7], [4, 5]]


def test_factories_land_on_it() -> None:
    x = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    made = [torch.arange(3, device=DEVICE), torch.tensor([1, 2], device=DEVICE), torch.full((2,), 1.0, device=DEVICE)]
    made += [x.new_ones(1), torch.zeros_like(x), torch.empty_like(torch.ones(2), device=DEVICE), torch.ones(2).to(x)]
    assert all(map(here, [x, *made]))
    assert made[-1].dtype == torch.float64
    assert not any(isinstance(y, PretendTensor) for y in (torch.ones(2), torch.empty_like(x, device="cpu"), x.cpu()))


def test_values_come_back() -> None:
    x = torch.arange(3.0).to(DEVICE)
    assert (float(x.sum()), int(x[2]), bool((x > 1).any()), x.nonzero().tolist()) == (3.0, 2, True, [[1], [2]])
    assert torch.equal(x.cpu(), torch.arange(3.0))
    assert torch.equal(x.to("cpu", torch.float64), torch.arange(3.0).double())
    for convert in (Tensor.numpy, PretendTensor.numpy, np.asarray):
        with pytest.raises((TypeError, RuntimeError)):
            convert(x)
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["x"], torch.arange(3.0))


@pytest.mark.parametrize("sparse", [False, True])
def test_modules_move_and_learn_as_on_the_cpu(sparse: bool) -> None:
    def learn(module: nn.Embedding, device: torch.device) -> Tensor:
        module = copy.deepcopy(module.to(device))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for rows in ([0, 0, 2], [1, 1]):
            optimizer.zero_grad()
            module(torch.tensor(rows, device=device)).square().sum().backward()
            assert module.weight.grad is not None
            assert module.weight.grad.is_sparse == sparse
            assert module.weight.grad.device == module.weight.device == device
            optimizer.step()
        return module.cpu().weight

    table = nn.Embedding(3, 2, sparse=sparse, _weight=torch.arange(6.0).view(3, 2))
    expected = learn(table, torch.device("cpu"))
    assert torch.equal(learn(table, DEVICE), expected)
    assert isinstance(table.to(DEVICE).weight, nn.Parameter)


def test_what_is_moved_is_counted() -> None:
    torch.ones(3, 5).to(DEVICE).to(torch.float64).cpu()
    torch.ones(3, 4)
    assert MOVED == {(3, 5): 1}
