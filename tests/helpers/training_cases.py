"""Parameters, gradients and comparisons that the tests share: pure functions of their arguments, on every rank."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Odd sizes, one element, none, whole rows, several rows, a shape with a dimension of 1.
SHAPES: tuple[tuple[int, ...], ...] = ((17, 9), (300,), (1,), (0,), (5, 3, 2), (128,), (40, 25), (2, 1))
TINY_CAP_MB = 0.0005  # 524 bytes: nearly every parameter is a bucket of its own
ROW = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Planned(Exception):
    """What a test raises itself, and catches."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise Planned("in backward")


def raise_in_backward(x: Tensor) -> Tensor:
    """``x``; a backward that comes by raises ``Planned``."""
    return _Raise.apply(x)


def make_parameters(
    shapes: Iterable[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    """Normal parameters of ``dtype``; a generator for each, so that its values do not depend on the others."""
    return [
        nn.Parameter(torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1000 * seed + i)).to(dtype))
        for i, shape in enumerate(shapes)
    ]


def make_gradients(
    like: Sequence[Tensor], rank: int, step: int, micro: int = 0, grid: int | None = None
) -> list[Tensor]:
    """Local gradients in the parameters' dtypes, different for every rank, step and micro-batch.

    ``grid=N``: multiples of N/64, |k| <= 16, so that packing by 1/N and sums over N <= 4 ranks and three micro-batches
    are exact in bf16 and fp16, in any order of summation.
    """
    grads = []
    for index, p in enumerate(like):
        generator = torch.Generator().manual_seed(((rank * 100 + step) * 10 + micro) * 100 + index + 7)
        if grid is None:
            grad = torch.randn(p.shape, generator=generator)
        else:
            grad = torch.randint(-16, 17, p.shape, generator=generator) * (grid / 64)
        grads.append(grad.to(p.dtype))
    return grads


def linear_loss(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor:
    """A scalar fp32 loss whose gradient by ``params[i]`` is exactly ``grads[i]``; None leaves the parameter unused."""
    loss = torch.zeros(())
    for p, g in zip(params, grads, strict=True):
        if g is not None:
            loss = loss + (p.float() * g.float()).sum()
    return loss


def linear_backward(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """A backward that gives ``params[i]`` the gradient ``grads[i]``."""
    linear_loss(params, grads).backward()


@contextlib.contextmanager
def impatient(patience: float = 0.02, standstill: float = 0.2) -> Iterator[None]:
    """On this rank: soon makes itself another buffer instead of waiting, and soon looks for a deadlock.

    For programs in which one rank waits for another that has raised: there patience finds nothing.
    """
    from zero_optim.comm import deadlock, handle
    from zero_optim.grads import reducer

    before = handle.PATIENCE_SECONDS, deadlock.SECONDS
    handle.PATIENCE_SECONDS = reducer.PATIENCE_SECONDS = patience
    deadlock.SECONDS = standstill
    try:
        yield
    finally:
        handle.PATIENCE_SECONDS, deadlock.SECONDS = before
        reducer.PATIENCE_SECONDS = before[0]


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Detached clones."""
    return [t.detach().clone() for t in tensors]


def named(params: Sequence[nn.Parameter], prefix: str = "layer") -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}{i}.weight", p) for i, p in enumerate(params)]


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that NaNs and signed zeros compare too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Empty when all tensors are equal bit for bit; otherwise which differ, in how many elements and by how much."""
    texts = []
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a.shape != e.shape or a.dtype != e.dtype:
            texts.append(f"[{index}] is {a.dtype} {tuple(a.shape)}, expected {e.dtype} {tuple(e.shape)}")
        elif not torch.equal(bits(a), bits(e)):
            off = (a.double() - e.double()).abs()
            count = f"{int((a != e).sum())} of {a.numel()}"
            texts.append(f"[{index}] {tuple(a.shape)}: {count} differ, by at most {float(off.max()):.3g}")
    return "; ".join(texts)


def assert_bitwise(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str = "parameters") -> None:
    """Raises AssertionError with the figures of :func:`difference` unless all tensors are equal bit for bit."""
    found = difference(actual, expected)
    if found:
        raise AssertionError(f"{what}: {found}")


def assert_within(actual: Sequence[Tensor], expected: Sequence[Tensor], bounds: Sequence[Tensor], what: str) -> None:
    """Raises AssertionError where ``|actual - expected|`` exceeds the bound, element by element."""
    for index, (a, e, bound) in enumerate(zip(actual, expected, bounds, strict=True)):
        excess = (a.double() - e.double()).abs() - bound.double()
        if a.shape != e.shape or not bool((excess <= 0).all()):
            raise AssertionError(
                f"{what}[{index}] {tuple(a.shape)}: beyond the bound by up to {float(excess.max()):.3g}"
            )


def maybe_no_sync(opt: Any, active: bool) -> contextlib.AbstractContextManager[Any]:
    return opt.no_sync() if active else contextlib.nullcontext()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what it raises; empty where it does not."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def through_a_file(state: Any) -> Any:
    """``state`` as ``torch.save`` and ``torch.load`` give it back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@contextlib.contextmanager
def debugging(poison: bool) -> Iterator[None]:
    """``ZERO_OPTIM_DEBUG`` for what is constructed inside."""
    before = os.environ.pop("ZERO_OPTIM_DEBUG", None)
    if poison:
        os.environ["ZERO_OPTIM_DEBUG"] = "poison"
    try:
        yield
    finally:
        os.environ.pop("ZERO_OPTIM_DEBUG", None)
        if before is not None:
            os.environ["ZERO_OPTIM_DEBUG"] = before
