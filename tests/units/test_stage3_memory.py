"""What stage 3 holds: 16/N bytes a parameter between steps; in a step a few units more, never the model."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from sharded_cases import Allocated, Block, Net, Run, allocated, gathered, loss_of, make, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training_cases import bytes_of
from zero_optim.comm.streams import is_there
from zero_optim.units.cycle import Prefetch

DEPTH = 6
WAITING = {"overlap_param_gather": False}
KINDS = {"parameters": 2, "gradients": 2, "master_low": 2, "exp_avg": 4, "exp_avg_sq": 4}  # bytes a parameter


class WideNet(Net):
    """Units of half a megabyte: beside them the activations of a few tokens, and the root, are small.

    ``segment``: how many blocks a checkpoint holds; 0: there is none. ``reentrant``: which kind it is.
    """

    def __init__(self, segment: int = 0, reentrant: bool = False) -> None:
        super().__init__(width=200, depth=DEPTH)
        self.segment, self.reentrant = segment, reentrant

    def forward(self, batch: Tensor) -> Tensor:
        if not self.segment:
            return super().forward(batch)
        x = self.embedding(batch)
        for start in range(0, DEPTH, self.segment):
            run = nn.Sequential(*self.blocks[start : start + self.segment])
            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def units_of(model: nn.Module) -> list[Any]:
    return model._zero_optim_sharded.units


def bytes_left(before: int, timeout: float = 20) -> int:
    """Live bytes beyond ``before``, once there are none, or after ``timeout`` seconds.

    A thread of gloo lets go of a collective's tensors a moment after ``wait`` has returned.
    """
    deadline = time.monotonic() + timeout
    while (left := live_bytes() - before) != 0 and time.monotonic() < deadline:
        pass
    return left


def full_bytes(unit: Any) -> int:
    """Of all parameters of a unit, padding included."""
    return sum(flat.full.numel() * flat.full.element_size() for flat in unit.flats)


def few(rank: int, step: int) -> Tensor:
    return tokens(rank, step, batch=1, length=3)


def short_step(rank: int, model: nn.Module, opt: Any, step: int, before_zero_grad: Any = None) -> None:
    loss_of(model, few(rank, step)).backward()
    opt.step()
    if before_zero_grad is not None:
        before_zero_grad()
    opt.zero_grad()


def live_storages() -> dict[int, int]:
    """Address to bytes of the storage of every tensor that Python knows of."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # a shard has no storage of its own
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def live_bytes() -> int:
    return sum(live_storages().values())


# -- between steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steady:
    """``live``: bytes after construction, then after each ``step`` and ``zero_grad``; ``stats``: ``memory`` then."""

    live: list[int]
    stats: list[dict[str, int]]
    parameters: int
    largest: int  # bytes of the largest unit's parameters


def _steady(rank: int, world_size: int, reshard: bool | int, steps: int) -> Steady:
    before = live_bytes()
    run = Run(dtype=torch.bfloat16, shard={"reshard_after_forward": reshard}, options=WAITING)
    model, opt = make(run, WideNet())
    live, stats = [], []

    def look() -> None:
        live.append(live_bytes() - before)
        stats.append(opt.stats()["memory"])

    look()
    for step in range(steps):
        short_step(rank, model, opt, step, look)
        look()
    largest = max(map(full_bytes, units_of(model)))
    opt.close()
    return Steady(live, stats, sum(p.numel() for p in model.parameters()), largest)


@pytest.mark.parametrize(("world_size", "reshard"), [(2, True), (2, False), (3, True), (4, 2)])
def test_a_rank_holds_14_bytes_a_parameter_over_n_and_12_without_gradients(world_size, reshard):
    """Seen live, and as ``stats`` counts: there all ranks together hold each parameter once."""
    ranks = run_ranks(world_size, _steady, reshard, 6)
    count = ranks[0].parameters
    for of_rank in ranks:
        assert of_rank.live[5:] == of_rank.live[5:7] * 4, "nothing grows"
    for moment in range(7):
        there = {kind: size for kind, size in KINDS.items() if kind != "gradients" or moment % 2 == 1}
        held_by_all = sum(there.values()) * count
        for of_rank in ranks:
            memory = of_rank.stats[moment]
            assert memory["communication"] == 0
            assert memory["unsharded"] == 0
            held = of_rank.live[moment] - memory["communication"] - memory["padding"]
            # Padding counts: equal shards give the last ranks less of the parameters and more of it.
            counted = sum(memory[kind] for kind in KINDS)
            for seen in (held, counted):
                assert seen + memory["padding"] == pytest.approx(held_by_all / world_size, rel=0.01)
        for kind in KINDS:
            assert sum(of_rank.stats[moment][kind] for of_rank in ranks) == there.get(kind, 0) * count, kind


def _kept(rank: int, world_size: int, reshards: Sequence[bool | int]) -> list[Any]:
    """Bytes of root and units; ``unsharded`` after a forward, its backward, an evaluation, a step; and ``close``."""
    results = []
    for reshard in reshards:
        run = Run(dtype=torch.bfloat16, shard={"reshard_after_forward": reshard, "prefetch": 2})
        model, opt = make(run, WideNet())
        seen = []
        for step in range(2):
            loss = loss_of(model, few(rank, step))
            seen.append(opt.stats()["memory"]["unsharded"])
            loss.backward()
            seen.append(opt.stats()["memory"]["unsharded"])
            with torch.no_grad():
                loss_of(model, few(rank, step))
            seen.append(opt.stats()["memory"]["unsharded"])
            opt.step()
            seen.append(opt.stats()["memory"]["unsharded"])
            opt.zero_grad()
        root, *units = map(full_bytes, units_of(model))
        opt.close()
        seen.append(sum(flat.nbytes() for unit in units_of(model) for flat in unit.flats))
        results.append((root, sum(units), seen))
    return results


def test_what_is_kept_between_forward_and_backward():
    """The root; all units; or a share of them: of two ranks the half; and the last unit, after the first forward.
    Evaluation keeps what may be kept for ever. After a step the root and the first unit are there, until the optimizer
    is closed."""
    reshards = (True, False, 2)
    for results in run_ranks(4, _kept, reshards):
        for reshard, (root, units, seen) in zip(reshards, results, strict=True):
            last = units // DEPTH
            share = {True: 0.0, False: 1.0, 2: 0.5}[reshard]
            ever, ahead = root + units if reshard is False else 0, root + last
            first = [root + share * units, 0, ever, ahead]
            assert seen == [*first, root + share * (units - last) + last, *first[1:], 0], reshard


# -- in a step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Of a step, in bytes. ``unit`` and ``root``: of their parameters."""

    unit: int
    root: int
    forward: Allocated
    backward: Allocated
    update: Allocated
    units_forward: int  # of units beside the root, the most that were unsharded, or about to be, at once
    units_backward: int
    gradients: int  # the most that were in full beside the root's

    def buffers(self, ranks: int) -> int:
        """What a reduction needs while it is under way: what is sent, and what is received beside the sum's place."""
        return 2 * self.unit * (ranks - 1) // ranks

    def check_left(self, ranks: int) -> int:
        """Until step the shards of the gradients are kept, and the buffers of what has not arrived. Returns those."""
        shards = (DEPTH * self.unit + self.root) // ranks
        left = self.forward.left + self.backward.left
        assert shards <= left <= shards + self.buffers(ranks)
        assert self.update.left == -left
        return shards


class _Watch(TorchDispatchMode):
    """Looks, at each op, at what of units beside the root is in memory in full: parameters and local gradients."""

    def __init__(self, units: Sequence[Any]) -> None:
        super().__init__()
        self.flats = [flat for unit in units[1:] for flat in unit.flats]
        self.parameters = self.gradients = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        there = sum(flat.full.untyped_storage().nbytes() for flat in self.flats)
        whole = [p.grad for flat in self.flats for p in flat.params if type(p.grad) is Tensor]
        self.parameters, self.gradients = max(self.parameters, there), max(self.gradients, bytes_of(whole))
        return result


def _step(rank: int, world_size: int, shard: dict[str, Any], segment: int, reentrant: bool) -> Step:
    model, opt = make(Run(dtype=torch.bfloat16, shard=shard, options=WAITING), WideNet(segment, reentrant))
    for step in range(2):
        short_step(rank, model, opt, step)
    losses: list[Tensor] = []
    forward = allocated(lambda: losses.append(loss_of(model, few(rank, 2))))
    backward = allocated(lambda: losses.pop().backward())
    update = allocated(lambda: (opt.step(), opt.zero_grad()))
    units = units_of(model)
    with _Watch(units) as forwards:
        loss = loss_of(model, few(rank, 3))
    with pytest.MonkeyPatch.context() as patch, _Watch(units) as backwards:
        # As where each reduction has arrived before the next unit is sent for.
        patch.setattr(Prefetch, "reduction_begins", lambda prefetch, of: None)
        loss.backward()
    opt.step()
    opt.close()
    root, unit = map(full_bytes, units[:2])
    counts = forwards.parameters // unit, backwards.parameters // unit
    return Step(unit, root, forward, backward, update, *counts, max(forwards.gradients, backwards.gradients))


def _steps(rank: int, world_size: int, cases: Sequence[tuple[dict[str, Any], int, bool]]) -> list[Step]:
    return [_step(rank, world_size, *case) for case in cases]


SLACK = 0.2  # of a unit, for the activations of two tokens and their gradients


@pytest.mark.parametrize(
    ("segment", "reentrant"),
    [(0, False), (1, False), (1, True), (2, False), (2, True)],
    ids=["plain", "checkpoints", "re-entrant", "checkpoints of two", "re-entrant of two"],
)
def test_the_peak_of_a_step_is_a_few_units_whatever_the_depth(segment, reentrant):
    """The one that computes, those sent for, and the gradients of one; then what is reduced.

    A checkpoint of several units needs them all at once; a re-entrant one calls its units while those after it still
    wait for the last of their gradients.
    """
    prefetches = (0, 2) if segment else (0, 1, 2)
    cases = [({"prefetch": prefetch}, segment, reentrant) for prefetch in prefetches]
    for steps in run_ranks(2, _steps, cases):
        for prefetch, step in zip(prefetches, steps, strict=True):
            forward, backward = prefetch + 1, prefetch + max(segment, 1) + reentrant
            assert (step.units_forward, step.units_backward) == (forward, backward)
            assert step.gradients == pytest.approx(step.unit, rel=0.01)
            slack = SLACK * step.unit
            assert forward * step.unit < step.forward.peak <= step.root + forward * step.unit + slack
            assert step.unit <= step.forward.left - step.root <= step.unit + slack, "the last unit stays"
            peak = step.backward.peak + step.unit
            # What is sent has the place of a unit that is not sent for yet.
            whole = (backward + 1) * step.unit + (step.buffers(ranks=2) if prefetch == 0 else 0)
            assert (backward + 1) * step.unit - slack < peak
            assert peak <= whole + step.root + step.check_left(ranks=2) + slack
            assert step.update.peak <= slack


def test_what_is_kept_is_not_allocated_twice():
    """Without resharding, backward allocates the gradients of one unit, in the place of one that is over; with a share
    kept by node, all else again."""
    cases = [({"reshard_after_forward": keep, "prefetch": 1}, 0, False) for keep in (False, 2)]
    for kept, by_node in run_ranks(4, _steps, cases):
        slack = SLACK * kept.unit
        assert kept.forward.peak <= kept.root + DEPTH * kept.unit + slack
        assert kept.backward.peak <= kept.check_left(ranks=4) + kept.buffers(ranks=4) + slack
        assert by_node.units_forward == by_node.units_backward == 2
        assert by_node.forward.left <= by_node.root + (DEPTH + 1) * by_node.unit // 2 + slack
        assert (
            by_node.backward.peak <= 2 * by_node.unit + by_node.check_left(ranks=4) + by_node.buffers(ranks=4) + slack
        )


# -- the beginning and the end -----------------------------------------------------------------------------------


def _from_meta(rank: int, world_size: int) -> tuple[list[int], Allocated, int, int, int]:
    """Bytes that are whole at each call of init_fn, what sharding allocates, and bytes of all, the largest, a shard."""
    import zero_optim

    with torch.device("meta"):
        model = WideNet().to(torch.bfloat16)
    whole: list[int] = []

    def init(module: nn.Module) -> None:
        here = [p for p in model.parameters() if type(p) is nn.Parameter and not p.is_meta]
        whole.append(bytes_of(here))
        module.reset_parameters()

    sharding = allocated(lambda: zero_optim.shard_module(model, (Block,), init_fn=init))
    every = list(map(full_bytes, units_of(model)))
    return whole, sharding, sum(every), max(every), sum(every) // world_size


def test_a_model_on_meta_is_never_whole_on_a_rank():
    """One unit is, while it is given values; twice, as it moves into its flat tensor."""
    for whole, sharding, total, largest, shards in run_ranks(3, _from_meta):
        assert 0 < max(whole) <= largest < total / 4
        assert len(whole) == 3 + 3 * DEPTH  # embedding, norm and head of the root; of each block, norm and two linears
        assert sharding.left == pytest.approx(shards, abs=4096)
        assert sharding.peak <= shards + 2 * largest + 4096


def _dropped(rank: int, world_size: int, close: bool, reshard: bool | int) -> tuple[list[str], int]:
    """What of model and optimizer is alive once both were deleted, after steps; bytes that are, beyond before."""
    before = live_bytes()
    run = Run(dtype=torch.bfloat16, shard={"reshard_after_forward": reshard})
    model, opt = make(run, WideNet())
    for step in range(2):
        short_step(rank, model, opt, step)
    gathered(model)
    loss_of(model, few(rank, 9))  # a forward without a backward leaves units unsharded
    things = {"model": model, "optimizer": opt, "block": model.blocks[1], "sharded": model._zero_optim_sharded}
    things |= dict(model.named_parameters())
    things |= {f"plain {name}": p.plain for name, p in model.named_parameters() if hasattr(p, "plain")}
    things |= {f"flat of {unit.label}": flat for unit in units_of(model) for flat in unit.flats}
    references = {name: weakref.ref(thing) for name, thing in things.items()}
    if close:
        opt.close()
    del things, model, opt
    left = bytes_left(before)
    return [name for name, reference in references.items() if reference() is not None], left


@pytest.mark.parametrize("close", [True, False])
def test_deleting_model_and_optimizer_frees_all(close):
    for reshard in (True, False):
        for alive, left in run_ranks(2, _dropped, close, reshard):
            assert not alive
            assert left == 0


def drop_amid_reductions(rank: int, world_size: int) -> list[bool]:
    """Drop an optimizer after a backward, without ``step`` or ``close``. Is there memory behind what is under way?"""
    model = zero_optim.shard_module(Net(), units=(Block,))
    opt = zero_optim.ShardedAdamW(model.named_parameters())
    loss_of(model, tokens(rank, step=0)).backward()
    written = [bucket.grad_buffer for bucket in opt.engine.reducer.buckets if bucket.arrivals.in_flight]
    del opt
    gc.collect()
    there = [is_there(buffer) for buffer in written]
    torch.distributed.barrier()
    return there


def test_an_optimizer_that_is_dropped_frees_no_memory_under_a_reduction():
    """gloo wrote into memory that had been freed: "corrupted double-linked list", some time later."""
    for there in run_ranks(2, drop_amid_reductions):
        assert there and all(there)
