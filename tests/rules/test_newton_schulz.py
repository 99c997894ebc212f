"""The Newton-Schulz iteration: where singular values end, and the Gram form beside exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from zero_optim.rules import newton_schulz
from zero_optim.rules.newton_schulz import POLAR_EXPRESS, QUINTIC, multiplications, orthogonalized, phases

QUINTICS = [QUINTIC] * 5
LONG = (40, 90)
in_both_forms = pytest.mark.parametrize("gram", [False, True])


def _random(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@in_both_forms
@pytest.mark.parametrize("shape", [(64, 64), (200, 50), (50, 200)])
def test_singular_values_end_near_1(shape: tuple[int, int], gram: bool) -> None:
    matrix = _random(shape)
    values = torch.linalg.svdvals(orthogonalized(matrix, QUINTIC, 5, 1e-7, gram).float())
    assert values.median() > 0.6 and values.max() < 1.3  # the smallest of a square matrix need more steps
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    polar = u @ v
    found = orthogonalized(matrix, QUINTIC, 5, 1e-7, gram).float()
    assert (found * polar).sum() / (found.norm() * polar.norm()) > 0.97


@in_both_forms
@pytest.mark.parametrize("shape", [(200, 50), (50, 200)])
def test_steps_may_have_coefficients_of_their_own(shape: tuple[int, int], gram: bool) -> None:
    matrix = _random(shape)
    values = torch.linalg.svdvals(orthogonalized(matrix, POLAR_EXPRESS, 6, 1e-7, gram).float())
    assert values.min() > 0.99 and values.max() < 1.01
    alike = orthogonalized(matrix, QUINTICS, 5, 1e-7, gram)
    assert torch.equal(alike, orthogonalized(matrix, QUINTIC, 5, 1e-7, gram))


@in_both_forms
def test_matrices_of_zeros_and_of_rank_one(gram: bool) -> None:
    assert not orthogonalized(torch.zeros(5, 17), QUINTIC, 5, 1e-7, gram).any()
    for columns in (9, 19):
        matrix = torch.ones(6, 1) @ torch.ones(1, columns)
        values = torch.linalg.svdvals(orthogonalized(matrix, QUINTIC, 5, 1e-7, gram).float())
        assert 0.6 < values[0] < 1.3 and values[1] < 0.05


@in_both_forms
def test_one_that_is_not_finite_is_so_alone(gram: bool) -> None:
    matrices = _random((3, 17, 60))
    alone = [orthogonalized(matrix, QUINTIC, 5, 1e-7, gram) for matrix in matrices]
    matrices[1, 4, 5] = torch.inf
    first, second, third = orthogonalized(matrices, QUINTIC, 5, 1e-7, gram)
    assert torch.equal(first, alone[0]) and torch.equal(third, alone[2])
    assert not second.isfinite().any()


# -- the Gram form ----------------------------------------------------------------------------------------------------


def _exact(matrix: Tensor, of_steps: Sequence[tuple[float, float, float]]) -> Tensor:
    """In float64, by the singular values: each becomes what the polynomials make of it."""
    matrix = matrix.bfloat16().double()
    u, values, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for a, b, c in of_steps:
        values = a * values + b * values**3 + c * values**5
    return u * values @ v


def _with_singular_values(values: Tensor, columns: int) -> Tensor:
    rows = len(values)
    u, _, v = torch.linalg.svd(_random((rows, columns)).double(), full_matrices=False)
    return (u * values @ v).float()


SPECTRA = {
    "1 over its number": 1 / torch.arange(1.0, 129.0),
    "down to a hundredth": torch.logspace(0, -2, 128),
    "down to a ten thousandth": torch.logspace(0, -4, 128),
    "one large": torch.full((128,), 1e-3).index_fill(0, torch.tensor([0]), 1.0),
}


@pytest.mark.parametrize("coefficients", [QUINTICS, POLAR_EXPRESS], ids=["quintic", "polar express"])
@pytest.mark.parametrize("spectrum", [None, *SPECTRA])
def test_the_gram_form_is_as_exact(spectrum: str | None, coefficients: Sequence[tuple[float, float, float]]) -> None:
    """bf16 leaves both forms about as far from exact arithmetic. No singular value grows beyond."""
    matrix = _random((128, 640)) if spectrum is None else _with_singular_values(SPECTRA[spectrum].double(), 640)
    exact, steps = _exact(matrix, coefficients), len(coefficients)
    plain, gram = (orthogonalized(matrix, coefficients, steps, 1e-7, form).double() for form in (False, True))
    off_plain, off_gram = ((found - exact).norm() / exact.norm() for found in (plain, gram))
    assert off_gram < 0.01 + 1.1 * off_plain
    assert torch.linalg.svdvals(gram).max() < 0.01 + torch.linalg.svdvals(exact).max()
    tall = orthogonalized(matrix.T.contiguous(), coefficients, steps, 1e-7, True).double()
    assert (tall.T - exact).norm() / exact.norm() < 0.01 + 1.1 * off_plain


def _awkward(count: int, rows: int, columns: int) -> Tensor:
    """Matrices whose singular values fall over up to six decades, more or less evenly."""
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(count, rows, columns, generator=generator), full_matrices=False)
    decades, bend, spread = (torch.rand(count, 1, generator=generator) for _ in range(3))
    values = 10 ** (-6 * decades * torch.linspace(0, 1, rows) ** (0.3 + 3 * bend))
    values = values * torch.exp(2 * spread * torch.randn(count, rows, generator=generator))
    return u * (values / values.amax(1, keepdim=True)).unsqueeze(1) @ v


@pytest.mark.parametrize(("coefficients", "most"), [(QUINTICS, 1.22), (POLAR_EXPRESS, 1.02)], ids=["quintic", "polar"])
def test_no_singular_value_grows_beyond(
    coefficients: Sequence[tuple[float, float, float]], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices that longer phases make go wrong: a direction that is all rounding grows, too."""
    matrices = _awkward(2000, 20, 44)

    def largest() -> float:
        found = orthogonalized(matrices, coefficients, len(coefficients), 1e-7, True)
        return float(torch.linalg.matrix_norm(found.float(), ord=2).max())

    assert largest() < most
    monkeypatch.setattr(newton_schulz, "MOST_GROWTH", 256)
    assert largest() > 2


def test_phases() -> None:
    """Each as long as what rounding has put into X X^T stays small."""
    assert [len(phase) for phase in phases(*LONG, QUINTICS, True)] == [2, 2, 1]
    assert [len(phase) for phase in phases(*LONG, POLAR_EXPRESS, True)] == [1, 1, 1, 2, 1]
    assert [len(phase) for phase in phases(*LONG, [(1.5, -0.5, 0.0)] * 9, True)] == [4, 4, 1]
    for steps in range(1, 9):
        assert [step for phase in phases(*LONG, [QUINTIC] * steps, True) for step in phase] == [QUINTIC] * steps
    assert phases(*LONG, QUINTICS, False) == phases(40, 80, QUINTICS, True) == [[step] for step in QUINTICS]


def test_what_it_multiplies() -> None:
    """As torch counts."""
    for shape in ((40, 40), (40, 80), (40, 90), (200, 40)):
        for coefficients, gram in ((QUINTICS, False), (QUINTICS, True), (POLAR_EXPRESS, True)):
            steps = len(coefficients)
            with FlopCounterMode(display=False) as counter:
                orthogonalized(_random(shape), coefficients, steps, 1e-7, gram)
            assert counter.get_total_flops() == 2 * multiplications(*shape, coefficients, steps, gram)
