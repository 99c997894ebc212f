"""`symmetric_product` under Triton's interpreter, and Muon's iteration by it. What it becomes in machine code is in
`test_code.py`."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from interpreter import interpreted
from torch import Tensor, nn

pytest.importorskip("triton.language", reason="triton is not installed")

import zero_kernels
from zero_kernels import BackendError, symmetric_product
from zero_kernels.triton import symmetric

BF16 = torch.bfloat16

# Rows and columns: of 1 to 9 rows of tiles, whole ones and with a rest, of each size of tiles.
SHAPES = ((1, 1), (5, 3), (33, 70), (64, 64), (65, 130), (128, 64), (300, 33))
LARGE = (2064, 16)
WAYS = ("contiguous", "transposed", "with gaps")


def integers(*shape: int, most: int = 8, seed: int = 0) -> Tensor:
    """Small enough that sums of their products are exact in fp32, in whatever order they are added."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def mirrored(x: Tensor) -> Tensor:
    """What is on and below the diagonal, above it, too."""
    return x.tril() + x.tril(-1).mT


def strided(x: Tensor, way: str) -> Tensor:
    """The same values in memory of another order, or with gaps."""
    if way == "transposed":
        return x.mT.contiguous().mT
    if way == "with gaps":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), math.nan)
        wide[..., 1::2][..., : x.shape[-1]] = x
        return wide[..., 1::2][..., : x.shape[-1]]
    return x


@pytest.mark.kernels
@pytest.mark.parametrize(("shape", "way"), [*itertools.product(SHAPES, WAYS), (LARGE, "contiguous")])
@interpreted
def test_each_element_is_exact_and_rounded_once(shape: tuple[int, int], way: str) -> None:
    """To the bit. What ``added`` has above the diagonal is NaN, so that it shows if it is read."""
    rows, columns = shape
    several = 1 if shape == LARGE else 2
    left = strided(integers(several, rows, columns), way)
    added = integers(several, rows, rows, most=99, seed=1)
    exact = left.double() @ left.mT.double()
    above = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    given = strided(added.masked_fill(above, math.nan), way)
    got = symmetric_product(left, left.mT, given, alpha=0.5, beta=-2.0)
    assert torch.equal(got, mirrored(0.5 * exact - 2 * added.double()).to(BF16))
    assert torch.equal(symmetric_product(left, left.mT), exact.to(BF16))
    assert got.is_contiguous()


@interpreted
def test_one_matrix_is_as_one_of_several() -> None:
    x, d = normal(40, 30), normal(40, 40, seed=1)
    one = symmetric_product(x, x.mT, d, alpha=0.3, beta=0.7)
    assert one.shape == (40, 40)
    assert torch.equal(one, symmetric_product(x[None], x.mT[None], d[None], alpha=0.3, beta=0.7)[0])


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "columns"), [(7, 1000), (65, 130), (130, 400), (272, 256)])
@interpreted
def test_it_is_within_rounding_of_exact_arithmetic(rows: int, columns: int) -> None:
    """fp32 adds up, and half a unit in the last place is lost to bf16. torch's own is as far from it, too."""
    x = normal(2, rows, columns)
    d = mirrored(normal(2, rows, rows, seed=1))
    for alpha, beta in ((1.0, 0.0), (2.0315, -4.775), (-1e-3, 1e4)):
        exact = alpha * (x.double() @ x.mT.double()) + beta * d.double()
        size = abs(alpha) * (x.double().abs() @ x.mT.double().abs()) + abs(beta) * d.double().abs()
        bound = exact.abs() * 2**-8 + size * (columns + 4) * 2**-24
        got = symmetric_product(x, x.mT, d, alpha=alpha, beta=beta)
        assert ((got.double() - exact).abs() <= bound).all()
        assert torch.equal(got, got.mT)
        if alpha * beta < 0:  # alone: torch's product on a CPU may round in between
            own = torch.baddbmm(d, x, x.mT, alpha=alpha, beta=beta)
            torch.testing.assert_close(got.double(), own.double(), rtol=2**-7, atol=float(2 * bound.max()))


@interpreted
def test_a_product_that_rounding_made_uneven_is_symmetric() -> None:
    """Of two polynomials of one matrix: what is above the diagonal differs there in the last bits."""
    a = symmetric_product(normal(2, 70, 90), normal(2, 70, 90).mT) / 90
    b = symmetric_product(a, a, a, alpha=2.0, beta=-3.0)
    plain = torch.bmm(a, b)
    got = symmetric_product(a, b)
    assert not torch.equal(plain, plain.mT) and torch.equal(got, got.mT)
    torch.testing.assert_close(got, plain, rtol=2**-7, atol=2**-7)


@pytest.mark.kernels
@interpreted
def test_bits_do_not_depend_on_the_batch() -> None:
    """What bf16 has rounded away of a product shows the bits of its sums."""
    for rows, columns in ((33, 130), (64, 48)):
        x = normal(5, rows, columns)
        d = symmetric_product(x, x.mT)
        together = symmetric_product(x, x.mT, d, beta=-1.0)
        for n, i in itertools.product((1, 2), range(4)):
            some = slice(i, i + n)
            alone = symmetric_product(x[some], x[some].mT, d[some], beta=-1.0)
            assert torch.equal(alone, together[some])


@interpreted
def test_what_is_not_finite_stays_in_its_matrix() -> None:
    x = normal(3, 40, 70)
    alone = symmetric_product(x, x.mT)
    x[1, 3, 60] = math.inf
    got = symmetric_product(x, x.mT)
    assert torch.equal(got[::2], alone[::2]) and not got[1, 3].isfinite().any()
    assert got[1, 3, 3] == math.inf and torch.equal(got[1, 4:, 4:], alone[1, 4:, 4:])


@interpreted
def test_nothing_is_a_matrix_too() -> None:
    assert symmetric_product(normal(0, 3, 4), normal(0, 4, 3)).shape == (0, 3, 3)
    assert symmetric_product(normal(2, 0, 4), normal(2, 4, 0)).shape == (2, 0, 0)
    d = mirrored(integers(2, 3, 3))
    assert torch.equal(symmetric_product(normal(2, 3, 0), normal(2, 0, 3), d, beta=2.0), 2 * d)


@interpreted
def test_opcheck() -> None:
    x = normal(2, 5, 7)
    for sample in ((x, x.mT), (x[0], x[0].mT, mirrored(normal(5, 5)), 0.5, 2.0)):
        torch.library.opcheck(torch.ops.zero_kernels.symmetric_product.default, sample)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ((torch.ones(3, 4), torch.ones(4, 3)), TypeError, "left must be bfloat16, got float32"),
        ((normal(3, 4), torch.ones(4, 3)), TypeError, "right must be bfloat16"),
        ((normal(3), normal(3)), ValueError, r"left must have shape \[rows, columns\] or"),
        ((normal(2, 3, 4), normal(4, 3)), ValueError, r"right must have shape \[2, 4, 3\], got \[4, 3\]"),
        ((normal(3, 4), normal(3, 4)), ValueError, r"right must have shape \[4, 3\]"),
        ((normal(3, 4), normal(4, 3), normal(4, 4)), ValueError, r"added must have shape \[3, 3\], got \[4, 4\]"),
        ((normal(3, 4), normal(4, 3).to("meta")), ValueError, "right is on meta, left on cpu: move it there"),
    ],
)
def test_errors(given: tuple[Tensor, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        symmetric_product(*given)


def test_it_says_why_it_cannot_run_here() -> None:
    """In this process Triton compiles, and a tensor is on the CPU."""
    if symmetric.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1")
    with pytest.raises(BackendError, match="needs Triton on a GPU, and runs on cuda tensors, not on cpu: take torch"):
        symmetric_product(normal(3, 4), normal(4, 3))
    assert zero_kernels.why_no_symmetric_product("cuda") is not None  # here is no GPU


def test_tiles_go_by_the_shape() -> None:
    shapes = [(64, 64), (257, 64), (2048, 4096), (2064, 4096), (4096, 4096), (4096, 4100), (1030, 4096), (33, 45)]
    tiles = [(32, 4), (64, 8), (64, 4), (128, 8), (128, 8), (64, 8), (64, 8), (32, 8)]
    assert [symmetric.tile_of(*shape) for shape in shapes] == tiles


# -- Muon's iteration by it --------------------------------------------------------------------------------------------


@contextmanager
def counted(least: int = 1) -> Iterator[mock.MagicMock]:
    """The kernel, of whose calls it notes the number. It makes the products of matrices of ``least`` rows on."""
    from zero_optim.rules import newton_schulz

    with (
        mock.patch.object(newton_schulz, "TRITON_FROM", least),
        mock.patch.object(zero_kernels, "symmetric_product", side_effect=symmetric_product) as made,
    ):
        yield made


@interpreted
def test_small_matrices_are_torchs() -> None:
    from zero_optim.rules.newton_schulz import QUINTIC, orthogonalized

    matrix = torch.randn((40, 48), generator=torch.Generator().manual_seed(0))
    for least, calls in ((41, 0), (40, 10)):
        with counted(least) as made:
            orthogonalized(matrix, QUINTIC, 5, 1e-7, True, "triton")
        assert made.call_count == calls


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("shape", [(40, 130), (2, 70, 33), (48, 48)])
@interpreted
def test_the_iteration_is_as_exact(shape: tuple[int, ...], gram: bool) -> None:
    from zero_optim.rules.newton_schulz import QUINTIC, listed, orthogonalized, phases

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, values, v = torch.linalg.svd(matrix.to(BF16).double(), full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    for a, b, c in listed(QUINTIC, 5):
        values = a * values + b * values**3 + c * values**5
    exact = u * values.unsqueeze(-2) @ v
    with counted() as made:
        got = orthogonalized(matrix, QUINTIC, 5, 1e-7, gram, "triton")
    own = orthogonalized(matrix, QUINTIC, 5, 1e-7, gram, "torch")
    assert made.call_count == (14 if len(phases(*shape[-2:], listed(QUINTIC, 5), gram)) < 5 else 10)
    off, off_own = ((x.double() - exact).norm() / exact.norm() for x in (got, own))
    assert off < 0.005 + 1.1 * off_own, (off, off_own)


def _trained(state: Any = None, **options: Any) -> tuple[list[Tensor], Any]:
    from zero_optim import ShardedMuon

    generator = torch.Generator().manual_seed(0)
    shapes = (12, 20), (10, 33), (16, 16)
    weights = [nn.Parameter(torch.randn(shape, generator=generator) / 4) for shape in shapes]
    opt = ShardedMuon(weights, lr=0.02, **options)
    if state is not None:
        opt.load_state_dict(state)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        opt.step()
    state = opt.state_dict()
    assert opt.param_groups[0]["ns_product"] == options.get("ns_product", "torch")
    opt.close()
    return [weight.detach() for weight in weights], state


@interpreted
def test_muon_trains_by_it_and_state_goes_from_one_to_the_other() -> None:
    """Updates differ by what bf16 rounds: about a percent of 0.02 each. Each run keeps its own choice."""
    with counted() as made:
        plain, of_plain = _trained()
        assert made.call_count == 0
        fused, of_fused = _trained(ns_product="triton")
        assert made.call_count == 2 * (10 + 14 + 10)
    assert not all(map(torch.equal, plain, fused))
    for own, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=2e-3)
    for state, product in ((of_plain, "triton"), (of_fused, "torch")):
        _trained(state, ns_product=product)
