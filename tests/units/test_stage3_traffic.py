"""What stage 3 communicates, exactly: calls and bytes of each kind, by formula from shapes, padding included.

A step gathers the root once and each unit twice (once where it is kept until backward), and reduces each once: with W
the padded bytes of all units and R those of the root, 3W + 2R, or 2W + 2R. A step ends with the gathers of the root and
the first unit for the next one, so the first step has those two more.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from guards import CollectiveLog
from harness import run_ranks
from sharded_cases import Block, Net, Run, full_state, gathered, loss_of, make, tokens, train_step
from torch import Tensor, nn
from training_cases import ROW
from zero_optim.units.unit import UnitState

Account = dict[str, tuple[int, int]]  # of each kind, calls and bytes
DEPTH = 3
ORDER_CODES = 64  # fp32 values of the exchange that tell ranks apart which gathered in different orders


def padded(parameters: Sequence[nn.Parameter], world_size: int) -> int:
    """Elements of the flat tensor of these: each on rows of its own, and equal shards of whole rows."""
    rows = sum(-(-p.numel() // ROW) for p in parameters)
    return -(-rows // world_size) * world_size * ROW


def sizes(world_size: int) -> tuple[int, int]:
    """Padded elements of the root of ``Net``, and of all its units."""
    model = Net(depth=DEPTH)
    of_units = [list(block.parameters()) for block in model.blocks]
    held = {id(p) for unit in of_units for p in unit}
    root = [p for p in model.parameters() if id(p) not in held]
    return padded(root, world_size), sum(padded(unit, world_size) for unit in of_units)


def account(opt) -> Account:
    return {kind: (of["calls"], of["bytes"]) for kind, of in opt.stats()["collectives"].items()}


def since(now: Account, before: Account) -> Account:
    """What was communicated in between; kinds with nothing are left out."""
    moved = {kind: tuple(n - b for n, b in zip(now[kind], before.get(kind, (0, 0)), strict=True)) for kind in now}
    return {kind: of for kind, of in moved.items() if any(of)}


def _steps(rank: int, world_size: int, runs: Sequence[Run]) -> list[list[Account]]:
    """Of each run: construction, then each step."""
    accounts = []
    for run in runs:
        model, opt = make(run, Net(depth=DEPTH))
        seen: list[Account] = [{}, account(opt)]
        for step in range(run.steps):
            train_step(run, rank, model, opt, step)
            seen.append(account(opt))
        accounts.append([since(now, before) for before, now in itertools.pairwise(seen)])
        opt.close()
    return accounts


def expected_step(run: Run, world_size: int, *, first: bool = False) -> Account:
    """Without the exchange. The last block stays for its backward, once the ``first`` forward has shown which it is."""
    root, units = sizes(world_size)
    reshard = run.shard.get("reshard_after_forward", True)
    wide = run.options.get("grad_reduce_dtype", run.dtype).itemsize
    reductions = 1 if run.no_sync else run.micro
    again, block = run.micro * (DEPTH - 1) + first, units // DEPTH
    twice = again if reshard is True else 0
    by_node = again if type(reshard) is int and reshard > 1 else 0
    moved = {
        "all_gather": (run.micro * (1 + DEPTH) + twice, run.micro * (root + units) + twice * block),
        "node_all_gather": (by_node, by_node * block),
        "reduce_scatter": (reductions * (1 + DEPTH), reductions * (root + units)),
    }
    itemsize = {"reduce_scatter": wide}
    return {kind: (calls, n * itemsize.get(kind, run.dtype.itemsize)) for kind, (calls, n) in moved.items() if calls}


def with_ahead(step: Account, run: Run, world_size: int, times: int = 1) -> Account:
    """With the two gathers of the next forward, so many times."""
    root, units = sizes(world_size)
    calls, sent = step.get("all_gather", (0, 0))
    ahead = (calls + 2 * times, sent + times * (root + units // DEPTH) * run.dtype.itemsize)
    return {kind: of for kind, of in (step | {"all_gather": ahead}).items() if any(of)}


def _cases(world_size: int) -> list[Run]:
    """Every way to reshard that the other numbers of ranks leave, with every prefetch; each accumulates in two ways."""
    reshards = {2: (True, False), 3: (True,), 4: (1, 2)}[world_size]
    shards = [{"reshard_after_forward": r, "prefetch": p} for r, p in itertools.product(reshards, (0, 1, 3))]
    runs = [Run(dtype=torch.bfloat16, steps=2, shard=shard) for shard in shards]
    for shard in shards[1::3]:  # of each way to reshard, one
        runs.append(Run(steps=1, micro=3, no_sync=True, shard=shard))
        runs.append(Run(steps=1, micro=2, shard=shard, options={"overlap_grad_reduce": False}))
    wide = {"grad_reduce_dtype": torch.float32}
    for options in ({"overlap_param_gather": False}, {"state_offload": "cpu"}, {"state_offload": "paged"}):
        runs.append(Run(steps=3, options=options))
    return [*runs, Run(dtype=torch.bfloat16, steps=3, options=wide), Run(stage=2, steps=2)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_communicates_what_the_formula_says(world_size):
    """Every step alike, and the first but for the last block's backward, and what it gathers ahead."""
    runs = _cases(world_size)
    root, units = sizes(world_size)
    for rank, accounts in enumerate(run_ranks(world_size, _steps, runs, timeout=120)):
        (exchange_calls, exchange_bytes) = accounts[-1][1]["exchange"]  # of stage 2
        for run, (construction, *steps) in zip(runs[:-1], accounts, strict=False):
            flags = 1 + DEPTH + 2  # whether a rank has failed to make a unit; then the buckets, and the state
            assert construction == {
                "construction": (flags + 1 + DEPTH, 4 * flags + (root + units) * run.dtype.itemsize)
            }
            exchange = {"exchange": (exchange_calls, exchange_bytes + 4 * ORDER_CODES)}
            step, first = (expected_step(run, world_size, first=of) | exchange for of in (False, True))
            if run.options.get("overlap_param_gather") is not False:
                first = with_ahead(first, run, world_size)
            assert steps == [first, *[step] * (run.steps - 1)], f"{run}, rank {rank}"


def _logged(rank: int, world_size: int, run: Run) -> tuple[Account, list[tuple[str, int]]]:
    """The second step as ``stats`` has it, and as the process groups have seen it."""
    model, opt = make(run, Net(depth=DEPTH))
    train_step(run, rank, model, opt, 0)
    before = account(opt)
    with CollectiveLog() as log:
        train_step(run, rank, model, opt, 1)
    moved = since(account(opt), before)
    opt.close()
    return moved, [(call.name, call.bytes) for call in log.calls]


@pytest.mark.parametrize("reshard", [True, 2])
def test_stats_hide_no_collective(reshard):
    """Gloo's gathers are a broadcast a rank, its reduce-scatters a scatter a rank, which the log has as one."""
    run = Run(shard={"reshard_after_forward": reshard})
    for moved, calls in run_ranks(4, _logged, run):
        seen = {name: (len(of), sum(of)) for name in {name for name, _ in calls} if (of := _bytes(calls, name))}
        whole, of_node = moved["all_gather"], moved.get("node_all_gather", (0, 0))
        assert seen == {
            "broadcast_": (4 * whole[0] + 2 * of_node[0], whole[1] + of_node[1]),
            "scatter_": moved["reduce_scatter"],
            "allreduce_": moved["exchange"],
        }


def _sent_ahead(rank: int, world_size: int) -> list[list[UnitState]]:
    """On rank 0, the states of the blocks in block 1's backward: while rank 1 waits in block 2's, and after that."""
    run = Run()
    model, opt = make(run, Net(depth=DEPTH))
    train_step(run, rank, model, opt, 0)
    store = dist.distributed_c10d._get_default_store()
    states = []

    def look(grad: Tensor) -> None:
        states.append([unit.state for unit in model._zero_optim_sharded.units[1:]])

    def let_the_other_go_on(grad: Tensor) -> None:
        store.set("looked", "")
        deadline = time.monotonic() + 30
        while not opt.engine.reducer.rounds.buffers.idle and time.monotonic() < deadline:
            pass

    def wait(grad: Tensor) -> None:
        store.wait(["looked"], timedelta(seconds=30))

    hooks = ((model.blocks[2].down, wait),)
    if rank == 0:
        block = model.blocks[1]
        hooks = ((block.down, look), (block.up, let_the_other_go_on), (block.norm, look))
    handles = [module.weight.register_hook(hook) for module, hook in hooks]
    loss_of(model, tokens(rank, 1)).backward()
    for handle in handles:
        handle.remove()
    opt.step()
    store.delete_key("looked")
    opt.close()
    return states


def test_a_gather_is_not_sent_ahead_beside_a_reduction_under_gloo():
    """It would need memory beside the buffers. As gradients become ready it is found that the reduction has arrived."""
    of_rank_0, _ = run_ranks(2, _sent_ahead)
    sharded, unsharding, unsharded = UnitState.SHARDED, UnitState.UNSHARDING, UnitState.UNSHARDED
    assert of_rank_0 == [[sharded, unsharded, sharded], [unsharding, unsharded, sharded]]


def _loaded_in_between(rank: int, world_size: int) -> tuple[UnitState, dict[str, Tensor], dict[str, Tensor]]:
    """Whether a unit is sent for as a backward raises: rank 1's alone. Parameters after loading and a step, and without
    all that."""
    from zero_optim.units.cycle import Prefetch

    run = Run()
    results = []
    for raises in (True, False):
        torch.manual_seed(0)
        model, opt = make(run, Net(depth=DEPTH))
        train_step(run, rank, model, opt, 0)
        if raises:
            saved = gathered(model)
            handles = [parameter.register_hook(_raise) for parameter in model.blocks[1].parameters()]
            told = "reductions_arrived" if rank == 0 else "reduction_begins"  # rank 0 never hears of an arrival
            tell = getattr(Prefetch, told)
            setattr(Prefetch, told, lambda prefetch, of: None)
            try:
                loss_of(model, tokens(rank, 1)).backward()
            except ArithmeticError:
                of_block_0 = model._zero_optim_sharded.units[1].state
            finally:
                setattr(Prefetch, told, tell)
                for handle in handles:
                    handle.remove()
            model.load_state_dict(saved)
            opt.zero_grad()
        train_step(run, rank, model, opt, 2)
        results.append(gathered(model))
        opt.close()
    return of_block_0, *results


def _raise(grad: Tensor) -> None:
    raise ArithmeticError


def test_loading_after_a_backward_that_raised_waits_for_no_rank():
    """One rank had sent for a unit that the other had not; both end the cycle before they load."""
    of_ranks = run_ranks(2, _loaded_in_between)
    assert [state for state, *_ in of_ranks] == [UnitState.SHARDED, UnitState.UNSHARDING]
    for _, after, expected in of_ranks:
        assert all(torch.equal(after[name], expected[name]) for name in expected)


def _bytes(calls: Sequence[tuple[str, int]], name: str) -> list[int]:
    return [size for of, size in calls if of == name]


def _evaluated(
    rank: int, world_size: int, runs: Sequence[Run], mode: Callable[[], AbstractContextManager[None]]
) -> list[list[Account]]:
    """Of each run: an evaluation before any training, one after a step, one more, and a step after it."""
    results = []
    for run in runs:
        model, opt = make(run, Net(depth=DEPTH))
        seen = [account(opt)]
        for what in ("evaluate", "train", "evaluate", "evaluate", "train"):
            if what == "train":
                train_step(run, rank, model, opt, 0)
            else:
                with mode():
                    loss_of(model, tokens(rank, 0))
            seen.append(account(opt))
        results.append([since(now, before) for before, now in itertools.pairwise(seen)])
        opt.close()
    return results


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_gathers_once_and_reduces_nothing(mode):
    """A unit that is kept until backward is kept after an evaluation too, and used by what follows."""
    world_size = 4
    shards = [{"reshard_after_forward": r, "prefetch": p} for r, p in ((True, 1), (False, 0), (2, 3))]
    runs = [Run(shard=shard) for shard in shards]
    root, units = sizes(world_size)
    once = (1 + DEPTH, 4 * (root + units))
    for results in run_ranks(world_size, _evaluated, runs, mode):
        for run, (first, step, second, third, last) in zip(runs, results, strict=True):
            kept = run.shard["reshard_after_forward"] is False
            assert first == {"all_gather": once}, run
            assert second == with_ahead({"all_gather": once}, run, world_size, -1), run
            assert third == ({} if kept else {"all_gather": once}), run
            for account_of, is_first in ((step, True), (last, False)):
                whole = expected_step(run, world_size, first=is_first)
                without = {kind: of for kind, of in whole.items() if kind != "all_gather"}
                del account_of["exchange"]
                assert account_of == with_ahead(without if kept else whole, run, world_size), run


class Untied(Net):
    def __init__(self) -> None:
        super().__init__(depth=DEPTH)
        self.head = nn.Linear(self.norm.normalized_shape[0], self.embedding.num_embeddings)


def _with_large_units(rank: int, world_size: int) -> tuple[list[str], Account]:
    model, opt = make(Run(), Untied(), (Block, nn.Embedding, "head"))
    train_step(Run(), rank, model, opt, 0)
    before = account(opt)
    train_step(Run(), rank, model, opt, 1)
    moved = since(account(opt), before)
    opt.close()
    return [unit.name for unit in model._zero_optim_sharded.units], moved


def test_embedding_and_head_may_be_units():
    """By class and by name. The root is a norm then, and both are gathered for forward, the embedding for backward."""
    model = Untied()
    of_units = [list(module.parameters()) for module in (model.embedding, *model.blocks, model.head)]
    root, units = padded(list(model.norm.parameters()), 3), sum(padded(unit, 3) for unit in of_units)
    for names, moved in run_ranks(3, _with_large_units):
        assert names == ["", "embedding", *(f"blocks.{number}" for number in range(DEPTH)), "head"]
        head = padded(of_units[-1], 3)
        assert moved["all_gather"] == (2 * len(of_units), 4 * (root + 2 * units - head))
        assert moved["reduce_scatter"] == (1 + len(of_units), 4 * (root + units))


def _asked_for(rank: int, world_size: int) -> list[Account]:
    model, opt = make(Run(), Net(depth=DEPTH))
    train_step(Run(), rank, model, opt, 0)
    seen = [account(opt)]
    for ask in (lambda: gathered(model), lambda: gathered(model.blocks[1]), model.state_dict, lambda: full_state(opt)):
        ask()
        seen.append(account(opt))
    opt.close()
    return [since(now, before) for before, now in itertools.pairwise(seen)]


def test_what_users_ask_for_is_counted_apart():
    """Whole parameters, once; of one unit alone; state dicts of shards nothing; the full state two moments."""
    root, units = sizes(3)
    for whole, unit, shards, state in run_ranks(3, _asked_for):
        assert whole == {"gather_parameters": (1 + DEPTH, 4 * (root + units))}
        assert unit == {"gather_parameters": (1, 4 * units // DEPTH)}
        assert shards == {}
        assert state == {"state": (2 * (1 + DEPTH), 2 * 4 * (root + units))}
