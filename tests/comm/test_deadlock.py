"""Ranks that deadlock raise within seconds, not at the time-out, and no process ends.

Gloo ends a process that is sent more than it expects, as where one rank gathers a large unit and another a small one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import astuple, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from script_ranks import run_script
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training_cases import Planned, raise_in_backward
from zero_optim.comm import deadlock
from zero_optim.comm.deadlock import Wait
from zero_optim.comm.handle import Handle

IN_VAIN = 5  # seconds of a group's time-out: the ranks are told after one, and their group cannot end before


def _another_optimizer_first(rank: int, world_size: int, **options: int) -> tuple[str, str, float]:
    """Rank 1 raises before its backward comes to the sharded model; rank 0 waits there. Then each goes on with the
    step of another optimizer, which the documents forbid. Afterwards a new optimizer trains on. The model's own has
    a step refused where its backward was cut short."""
    deadlock.SECONDS, seconds = 0.2, deadlock.SECONDS
    torch.manual_seed(0)
    sharded, plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)
    zero_optim.shard_module(sharded, units=(nn.Linear,), **options)
    of_sharded = zero_optim.ShardedAdamW(sharded.parameters(), lr=0.1)
    of_plain = zero_optim.ShardedAdamW(plain.parameters(), lr=0.1)
    text = ""
    try:
        y = sharded(torch.ones(1, 8)).sum()
        (raise_in_backward(y) if rank == 1 else y).backward()
        of_plain.step()
    except Planned:
        try:
            of_plain.step()
        except zero_optim.ZeroOptimError as error:
            text = f"{type(error).__name__}: {error}"
    except zero_optim.ZeroOptimError as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        deadlock.SECONDS = seconds
    refused = ""
    if rank == 0:
        try:
            of_sharded.step()
        except zero_optim.RankMismatchError as error:
            refused = str(error)
    of_plain.close()
    again = zero_optim.ShardedAdamW(plain.parameters(), lr=0.1)
    plain(torch.ones(1, 8)).sum().backward()
    again.step()
    return text, refused, float(plain.weight.detach().sum())


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, {}), (4, {"reshard_after_forward": 2})], ids=["one group", "within a node"]
)
def test_waiting_in_different_groups(ranks, options):
    """Of four ranks, rank 0 alone waits in the sharded model: for the other one of its node."""
    results = run_ranks(ranks, partial(_another_optimizer_first, **options), collective_timeout=IN_VAIN)
    for text, _, _ in results:
        assert text.startswith("RankMismatchError: the ranks wait for each other, in different places"), text
        assert re.search(r"rank 0 in (node_)?all_gather of unit '[01]' of a sharded model, rank 1 in ", text)
        assert "of an optimizer" in text
    assert results[0][1].startswith("ranks are out of sync after an earlier error")
    assert len({total for *_, total in results}) == 1


SIZES = (8, 64, 24, 40)  # of units, so that no two gathers are of one size, padding included
CAP_MB = 0.001


def _one_forward_more(rank: int, model: nn.Module, opt: Any) -> None:
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()


def _another_backward_after_a_raise(rank: int, model: nn.Module, opt: Any) -> None:
    """Not ``step``, which would settle it."""
    with contextlib.suppress(Planned):
        y = model(torch.ones(2, 8)).sum()
        (raise_in_backward(y) if rank == 1 else y).backward()
    model(torch.ones(2, 8)).sum().backward()


def _a_closure_after_a_raise(rank: int, model: nn.Module, opt: Any) -> None:
    with contextlib.suppress(Planned):
        y = model(torch.ones(2, 8)).sum()
        (raise_in_backward(y) if rank == 1 else y).backward()
    opt.step(lambda: model(torch.ones(2, 8)).sum().backward())


def _one_backward_more(rank: int, model: nn.Module, opt: Any) -> None:
    for _ in range(1 + rank):
        model(torch.ones(2, 8)).sum().backward()


def _made(stage: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, size), nn.Linear(size, 8)) for size in SIZES))
    if stage == 3:
        zero_optim.shard_module(model, (nn.Sequential,))
        return model, zero_optim.ShardedAdamW(model.parameters())
    return model, zero_optim.ShardedAdamW(model.parameters(), stage=stage, bucket_cap_mb=CAP_MB)


def _trained_anew(stage: int) -> float:
    """What a model gives that a new optimizer has trained for two steps."""
    another, new = _made(stage)
    for _ in range(2):
        another(torch.ones(2, 8)).sum().backward()
        new.step()
        new.zero_grad()
    with torch.no_grad():
        return float(another(torch.ones(2, 8)).sum())


def _out_of_step(
    rank: int, world_size: int, stage: int, part: Callable[[int, nn.Module, Any], None]
) -> tuple[str, float]:
    """The error, and what another model then makes in two steps, beside the first."""
    model, opt = _made(stage)
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(zero_optim.RankMismatchError) as caught:
        patch.setattr(deadlock, "SECONDS", 0.1)
        part(rank, model, opt)
        opt.step()
    return str(caught.value), _trained_anew(stage)


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        (3, _one_forward_more),
        (3, _another_backward_after_a_raise),
        (0, _one_backward_more),
        (0, _a_closure_after_a_raise),
        (2, _a_closure_after_a_raise),
    ],
)
def test_ranks_out_of_step_are_told_and_live_on(stage, part):
    results = run_ranks(2, _out_of_step, stage, part, collective_timeout=IN_VAIN)
    assert results[0][1] == results[1][1]
    for text, _ in results:
        assert text.startswith("the ranks wait for each other"), text
        if part is _one_forward_more:
            assert "rank 0 in all_gather of unit '0' of a sharded model, rank 1 in all_gather of unit '2'" in text


def _one_backward_more_in_a_grid(rank: int, world_size: int) -> str:
    """Rank 1 reduces twice within its row, where its own replica, rank 3, and the others reduce once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = nn.Linear(8, 8)
    opt = zero_optim.ShardedAdamW(model.parameters(), mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    opt.zero_grad()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(zero_optim.RankMismatchError) as caught:
        patch.setattr(deadlock, "SECONDS", 0.1)
        for _ in range(1 + (rank == 1)):
            model(torch.ones(2, 8)).sum().backward()
        opt.step()
    return str(caught.value)


def test_ranks_of_a_grid_are_told_how_many_backwards_each_has_reduced():
    told = run_ranks(4, _one_backward_more_in_a_grid, collective_timeout=IN_VAIN)
    assert len({*told}) == 1
    counts = "rank 0 has reduced 2, rank 1 has reduced 3, rank 2 has reduced 2, rank 3 has reduced 2"
    assert f"have reduced different numbers of backwards: {counts}" in told[0]


def _gone_on(rank: int, world_size: int, stage: int) -> tuple[list[str], int, float]:
    """Rank 0's backward raises, and it zeroes; rank 1 steps. Both go on as if nothing had happened, then anew."""
    model, opt = _made(stage)
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    opt.zero_grad()
    told = []

    def tell(call: Callable[[], Any]) -> None:
        try:
            call()
        except zero_optim.RankMismatchError as error:
            told.append(str(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlock, "SECONDS", 0.1)
        y = model(torch.ones(2, 8)).sum()
        with contextlib.suppress(Planned):
            tell((raise_in_backward(y) if rank == 0 else y).backward)
        if not told:
            tell(opt.zero_grad if rank == 0 else opt.step)
        # From here on nothing looks for a deadlock: whoever waits does so until the time-out.
        patch.setattr(deadlock, "SECONDS", 2 * IN_VAIN)
        for call in (opt.step, lambda: opt.clip_grad_norm_(1.0), lambda: zero_optim.full_state_dict(opt), opt.sleep):
            tell(call)
    steps = opt.stats()["steps"]
    opt.close()
    return told, steps, _trained_anew(stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_have_parted_are_refused_at_once(stage):
    results = run_ranks(2, _gone_on, stage, collective_timeout=IN_VAIN)
    for told, steps, _ in results:
        first, *others = told
        assert first.startswith("the ranks wait for each other"), first
        assert len(others) == 4 and len({*others}) == 1
        assert others[0].startswith("ranks are out of sync after an earlier error; make a new optimizer")
        assert others[0].endswith(f"The error was: {first}")
        assert steps == 1
    assert results[0][2] == results[1][2]


def _alone_in_a_call(rank: int, world_size: int) -> list[str]:
    """Rank 0 alone makes a call of all ranks: while rank 1 trains on, and where rank 1 comes to nothing any more."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlock, "SECONDS", 0.1)
        model, opt = _made(2)
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
        with pytest.raises(zero_optim.RankMismatchError) as caught:
            if rank == 0:
                zero_optim.full_state_dict(opt)
            model(torch.ones(2, 8)).sum().backward()
            opt.step()
        told.append(str(caught.value))
        opt.close()
    opt = zero_optim.ShardedAdamW([nn.Parameter(torch.ones(4))])
    if rank == 0:
        with pytest.raises(zero_optim.CollectiveError) as end:
            zero_optim.full_state_dict(opt)
        told.append(str(end.value))
    return told


def test_a_rank_that_is_alone_in_a_call_is_told_of_it():
    (full, end), of_rank_1 = run_ranks(2, _alone_in_a_call, collective_timeout=IN_VAIN)
    assert of_rank_1 == [full]
    assert full.startswith("the ranks wait for each other: rank 0 in full_state_dict, rank 1 in "), full
    assert "Every rank has to call full_state_dict," in full
    assert end.startswith("the wait for the other ranks in full_state_dict did not complete"), end
    assert "every rank has to call full_state_dict" in end


LONG = [(number, "all_gather of 64") for number in range(8, 8 + deadlock.ISSUED_LATELY)]
ALIKE = [(5, "all_gather of 64"), (6, "all_gather of 80"), (7, "all_gather of 64")]


@pytest.mark.parametrize(
    ("number", "of_others", "on_its_way"),
    [
        (7, {"model": ALIKE}, True),
        (6, {"model": ALIKE[:2]}, True),  # they will issue the seventh later
        (7, {"model": ALIKE[:2]}, False),  # not issued yet
        (7, {"model": [*ALIKE[:2], (7, "all_gather of 80")]}, False),
        (7, {"model": [ALIKE[0], (6, "all_gather of 64"), ALIKE[2]]}, False),  # they parted before
        (6, {"model": [*ALIKE[:2], (7, "all_gather of 80")]}, True),  # they part later
        (7, {"model": LONG}, True),  # issued so long ago that it is not kept
        (7, {"model": LONG[1:]}, False),  # reserved, and not issued yet: the record is not full
        (7, {"model": [ALIKE[0], ALIKE[2]]}, True),  # the sixth is the second half of a chain
        (6, {"model": [ALIKE[0], ALIKE[2]]}, False),
        (7, {"another model": ALIKE}, False),
        (7, {"model": []}, False),
    ],
)
def test_what_all_ranks_have_issued_is_on_its_way(number, of_others, on_its_way):
    wait = Wait([0, 1], "model, by nodes", 1, "all_gather of unit 'a'", number)
    assert wait.whole == "model"
    waits = {0: wait, 1: Wait([0, 1], "another model", 1, "all_gather of unit 'a'")}
    issued = {0: {"model": ALIKE}, 1: of_others}
    assert deadlock._is_in_flight(wait, waits, issued) is on_its_way
    assert not deadlock._is_in_flight(replace(wait, given=True), waits, issued)


def _slow_reductions(rank: int, world_size: int) -> float:
    """Two optimizers reduce in one backward, over a connection on which each rank has to wait for another one's."""
    torch.manual_seed(0)
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    optimizers = [zero_optim.ShardedAdamW(model.parameters(), lr=0.1) for model in models]
    slow, judged = optimizers[rank].engine.sharding.world.owner, False
    arrives_within = Handle.leg_arrives_within

    def arrives_late(handle: Handle, seconds: float) -> bool:
        """Not before this rank has judged whether there is a deadlock."""
        nonlocal judged
        if handle.watch is not None and handle.watch.comm.owner == slow and not judged:
            judged = deadlock._record_of(handle.watch.comm)._looks > deadlock.LOOKS
            return False
        return arrives_within(handle, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlock, "SECONDS", 0.05)
        patch.setattr(Handle, "leg_arrives_within", arrives_late)
        sum(model(torch.ones(1, 8)).sum() for model in models).backward()
        for opt in optimizers:
            opt.step()
    assert judged
    return float(sum(model.weight.detach().sum() for model in models))


def test_ranks_that_wait_for_slow_collectives_of_two_optimizers_are_no_deadlock():
    first, second = run_ranks(2, _slow_reductions, collective_timeout=IN_VAIN)
    assert first == second


def _issued(rank: int, world_size: int, rule: str, stage: int, mesh: bool) -> dict[str, dict[int, str]]:
    """What a rank has issued after two steps, by owner. Matrices are of two sizes, so ranks send unequal parts."""
    torch.manual_seed(0)
    sizes = (32, 48, 32, 48, 7)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))
    of = {"mesh": init_device_mesh("cpu", (2, world_size // 2))} if mesh else {}
    if stage == 3:
        zero_optim.shard_module(model, (nn.Linear,), **of)
    made = getattr(zero_optim, rule)
    opt = made(model.parameters()) if stage == 3 else made(model.parameters(), stage=stage, **of)
    for _ in range(2):
        model(torch.randn(2, 32)).sum().backward()
        opt.clip_grad_norm_(1.0, parameters=model[0].weight)
        opt.step()
        opt.zero_grad()
    comms = deadlock._with_others(opt.engine.sharding.world)
    return {comm.owner: dict(comm.log.issued()) for comm in comms}


@pytest.mark.parametrize(
    ("ranks", "rule", "stage"),
    [
        (2, "ShardedMuon", 3),
        (2, "ShardedMuon", 2),
        (2, "ShardedAdamW", 0),
        (4, "ShardedMuon", 3),
        (4, "ShardedAdamW", 1),
    ],
)
def test_ranks_that_do_the_same_have_issued_the_same(ranks, rule, stage):
    """By what is compared. Four ranks are a grid."""
    first, *others = run_ranks(ranks, _issued, rule, stage, ranks == 4)
    kinds = [kind for numbers in first.values() for kind in numbers.values()]
    assert len(kinds) > 4
    assert any("all_to_all" in kind for kind in kinds) is ((rule, stage) == ("ShardedMuon", 3))
    assert all(other == first for other in others)


def _groups() -> tuple[dict[int, Any], dict[int, Any]]:
    """By rank, its column of two and its row of two. What waits there in vain ends soon."""
    lines = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    within = timedelta(seconds=IN_VAIN)
    made = [[(line, dist.new_group(line, timeout=within)) for line in of] for of in lines]
    columns, rows = ({rank: group for line, group in of for rank in line} for of in made)
    return columns, rows


def _other_ranks(rank: int, world_size: int) -> list[str]:
    """Rank 0 averages over two ranks, the others over all; then rank 1 averages over its row, the others over their
    columns, of parameters that are cut over rows."""
    told = []
    columns, rows = _groups()
    slices = nn.Parameter(torch.ones(4, 3))
    slices.tensor_model_parallel = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlock, "SECONDS", 0.1)
        with pytest.raises(zero_optim.RankMismatchError) as caught:
            zero_optim.ShardedAdamW([nn.Parameter(torch.ones(4, 3))], process_group=columns[0] if rank == 0 else None)
        told.append(str(caught.value))
        columns, rows = _groups()
        given = rows[rank] if rank == 1 else columns[rank]
        with pytest.raises(zero_optim.RankMismatchError) as caught:
            zero_optim.ShardedAdamW([slices], process_group=given, tensor_parallel=rows[rank])
        told.append(str(caught.value))
    return told


def test_ranks_that_were_given_different_ranks_are_told():
    for one_of_all, one_of_rows in run_ranks(4, _other_ranks, collective_timeout=IN_VAIN):
        for told in (one_of_all, one_of_rows):
            assert told.startswith("the ranks wait for each other, and were given different ranks to wait for: rank 0")
            assert "in the constructor" in told and "mesh=world_mesh['dp']" in told
        assert "rank 0 with ranks [0, 2]" in one_of_all and "rank 3 with ranks [0, 1, 2, 3]" in one_of_all
        assert "rank 1 with ranks [0, 1]" in one_of_rows and "rank 3 with ranks [1, 3]" in one_of_rows


PARTED = """
import sys
import torch
import torch.distributed as dist
import zero_optim
from zero_optim.comm import deadlock

rank, world_size, meet, how = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
deadlock.SECONDS = 0.1
if how == "interrupted":
    def interrupt(*of):
        raise KeyboardInterrupt  # as Ctrl-C does while the host waits
    deadlock.Record.look = interrupt
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size)
model = torch.nn.Linear(8, 8)
opt = zero_optim.ShardedAdamW(model.parameters())
model(torch.ones(1, 8)).sum().backward()
opt.step()
opt.zero_grad()
try:
    for _ in range(1 + (rank == 0)):
        model(torch.ones(1, 8)).sum().backward()
    opt.step()
except zero_optim.RankMismatchError:
    if how == "uncaught":
        raise
except (KeyboardInterrupt, zero_optim.CollectiveError):  # or the other rank was interrupted, and has ended
    opt.close()
dist.destroy_process_group()
print("destroyed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["uncaught", "interrupted"])
def test_ranks_that_have_waited_in_vain_end(how, tmp_path):
    """Not half an hour later: until then, a thread of gloo's waits for the other rank."""
    for end in run_script(PARTED, 2, tmp_path, how):
        assert (end.code, end.output) == ((1, "") if how == "uncaught" else (0, "destroyed\n")), end.errors
        assert "RankMismatchError" in end.errors or how != "uncaught"


class _Store(dict):
    """What the ranks of a job write: ``get`` gives bytes."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:
        return self[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.mark.parametrize(
    ("of_others", "in_vain"),
    [
        ({1: [0, 1, 2], 2: [0, 1, 2]}, True),  # each of these waits for rank 0, which waits for rank 1
        ({1: [1, 2], 2: None}, False),  # rank 2 computes, and may come
        ({1: [1, 2]}, False),  # rank 2 has never waited
        ({1: [1, 2], 2: [1, 2]}, False),  # ranks 1 and 2 have met: their call goes on
        ({1: [0, 1]}, False),  # ranks 0 and 1 have met
    ],
)
def test_ranks_wait_in_vain_where_nobody_of_whom_they_wait_for_can_go_on(monkeypatch, of_others, in_vain):
    store = _Store()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    record = deadlock.Record()
    for rank, ranks in of_others.items():
        wait = ranks and [astuple(Wait(ranks, "a group", 0, "a wait", given=True, call="the constructor")), 1]
        store.set(record._key("wait", rank), json.dumps(wait) if wait else "")
        store.set(record._key("issued", rank), "{}")
    own = Wait([0, 1], "a group", 0, "a wait", given=True, call="the constructor")
    found = [record.look(own, ()) for _ in range(deadlock.LOOKS + 2)][deadlock.LOOKS]
    if not in_vain:
        assert found is None and record.end() is None
        return
    assert found is not None
    assert re.search(r"rank 0 with ranks \[0, 1\], in the constructor; rank 1", found.text)
    assert {key for key in store if "deadlock" in key} == {record._key("deadlock 1", rank) for rank in (0, 1, 2)}
    assert record.end() == found
    assert store[record._key("wait", 0)] == ""


def _of_some_ranks(rank: int, world_size: int) -> tuple[Any, str, str]:
    """Ranks 2 and 3 train together. Rank 3's gradient overflows; then it gives a wrong rate, and waits elsewhere."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    parameter = nn.Parameter(torch.ones(4))
    opt = zero_optim.ShardedAdamW([parameter], process_group=groups[rank // 2])
    (parameter.sum() * (float("inf") if rank == 3 else 1.0)).backward()
    opt.step()
    first = opt.stats()["non_finite"]
    told = ""
    try:
        zero_optim.ShardedAdamW(
            [nn.Parameter(torch.ones(4))], lr=-1.0 if rank == 3 else 1.0, process_group=groups[rank // 2]
        )
    except (ValueError, zero_optim.ZeroOptimError) as error:
        told = str(error)
    parted = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlock, "SECONDS", 0.1)
        try:
            for _ in range(1 + (rank == 3)):
                parameter.sum().backward()
            opt.step()
        except zero_optim.RankMismatchError as error:
            parted = str(error)
    return first, told, parted


def test_ranks_of_a_part_are_named_as_the_whole_job_numbers_them():
    own = run_ranks(4, _of_some_ranks, collective_timeout=5)
    assert [first for first, _, _ in own[:2]] == [None, None]
    for first, _, parted in own[2:]:
        assert first["rank"] == 3
        assert "rank 2" in parted and "rank 3" in parted and "rank 0" not in parted
    assert own[2][1].startswith("rank 3 failed with ValueError: lr of parameter group 0")
