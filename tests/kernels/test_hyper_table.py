"""`hyper_table`: every coefficient is float64 arithmetic, rounded once."""

import math

import numpy as np
import pytest
import torch
from guards import no_host_reads
from kernel_cases import ISAS, backend, same_bits

import zero_kernels
from zero_kernels import HYPER_COLUMNS

LR, BETA1, BETA2, EPS, WD = 3e-4, 0.9, 0.999, 1e-8, 0.1


def row(table: torch.Tensor, slot: int = 0) -> dict[str, float]:
    return dict(zip(HYPER_COLUMNS, table[slot].tolist(), strict=True))


@pytest.mark.parametrize("step", [1, 2, 1000, 10_000_000])
@pytest.mark.parametrize("decoupled", [True, False])
def test_columns_are_float64_rounded_once(step: int, decoupled: bool) -> None:
    got = row(zero_kernels.hyper_table(LR, (BETA1, BETA2), EPS, WD, step, decoupled=decoupled))
    exact = {
        "decay": 1 - LR * WD if decoupled else 1.0,
        "weight_decay": 0.0 if decoupled else WD,
        "eps": EPS,
        "beta1": BETA1,
        "one_minus_beta1": 1 - BETA1,
        "beta2": BETA2,
        "one_minus_beta2": 1 - BETA2,
        "active": 1.0,
        "grad_factor": 1.0,
        "step_number": step,
    }
    for name, value in exact.items():
        assert got[name] == float(np.float32(value)), name
    # Two libraries' float64 powers may differ in the last place, which may move the rounding to fp32 by one unit.
    assert got["step_size"] == pytest.approx(LR / (1 - BETA1**step), rel=2**-23)
    assert got["bias_correction2_sqrt"] == pytest.approx(math.sqrt(1 - BETA2**step), rel=2**-23)


def test_a_group_that_is_not_there_is_named() -> None:
    arguments = (torch.rand(7, 2, dtype=torch.float64), torch.tensor([0, 2], dtype=torch.int32))
    with pytest.raises((RuntimeError, IndexError), match=r"group\[1\] = 2, but coefficients has 2|out of range"):
        torch.ops.zero_kernels.hyper_table(*arguments, torch.ones(2, dtype=torch.float64), None, torch.empty(2, 12))


def test_wrong_tensors_are_named() -> None:
    good = {
        "coefficients": torch.rand(7, 2, dtype=torch.float64),
        "group": torch.zeros(3, dtype=torch.int32),
        "step": torch.ones(3, dtype=torch.float64),
        "active": torch.ones(3, dtype=torch.bool),
        "out": torch.empty(3, 12),
    }
    wrong = {
        "coefficients": (torch.rand(6, 2, dtype=torch.float64), ValueError, r"shape \[7, groups\]"),
        "group": (torch.zeros(3, dtype=torch.int64), TypeError, "group must be int32"),
        "step": (torch.ones(4, dtype=torch.float64), ValueError, "step must have 3 elements"),
        "active": (torch.ones(3), TypeError, "active must be bool"),
        "out": (torch.empty(3, 11), ValueError, r"out must have shape \[slots, 12\]"),
    }
    for name, (value, error, said) in wrong.items():
        with pytest.raises(error, match=said):
            torch.ops.zero_kernels.hyper_table(*{**good, name: value}.values())


@pytest.mark.parametrize("name", ["reference", *ISAS[:1]])
def test_maximize_turns_the_factor_of_its_slots(name: str) -> None:
    with backend(name):
        down = zero_kernels.hyper_table(LR, (BETA1, BETA2), EPS, WD, [1, 2, 3], decoupled=[True, False, True])
        up = zero_kernels.hyper_table(
            *(LR, (BETA1, BETA2), EPS, WD, [1, 2, 3]), decoupled=[True, False, True], maximize=[True, True, False]
        )
    factor = HYPER_COLUMNS.index("grad_factor")
    assert up[:, factor].tolist() == [-1.0, -1.0, 1.0] and down[:, factor].eq(1).all()
    up[:, factor] = 1.0
    assert same_bits(up, down)


def test_scalars_sequences_and_tensors_agree() -> None:
    lrs, steps, active = [1e-3, 2e-3, 5e-3], [1, 7, 300], [True, False, True]
    columns = zero_kernels.hyper_table(lrs, (BETA1, [BETA2] * 3), EPS, WD, steps, active=active, maximize=active)
    tensors = zero_kernels.hyper_table(
        torch.tensor(lrs, dtype=torch.float64),
        (torch.tensor(BETA1, dtype=torch.float64), torch.full((3,), BETA2, dtype=torch.float64)),
        torch.tensor(EPS, dtype=torch.float64),
        torch.full((3,), WD, dtype=torch.float64),
        torch.tensor(steps),
        decoupled=torch.ones(3, dtype=torch.bool),
        active=torch.tensor(active),
        maximize=torch.tensor(active),
    )
    assert columns.dtype == torch.float32 and columns.shape == (3, len(HYPER_COLUMNS))
    assert torch.equal(columns, tensors)
    assert row(columns, 1)["active"] == 0
    for slot, (lr, step) in enumerate(zip(lrs, steps, strict=True)):
        alone = zero_kernels.hyper_table(lr, (BETA1, BETA2), EPS, WD, step, active=active[slot], maximize=active[slot])
        torch.testing.assert_close(columns[slot], alone[0], rtol=2**-23, atol=0)


def test_out_is_written_in_place_without_a_host_read() -> None:
    out = torch.full((2, len(HYPER_COLUMNS)), math.nan)
    lr, beta1, beta2, eps, wd = (torch.full((2,), x, dtype=torch.float64) for x in (LR, BETA1, BETA2, EPS, WD))
    step = torch.tensor([1.0, 2.0], dtype=torch.float64)
    with no_host_reads():
        returned = zero_kernels.hyper_table(lr, (beta1, beta2), eps, wd, step, out=out)
    assert returned is out
    assert torch.equal(out, zero_kernels.hyper_table([LR] * 2, (BETA1, BETA2), EPS, WD, [1, 2]))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="step must be 1 or more"):
        zero_kernels.hyper_table(LR, (BETA1, BETA2), EPS, WD, 0)
    with pytest.raises(ValueError, match=r"one length for all sequences.*'lr': 2.*'step': 3"):
        zero_kernels.hyper_table([LR] * 2, (BETA1, BETA2), EPS, WD, [1, 2, 3])
    with pytest.raises(ValueError, match="lr must be a scalar or have one dimension"):
        zero_kernels.hyper_table(torch.ones(2, 2), (BETA1, BETA2), EPS, WD, 1)
    with pytest.raises(ValueError, match="lr is on meta, but the table is made on cpu"):
        zero_kernels.hyper_table(torch.ones(2, device="meta"), (BETA1, BETA2), EPS, WD, 1)
    with pytest.raises(TypeError, match=r"out must be float32 \[1, 12\]"):
        zero_kernels.hyper_table(LR, (BETA1, BETA2), EPS, WD, 1, out=torch.empty(2, 12))
