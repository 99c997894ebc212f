"""`ema`: averages of the masters, by the written formula; what stays as it was; what is refused."""

import math

import numpy as np
import pytest
import torch
from kernel_cases import FLOATS, ISAS, Averaged, awkward, backend, joined, same_bits, threads
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, codecs

every_backend = pytest.mark.parametrize("name", ["reference", *ISAS])
every_dtype = pytest.mark.parametrize("dtype", (*FLOATS, *codecs.LOWS), ids=str)
SIZES = (2000, 0, 1, 127, 128, 129, 4097)


def written(shards: Averaged) -> list[Tensor]:
    """In NumPy, whose fp32 operations are each correctly rounded."""
    each, made = shards.rates.shape[1], []
    for i, average in enumerate(shards.averages):
        master, slots = shards.masters[i // each], shards.row_slots[i // each].long()
        p = joined(shards.params[i // each], master) if shards.params else master.float()
        slot = slots.repeat_interleave(ROW)[: len(average)]
        rate, e = shards.rates[slot, i % each].numpy(), average.numpy()
        with np.errstate(all="ignore"):
            moved = torch.from_numpy(e + rate * (p.numpy() - e))
        made.append(torch.where((slot >= 0) & (torch.from_numpy(rate) != 0), moved, average))
    return made


@every_backend
@every_dtype
def test_averages_are_those_of_the_written_formula(dtype: torch.dtype, name: str) -> None:
    for each, offset in ((0, 0), (1, 0), (2, 3), (3, 1)):
        shards = Averaged(SIZES, dtype, each, offset)
        want = written(shards)
        assert len(want) == len(SIZES) * each
        assert all(map(same_bits, want, shards.run(name))), (each, offset)


@every_dtype
def test_threads_share_rows_without_changing_a_bit(dtype: torch.dtype) -> None:
    shards = Averaged((0, 3 * ROW, 100_003, 77_777), dtype, 2)
    want = written(shards)
    for isa in ISAS:
        with threads(3):
            assert all(map(same_bits, want, shards.run(isa))), isa


@every_backend
@every_dtype
def test_where_the_rate_is_0_every_bit_stays_and_no_master_counts(dtype: torch.dtype, name: str) -> None:
    """Not 0 * inf, and a NaN's bits as well; padding, whatever its rate would be; and no slot at all."""
    numel, high = 3 * ROW + 5, torch.tensor([math.nan, math.inf, -math.inf]).repeat(ROW + 2)[: 3 * ROW + 5]
    split = dtype in codecs.LOWS
    masters, params = [torch.ones(numel).to(dtype) if split else high.to(dtype)], [high.bfloat16()] if split else []
    rates = torch.tensor([[0.0, 0.5], [-0.0, 0.0], [1.0, 1.0]])
    for slots, table in (([0, 1, -1, 0], rates), ([-1] * 4, rates), ([-1] * 4, rates[:0])):
        averages = [awkward(numel, torch.float32, k).clone() for k in range(2)]
        averages[0].view(torch.int32)[::7] = 0x7FA00001  # a NaN that signals
        before = [x.view(torch.int32).clone() for x in averages]
        with backend(name):
            zero_kernels.ema(averages, masters, params, [torch.tensor(slots, dtype=torch.int32)], table)
        moved = torch.tensor([slot == 0 for slot in slots]).repeat_interleave(ROW)[:numel]
        assert torch.equal(averages[0].view(torch.int32), before[0])
        assert torch.equal(averages[1].view(torch.int32)[~moved], before[1][~moved])
        assert not averages[1][moved].isfinite().any()


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_of_no_slot_is_named_before_any_shard_is_averaged(isa: str) -> None:
    averages, masters = ([torch.full((ROW,), value) for _ in range(2)] for value in (1.0, 2.0))
    rows = [torch.tensor([slot], dtype=torch.int32) for slot in (0, 3)]
    with backend(isa), pytest.raises(RuntimeError, match=r"row_slot\[0\] = 3, but rates has 3 rows"):
        zero_kernels.ema(averages, masters, [], rows, torch.ones(3, 1))
    assert all((average == 1).all() for average in averages)


def test_autograd_knows_that_averages_changed_and_masters_did_not() -> None:
    lists, averages = Averaged((300, 5), torch.int16, 2).lists()
    zero_kernels.ema(*lists)
    assert [tensor._version for tensor in averages] == [1] * 4
    assert not any(tensor._version for given in lists[1:4] for tensor in given)


def arguments(split: bool = False) -> dict[str, object]:
    """Of two shards, with two averages each."""
    return {
        "averages": [torch.zeros(200) for _ in range(4)],
        "masters": [torch.zeros(200, dtype=torch.int8 if split else torch.float32) for _ in range(2)],
        "params": [torch.zeros(200, dtype=torch.bfloat16) for _ in range(2 * split)],
        "row_slots": [torch.zeros(2, dtype=torch.int32)] * 2,
        "rates": torch.ones(3, 2),
    }


ONE, HALVES = torch.zeros(200), torch.zeros(200, dtype=torch.bfloat16)
LOWS = [torch.zeros(200, dtype=low) for low in codecs.LOWS]
SLOTS = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("split", "changed", "error", "message"),
    [
        (False, {"masters": []}, ValueError, "ema needs at least one shard"),
        (False, {"averages": [ONE] * 3}, ValueError, r"got \[3, 2\] for 3 averages of 2 masters"),
        (False, {"rates": torch.ones(3, 1)}, ValueError, r"rates must have shape \[slots, averages of a shard\]"),
        (False, {"rates": torch.ones(6)}, ValueError, r"rates must have shape .*, got \[6\] for 4 averages"),
        (False, {"rates": torch.ones(3, 2).double()}, TypeError, "rates must be float32, got float64"),
        (False, {"rates": torch.ones(3, 4)[:, ::2]}, ValueError, "rates must be contiguous"),
        (False, {"rates": torch.ones(3, 2, device="meta")}, ValueError, "rates is on meta, the other tensors on cpu"),
        (False, {"averages": [ONE, ONE, ONE, ONE.half()]}, TypeError, "shard 1: average 1 must be float32, got float1"),
        (False, {"averages": [ONE, ONE[1:]] * 2}, ValueError, "shard 0: average 1 must have 200 elements, got 199"),
        (False, {"averages": [ONE.view(10, 20)] * 4}, ValueError, "shard 0: average 0 must be flat"),
        (False, {"masters": [ONE, ONE.double()]}, TypeError, "shard 1: master must be .* or int8, got float64"),
        (
            False,
            {"masters": [ONE, ONE.half()]},
            TypeError,
            "shard 1: masters must have one dtype: make a call for each",
        ),
        (True, {"masters": LOWS}, TypeError, "shard 1: masters must have one dtype: make a call for each dtype"),
        (False, {"masters": [torch.zeros(400)[::2]] * 2}, ValueError, "shard 0: master must be contiguous"),
        (False, {"masters": [ONE, ONE.to("meta")]}, ValueError, "shard 1: master is on meta, the other tensors on cpu"),
        (False, {"params": [HALVES]}, ValueError, "params must have one tensor a shard: 2 masters, 1 params"),
        (True, {"params": []}, ValueError, "params must have one tensor a shard: 2 masters, 0 params"),
        (True, {"params": [ONE] * 2}, TypeError, "shard 0: param must be bfloat16, got float32"),
        (True, {"params": [HALVES, HALVES[1:]]}, ValueError, "shard 1: param must have 200 elements, got 199"),
        (False, {"row_slots": [SLOTS]}, ValueError, "row_slots must have one tensor a shard: 2 masters, 1 row_slots"),
        (False, {"row_slots": [SLOTS, SLOTS[:1]]}, ValueError, "shard 1: row_slot must have 2 elements, got 1"),
        (False, {"row_slots": [SLOTS.long()] * 2}, TypeError, "shard 0: row_slot must be int32, got int64"),
    ],
)
def test_wrong_arguments_are_named(
    split: bool, changed: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        zero_kernels.ema(**arguments(split) | changed)  # type: ignore[arg-type]
