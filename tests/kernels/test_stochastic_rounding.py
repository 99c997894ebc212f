"""bf16 states that are rounded stochastically: the written arithmetic, its evenness, the same bits on every backend."""

import math

import numpy as np
import pytest
import torch
from kernel_cases import ISAS, backend, rule_table, same_bits
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, RULES, codecs

BF16 = torch.bfloat16
NAMES = ["reference", *ISAS]
every_backend = pytest.mark.parametrize("name", NAMES)
# ---- the arithmetic, written anew, an element at a time --------------------------------------------------------------

WORD = 2**32


def mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % WORD
    x = (x ^ x >> 15) * 0x846CA68B % WORD
    return x ^ x >> 16


def noise(key: int, step: float, state: int, element: int) -> int:
    of_row = mixed((mixed(key % WORD) + int(np.float32(step).view(np.uint32))) % WORD)
    word = mixed((mixed((of_row + state) % WORD) + element // 2 * 0x9E3779B9) % WORD)
    return word >> 16 if element % 2 else word & 0xFFFF


def rounded(value: np.float32, by: int) -> int:
    bits = int(value.view(np.uint32))
    if np.isnan(value):
        return 0x7FC0
    return (bits if bits & 0x7FFFFFFF >= 0x7F7F0000 else bits + by) >> 16


def stored(values: Tensor, keys: Tensor, step: float, name: str = "reference") -> Tensor:
    """What is stored of `values` in rows of these keys, by SGD: the new buffer is the gradient, and of -0 -0, too."""
    rule = RULES["sgd"]
    table = torch.zeros(1, len(rule.columns))
    for column, value in (("keep", -1.0), ("take", 1.0), ("active", 1.0), ("grad_factor", 1.0), ("step_number", step)):
        table[0, rule.columns.index(column)] = value
    buffer, rows = torch.zeros(values.numel(), dtype=BF16), torch.zeros(len(keys), dtype=torch.int32)
    lists = ([values.reshape(-1)], [torch.zeros(values.numel())], [buffer], [], [rows], table)
    with backend(name):
        zero_kernels.foreach_step(rule.name, *lists, row_keys=[keys])
    return buffer


@every_backend
def test_values_are_rounded_as_the_docs_write_it(name: str) -> None:
    """Of every magnitude and sign; zeros, subnormals, infinities, NaN, and what lies around the largest finite bf16."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(40, ROW, generator=generator) * torch.logspace(-44, 38, 40, dtype=torch.float64).unsqueeze(1)
    values = values.float()
    ends = [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-126), 3.4028235e38, -3.3961776e38]
    values[7, 3 : 3 + len(ends)] = torch.tensor(ends)
    bits = torch.tensor([0x7F7EFFFF, 0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF, 0x00000001, 0x0000FFFF, 0x3F80FFFF])
    values[9, 100 : 100 + len(bits)] = bits.to(torch.int32).view(torch.float32)
    keys = torch.randint(-(2**31), 2**31 - 1, (40,), dtype=torch.int32, generator=generator)
    for step in (1.0, 1000.0):
        want = [
            rounded(value, noise(int(keys[i // ROW]), step, 0, i % ROW))
            for i, value in enumerate(values.numpy().reshape(-1))
        ]
        want = torch.from_numpy(np.array(want, dtype=np.uint16)).view(BF16)
        assert same_bits(stored(values, keys, step, name), want), (name, step)


def test_noise_is_that_of_row_step_state_and_element() -> None:
    """A state of AdamW's is rounded by noise of its own, and each slot by that of its own step."""
    rule = RULES["adamw"]
    table = rule_table(rule)
    grad, rows = torch.full((3 * ROW,), 0.37), torch.tensor([0, 1, 2], dtype=torch.int32)
    keys = torch.tensor([5, 5, -9], dtype=torch.int32)
    states = [torch.zeros(3 * ROW, dtype=BF16) for _ in rule.states]
    exact = [torch.zeros(3 * ROW) for _ in rule.states]
    for of, given in ((states, {"row_keys": [keys]}), (exact, {})):
        zero_kernels.foreach_step("adamw", [grad], [torch.ones(3 * ROW)], of, [], [rows], table, **given)
    steps = table[:, rule.columns.index("step_number")].tolist()
    assert steps == [1.0, 2.0, 1000.0, 3.0]
    for state, (got, values) in enumerate(zip(states, exact, strict=True)):
        for i, value in enumerate(values.numpy()):
            by = noise(int(keys[i // ROW]), steps[i // ROW], state, i % ROW)
            assert int(got.view(torch.int16)[i]) % 2**16 == rounded(value, by)


# ---- evenness --------------------------------------------------------------------------------------------------------


def chi_squared(counts: Tensor) -> float:
    """In standard deviations from its mean, of counts that are all expected to be the same."""
    expected = counts.sum() / counts.numel()
    degrees = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def test_noise_is_even() -> None:
    """Of 256 rows that follow each other, 128 steps that do, and two states: each of 16 bits in each element, the upper
    and lower byte, and both together; and the upper bits of neighbours in each direction."""
    keys = codecs.row_keys(3, 0, 256).unsqueeze(1)
    steps = torch.arange(1, 129, dtype=torch.float32)
    found = torch.stack(
        [torch.stack([codecs.noise_of(keys, step.expand(256, 1), state).int() for step in steps]) for state in range(2)]
    )  # [2 states, 128 steps, 256 rows, 128 elements]
    count = found[..., 0].numel()
    for bit in range(16):
        ones = (found >> bit & 1).sum((0, 1, 2)).double()
        assert float((ones - count / 2).abs().max()) < 5 * math.sqrt(count) / 2, bit
    for shift in (0, 8):
        assert abs(chi_squared((found >> shift & 255).flatten().bincount(minlength=256).double())) < 5
    assert abs(chi_squared(found.flatten().bincount(minlength=2**16).double())) < 5
    upper = found >> 12
    for dim, apart in ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (3, 64)):
        here, there = upper.narrow(dim, 0, found.shape[dim] - apart), upper.narrow(dim, apart, found.shape[dim] - apart)
        assert abs(chi_squared((here * 16 + there).flatten().bincount(minlength=256).double())) < 5, (dim, apart)


def test_rounding_is_unbiased() -> None:
    """The mean over rows and steps of what is stored, of each of 128 values, is within its standard error of the value
    itself: no further than 4.5 of them in any. To nearest they would be off by up to half a unit, always."""
    rows, steps = 64, 256
    values = torch.linspace(1.0, 2.0, ROW + 1)[:ROW] * 1.37
    keys, mean = codecs.row_keys(0, 0, rows), torch.zeros(ROW, dtype=torch.float64)
    for step in range(1, steps + 1):
        mean += stored(values.repeat(rows), keys, float(step)).double().view(rows, ROW).mean(0) / steps
    ulp = 2.0 ** (values.log2().floor().double() - 7)
    low = (values.view(torch.int32) & 0xFFFF).double() / 2**16
    error = (mean - values.double()) / ulp
    assert float((error.abs() / (low * (1 - low) / (rows * steps)).sqrt().clamp(min=1e-12)).max()) < 4.5
    assert float((values.bfloat16().double() - values.double()).abs().div(ulp).max()) > 0.4


def test_a_second_moment_follows_where_nearest_even_stays() -> None:
    """AdamW with beta2 = 0.999, gradients first of 1, then of 0.5: the moment is to fall from 1 towards 0.25."""
    means = {}
    for form in ("fp32", "stochastic"):
        dtype = torch.float32 if form == "fp32" else BF16
        states = [torch.zeros(32 * ROW, dtype=dtype), torch.ones(32 * ROW, dtype=dtype)]
        master, rows = torch.zeros(32 * ROW), torch.zeros(32, dtype=torch.int32)
        keys = {"row_keys": [codecs.row_keys(0, 0, 32)]} if form == "stochastic" else {}
        for step in range(1, 1001):
            table = zero_kernels.hyper_table(1e-3, (0.9, 0.999), 1e-8, 0.0, step)
            grad = torch.full((32 * ROW,), 0.5)
            zero_kernels.foreach_step("adamw", [grad], [master], states, [], [rows], table, **keys)
        means[form] = float(states[1].float().mean())
    assert means["fp32"] == pytest.approx(0.25 + 0.75 * 0.999**1000, rel=1e-4)
    assert means["stochastic"] == pytest.approx(means["fp32"], rel=2e-3)


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_keys_are_those_of_the_row_wherever_it_is() -> None:
    whole = codecs.row_keys(7, 0, 100)
    assert whole.dtype == torch.int32
    assert torch.equal(torch.cat([codecs.row_keys(7, 0, 33), codecs.row_keys(7, 33, 67)]), whole)
    assert not set(whole.tolist()) & set(codecs.row_keys(8, 0, 100).tolist())
    assert len(set(whole.tolist())) == 100
    assert codecs.row_keys(7, 2**32 - 1, 2).tolist() == [int(whole[0]) - 1, int(whole[0])], "modulo 2^32"


def test_what_does_not_fit_is_named() -> None:
    lists = ([torch.zeros(200)], [torch.zeros(200)], [torch.zeros(200, dtype=BF16)], [])
    given = (*lists, [torch.zeros(2, dtype=torch.int32)], rule_table(RULES["lion"]))
    for keys, error, message in (
        ([torch.zeros(3, dtype=torch.int32)], ValueError, "row_keys must have 2 elements, got 3"),
        ([torch.zeros(2)], TypeError, "row_keys must be int32, got float32"),
        ([], ValueError, "row_keys must have one tensor a shard: 1 grads, 0 row_keys"),
        (None, ValueError, "bfloat16 states are rounded stochastically: give row_keys"),
    ):
        with pytest.raises(error, match=message):
            zero_kernels.foreach_step("lion", *given, row_keys=keys)
