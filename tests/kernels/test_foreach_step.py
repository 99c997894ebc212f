"""`foreach_step` and `update_rows`: every rule gives one result on every backend, and the right one."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from guards import no_host_reads
from kernel_cases import ISAS, Shards, backend, rule_table, same_bits, threads
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, RULES, Rule, columns_of, update_rows

NAMES = ["reference", *ISAS]
every_rule = pytest.mark.parametrize("rule", RULES)
every_backend = pytest.mark.parametrize("name", NAMES)


@every_rule
def test_threads_share_shards_without_changing_a_bit(rule: str) -> None:
    shards = Shards(rule, (0, 3 * ROW, 0, 100_003, 77_777), torch.bfloat16, torch.bfloat16)
    want = shards.run("reference")
    for isa in ISAS:
        for count in (1, 3):
            with threads(count):
                assert all(map(same_bits, want, shards.run(isa))), (isa, count)


def sgd(g: np.ndarray, p: np.ndarray, b: np.ndarray, c: Mapping[str, np.float32]) -> tuple[np.ndarray, ...]:
    g = g + c["weight_decay"] * p if c["weight_decay"] != 0 else g
    b = b * c["keep"] + g * c["take"]
    u = g + c["momentum"] * b if c["nesterov"] != 0 else b
    return p - c["lr"] * u, b


def sgd_plain(g: np.ndarray, p: np.ndarray, c: Mapping[str, np.float32]) -> tuple[np.ndarray, ...]:
    return (p - c["lr"] * (g + c["weight_decay"] * p if c["weight_decay"] != 0 else g),)


def lion(g: np.ndarray, p: np.ndarray, m: np.ndarray, c: Mapping[str, np.float32]) -> tuple[np.ndarray, ...]:
    u = m * c["beta1"] + g * c["one_minus_beta1"]
    p = p * c["decay"] - c["step_size"] * np.sign(u)
    return p, m * c["beta2"] + g * c["one_minus_beta2"]


def _lerped(start: np.ndarray, end: np.ndarray, weight: np.float32, rest: np.float32) -> np.ndarray:
    return start + weight * (end - start) if weight < 0.5 else end - rest * (end - start)


def muon_look_ahead(g: np.ndarray, p: np.ndarray, m: np.ndarray, c: Mapping[str, np.float32]) -> tuple[np.ndarray, ...]:
    m = _lerped(m, g, c["share"], c["momentum"])
    return _lerped(g, m, c["momentum"], c["share"]) if c["nesterov"] != 0 else m, m


def muon_subtract(g: np.ndarray, p: np.ndarray, d: np.ndarray, c: Mapping[str, np.float32]) -> tuple[np.ndarray, ...]:
    return p * c["decay"] - d, d


def amsgrad(
    g: np.ndarray, p: np.ndarray, m: np.ndarray, v: np.ndarray, w: np.ndarray, c: Mapping[str, np.float32]
) -> tuple[np.ndarray, ...]:
    g = g + c["weight_decay"] * p if c["weight_decay"] != 0 else g
    m = m * c["beta1"] + g * c["one_minus_beta1"]
    v = v * c["beta2"] + (g * c["one_minus_beta2"]) * g
    w = np.maximum(np.abs(w), np.abs(v))  # which gives NaN where one is
    root = np.sqrt(w) / c["bias_correction2_sqrt"]
    return p * c["decay"] - c["step_size"] * (m / (root + c["eps"])), m, v, w


FORMULAS = (sgd, sgd_plain, lion, amsgrad, muon_look_ahead, muon_subtract)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_the_reference_is_the_written_formula(formula: Callable[..., tuple[np.ndarray, ...]]) -> None:
    """Against NumPy, whose fp32 operations are each correctly rounded."""
    rule = RULES[formula.__name__]
    shards = Shards(rule.name, (1000,), torch.float16, torch.bfloat16)
    got = shards.run("reference")
    want = [x.numpy().copy() for x in (shards.masters[0], *shards.states)]
    with np.errstate(all="ignore"):
        grad = shards.grads[0].numpy().astype(np.float32)
        for row, slot in enumerate(shards.row_slots[0].tolist()):
            c = dict(zip(rule.columns, shards.table[slot].numpy(), strict=True))
            if slot < 0 or c["active"] == 0:
                continue
            at = slice(row * ROW, (row + 1) * ROW)
            g = grad[at] * (np.float32(0.37) * c["grad_factor"])
            for tensor, new in zip(want, formula(g, *(x[at] for x in want), c), strict=True):
                tensor[at] = new
    for numbers, tensor in zip(want, got, strict=False):
        assert same_bits(torch.from_numpy(numbers), tensor)
    live = torch.isin(shards.row_slots[0], torch.tensor([0, 1, 2])).repeat_interleave(ROW)[:1000]
    assert same_bits(torch.where(live, got[0].bfloat16(), shards.params[0]), got[-1])


@every_rule
@every_backend
def test_found_inf_leaves_every_shard_and_names_the_slots_of_all(name: str, rule: str) -> None:
    shards = Shards(rule, (ROW, 2 * ROW, 5), torch.float32, None)
    shards.grads = [torch.ones_like(grad) for grad in shards.grads]
    shards.grads[0][7], shards.grads[2][4] = math.nan, -math.inf
    shards.row_slots = [torch.tensor(slots, dtype=torch.int32) for slots in ([2], [0, 1], [3])]
    shards.table[3, RULES[rule].columns.index("grad_factor")] = 1.0
    for found, want in ((1.0, [7, 0, 1, 1]), (math.nan, [7, 0, 1, 1]), (-2.0, [7, 0, 1, 1]), (0.0, [7, 0, 0, 0])):
        slots = torch.tensor([7, 0, 0, 0], dtype=torch.int32)  # nothing is cleared in it
        after = shards.run(name, found_inf=torch.tensor([found]), nonfinite_slots=slots)
        assert slots.tolist() == want
        assert all(map(same_bits, shards.written, after)) == (found != 0)


class Trained:
    """One parameter, trained by a rule as by an optimizer of torch: fp32, with gradients that both are given."""

    def __init__(self, name: str, rule: str, coefficients: Mapping[str, float]) -> None:
        self._backend, self._rule = name, RULES[rule]
        self._coefficients = torch.tensor(
            [[coefficients.get(wanted, 0.0)] for wanted in self._rule.coefficients], dtype=torch.float64
        )
        generator = torch.Generator().manual_seed(0)
        self.master = torch.randn(1000, generator=generator)
        self.grads = [torch.randn(1000, generator=generator) for _ in range(20)]
        self.states = [torch.zeros(1000) for _ in self._rule.states]

    def steps(self) -> None:
        rows, table = torch.zeros(8, dtype=torch.int32), torch.empty(1, 12)
        for step, grad in enumerate(self.grads, 1):
            count = torch.tensor([step], dtype=torch.float64)
            self._rule.fill_table(self._coefficients, None, count, None, table)
            with backend(self._backend):
                zero_kernels.foreach_step(self._rule.name, [grad], [self.master], self.states, [], [rows], table)

    def steps_of(self, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> tuple[Tensor, Mapping[str, Any]]:
        parameter = torch.nn.Parameter(self.master.clone())
        optimizer = make([parameter])
        for grad in self.grads:
            parameter.grad = grad.clone()
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter]


def few_units(ours: Tensor, theirs: Tensor, lr: float, each: int = 1) -> bool:
    """Whether these differ by no more than `each` roundings in each of 20 steps may make, all of them to one side."""
    return bool(((ours - theirs).abs() <= 20 * each * 2**-24 * theirs.abs().clamp(min=20 * lr)).all())


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", NAMES[:2])
def test_amsgrad_is_torchs(name: str, decoupled: bool, maximize: bool) -> None:
    settings = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1, "maximize": maximize}
    ours = Trained(name, "amsgrad", settings | {"beta1": 0.9, "beta2": 0.8, "decoupled": decoupled})
    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs, state = ours.steps_of(lambda p: optimizer(p, betas=(0.9, 0.8), amsgrad=True, **settings))
    ours.steps()
    assert few_units(ours.master, theirs, settings["lr"])
    torch.testing.assert_close(ours.states[2], state["max_exp_avg_sq"], rtol=1e-6, atol=0)
    assert (ours.states[2] > ours.states[1]).any()


SGD_SETTINGS = [
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.5, "weight_decay": 2**-6},
    {"momentum": 0.5, "weight_decay": 2**-6, "nesterov": True},
    {"momentum": 0.75, "dampening": 0.5, "weight_decay": 2**-6, "maximize": True},
    {},
    {"weight_decay": 2**-6, "maximize": True},
]


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_sgd_has_the_bits_of_torch(name: str, settings: dict[str, float]) -> None:
    """torch fuses some products with the sum behind them. A power of two in them leaves nothing to round twice."""
    rule, lr = "sgd" if settings.get("momentum") else "sgd_plain", 2**-5
    ours = Trained(name, rule, {"lr": lr} | settings)
    theirs, state = ours.steps_of(lambda p: torch.optim.SGD(p, lr=lr, foreach=False, **settings))
    ours.steps()
    assert same_bits(ours.master, theirs)
    if rule == "sgd":
        assert same_bits(ours.states[0], state["momentum_buffer"])


def test_a_group_without_momentum_takes_the_gradient_itself() -> None:
    """As with torch, whose dampening is a momentum's."""
    alone, beside = (Trained(NAMES[-1], rule, {"lr": 0.1, "dampening": 0.3}) for rule in ("sgd_plain", "sgd"))
    alone.steps()
    beside.steps()
    assert torch.equal(alone.master, beside.master)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_lion_is_the_papers(name: str, maximize: bool) -> None:
    """Algorithm 2 of Chen et al. (2023), in float64."""
    settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "maximize": maximize}
    ours = Trained(name, "lion", settings)
    theta, m = ours.master.double(), torch.zeros(1000, dtype=torch.float64)
    for grad in ours.grads:
        g = -grad.double() if maximize else grad.double()
        c = 0.9 * m + 0.1 * g
        theta = theta - 1e-2 * (c.sign() + 0.1 * theta)
        m = 0.99 * m + 0.01 * g
    ours.steps()
    assert few_units(ours.master.double(), theta, 1e-2, each=2)
    torch.testing.assert_close(ours.states[0].double(), m, rtol=1e-5, atol=1e-7)


@every_backend
def test_lions_sign_keeps_zero_and_nan(name: str) -> None:
    table = torch.zeros(1, 12)
    table[0, :4] = torch.tensor([1.0, 1.0, 0.0, 1.0])  # step_size, decay, beta1, one_minus_beta1
    table[0, 9:11] = 1.0
    grad = torch.tensor([0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf, math.nan, 3.0]).repeat(16)
    master = torch.zeros(ROW)
    with backend(name):
        zero_kernels.foreach_step(
            "lion", [grad], [master], [torch.zeros(ROW)], [], [torch.zeros(1, dtype=torch.int32)], table
        )
    want = [0.0, 0.0, -1.0, 1.0, -1.0, 1.0, math.nan, -1.0]
    assert torch.equal(master[:8].nan_to_num(7.0), torch.tensor(want).nan_to_num(7.0))


@every_backend
def test_amsgrad_keeps_a_nan(name: str) -> None:
    """A second moment that once was NaN is one for good, as with torch."""
    table = rule_table(RULES["amsgrad"])
    states = [torch.zeros(ROW), torch.ones(ROW), torch.ones(ROW)]
    states[2][0], states[2][1], states[1][2] = math.nan, math.inf, math.nan
    with backend(name):
        zero_kernels.foreach_step(
            "amsgrad", [torch.ones(ROW)], [torch.ones(ROW)], states, [], [torch.zeros(1, dtype=torch.int32)], table
        )
    assert states[2][:3].isnan().tolist() == [True, False, True] and states[2][1] == math.inf


# ---- rules of anybody -----------------------------------------------------------------------------------------------


def per_row(g: Tensor, p: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Divides by the root of a mean square that a row shares; keeps a sum of gradients in 16 bits."""
    mean, total = states
    mean = mean * c["keep"] + (g * g).mean(dim=1, keepdim=True)
    return p - c["rate"] * g / (mean.sqrt() + 1), [mean, total.float() + g]


PER_ROW = Rule("per_row", ("mean", "total"), ("lr",), columns_of("rate", "keep"), lambda c, step: {}, per_row)


def test_a_rule_of_anybody_is_run_over_rows() -> None:
    numel, rows = 2 * ROW + 40, 3
    grad, master, out = torch.randn(numel), torch.randn(numel), torch.zeros(numel, dtype=torch.bfloat16)
    mean, total = torch.ones(rows), torch.ones(numel, dtype=torch.bfloat16)
    before = [x.clone() for x in (master, mean, total, out)]
    hyper = torch.zeros(2, 12)
    hyper[:, :2] = torch.tensor([[0.5, 0.25], [2.0, 1.0]])
    hyper[:, 9:11] = torch.tensor([[1.0, 3.0], [0.0, 1.0]])
    slots = torch.tensor([0, 1, 0], dtype=torch.int32)
    update_rows(per_row, PER_ROW.columns, [grad], [master], [mean, total], [out], [slots], hyper, torch.tensor(2.0))
    want = [x.clone() for x in before]
    for row, at in ((0, slice(0, ROW)), (2, slice(2 * ROW, numel))):
        g = grad[at] * 6
        want[1][row] = 0.25 + (g * g).mean()
        want[0][at] -= 0.5 * g / (want[1][row].sqrt() + 1)
        want[2][at] = (before[2][at].float() + g).bfloat16()
        want[3][at] = want[0][at].bfloat16()
    for ours, theirs in zip((master, mean, total, out), want, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(master[ROW : 2 * ROW], before[0][ROW : 2 * ROW]) and mean[1] == 1


def test_a_rule_of_anybody_is_skipped_and_marks() -> None:
    grads = [torch.ones(ROW), torch.full((ROW,), math.inf)]
    masters, means, totals = ([torch.ones(n), torch.ones(n)] for n in (ROW, 1, ROW))
    states = [means[0], totals[0], means[1], totals[1]]
    hyper, slots = torch.ones(2, 12), [torch.tensor([i], dtype=torch.int32) for i in range(2)]
    marks = torch.zeros(2, dtype=torch.int32)
    lists = (grads, masters, states, [], slots)
    update_rows(per_row, PER_ROW.columns, *lists, hyper, None, torch.ones(1), marks)
    assert marks.tolist() == [0, 1]
    assert all(tensor.eq(1).all() for tensor in (*masters, *states))


def test_columns_have_room_for_nine() -> None:
    names = columns_of(*"abcdefghi")
    assert names == (*"abcdefghi", "active", "grad_factor", "step_number")
    assert all(rule.columns[9:11] == ("active", "grad_factor") for rule in RULES.values())
    with pytest.raises(ValueError, match="at most 9 columns of its own, got 10: a, b"):
        columns_of(*"abcdefghij")
    for taken in (("a", "a"), ("active",), ("padding",), ("step_number",), ("row_key",)):
        with pytest.raises(ValueError, match="is given twice, or taken"):
            columns_of(*taken)


@every_rule
def test_a_table_reads_nothing_on_the_host(rule: str) -> None:
    want = rule_table(RULES[rule])
    assert want[:, 9].tolist() == [1, 1, 1, 0] and want[:, 11].tolist() == [1, 2, 1000, 3]
    with no_host_reads():
        got = rule_table(RULES[rule])
    assert torch.equal(got, want)


def test_columns_of_lion_and_sgd_are_float64_rounded_once() -> None:
    def row(rule: Rule, step: float, **values: float) -> dict[str, float]:
        coefficients = torch.tensor([[values.get(name, 0.0)] for name in rule.coefficients], dtype=torch.float64)
        table = torch.empty(1, 12)
        rule.fill_table(coefficients, None, torch.tensor([step], dtype=torch.float64), None, table)
        return dict(zip(rule.columns, table[0].tolist(), strict=True))

    def f32(value: float) -> float:
        return float(np.float32(value))

    of_lion = row(RULES["lion"], 3, lr=3e-4, beta1=0.9, beta2=0.999, weight_decay=0.1, maximize=1)
    assert of_lion["decay"] == f32(1 - 3e-4 * 0.1) and of_lion["one_minus_beta2"] == f32(1 - 0.999)
    assert of_lion["step_size"] == f32(3e-4) and of_lion["grad_factor"] == -1
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 1e-4, "nesterov": 1}
    first, later = (row(RULES["sgd"], step, **settings) for step in (1, 2))
    assert (first["keep"], first["take"], first["momentum"]) == (0, 1, f32(0.9))
    assert (later["keep"], later["take"], later["momentum"]) == (f32(0.9), f32(1 - 0.3), f32(0.9))
    assert later["nesterov"] == 1 and later["weight_decay"] == f32(1e-4)


# ---- errors ---------------------------------------------------------------------------------------------------------


BAD_ARGUMENTS = {
    "rule": (
        "adagrad",
        ValueError,
        "rule must be one of adamw, amsgrad, lion, sgd, sgd_plain, muon_look_ahead, muon_subtract, got 'adagrad'",
    ),
    "grads": ([torch.zeros(ROW), torch.zeros(ROW).half()], TypeError, "grads must have one dtype"),
    "masters": ([torch.zeros(ROW)], ValueError, "masters must have one tensor a shard: 2 grads, 1 masters"),
    "states": (
        [torch.zeros(ROW)] * 2,
        ValueError,
        r"states of adamw are 2 \(exp_avg, exp_avg_sq\) a shard: 2 grads, 2 states",
    ),
    "params_out": ([torch.zeros(ROW)], ValueError, "params_out must have one tensor a shard: 2 grads, 1 params_out"),
    "row_slots": ([torch.zeros(1, dtype=torch.int32)], ValueError, "row_slots must have one tensor a shard"),
    "hyper": (torch.zeros(4, 3), ValueError, r"shard 0: hyper must have shape \[slots, 12\]"),
    "nonfinite_slots": (torch.zeros(3, dtype=torch.int32), ValueError, "nonfinite_slots must have 4 elements"),
}


def good_arguments() -> dict[str, Any]:
    return {
        "rule": "adamw",
        "grads": [torch.zeros(ROW), torch.zeros(ROW)],
        "masters": [torch.zeros(ROW), torch.zeros(ROW)],
        "states": [torch.zeros(ROW) for _ in range(4)],
        "params_out": [],
        "row_slots": [torch.zeros(1, dtype=torch.int32)] * 2,
        "hyper": torch.zeros(4, 12),
    }


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_wrong_arguments_are_named(argument: str) -> None:
    value, error, message = BAD_ARGUMENTS[argument]
    with pytest.raises(error, match=message):
        zero_kernels.foreach_step(**good_arguments() | {argument: value})


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (
            1,
            torch.zeros(ROW).double(),
            TypeError,
            "shard 0: exp_avg_sq must be .* or uint8, got float64",
        ),
        (2, torch.zeros(1), ValueError, "shard 1: exp_avg must have 128 elements, got 1"),
        (3, torch.zeros(2 * ROW)[::2], ValueError, "shard 1: exp_avg_sq must be contiguous"),
    ],
)
def test_a_wrong_state_is_named(place: int, value: Tensor, error: type[Exception], message: str) -> None:
    arguments = good_arguments()
    arguments["states"][place] = value
    with pytest.raises(error, match=message):
        zero_kernels.foreach_step(**arguments)


def test_a_rule_without_state_takes_none() -> None:
    with pytest.raises(ValueError, match="states of sgd_plain are none a shard: 2 grads, 4 states"):
        zero_kernels.foreach_step(**good_arguments() | {"rule": "sgd_plain"})
    with pytest.raises(ValueError, match="foreach_step needs at least one shard"):
        zero_kernels.foreach_step("adamw", [], [], [], [], [], torch.zeros(4, 12))
