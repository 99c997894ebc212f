"""Parameters whose shards rest on a disk: who reads and writes them, what that takes of memory, a disk that fails."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zero_optim
from compare import bits, first_difference
from grid_cases import make_mesh, on_mesh
from guards import open_files_in
from harness import run_ranks
from sharded_cases import Net, Run, full_state, gathered, loss_of, make, tokens, train_step
from stores.test_disk_faults import failing
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from training_cases import error_of
from zero_optim import checkpoint
from zero_optim.checkpoint import saving
from zero_optim.checkpoint.background import SaveBuffer
from zero_optim.errors import OffloadError, ShardAccessError
from zero_optim.stores.disk_pages import PagePlace
from zero_optim.stores.host_memory import HostMemory
from zero_optim.stores.paged_store import PagedStore


def on_disk(folder: str, run: Run = Run(), **shard: Any) -> Run:  # noqa: B008  # frozen
    return Run(**{**vars(run), "shard": {**run.shard, "param_offload": f"nvme:{folder}", **shard}})


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "local", tensor)  # alone a rank has plain ones, where parameters are in memory


def job(run: Run, seed: int = 0, frozen: bool = False) -> tuple[Net, Any]:
    """On four ranks their state is over all of two replicas, and a rank updates a part of a shard."""
    if dist.is_initialized() and dist.get_world_size() == 4:
        run = on_mesh(run, make_mesh(2, 2), state_over="all")
    torch.manual_seed(seed)
    model = Net()
    model.blocks[1].up.requires_grad_(not frozen)
    return make(run, model)


# -- the bits of parameters that are in memory -------------------------------------------------------------------------


def _through_everything(rank: int, run: Run, folder: str) -> list[Any]:
    """All that reads or writes shards beside forwards and steps, with what comes of it."""
    found: list[Any] = []
    model, opt = job(run, frozen=True)

    def look() -> None:
        found.extend((gathered(model), full_state(opt)))

    train_step(run, rank, model, opt, 0)
    with zero_optim.gather_parameters(model, writeback=True), torch.no_grad():
        model.norm.weight.mul_(1.5)
        model.blocks[1].up.weight.add_(0.5)  # frozen
    train_step(run, rank, model, opt, 1)
    look()
    with opt.swap_to_ema(), torch.no_grad():
        found += [gathered(model), model(tokens(rank, 5))]
    look()
    opt.sleep()
    opt.wake()
    train_step(run, rank, model, opt, 2)
    saved = {name: local_of(value).clone() for name, value in get_model_state_dict(model).items()}
    checkpoint.save(folder, model, opt)
    train_step(run, rank, model, opt, 3)
    look()
    state = get_model_state_dict(model)
    for name, value in state.items():
        local_of(value).copy_(saved[name])
    set_model_state_dict(model, state)
    look()
    model.load_state_dict(zero_optim.full_model_state_dict(model, rank=None))
    opt.refresh_master()
    train_step(run, rank, model, opt, 4)
    found.append({name: p.clone() for name, p in zero_optim.iter_full_parameters(model, opt, torch.float32)})
    checkpoint.load(folder, model, opt)
    look()
    train_step(run, rank, model, opt, 5)
    look()
    opt.close()
    return found


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16, split": ({"dtype": torch.bfloat16}, {}),
    "split8, kept": ({"dtype": torch.bfloat16, "options": {"master": "split8"}}, {"reshard_after_forward": False}),
    "fp32 masters, updated on the host": (
        {"dtype": torch.bfloat16, "options": {"master": "fp32", "state_offload": "cpu"}},
        {"reshard_after_forward": 1},
    ),
    "split, updated on the host": ({"dtype": torch.bfloat16, "options": {"state_offload": "cpu"}}, {"prefetch": 3}),
    "fp32, paged": ({"options": {"state_offload": "paged", "device_budget": 0}}, {"prefetch": 0}),
    "all on a disk": ({"dtype": torch.bfloat16, "options": {"state_offload": "nvme:{}"}}, {"prefetch": 2}),
}


def _as_in_memory(rank: int, world_size: int, way: str, folder: str) -> str | None:
    given, shard = WAYS[way]
    options = {name: str(of).format(folder) if "off" in name else of for name, of in given.get("options", {}).items()}
    if shard.get("reshard_after_forward") == 1:
        shard = {"reshard_after_forward": min(world_size, 2)}
    run = Run(**{**given, "options": {**options, "ema_decay": 0.9}})
    both = [run, on_disk(folder, run, **shard)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, have = (_through_everything(rank, one, f"{folder}/{n}") for n, one in enumerate(both))
    return first_difference(want, have, bits)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_reads_and_writes_them_it_is_as_in_memory(way: str, ranks: int, tmp_path: Path) -> None:
    assert run_ranks(ranks, _as_in_memory, way, str(tmp_path)) == [None] * ranks


def _checkpoints(rank: int, world_size: int, folder: str) -> str | None:
    """From a disk to other settings, and back; by DCP from a disk to a disk."""
    here, there, found = Run(), on_disk(folder), []
    for saves, loads in ((here, there), (there, here)):
        model, opt = job(saves)
        train_step(saves, rank, model, opt, 0)
        checkpoint.save(f"{folder}/from {bool(saves.shard)}", model, opt)
        other, its = job(loads, seed=1)
        checkpoint.load(f"{folder}/from {bool(saves.shard)}", other, its)
        train_step(saves, rank, model, opt, 1)
        train_step(loads, rank, other, its, 1)
        found += [gathered(model), gathered(other)]
    for run, what in ((there, model), (there, other)) if world_size > 1 else ():
        model, opt = job(run, seed=2)
        dcp.save({"model": get_model_state_dict(what)}, checkpoint_id=f"{folder}/dcp")
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        set_model_state_dict(model, state["model"])
        found.append(gathered(model))
    return next((lost for other in found[1:] if (lost := first_difference(found[0], other, bits))), None)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checkpoints_go_to_other_settings_and_back(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(ranks, _checkpoints, str(tmp_path)) == [None] * ranks


def test_at_rest_a_shard_has_no_values_to_read(tmp_path: Path) -> None:
    model, opt = job(on_disk(str(tmp_path)))
    weight = model.blocks[0].up.weight
    with pytest.raises(ShardAccessError, match=r"blocks.0.up.weight.*rests on a disk.*gather_parameters"):
        weight.local.sum()
    assert weight.flat.shard.device.type == "meta"  # whoever forgets to open it fails
    assert not list(tmp_path.iterdir()) and open_files_in(str(tmp_path))
    opt.close()


# -- memory ------------------------------------------------------------------------------------------------------------


def _host_memory(rank: int, world_size: int, folder: str, prefetch: int) -> tuple[int, int, int, int]:
    """The most bytes of host memory in a training, with those of the largest shard, read, and on the disk."""
    take = HostMemory.take

    def watched(self: HostMemory, nbytes: int) -> torch.Tensor:
        nonlocal peak
        run = take(self, nbytes)
        peak = max(peak, self.in_use)
        return run

    run = on_disk(folder, prefetch=prefetch)
    torch.manual_seed(0)
    model, opt = make(run, Net(width=64, depth=8))
    peak = opt.stats()["param_offload"]["host"]
    with mock.patch.object(HostMemory, "take", watched):
        before = opt.stats()["param_offload"]["read"]
        loss_of(model, tokens(rank, 0)).backward()
        read = opt.stats()["param_offload"]["read"] - before
        opt.step()
    shards = [flat.shard.nbytes for unit in opt.engine.sharded_model.units for flat in unit.flats]
    taken = opt.stats()["param_offload"]
    assert taken["host"] == peak and taken["disk"] >= sum(shards)
    # A unit is read for its forward and for its backward; the root stays, and so does what backward begins with.
    assert 2 * sum(shards[1:]) - shards[-1] <= read - shards[0] <= 2 * sum(shards[1:]) + shards[0] + shards[-1]
    opt.close()
    return peak, max(shards), taken["disk"], sum(shards)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_host_memory_has_buffers_for_the_units_in_use_and_those_ahead(prefetch: int, tmp_path: Path) -> None:
    for peak, largest, disk, shards in run_ranks(2, _host_memory, str(tmp_path), prefetch):
        block = -(-largest // 4096) * 4096
        assert peak == max(3, prefetch + 1) * block < shards
        assert shards <= disk < shards + 4096 * 9


# -- a disk that fails -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _fault(call: str, here: bool) -> Iterator[None]:
    with warnings.catch_warnings(), mock.patch.object(os, call, failing) if here else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        yield


def _lost(rank: int, world_size: int, folder: str, what: str, store: str | None = None) -> dict[str, Any]:
    """The errors of the call in which the disk of the last rank fails, and of the next step."""
    run = on_disk(folder, Run(dtype=torch.bfloat16, options={"state_offload": store}))
    model, opt = job(run)
    train_step(run, rank, model, opt, 0)
    found: dict[str, Any] = {}

    def evaluate() -> None:
        with torch.no_grad():
            model(tokens(rank, 1))

    def train() -> None:
        loss = loss_of(model, tokens(rank, 1))
        found["loss"] = float(loss.detach())
        loss.backward()
        opt.step()

    def edit() -> None:
        with zero_optim.gather_parameters(model, writeback=True), torch.no_grad():
            model.norm.weight.fill_(2.0)
        evaluate()

    def backward() -> None:
        with _fault("preadv", False):
            loss = loss_of(model, tokens(rank, 1))
        with _fault("preadv", rank == world_size - 1):
            loss.backward()
        opt.step()

    calls: dict[str, Callable[[], None]] = {
        "evaluation": evaluate,
        "training": train,
        "backward": backward,
        "a write of a step": lambda: (train(), evaluate()),
        "gather_parameters": lambda: gathered(model),
        "writeback": edit,
        "whole weights": lambda: zero_optim.full_model_state_dict(model),
        "load_state_dict": lambda: (model.load_state_dict(state), evaluate()),
        "save": lambda: checkpoint.save(f"{folder}/saved", model, opt),
    }
    state = model.state_dict()
    evaluate()  # what was written is over
    call = "pwritev" if what in ("a write of a step", "writeback") else "preadv"
    with _fault(call, rank == world_size - 1 and what != "backward"):
        found[what] = error_of(calls[what])
        opt.zero_grad()
        found["step"] = error_of(train)
    opt.close()
    return found


LOST = (
    *("evaluation", "training", "backward", "a write of a step", "gather_parameters", "writeback", "whole weights"),
    *("load_state_dict", "save"),
)


@pytest.mark.parametrize("what", LOST)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_failing_disk_raises_on_every_rank(ranks: int, what: str, tmp_path: Path) -> None:
    *others, last = run_ranks(ranks, _lost, str(tmp_path), what)
    for rank, of_rank in enumerate((*others, last)):
        assert of_rank["step"][0] == "OffloadError", of_rank
        assert of_rank[what][0] == "OffloadError" or (what == "save" and of_rank is not last), of_rank
        # NaN, of what has not arrived in this replica
        assert of_rank["loss"] != of_rank["loss"] or (ranks == 4 and rank < 2)
    for word in ("state is lost", "param_offload", "Input/output error", str(tmp_path), "load a checkpoint"):
        assert word in last[what][1] and word in last["step"][1]


@pytest.mark.parametrize("what", ["training", "a write of a step"])
@pytest.mark.parametrize("store", ["cpu", "nvme"])
def test_a_failing_disk_raises_on_every_rank_wherever_the_state_is(what: str, store: str, tmp_path: Path) -> None:
    for of_rank in run_ranks(2, _lost, str(tmp_path), what, f"nvme:{tmp_path}" if store == "nvme" else store):
        assert of_rank["step"][0] == of_rank[what][0] == "OffloadError", of_rank


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_leaves_no_page_open(background: bool, tmp_path: Path) -> None:
    model, opt = job(on_disk(str(tmp_path)))

    def write_nothing(*given: Any) -> None:
        next(iter(given[2]))
        raise OSError("the file system is full")

    where = (SaveBuffer, "hold") if background else (saving, "write_file")
    with mock.patch.object(*where, write_nothing), pytest.raises(OSError) as kept:
        checkpoint.save(tmp_path, model, opt, step=1, background=background)
    places = [flat.memory.page.place for unit in opt.engine.sharded_model.units for flat in unit.flats]
    assert kept and PagePlace.HELD not in places
    opt.close()


def _lost_beside_state(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """The error of the step after one in which the parameters' disk of rank 1 fails, and that of the state does not."""
    run = on_disk(folder, Run(dtype=torch.bfloat16, options={"state_offload": f"nvme:{folder}"}))
    torch.manual_seed(0)
    model, opt = make(run, Net(depth=12))  # more units than a store has buffers
    loss_of(model, tokens(rank, 0)).backward()
    gone = mock.patch.object(opt.engine.sharded_model.disk, "check", side_effect=OffloadError("the disk is gone"))
    with warnings.catch_warnings(), gone if rank else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        opt.step()
    opt.zero_grad()
    loss_of(model, tokens(rank, 1)).backward()
    return error_of(opt.step)


def test_a_page_of_state_is_given_back_where_the_parameters_are_lost(tmp_path: Path) -> None:
    assert [kind for kind, _ in run_ranks(2, _lost_beside_state, str(tmp_path))] == ["OffloadError"] * 2


def _lost_before_a_commit(rank: int, world_size: int, folder: str) -> str:
    """The error of the step after one in which the disk of rank 3 fails, between fetch and commit of a page."""
    run = on_disk(folder, Run(dtype=torch.bfloat16, options={"state_offload": f"nvme:{folder}"}))
    model, opt = make(on_mesh(run, make_mesh(2, 2), state_over="all"), Net())
    commit = PagedStore.commit

    def fails(store: PagedStore, number: int) -> None:
        opt.engine.sharded_model.disk.failure = "the disk is gone"
        commit(store, number)

    def train(step: int) -> None:
        loss_of(model, tokens(rank, step)).backward()
        opt.step()

    train(0)
    opt.zero_grad()
    with warnings.catch_warnings(), mock.patch.object(PagedStore, "commit", fails if rank == 3 else commit):
        warnings.simplefilter("ignore")
        train(1)
    opt.zero_grad()
    kind, _ = error_of(lambda: train(2))
    opt.close()
    return kind


def test_a_page_of_parts_is_given_back_where_the_disk_fails_before_its_commit(tmp_path: Path) -> None:
    assert run_ranks(4, _lost_before_a_commit, str(tmp_path)) == ["OffloadError"] * 4
