"""`adam_step` and `fused_adamw_`: one result on every backend, and the right one."""

import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import ISAS, at_offset, awkward, backend, same_bits
from places import four_slots
from torch import Tensor

import zero_kernels
from zero_kernels import HYPER_COLUMNS, ROW

TABLE = four_slots()
GRAD_FACTOR = HYPER_COLUMNS.index("grad_factor")


class Case:
    """One shard's tensors; `run` returns what the named backend makes of copies of them."""

    def __init__(self, numel: int, grad_dtype: torch.dtype, param_dtype: torch.dtype | None, offset: int = 0) -> None:
        self.offset = offset
        self.grad = awkward(numel, grad_dtype, seed=1, offset=offset)
        self.state = [awkward(numel, torch.float32, seed) for seed in (2, 3)]
        self.state.append(awkward(numel, torch.float32, seed=4).abs())
        self.param = None if param_dtype is None else awkward(numel, param_dtype, seed=5)
        generator = torch.Generator().manual_seed(numel)
        self.row_slot = torch.randint(-1, 4, (-(-numel // ROW),), dtype=torch.int32, generator=generator)

    def run(self, name: str, table: Tensor = TABLE, **kwargs: Tensor | None) -> list[Tensor]:
        kwargs.setdefault("grad_scale", torch.tensor(0.37))
        tensors = self.state + ([] if self.param is None else [self.param])
        copies = [at_offset(tensor, self.offset) for tensor in tensors]
        out = copies[3] if self.param is not None else None
        with backend(name):
            zero_kernels.adam_step(self.grad, *copies[:3], out, self.row_slot, table, **kwargs)
        return copies

    def before(self) -> list[Tensor]:
        return self.state + ([] if self.param is None else [self.param])


def test_reference_is_the_written_formula() -> None:
    """Against NumPy, whose fp32 operations are each correctly rounded."""
    numel = 1000
    case = Case(numel, torch.float16, torch.bfloat16)
    master, exp_avg, exp_avg_sq, param = case.run("reference")
    f32 = np.float32
    p, m, v = (tensor.numpy().copy() for tensor in case.state)
    with np.errstate(all="ignore"):
        grad = case.grad.numpy().astype(f32)
        for row, slot in enumerate(case.row_slot.tolist()):
            at = slice(row * ROW, min((row + 1) * ROW, numel))
            c = dict(zip(HYPER_COLUMNS, TABLE[max(slot, 0)].numpy(), strict=True))
            if slot < 0 or c["active"] == 0:
                continue
            g = grad[at] * (f32(0.37) * c["grad_factor"])
            if c["weight_decay"] != 0:
                g = g + c["weight_decay"] * p[at]
            p[at] = p[at] * c["decay"]
            m[at] = m[at] * c["beta1"] + g * c["one_minus_beta1"]
            v[at] = v[at] * c["beta2"] + (g * c["one_minus_beta2"]) * g
            root = np.sqrt(v[at]) / c["bias_correction2_sqrt"]
            p[at] = p[at] - c["step_size"] * (m[at] / (root + c["eps"]))
    for want, got in ((p, master), (m, exp_avg), (v, exp_avg_sq)):
        assert same_bits(torch.from_numpy(want), got)
    live = torch.isin(case.row_slot, torch.tensor([0, 1, 2])).repeat_interleave(ROW)[:numel]
    assert same_bits(torch.where(live, master.bfloat16(), case.param), param)


@pytest.mark.skipif("avx512" not in ISAS or shutil.which("g++") is None, reason="AVX-512, compiled by g++")
def test_quotients_by_a_divisor_have_the_bits_of_a_division(tmp_path: Path) -> None:
    flags = ["-std=c++20", "-O3", "-w", "-ffp-contract=off", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
    subprocess.run(["g++", *flags, str(Path(__file__).with_name("divisors.cpp")), "-o", tmp_path / "run"], check=True)
    done = subprocess.run([tmp_path / "run"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"] * 3, "how many are wrong: all fractions, any exponents, unusual divisors"


@pytest.mark.parametrize("name", ["reference", *ISAS])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_the_first_second_moment_has_the_bits_of_torch(name: str, kind: str) -> None:
    """torch multiplies (1 - beta2) * g * g from the left: it overflows only where the product itself does. Were g * g
    made first, a gradient of 1.9e19 would give inf, and its parameter would stand still."""
    magnitudes = [1.1e-23, 1e-21, 1e-19, 1e-10, 1.0, 1e10, 1.9e19, 3e19, 5.7e20, 6e20]
    grad = torch.tensor(magnitudes).repeat_interleave(ROW) * torch.linspace(1, 1.01, len(magnitudes) * ROW)
    parameter = torch.nn.Parameter(torch.ones_like(grad))
    parameter.grad = grad.clone()
    theirs = torch.optim.AdamW([parameter], lr=1e-2, **{kind: True})
    theirs.step()
    state = [torch.ones_like(grad), torch.zeros_like(grad), torch.zeros_like(grad)]
    with backend(name):
        zero_kernels.fused_adamw_(grad, *state, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, step=1)
    assert same_bits(state[2], theirs.state[parameter]["exp_avg_sq"])
    assert torch.isfinite(state[2][: 9 * ROW]).all()
    assert torch.isinf(state[2][9 * ROW :]).any()
    torch.testing.assert_close(state[0], parameter.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["reference", *ISAS])
def test_shard_boundaries_do_not_change_the_numbers(name: str) -> None:
    case = Case(4097, torch.bfloat16, torch.float16)
    whole = case.run(name)
    parts = [tensor.clone() for tensor in case.before()]
    for begin, end in itertools.pairwise((0, 1, 2, 9, 30, 33)):
        at, rows = slice(begin * ROW, end * ROW), slice(begin, end)
        with backend(name):
            zero_kernels.adam_step(
                case.grad[at],
                *(part[at] for part in parts),
                case.row_slot[rows],
                TABLE,
                grad_scale=torch.tensor(0.37),
            )
    assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("name", ["reference", *ISAS])
@pytest.mark.parametrize("factor", [0.37, -1.0, 0.0, -0.0, 1e-40])
def test_a_factor_is_a_part_of_the_scale(name: str, factor: float) -> None:
    """It gives the bits of a scale that was multiplied by it beforehand, in fp32."""
    case = Case(4097, torch.bfloat16, torch.float16)
    case.row_slot = case.row_slot.clamp(min=0)
    factored, plain = TABLE.clone(), TABLE.clone()
    factored[:, GRAD_FACTOR], plain[:, GRAD_FACTOR] = factor, 1.0
    scale = torch.tensor(0.1)
    got = case.run(name, factored, grad_scale=scale)
    want = case.run(name, plain, grad_scale=scale * torch.tensor(factor))
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    alone = case.run(name, factored, grad_scale=None)
    want = case.run(name, plain, grad_scale=torch.tensor(factor))
    assert all(same_bits(a, b) for a, b in zip(want, alone, strict=True))


@pytest.mark.parametrize("isa", ISAS)
def test_a_slot_outside_the_table_raises(isa: str) -> None:
    case = Case(ROW, torch.float32, None)
    case.row_slot = torch.full((1,), 4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"row_slot\[0\] = 4, but hyper has 4 rows"):
        case.run(isa)


@pytest.mark.parametrize("name", ["reference", *ISAS])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [True, False])
def test_matches_torch_optim(name: str, decoupled: bool, maximize: bool) -> None:
    """fp32, 20 steps: torch orders the operations its own way, so a few units in the last place of the parameter."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(33, 17, generator=generator)
    parameter = torch.nn.Parameter(-start if maximize else start)  # either way the same numbers, signs aside
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": maximize}
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([parameter], **settings)
    master = parameter.detach().clone()
    state = [torch.zeros_like(master), torch.zeros_like(master)]
    copy = torch.empty_like(master, dtype=torch.bfloat16)
    for step in range(1, 21):
        parameter.grad = torch.randn(33, 17, generator=generator)
        with backend(name):
            zero_kernels.fused_adamw_(
                parameter.grad * 8, master, *state, copy, step=step, grad_scale=0.125, decoupled=decoupled, **settings
            )
        optimizer.step()
    scale = parameter.detach().abs().clamp(min=settings["lr"])
    assert ((master - parameter.detach()).abs() <= 4 * 2**-23 * scale + 20 * 2**-24 * settings["lr"]).all()
    assert torch.equal(copy, master.bfloat16())


def test_versions_of_what_was_written_move() -> None:
    """Autograd and the optimizer learn of edits by the version counter, on every backend."""
    for name in ("reference", *ISAS):
        state = [torch.zeros(ROW) for _ in range(4)]
        versions = [tensor._version for tensor in state]
        with backend(name):
            zero_kernels.adam_step(torch.ones(ROW), *state, torch.zeros(1, dtype=torch.int32), TABLE)
        assert all(tensor._version > before for tensor, before in zip(state, versions, strict=True)), name


BAD_ARGUMENTS = {  # and those of foreach_step
    "master": (torch.zeros(ROW, dtype=torch.int16), TypeError, "^master must be float32, got int16"),
    "grad": (torch.zeros(ROW, dtype=torch.int32), TypeError, "grad must be float16 or bfloat16 or float32"),
    "param_out": (torch.zeros(2, ROW // 2), ValueError, "param_out must be flat"),
    "row_slot": (torch.zeros(2, dtype=torch.int32), ValueError, "row_slot must have 1 elements, got 2"),
    "grad_scale": (torch.ones(2), ValueError, "grad_scale must have 1 elements"),
    "found_inf": (torch.zeros(1, dtype=torch.bool), TypeError, "found_inf must be float32"),
}


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_wrong_arguments_are_named(argument: str) -> None:
    value, error, message = BAD_ARGUMENTS[argument]
    arguments = {name: torch.zeros(ROW) for name in ("grad", "master", "exp_avg", "exp_avg_sq", "param_out")}
    arguments |= {"row_slot": torch.zeros(1, dtype=torch.int32), "hyper": TABLE}
    with pytest.raises(error, match=message):
        zero_kernels.adam_step(**arguments | {argument: value})
