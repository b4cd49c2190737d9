"""A processor that is not there: it rounds the last bits in its own way, as every other processor does.

Products, sums and functions such as ``exp`` are rounded differently by processors with other vector lengths, and on one
processor differently by shape, by place in a tile and by number of threads. Inside ``with Processor(seed):`` the result
of each such operation moves by at most one unit of rounding of the terms it was made of. The move is a function of the
seed, the operation, the shapes, the place in a tile and the number of threads. So the same operation on the same shapes
still gives the same bits, and nothing else is promised.

What every processor computes exactly stays: a result that is a multiple of a coarse power of two, such as a sum of
whole numbers.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode

TILE = 53  # places in a tile: no multiple of the sizes that occur, so that equal rows meet different places
COARSE = {torch.float32: 2.0**12, torch.float64: 2.0**30}  # multiples of the inverse are taken for exact
SUMS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "sum", "mean", "cumsum"}
FUNCTIONS = {
    "exp", "exp2", "expm1", "log", "log2", "log1p", "log10", "sqrt", "rsqrt", "sigmoid", "tanh", "pow", "softplus",
    "_softmax", "_log_softmax", "logsumexp", "addcmul", "addcdiv", "index_add", "scatter_add", "linalg_vector_norm",
    "_sparse_mm", "_sparse_addmm", "var", "std", "var_mean", "std_mean", "sin", "cos", "erf", "atan2",
}  # fmt: skip
DECOMPOSITIONS = {
    "linalg_cholesky_ex", "linalg_solve_triangular", "_linalg_eigh", "_linalg_svd", "linalg_qr", "_linalg_solve_ex",
    "cholesky_inverse", "cholesky_solve", "linalg_inv_ex", "_linalg_det", "_linalg_slogdet",
}  # fmt: skip
ROUNDED = SUMS | FUNCTIONS | DECOMPOSITIONS


class Processor(TorchDispatchMode):
    """While this is active, operations round in the way of the pretend processor ``seed``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as this machine does, then move the last bits."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.removesuffix("_")
        if name not in ROUNDED or any(isinstance(x, Tensor) and is_fake(x) for x in args):  # a program is traced
            return func(*args, **kwargs)
        sizes = term_sizes(name, func, args, kwargs)
        shapes = [tuple(x.shape) for x in args if isinstance(x, Tensor)]
        out = func(*args, **kwargs)
        for number, part in enumerate(out if isinstance(out, tuple) else [out]):
            if isinstance(part, Tensor) and part.dtype in COARSE and part.layout == torch.strided:
                move(part, sizes, f"{self.seed} {torch.get_num_threads()} {name} {shapes} {number}")
        return out


def term_sizes(name: str, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """How large the terms of each sum are: rounding is relative to them, not to what is left of them."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    if name not in SUMS or func._schema.is_mutable or any(x.layout != torch.strided for x in tensors):
        return None
    return func(*[x.abs() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args], **kwargs)


def move(out: Tensor, sizes: Tensor | None, key: str) -> None:
    """Give a result other last bits, except where every processor has the same."""
    if sizes is None or sizes.shape != out.shape:
        sizes = out
    units = pattern(key, out.dtype)
    if out.numel() > TILE:
        units = units.repeat(math.ceil(out.numel() / TILE))
    moved = out + units[: out.numel()].reshape(out.shape) * sizes
    exact = ((out * COARSE[out.dtype]).frac() == 0) | ~moved.isfinite()
    out.copy_(torch.where(exact, out, moved))


@lru_cache(maxsize=4096)
def pattern(key: str, dtype: torch.dtype) -> Tensor:
    """Minus one, none or one unit of rounding for each place of a tile."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    units = torch.randint(-1, 2, (TILE,), generator=torch.Generator().manual_seed(seed))
    return units.to(dtype) * torch.finfo(dtype).eps
