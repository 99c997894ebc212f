"""What a step sends: exact calls and bytes, in ``stats()`` and as the process group saw them, in one fixed order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from guards import Collective, CollectiveLog
from harness import run_ranks
from training_cases import ROW, TINY_CAP_MB, bytes_of, linear_backward, make_gradients, make_parameters, maybe_no_sync

# Whole rows on every rank for 1 to 4 ranks: no padding, so bytes are exact whatever bucket a parameter is in.
ALIGNED = ((12 * ROW,), (12, ROW), (2, 6, ROW), (24, ROW))
WARM_UP = 3


@dataclass(frozen=True)
class Run:
    """A training run whose last step is observed."""

    stage: int
    shapes: tuple[tuple[int, ...], ...] = ALIGNED
    dtype: torch.dtype = torch.bfloat16
    cap_mb: float = TINY_CAP_MB
    reduce_dtype: torch.dtype | None = None
    micro: int = 1
    no_sync: bool = False
    overlap: bool = True
    clip: tuple[float, ...] = ()  # norm types asked for before the step


@dataclass(frozen=True)
class Seen:
    """One steady step: ``stats()`` before and after, and the collectives in order."""

    before: dict[str, Any]
    after: dict[str, Any]
    calls: list[Collective]

    def counted(self, kind: str) -> tuple[int, int]:
        """Calls and bytes of ``kind`` in this step by ``stats()``."""
        none = {"calls": 0, "bytes": 0}
        old, new = (stats["collectives"].get(kind, none) for stats in (self.before, self.after))
        return new["calls"] - old["calls"], new["bytes"] - old["bytes"]

    def issued(self, name: str) -> tuple[int, int]:
        """Calls and bytes of a c10d operator in this step."""
        sizes = [call.bytes for call in self.calls if call.name == name]
        return len(sizes), sum(sizes)


def observe(rank: int, run: Run) -> Seen:
    import zero_optim

    params = make_parameters(run.shapes, run.dtype)
    opt = zero_optim.ShardedAdamW(
        params,
        stage=run.stage,
        bucket_cap_mb=run.cap_mb,
        grad_reduce_dtype=run.reduce_dtype,
        overlap_grad_reduce=run.overlap,
    )

    def one_step(step: int) -> None:
        for micro in range(run.micro):
            with maybe_no_sync(opt, run.no_sync and micro < run.micro - 1):
                linear_backward(params, make_gradients(params, rank, step, micro))
        for norm_type in run.clip:
            opt.clip_grad_norm_(1.0, norm_type)
        opt.step()
        opt.zero_grad()

    for step in range(WARM_UP):
        one_step(step)
    before = opt.stats()
    with CollectiveLog() as log:
        one_step(WARM_UP)
    seen = Seen(before, opt.stats(), log.calls)
    opt.close()
    return seen


def _observe(rank: int, world_size: int, runs: list[Run]) -> list[Seen]:
    return [observe(rank, run) for run in runs]


def _padded_bytes(run: Run, world_size: int) -> int:
    """Bytes of the one bucket of a single-parameter model, in the reduce dtype."""
    (shape,) = run.shapes
    unit = ROW * (world_size if run.stage >= 1 else 1)  # nothing is sharded at stage 0
    numel = torch.Size(shape).numel()
    return -(-numel // unit) * unit * (run.reduce_dtype or run.dtype).itemsize


def _check(seen: Seen, run: Run, world_size: int, bucket_bytes: int, param_bytes: int, reductions: int = 1) -> None:
    buckets = seen.after["buckets"]
    reduce_kind, reduce_op = ("all_reduce", "allreduce_") if run.stage == 0 else ("reduce_scatter", "scatter_")
    expected = {reduce_kind: (buckets * reductions, bucket_bytes * reductions)}
    if run.stage >= 1:
        expected["all_gather"] = (buckets, param_bytes)
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        assert seen.counted(kind) == expected.get(kind, (0, 0)), f"{run}: stats of {kind}"
    exchanges, exchange_bytes = seen.counted("exchange")
    beside = [norm for call, norm in enumerate(run.clip) if call > 0 or norm not in (1.0, 2.0)]
    assert exchanges == 1 + len(beside), f"{run}: exchanges"
    assert seen.counted("construction") == (0, 0)

    # The same by what the process group saw. The exchange is an all-reduce of one fp32 vector.
    reduced = seen.issued("allreduce_")
    assert reduced[1] - exchange_bytes == (bucket_bytes * reductions if run.stage == 0 else 0), f"{run}: {reduced}"
    assert reduced[0] - exchanges == (buckets * reductions if run.stage == 0 else 0)
    if run.stage >= 1:
        assert seen.issued(reduce_op) == expected[reduce_kind], f"{run}: gloo's reduce-scatter"
        parts = (buckets * world_size, param_bytes)
        assert seen.issued("broadcast_") == parts, f"{run}: over gloo a gather is a broadcast a rank"
    assert not {call.name for call in seen.calls} - {"allreduce_", "scatter_", "broadcast_"}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_calls_and_bytes_of_one_step(world_size):
    runs = [Run(stage, dtype=dtype) for stage in (0, 1, 2) for dtype in (torch.float32, torch.bfloat16)]
    runs += [Run(2, reduce_dtype=torch.float32), Run(1, reduce_dtype=torch.float32), Run(1, overlap=False)]
    for results in run_ranks(world_size, _observe, runs):
        for run, seen in zip(runs, results, strict=True):
            params = make_parameters(run.shapes, run.dtype)
            assert seen.after["buckets"] == len(ALIGNED)  # every parameter is larger than the cap
            numel = sum(p.numel() for p in params)
            _check(seen, run, world_size, numel * (run.reduce_dtype or run.dtype).itemsize, bytes_of(params))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_bucket_is_padded_to_whole_rows_on_every_rank_that_shares_it(world_size):
    runs = [Run(stage, ((numel,),)) for stage in (0, 1, 2) for numel in (1, 129, 1000)]
    for results in run_ranks(world_size, _observe, runs):
        for run, seen in zip(runs, results, strict=True):
            padded = _padded_bytes(run, world_size)
            assert seen.after["buckets"] == 1
            _check(seen, run, world_size, padded, padded)


def test_accumulation_sends_once_under_no_sync_and_each_time_without():
    runs = [Run(stage, micro=3, no_sync=no_sync) for stage in (0, 1, 2) for no_sync in (True, False)]
    for results in run_ranks(2, _observe, runs):
        for run, seen in zip(runs, results, strict=True):
            size = bytes_of(make_parameters(run.shapes, run.dtype))
            _check(seen, run, 2, size, size, reductions=1 if run.no_sync else 3)


def test_a_norm_is_the_exchange_that_the_step_makes_anyway_and_another_type_costs_one_more():
    clips = ((2.0,), (float("inf"),), (1.0, 2.0), (3.0,), (2.0, 8.0))
    runs = [Run(stage, clip=clip) for stage in (0, 1, 2) for clip in clips]
    for results in run_ranks(2, _observe, runs):
        for run, seen in zip(runs, results, strict=True):
            size = bytes_of(make_parameters(run.shapes, run.dtype))
            _check(seen, run, 2, size, size)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_sends_nothing(stage):
    (results,) = run_ranks(1, _observe, [Run(stage), Run(stage, clip=(2.0,))])
    for seen in results:
        assert seen.calls == []
        assert not any(entry["calls"] for entry in seen.after["collectives"].values())


def _orders(rank: int, world_size: int, stage: int) -> list[list[tuple[str, int]]]:
    """Collectives of three steps in which gradients become ready in an order of the rank's own."""
    import zero_optim

    shapes = [((i + 1) * 12, ROW) for i in range(5)]
    params = make_parameters(shapes, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    steps = []
    for step in range(4):
        grads = make_gradients(params, rank, step)
        order = list(range(5)) if (rank + step) % 2 else [3, 1, 4, 0, 2]
        with CollectiveLog() as log:
            linear_backward([params[i] for i in order], [grads[i] for i in order])
            opt.step()
        opt.zero_grad()
        steps.append([(call.name, call.bytes) for call in log.calls])
    opt.close()
    return steps


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_order_is_the_same_on_every_rank_whatever_becomes_ready_first(stage):
    """Reductions by ascending bucket, gathers by descending: told apart by their sizes, which all differ."""
    first, *others = run_ranks(3, _orders, stage)
    assert all(other == first for other in others)
    for step in first[1:]:
        assert Counter(step) == Counter(first[-1])
        reductions = [size for name, size in step if name == ("scatter_" if stage else "allreduce_")][:5]
        parts = [size for name, size in step if name == "broadcast_"]  # three ranks' of one bucket after another
        gathers = [3 * size for size in parts[::3]]
        assert parts == [part for part in parts[::3] for _ in range(3)]
        assert len(set(reductions)) == 5
        assert gathers == (reductions[::-1] if stage else [])
