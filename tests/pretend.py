"""A device that is not there: tensors with real values that refuse to meet tensors of the CPU, as a GPU's do.

Inside ``with pretend():`` the name `DEVICE` can be used like ``"cuda:0"``. Operations are computed on the CPU, but

- a tensor of the device and one of the CPU do not mix, except that a CPU tensor without dimensions is a number;
- CPU indices may select from a tensor of the device, not the other way round;
- values leave it by ``.cpu()``, ``.item()`` and the like, never by ``.numpy()``.

`MOVED` counts what was copied to the device, by shape, so that tests can say what must stay.

For torch's own C++ the tensors are of the device "meta", the only one besides the CPU that autograd knows without a
backend; hence "meta" means this device as long as the mode lasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DEVICE = torch.device("fpga", 0)  # a name torch knows and has nothing behind
MOVED: Counter[tuple[int, ...]] = Counter()

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class PretendTensor(Tensor):
    """A tensor of the device, around the tensor of the CPU that has its values."""

    held: Tensor
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        if held.layout == torch.strided:
            shape = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        else:
            shape = {"layout": held.layout}
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device="meta", **shape)
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{self.held!r} on {DEVICE}"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()

    def __getitem__(self, item: Any) -> Tensor:
        return super().__getitem__(torch.tensor(item) if isinstance(item, list) else item)

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendTensor:
        made = PretendTensor(self.held.clone()).requires_grad_(self.requires_grad)
        made._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = made
        return made

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert a tensor of {DEVICE} to numpy; copy it to the CPU first")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # In a file it is a tensor like any other, as one of a GPU is that was read with map_location="cpu".
        return self.held.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Pretend(TorchDispatchMode):
    """Catches what names the device without having a tensor of it: factories, and moves to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


@contextmanager
def pretend() -> Iterator[None]:
    """As long as this lasts there is the device."""
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # lets `torch.tensor(..., device=...)` ask the mode for the last copy
    MOVED.clear()
    try:
        with Pretend():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)


def compute(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the values; its results are where its arguments are, or where it is told to put them."""
    flat, spec = tree_flatten((args, kwargs))
    mine = [x for x in flat if isinstance(x, PretendTensor)]
    assert not any(isinstance(x, Tensor) and type(x) is not PretendTensor and x.is_meta for x in flat), func
    wanted = kwargs.get("device")
    there = bool(mine) if wanted is None else torch.device(wanted).type in (DEVICE.type, "meta")
    if mine and func not in COPIES:
        refuse_strangers(func, args, kwargs)
    plain_args, plain = tree_unflatten([x.held if isinstance(x, PretendTensor) else x for x in flat], spec)
    if wanted is not None:
        plain["device"] = torch.device("cpu")
    out = func(*plain_args, **plain)
    if there and not mine and func is aten._to_copy.default:
        MOVED[tuple(out.shape)] += 1
    if func is aten.copy_.default:
        return args[0]
    changed = {id(x.held): x for x in mine}  # what an operation changed in place is what it was given

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor) or not there:
            return x
        return changed[id(x)] if id(x) in changed else PretendTensor(x)

    return tree_map(placed, out)


def refuse_strangers(func: Any, args: Any, kwargs: Any) -> None:
    """Raise where a tensor of the device meets one of the CPU that is more than a number."""
    if func in INDEXED and isinstance(args[0], PretendTensor):
        args = (args[0], *args[2:])
    for other in tree_flatten((args, kwargs))[0]:
        if isinstance(other, Tensor) and not isinstance(other, PretendTensor) and other.dim():
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, got {DEVICE} and {other.device} "
                f"(shape {tuple(other.shape)})"
            )
