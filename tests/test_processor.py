"""The pretend processor rounds in its own way, and only that."""

from __future__ import annotations

import torch

from tests.processor import Processor


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_same_operation_on_the_same_shapes_gives_the_same_bits() -> None:
    a, b = draw(40, 7), draw(7, 9)
    with Processor(1):
        assert (a @ b).equal(a @ b)
        assert a.exp().equal(a.clone().exp_())


def test_another_shape_place_seed_or_number_of_threads_rounds_in_another_way() -> None:
    a, b = draw(40, 7), draw(7, 9)
    threads = torch.get_num_threads()
    with Processor(1):
        whole, part, equal_rows = a @ b, a[:20] @ b, a[:1].expand(40, 7) @ b
        try:
            torch.set_num_threads(threads + 1)
            threaded = a @ b
        finally:
            torch.set_num_threads(threads)
    with Processor(2):
        other = a @ b
    assert not whole[:20].equal(part)
    assert not equal_rows[0].equal(equal_rows[1])
    assert not whole.equal(other)
    assert not whole.equal(threaded)


def test_results_move_by_a_unit_of_rounding_of_their_terms_at_most() -> None:
    for dtype in (torch.float32, torch.float64):
        a, b = draw(30, 50).to(dtype), draw(50, 8).to(dtype)
        eps = torch.finfo(dtype).eps
        plain, sums, roots = a @ b, a.sum(0), a.abs().sqrt()
        with Processor(3):
            moved, moved_sums, moved_roots = a @ b, a.sum(0), a.abs().sqrt()
        assert ((moved - plain).abs() <= 1.5 * eps * (a.abs() @ b.abs())).all()
        assert ((moved_sums - sums).abs() <= 1.5 * eps * a.abs().sum(0)).all()
        assert ((moved_roots - roots).abs() <= 1.5 * eps * roots).all()


def test_what_every_processor_has_exactly_stays() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    with Processor(4):
        assert (whole @ whole.T).equal(torch.tensor([[55.0, 145, 235, 325], [145, 451, 757, 1063],
                                                     [235, 757, 1279, 1801], [325, 1063, 1801, 2539]]))  # fmt: skip
        assert float(whole.sum()) == 276
        assert whole.square().sqrt().equal(whole)
        assert torch.zeros(3).exp().equal(torch.ones(3))


def test_gradients_are_rounded_too() -> None:
    x = draw(5, 4).requires_grad_()
    (plain,) = torch.autograd.grad((x @ draw(4, 3)).exp().sum(), x)
    with Processor(5):
        (moved,) = torch.autograd.grad((x @ draw(4, 3)).exp().sum(), x)
    assert not moved.equal(plain)
    torch.testing.assert_close(moved, plain, rtol=1e-5, atol=1e-5)
