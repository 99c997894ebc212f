"""`symmetric_product` where it runs: exact where sums are, exactly symmetric, the same bits whatever is beside it; and
Muon by it.

On a CPU Triton's interpreter rehearses it, under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from places import DEVICE, ON_GPU, SEED, needs_gpu
from torch import Tensor, nn
from zero_optim import ShardedMuon
from zero_optim.rules import newton_schulz

import zero_kernels
from zero_kernels import symmetric_product

REASON = zero_kernels.why_no_symmetric_product(DEVICE)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=f"no Triton: {REASON}")]

BF16 = torch.bfloat16
SHAPES = [(1, 1), (33, 70), (64, 64), (130, 65)]  # rows, columns
LARGE = [(300, 1000), (2064, 16), (1024, 1024), (2000, 3000), (2048, 512), (4096, 4096), (1999, 301)] if ON_GPU else []


def integers(*shape: int, most: int = 8) -> Tensor:
    """Sums of up to 4096 of their products, and twice 99, are exact in fp32 whatever the order."""
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    return torch.randint(-most, most + 1, shape, generator=generator, device=DEVICE, dtype=BF16)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(SEED + seed), device=DEVICE).to(BF16)


def mirrored(x: Tensor) -> Tensor:
    return x.tril() + x.tril(-1).mT


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, *LARGE])
def test_each_element_is_exact_and_rounded_once(rows: int, columns: int, transposed: bool) -> None:
    x = integers(2, columns, rows).mT if transposed else integers(2, rows, columns)
    d = mirrored(integers(2, rows, rows, most=99))
    exact = torch.bmm(x.double(), x.mT.double())
    assert torch.equal(symmetric_product(x, x.mT), exact.to(BF16))
    assert torch.equal(symmetric_product(x, x.mT, d, alpha=0.5, beta=-2.0), (0.5 * exact - 2 * d.double()).to(BF16))


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, *LARGE])
def test_values_are_torchs_and_exactly_symmetric(rows: int, columns: int) -> None:
    x = normal(3, rows, columns) / columns**0.5
    d = mirrored(normal(3, rows, rows, seed=2))
    got = symmetric_product(x, x.mT, d, alpha=2.0315, beta=-4.775)
    assert torch.equal(got, got.mT)
    exact = torch.baddbmm(d.double(), x.double(), x.mT.double(), alpha=2.0315, beta=-4.775)
    size = 2.0315 * torch.bmm(x.double().abs(), x.mT.double().abs()) + 4.775 * d.double().abs()
    bound = exact.abs() * 2**-8 + size * (columns + 4) * 2**-24
    off, own = ((y.double() - exact).abs() for y in (got, torch.baddbmm(d, x, x.mT, alpha=2.0315, beta=-4.775)))
    assert off.max() <= 2 * own.max() + 2 * bound.max(), f"seed {SEED}"
    assert bool((off <= bound).all()), f"{rows} x {columns}: {(off / bound).max():.2f} of what rounding explains"


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, *LARGE])
def test_the_same_bits_twice_and_alone_or_beside_others(rows: int, columns: int) -> None:
    """What bf16 has rounded away of a product shows the bits of its sums."""
    x = normal(3, rows, columns)
    d = symmetric_product(x, x.mT)
    rest = symmetric_product(x, x.mT, d, beta=-1.0)
    assert torch.equal(rest, symmetric_product(x, x.mT, d, beta=-1.0))
    for i in range(3):
        assert torch.equal(rest[i], symmetric_product(x[i], x[i].mT, d[i], beta=-1.0))


def test_the_last_of_many_matrices() -> None:
    """On a GPU their elements are more than 2^31."""
    n, side = (2**15 + 3, 256) if ON_GPU else (5, 16)
    if ON_GPU and torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("10 GiB are needed")
    x = integers(n, side, side)
    got = symmetric_product(x, x.mT)
    for i in (0, n // 2, n - 2, n - 1):
        assert torch.equal(got[i], symmetric_product(x[i], x[i].mT)), i
        assert torch.equal(got[i], (x[i].double() @ x[i].mT.double()).to(BF16)), i


@needs_gpu
def test_it_is_captured() -> None:
    x = normal(2, 128, 256)
    want = symmetric_product(x, x.mT)  # Triton compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = symmetric_product(x, x.mT)
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)


def test_muon_trains_by_it() -> None:
    """Two updates of about 0.02 an element, which differ by what bf16 rounds in the iteration."""
    shapes = [(256, 256), (300, 1000), (2048, 512)] if ON_GPU else [(16, 16), (10, 33)]
    weights = [nn.Parameter(normal(*shape).float() / 4) for shape in shapes]
    trained = []
    for product in ("torch", "triton"):
        own = copy.deepcopy(weights)
        opt = ShardedMuon(own, lr=0.02, ns_product=product)
        with (
            mock.patch.object(newton_schulz, "TRITON_FROM", 1),
            mock.patch.object(zero_kernels, "symmetric_product", side_effect=symmetric_product) as made,
        ):
            for step in range(2):
                for i, weight in enumerate(own):
                    weight.grad = normal(*weight.shape, seed=10 * step + i).float()
                opt.step()
        assert made.called == (product == "triton")
        opt.close()
        trained.append([own.detach() - weight.detach() for own, weight in zip(own, weights, strict=True)])
    for plain, fused in zip(*trained, strict=True):
        apart = float((plain - fused).norm() / plain.norm())
        assert apart < 0.2
        assert apart < 0.03, f"updates of {tuple(plain.shape)} are {apart:.3f} apart"


def test_tiles_are_of_each_size() -> None:
    """What the tests above have run."""
    from zero_kernels.triton import symmetric

    if ON_GPU:
        assert {symmetric.tile_of(*shape)[0] for shape in (*SHAPES, *LARGE)} == {32, 64, 128}
