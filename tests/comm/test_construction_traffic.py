"""What construction sends: a collective a bucket, not one a parameter, and afterwards all have rank 0's values."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from cells import slow
from guards import CollectiveLog
from harness import run_ranks
from torch import Tensor, nn
from training_cases import ROW, TINY_CAP_MB, linear_backward
from zero_optim.comm import sharding, transport

ROWS = 2 * 3 * ROW  # whole rows for 2 and 3 ranks: no padding
COUNT = 12


@dataclass(frozen=True)
class Built:
    """``calls``: bytes of each broadcast. ``account``: what ``stats`` calls construction."""

    values: list[Tensor]
    calls: list[int]
    account: dict[str, Any]
    buckets: int


def _sent(log: CollectiveLog) -> list[int]:
    return [call.bytes for call in log.calls if call.name == "broadcast_"]


def _of_rank(rank: int, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    """Values that no other rank has, and that differ from one parameter to the next."""
    return [
        nn.Parameter(torch.full(shape, 10.0 * rank + number).to(dtype)) for number, shape in enumerate(shapes, start=1)
    ]


def _built(opt: zero_optim.ShardedAdamW, params: list[nn.Parameter], log: CollectiveLog) -> Built:
    stats = opt.stats()
    return Built(
        [p.detach().clone() for p in params], _sent(log), stats["collectives"]["construction"], stats["buckets"]
    )


def _build(rank: int, world_size: int, stage: int, cap_mb: float) -> Built:
    params = _of_rank(rank, [(ROWS,)] * COUNT, torch.bfloat16)
    with CollectiveLog() as log:
        opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=cap_mb)
    built = _built(opt, params, log)
    opt.close()
    return built


def test_parameters_travel_by_the_bucket():
    """12 parameters in 4 buckets, as a quarter of them fits; and in a bucket each, where the cap is smaller."""
    for stage, (cap_mb, buckets) in [(s, case) for s in (0, 1, 2) for case in ((25.0, 4), (TINY_CAP_MB, COUNT))]:
        for built in run_ranks(3, _build, stage, cap_mb):
            whole = COUNT * ROWS * 2
            assert built.buckets == buckets
            assert built.calls == [whole // buckets] * buckets
            assert (built.account["calls"], built.account["bytes"]) == (
                buckets + 2,
                whole + 2 * 4,
            )  # did any rank fail?
            assert [value.unique().tolist() for value in built.values] == [[n] for n in range(1, COUNT + 1)]


def _build_frozen(rank: int, world_size: int, together_bytes: int | None) -> tuple[Built, list[bool]]:
    """Two dtypes, a parameter in five of them trained; one frozen one has no elements, and one is transposed."""
    params = [*_of_rank(rank, [(ROWS,), (3, 5), (7,), (0,), (2, 9)], torch.float32)]
    params += _of_rank(rank, [(ROWS,), (11,)], torch.bfloat16)
    params[4].data = params[4].data.t()
    for place in (1, 2, 3, 4, 6):
        params[place].requires_grad_(False)
    before, sharding._TOGETHER_BYTES = sharding._TOGETHER_BYTES, together_bytes or sharding._TOGETHER_BYTES
    try:
        with CollectiveLog() as log:
            opt = zero_optim.ShardedAdamW(params)
        built = _built(opt, params, log)
    finally:
        sharding._TOGETHER_BYTES = before
    strides = [params[4].stride() == (1, 9)]
    opt.close()
    return built, strides


def test_frozen_parameters_travel_together_by_dtype():
    for built, strides in run_ranks(2, _build_frozen, None):
        frozen = [4 * (15 + 7 + 0 + 18), 2 * 11]
        assert built.calls == [*frozen, 2 * ROWS, 4 * ROWS]  # in a bucket of its own each, the last ready first
        assert [value.unique().tolist() for value in built.values] == [[1], [2], [3], [], [5], [1], [2]]
        assert strides == [True]


def test_a_large_frozen_parameter_travels_alone():
    """Together they may have 64 bytes: 60 and 28 do not, 28, 0 and 32 would, but the last has 72."""
    for built, _ in run_ranks(2, _build_frozen, 64):
        assert built.calls[:4] == [60, 28, 72, 22]
        assert [value.unique().tolist() for value in built.values] == [[1], [2], [3], [], [5], [1], [2]]


def _grow(rank: int, world_size: int) -> tuple[list[int], list[int], list[list[float]]]:
    """Eight parameters are added, then eight frozen ones thaw. Bytes of what was broadcast, and all values."""
    first, added, frozen = (_of_rank(rank, [(ROWS,)] * 8, torch.float32) for _ in range(3))
    for parameter in frozen:
        parameter.requires_grad_(False)
    opt = zero_optim.ShardedAdamW([*first, *frozen], lr=0.0, weight_decay=0.0)
    with CollectiveLog() as adding:
        opt.add_param_group({"params": added})
    for parameter in frozen:
        parameter.data.add_(rank)  # the ranks have parted: what thaws is broadcast once more
        parameter.requires_grad_(True)
    linear_backward([*first, *added, *frozen], [torch.ones(ROWS)] * 24)
    comm, thawing = opt.engine.sharding.world, []
    broadcast = comm.broadcast
    comm.broadcast = lambda tensor: (thawing.append(tensor.nbytes), broadcast(tensor))
    opt.step()
    values = [p.detach().unique().tolist() for p in [*added, *frozen]]
    opt.close()
    return _sent(adding), thawing, values


def test_what_is_added_and_what_thaws_travels_by_the_bucket():
    """A bucket has a quarter of all that is trained then, at most: 4 of 16 parameters, and 6 of 24."""
    for adding, thawing, values in run_ranks(2, _grow):
        assert adding == [4 * ROWS * 4] * 2
        assert thawing == [6 * ROWS * 4, 2 * ROWS * 4]
        assert values == [[n] for n in range(1, 9)] * 2


Sizes = dict[tuple[str, str], int]


def _first_step(rank: int, world_size: int, stage: int, dtype: torch.dtype, options: dict[str, Any]) -> list[Sizes]:
    """By kind and group, the most elements that a rank has sent in a call: at construction, and in the first step."""

    def largest() -> Sizes:
        sizes: Sizes = {}
        for entry in used.issued:
            if entry.kind in ("reduce_scatter", "all_gather", "all_reduce"):
                of = entry.kind, entry.group
                sizes[of] = max(entry.numel, sizes.get(of, 0))
        used.issued.clear()
        return sizes

    used: Any = transport.used()
    model = nn.Sequential(*(nn.Linear(ROW, ROW, bias=False) for _ in range(4))).to(dtype)
    if stage == 3:
        zero_optim.shard_module(model, (nn.Linear,), **options)
    opt = zero_optim.ShardedAdamW(model.parameters(), stage=stage)
    sizes = [largest()]
    model(torch.ones(2, ROW, dtype=dtype)).sum().backward()
    opt.step()
    sizes.append(largest())
    opt.close()
    return sizes


@pytest.mark.parametrize(
    ("stage", "ranks", "options"),
    [(0, 2, {}), pytest.param(1, 2, {}, marks=slow), (2, 2, {}), (3, 2, {}), (3, 4, {"reshard_after_forward": 2})],
)
def test_nccl_has_connected_for_the_sizes_of_a_step(stage, ranks, options):
    """It chooses an algorithm by size, and connects the ranks at its first use, while its host waits for all of them.
    In the first backward one may have raised."""
    least = ROW * ROW // ranks  # a bucket or a unit, or this rank's part of it
    for before, first in run_ranks(ranks, _first_step, stage, torch.bfloat16, options, simulated="late"):
        large = {of: numel for of, numel in first.items() if numel >= least}
        assert len(large) == {0: 1, 3: 2 + len(options)}.get(stage, 2)
        assert all(before.get(of, 0) >= numel for of, numel in large.items()), (before, first)


WIDTHS = (1, 1, 3, 8, 8, 64)  # rows of a bucket of its own each; four of them are of sizes of their own


def _connected(
    rank: int, world_size: int, stage: int, reduced: torch.dtype | None
) -> tuple[list[tuple[str, int]], list[int], int]:
    """What a rank has connected for, by kind and elements, in this order; the buckets; memory taken for that."""
    used: Any = transport.used()
    params = [nn.Parameter(torch.ones(ROWS * width, dtype=torch.bfloat16)) for width in WIDTHS]
    taken, empty = [], torch.empty

    def seen(*size: Any, **options: Any) -> Tensor:
        if options.get("dtype") == torch.uint8 and sys._getframe(1).f_code.co_name == "connect_for":
            taken.append(size[0])
        return empty(*size, **options)

    with mock.patch.object(torch, "empty", seen):
        opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=TINY_CAP_MB, grad_reduce_dtype=reduced)
    kinds = ("reduce_scatter", "all_gather", "all_reduce")
    sent = [(entry.kind, entry.numel) for entry in used.issued if entry.kind in kinds]
    buckets = [bucket.layout.numel for bucket in opt.engine.reducer.buckets]
    opt.close()
    return sent, buckets, max(taken)


@pytest.mark.parametrize(("stage", "reduced"), [(0, None), (2, None), (2, torch.float32)])
def test_nccl_has_connected_for_each_size_of_a_bucket(stage: int, reduced: torch.dtype | None) -> None:
    """By a factor of 4: the largest of each. They take the memory of the buffers that reductions have anyway."""
    (first, buckets, taken), *others = run_ranks(2, _connected, stage, reduced, simulated="late")
    assert all(sent == first for sent, _, _ in others), "all ranks have to connect for the same, in one order"
    assert sorted(buckets) == [ROWS * width for width in WIDTHS]
    reductions = [numel for kind, numel in first if kind == ("reduce_scatter" if stage else "all_reduce")]
    large = [numel for numel in reductions if numel >= ROWS]
    assert sorted(large) == [ROWS, ROWS * 3, ROWS * 8, ROWS * 64], "one of each class of sizes"
    gathers = [numel * 2 for kind, numel in first if kind == "all_gather" and numel * 2 >= ROWS]
    assert sorted(gathers) == (sorted(large) if stage else [])
    # The first connection is of as many elements as there are ranks. A gradient that is reduced as it is has no buffer.
    straight = stage == 2 and reduced is None
    assert taken <= (2 * max(buckets) if straight else 64)


def test_sizes_that_are_connected() -> None:
    every = [(2**shift, torch.bfloat16) for shift in range(10, 21)] + [(2**20, torch.float32)]
    sizes = sharding.of_each_size(every)
    assert sizes == [(2**shift, torch.bfloat16) for shift in (11, 13, 15, 17, 19, 20)] + [(2**20, torch.float32)]
