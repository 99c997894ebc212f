"""Prepared calls: the bits and the version counts of the op, checked once, by the backend that is chosen now."""

import weakref
from collections.abc import Sequence

import pytest
import torch
from kernel_cases import ISAS, awkward, backend, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zero_kernels
from zero_kernels import ROW, Prepared

NAMES = ["reference", *ISAS]
SIZES = (2 * ROW + 5, 0, 130 * ROW)
TABLE = zero_kernels.hyper_table([1e-3, 1e-2], (0.9, 0.99), 1e-8, [0.1, 0.0], 3, active=[True, False])
needs_library = pytest.mark.skipif(not ISAS, reason="the CPU library is not built")


class Watch(TorchDispatchMode):
    """Notes the namespaces of the ops that run."""

    def __init__(self, ran: list[str]) -> None:
        super().__init__()
        self._ran = ran

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace = func._schema.name.split("::")[0]
        if namespace.startswith("zero_kernels"):
            self._ran.append(namespace)
        return func(*args, **(kwargs or {}))


def adam_arguments(numel: int, seed: int, found_inf: float = 0.0) -> list[Tensor | None]:
    """Of two slots, one of them inactive, and padding."""
    state = [awkward(numel, torch.float32, seed + i).abs() for i in range(3)]
    rows = torch.arange(-(-numel // ROW), dtype=torch.int32) % 3 - 1
    flags = torch.zeros(2, dtype=torch.int32)
    scale, found = torch.full((1,), 0.5), torch.full((1,), found_inf)
    grad = awkward(numel, torch.float16, seed + 3).clone()
    return [grad, *state, state[0].bfloat16(), rows, TABLE, scale, found, flags]


def foreach_arguments(sizes: Sequence[int], seed: int, found_inf: float = 0.0, *, masters_alone: bool = False) -> list:
    shards = [adam_arguments(numel, seed + 7 * i, found_inf) for i, numel in enumerate(sizes)]
    grads, masters, exp_avgs, exp_avg_sqs, outs, rows = map(list, zip(*(shard[:6] for shard in shards), strict=True))
    states = [state for pair in zip(exp_avgs, exp_avg_sqs, strict=True) for state in pair]
    return ["adamw", grads, masters, states, [] if masters_alone else outs, rows, *shards[0][6:]]


def ema_arguments(seed: int, *, split: bool = False) -> list:
    masters = [awkward(numel, torch.float32, seed + numel).clone() for numel in SIZES]
    averages = [awkward(numel, torch.float32, seed + numel + k).clone() for numel in SIZES for k in (1, 2)]
    params = [master.bfloat16() for master in masters] if split else []
    lows = [master.view(torch.int32).to(torch.int16) for master in masters]
    rows = [torch.arange(-(-numel // ROW), dtype=torch.int32) % 3 - 1 for numel in SIZES]
    return [averages, lows if split else masters, params, rows, torch.tensor([[0.25, 0.0], [1.0, 0.5]])]


def pack_arguments(seed: int) -> list:
    grads = [awkward(numel, torch.bfloat16, seed + numel).clone() for numel in (0, 5, 300)]
    return [grads, [1, 1, 128], torch.ones(500, dtype=torch.float16), 0.3, torch.ones(3, dtype=torch.int32)]


def copied(value):
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


def tensors(arguments: list) -> list[Tensor]:
    flat = [item for value in arguments for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, Tensor)]


def runs_like_the_op(name: str, calls: list[list]) -> None:
    prepared, op = Prepared(name), getattr(torch.ops.zero_kernels, name)
    for arguments in calls:
        given, twins = copied(arguments), copied(arguments)
        prepared(*given)
        op(*twins)
        for ours, theirs in zip(tensors(given), tensors(twins), strict=True):
            assert same_bits(ours, theirs) if ours.is_floating_point() else torch.equal(ours, theirs)
            assert ours._version == theirs._version


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masters_alone", [False, True])
def test_foreach_step_has_the_bits_and_versions_of_the_op(name: str, masters_alone: bool) -> None:
    calls = [(SIZES, 0, 0.0), (SIZES[::-1], 50, 0.0), (SIZES[:1], 100, 1.0), (SIZES, 150, 0.0)]
    with backend(name):
        runs_like_the_op("foreach_step", [foreach_arguments(*call, masters_alone=masters_alone) for call in calls])


@pytest.mark.parametrize("name", NAMES)
def test_ema_has_the_bits_and_versions_of_the_op(name: str) -> None:
    with backend(name):
        runs_like_the_op("ema", [ema_arguments(seed) for seed in (0, 50)])
        runs_like_the_op("ema", [ema_arguments(seed, split=True) for seed in (0, 50)])


@pytest.mark.parametrize("name", NAMES)
def test_pack_has_the_bits_and_versions_of_the_op(name: str) -> None:
    with backend(name):
        runs_like_the_op("pack", [pack_arguments(seed) for seed in (0, 1000, 2000)])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_given_is_not_written(name: str) -> None:
    with backend(name):
        given = [foreach_arguments((ROW,), seed, masters_alone=True) for seed in (0, 9)]
        runs_like_the_op("foreach_step", [[*arguments[:7], None, None, None] for arguments in given])
        runs_like_the_op("pack", [[*pack_arguments(seed)[:4], None] for seed in (0, 1000)])


def test_the_first_call_is_checked() -> None:
    arguments = foreach_arguments((ROW,), 0)
    arguments[2] = [arguments[2][0].double()]
    with pytest.raises(TypeError, match="master must be float32 or int16 or int8, got float64"):
        Prepared("foreach_step")(*arguments)
    with pytest.raises(ValueError, match="op must be one of foreach_step, ema, pack, got 'unpack'"):
        Prepared("unpack")


@needs_library
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, "sgd"),
        (0, "adagrad"),
        (1, []),
        (1, [torch.ones(ROW)]),
        (1, [torch.ones(ROW), torch.ones(ROW).half()]),
        (1, [torch.ones(ROW // 2)] * 2),
        (2, [torch.ones(ROW)]),
        (2, [torch.ones(ROW), torch.ones(ROW - 1)]),
        (2, [torch.ones(ROW, dtype=torch.float64)] * 2),
        (3, [torch.ones(2 * ROW)[::2]] * 4),
        (3, [torch.ones(ROW - 1)] * 4),
        (3, [torch.ones(ROW, dtype=torch.float64)] * 4),
        (3, [torch.ones(ROW)] * 3),
        (3, []),
        (4, [torch.ones(ROW).bfloat16()]),
        (4, [torch.ones(ROW).bfloat16(), torch.ones(ROW)]),
        (5, [torch.zeros(1, dtype=torch.int32)]),
        (5, [torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)]),
        (5, [torch.zeros(1, dtype=torch.int64)] * 2),
        (6, torch.zeros(2, 11)),
        (7, torch.ones(0)),
        (8, torch.ones(1, dtype=torch.float64)),
        (9, torch.zeros(1, dtype=torch.int32)),
    ],
)
def test_a_later_call_of_foreach_step_stays_in_bounds(place: int, value: object) -> None:
    prepared, arguments = Prepared("foreach_step"), foreach_arguments((ROW, ROW), 0)
    with backend(ISAS[0]):
        prepared(*arguments)
        wrong = [*arguments[:place], value, *arguments[place + 1 :]]
        before = copied(wrong)
        with pytest.raises(
            RuntimeError, match="this call was prepared for|unlike lengths|must be empty|no rule 'adagrad'"
        ):
            prepared(*wrong)
    for ours, theirs in zip(tensors(wrong), tensors(before), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@needs_library
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, [torch.ones(2), torch.ones(5), torch.ones(3)]),  # over the next one
        (0, [torch.ones(0), torch.ones(5), torch.ones(373)]),  # over the end
        (0, [torch.ones(0), torch.ones(5)]),
        (0, [torch.ones(0), torch.ones(5), torch.ones(6)[::2]]),
        (1, [-1, 1, 128]),
        (2, torch.ones(400, dtype=torch.float16)),
        (2, torch.ones(1000, dtype=torch.float16)[::2]),
        (4, torch.ones(2, dtype=torch.int32)),
        (4, torch.ones(3)),
    ],
)
def test_a_later_call_of_pack_stays_in_bounds(place: int, value: object) -> None:
    prepared, arguments = Prepared("pack"), pack_arguments(0)
    with backend(ISAS[0]):
        prepared(*arguments)
        with pytest.raises(RuntimeError, match="this call was prepared for|do not fit"):
            prepared(*arguments[:place], value, *arguments[place + 1 :])


LOW, HIGH = torch.ones(ROW, dtype=torch.int16), torch.ones(ROW, dtype=torch.bfloat16)


@needs_library
@pytest.mark.parametrize(
    ("split", "place", "value"),
    [
        (False, 0, [torch.ones(ROW)]),
        (False, 0, [torch.ones(ROW), torch.ones(ROW - 1)]),
        (False, 0, [torch.ones(ROW), torch.ones(2 * ROW)[::2]]),
        (False, 0, [torch.ones(ROW), torch.ones(ROW, dtype=torch.float64)]),
        (False, 1, [torch.ones(ROW - 1)]),
        (False, 1, [torch.ones(ROW, dtype=torch.float64)]),
        (False, 1, [torch.ones(2 * ROW)[::2]]),
        (False, 1, [torch.ones(ROW), torch.ones(ROW)]),
        (False, 1, [LOW]),
        (False, 3, [torch.zeros(2, dtype=torch.int32)]),
        (False, 3, [torch.zeros(1, dtype=torch.int64)]),
        (False, 3, [torch.ones(1, dtype=torch.int32)]),
        (False, 4, torch.ones(1, 1)),
        (False, 4, torch.ones(1, 2).half()),
        (False, 4, torch.ones(1, 4)[:, ::2]),
        (True, 1, [LOW[1:]]),
        (True, 1, [LOW, LOW]),
        (True, 2, []),
        (True, 2, [torch.ones(ROW)]),
        (True, 2, [HIGH[1:]]),
    ],
)
def test_a_later_call_of_ema_stays_in_bounds(split: bool, place: int, value: object) -> None:
    prepared, masters = Prepared("ema"), [LOW] if split else [torch.ones(ROW)]
    averages, rows = [torch.zeros(ROW), torch.zeros(ROW)], [torch.zeros(1, dtype=torch.int32)]
    arguments = [averages, masters, [HIGH] if split else [], rows, torch.ones(1, 2)]
    with backend(ISAS[0]):
        prepared(*arguments)
        wrong = [*arguments[:place], value, *arguments[place + 1 :]]
        before = copied(wrong)
        with pytest.raises(
            RuntimeError, match="this call was prepared for|unlike lengths|expected float16|but rates has"
        ):
            prepared(*wrong)
    assert all(map(torch.equal, tensors(wrong), tensors(before)))


@needs_library
def test_a_backend_that_is_chosen_later_runs() -> None:
    prepared, ran = Prepared("pack"), []
    with Watch(ran):
        for name in ("cpu", "reference", "cpu"):
            with zero_kernels.use_backend(name):
                prepared(*pack_arguments(0))
                prepared(*pack_arguments(0))
    assert ran == [
        "zero_kernels_C",
        "zero_kernels_C",
        "zero_kernels",
        "zero_kernels",
        "zero_kernels_C",
        "zero_kernels_C",
    ]


def test_nothing_is_kept() -> None:
    prepared, arguments = Prepared("foreach_step"), foreach_arguments((ROW,), 0)
    prepared(*arguments)
    kept = [weakref.ref(tensor) for tensor in tensors(arguments) if tensor is not TABLE]
    del arguments
    assert not any(reference() is not None for reference in kept)
