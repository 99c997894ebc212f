"""What the library's process groups are made with: NCCL's options, and descriptions for the flight recorder."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zero_optim
from grid_cases import make_mesh
from harness import run_ranks
from sharded_cases import Block, Net
from zero_optim import validate
from zero_optim.comm import transport

TIMEOUT = timedelta(seconds=77)


class Options:
    """``ProcessGroupNCCL.Options``, which a torch for the CPU does not have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)


def _made(rank: int, world_size: int, backend: str, members: list[int]) -> list[tuple[Any, ...]]:
    """What each call of ``dist.new_group`` is given for one group of its own over ``backend``."""
    group = dist.new_group(members, TIMEOUT)
    calls: list[tuple[Any, ...]] = []

    def new_group(ranks: Any, timeout: Any, backend: Any, pg_options: Any = None, **named: Any) -> str:
        shown = None if pg_options is None else (pg_options.is_high_priority_stream, pg_options._timeout)
        calls.append((ranks, timeout, shown, named["use_local_synchronization"], named["group_desc"]))
        return f"group {len(calls)}"

    nccl = mock.Mock(Options=Options)
    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
        mock.patch.object(transport, "backends", lambda group: {"cpu": "gloo", "cuda": backend}),
    ):
        if rank in members:
            assert transport.Transport().split(group, [[member] for member in members], "across replicas") == (
                f"group {1 + (members.index(rank) if len(members) == world_size else 0)}"
            )
    dist.barrier()  # else a rank leaves while another is still connecting the group, which then fails (seen)
    return calls


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_groups_have_options_and_a_description(backend: str) -> None:
    options = (True, TIMEOUT) if backend == "nccl" else None
    whole = run_ranks(2, _made, backend, [0, 1])
    expected = [([rank], TIMEOUT, options, False, "zero_optim:across replicas") for rank in (0, 1)]
    assert whole == [expected, expected]  # each rank of the job makes all groups, in one order
    part = run_ranks(3, _made, backend, [0, 2])
    assert part == [
        [([rank], TIMEOUT, options, True, "zero_optim:across replicas")] if rank in (0, 2) else [] for rank in range(3)
    ]


def _described(rank: int, world_size: int, stage: int) -> tuple[list[str], bool]:
    mesh, model = make_mesh(2, 2), Net()
    if stage == 3:
        zero_optim.shard_module(model, (Block,), mesh=mesh)
        mesh = None
    opt = zero_optim.ShardedAdamW(model.parameters(), stage=stage, mesh=mesh)
    groups = opt.stats()["process_groups"]
    own = all(rank in ranks for _, ranks in groups.values())
    opt.close()
    return sorted(description for description, _ in groups.values()), own


@pytest.mark.parametrize("stage", [2, 3])
def test_stats_list_the_groups(stage: int) -> None:
    ours = ["zero_optim:across replicas", "zero_optim:own", "zero_optim:within a replica"] * (stage - 1)
    for described, own in run_ranks(4, _described, stage):
        channels = described.count("zero_optim:own") - (stage - 1)
        assert own and described == sorted(["default_pg", *ours, *["zero_optim:own"] * channels])


class OnTwoRanks:
    world_size, group = 2, None


def test_a_wait_that_blocks_the_host_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "serves", lambda comm, device: True)
    monkeypatch.setattr(validate, "backend_of", lambda comm, device: "nccl" if device.type == "cuda" else "gloo")
    gpu = torch.device("cuda", 0)
    validate._warn_of_blocking_wait.cache_clear()
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate.check_backend(OnTwoRanks(), torch.device("cpu"))
    with pytest.warns(UserWarning, match="TORCH_NCCL_BLOCKING_WAIT is set.*Unset it"):
        validate.check_backend(OnTwoRanks(), gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate.check_backend(OnTwoRanks(), gpu)
        validate._warn_of_blocking_wait.cache_clear()
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
        validate.check_backend(OnTwoRanks(), gpu)
    validate._warn_of_blocking_wait.cache_clear()
