"""Stores by themselves on the simulated GPU: memory that is given back, and taken anew, while copies are under way.

Whole trainings with stores are among the order programs of ``make race-check``.
"""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from harness import on_one_gpu, run_ranks
from order_programs import OrderProgram, train_all, wrong
from simulated_gpu.switch import LATE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero_optim import shard_module
from zero_optim.checkpoint.background import SaveBuffer
from zero_optim.errors import OffloadError
from zero_optim.stores.host_memory import HostMemory, Lanes
from zero_optim.stores.paged_store import HostBacking, PagedStore

NUMEL = 512
PAGE = NUMEL * 4  # bytes


def _store(budget: float = 0, room: Any = None) -> Any:
    device = torch.device("cuda", 0)
    return PagedStore(device, Lanes(device), HostBacking(HostMemory(pinned=True)), budget, room)


def _page(value: float) -> dict[str, Tensor]:
    return {"exp_avg": torch.full((NUMEL,), float(value), device="cuda")}


def pages_in_turn(steps: int, room: int | None) -> list[list[float]]:
    """As a step goes through them, each with parameters that visit. ``room``: for so many, after the second step."""
    store = _store(0, None if room is None else lambda: room * PAGE)
    homes = [store._backing.allocate(PAGE) for _ in range(5)]
    for home in homes:
        home.overwrite().zero_()
    visiting = [{"parameter": (torch.empty(NUMEL), home)} for home in homes]
    pages = [store.allocate(_page(value), visits) for value, visits in enumerate(visiting)]
    for _ in range(steps):
        store.prefetch(pages[0])
        for place, number in enumerate(pages):
            for later in pages[place + 1 : place + 2]:
                store.prefetch(later)
            here = store.fetch(number)
            here["exp_avg"].mul_(2).add_(1)
            here["parameter"].add_(1)
            store.commit(number)
        store.end_step()
    values = [[float(home.fetch().view(torch.float32)[at]) for at in (0, -1)] for home in homes]
    for number in pages:
        state = store.fetch(number)["exp_avg"]
        values.append([float(state[at].cpu()) for at in (0, -1)])
        store.discard(number)
    torch.cuda.synchronize()
    store.close()
    return values


@pytest.mark.parametrize("room", (None, 0, 2, 5))
def test_pages_in_turn(room: int | None) -> None:
    want = [[4.0] * 2] * 5 + [[value * 2**4 + 15] * 2 for value in range(5)]
    assert on_one_gpu(pages_in_turn, 4, room) == want


def closed_under_way(kept: bool, written: bool) -> list[int]:
    """The memory of the frames, and of the homes, goes while the lanes have work."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        store = _store(math.inf if kept else 0)
        pages = [store.allocate(_page(value)) for value in range(3)]
    torch.cuda.current_stream().wait_stream(side)
    for number in pages:
        store.prefetch(number)
        state = store.fetch(number)["exp_avg"]
        if written:
            state.add_(1)
            store.commit(number)
        else:
            state.sum()
            store.discard(number)
    store.close()
    footprint = store.footprint()
    del store
    gc.collect()
    torch.cuda.synchronize()
    return [*footprint.values()]


@pytest.mark.parametrize("written", (False, True))
@pytest.mark.parametrize("kept", (False, True))
def test_a_store_is_closed_while_copies_are_under_way(kept: bool, written: bool) -> None:
    assert on_one_gpu(closed_under_way, kept, written) == [0, 0, 0]


class _Streams(TorchDispatchMode):
    """Notes on which streams host memory is copied to the device, and on which a layer computes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        if name == "linear" or (name == "copy_" and args[0].is_cuda and not args[1].is_cuda):
            self.used.append((name, torch.cuda.current_stream().stream_id))
        return func(*args, **(kwargs or {}))


def units_from_host_memory() -> tuple[bool, list[tuple[str, int]]]:
    """Whether two forwards of a model with its parameters in host memory are right; what the second has used."""
    plain = nn.Sequential(*(nn.Linear(8, 8, device="cpu") for _ in range(3)))
    model = shard_module(copy.deepcopy(plain), (nn.Linear,), device="cuda", param_offload="cpu")
    x = torch.ones(2, 8, device="cpu")
    with torch.inference_mode():
        wanted, there = plain(x), x.to("cuda")
        model(there)
        with _Streams() as streams:
            got = model(there)
        return torch.equal(got.cpu(), wanted), streams.used


def test_the_next_unit_is_copied_beside_the_one_in_use() -> None:
    """On the stream that computes it would hold the unit in use, before which it is asked for."""
    right, used = on_one_gpu(units_from_host_memory)
    assert right
    assert [name for name, _ in used] == ["copy_", "copy_", "linear", "copy_", "linear", "linear"]
    lane = {stream for name, stream in used if name == "copy_"}
    assert len(lane) == 1 and lane != {0} and {stream for name, stream in used if name == "linear"} == {0}


@pytest.mark.parametrize("where", ("", ", edited", ", updated on the host"))
def test_parameters_on_a_disk(where: str) -> None:
    programs = [OrderProgram(3, f"parameters on a disk{where}")]
    assert not wrong(run_ranks(2, train_all, programs, simulated=LATE), programs)


class _LastError(TorchDispatchMode):
    """CUDA keeps the error of a call that has failed; torch asks for it after each launch, whoever's that is."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pending = True
        return 2  # cudaErrorMemoryAllocation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        launched = isinstance(result, Tensor) and result.is_cuda and "empty" not in str(func)
        if self.pending and launched:
            self.pending = False
            raise RuntimeError("CUDA error: out of memory")
        return result


def refused() -> tuple[str, float]:
    """What a store says whose memory cannot be pinned, and what somebody else's kernel then gives."""
    x, before = torch.ones(1, device="cuda"), torch.cuda.cudart
    with _LastError() as runtime:
        torch.cuda.cudart = lambda: runtime
        try:
            _store().allocate(_page(1.0))
        except OffloadError as error:
            return str(error), float(x.add_(1).cpu())
        finally:
            torch.cuda.cudart = before
    return "", 0.0


def test_memory_that_cannot_be_pinned_leaves_no_error_to_others() -> None:
    told, value = on_one_gpu(refused)
    assert "could not be pinned (CUDA error 2)" in told and "ulimit -l" in told
    assert value == 2.0


class _Pinned(TorchDispatchMode):
    """Counts what is pinned by torch's own allocator, which takes a power of two."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += bool((kwargs or {}).get("pin_memory"))
        return func(*args, **(kwargs or {}))


def as_large_as_asked_for() -> tuple[int, list[int], bool]:
    """Of two saves in the background, how often torch pins, the bytes of their memory, and whether it is pinned."""
    torch.empty(1, pin_memory=True)  # else ``is_pinned`` of this torch, which has no CUDA, asks nobody
    buffer, sizes = SaveBuffer(), []
    with _Pinned() as by_torch:
        for numel in (5000, 3000):
            values = torch.arange(numel, dtype=torch.float32, device="cuda")
            copied = buffer.hold([4 * numel], [values])
            assert torch.equal(next(iter(copied)).view(torch.float32), values.cpu())
            sizes.append(buffer._memory.untyped_storage().nbytes())
    return by_torch.count, sizes, buffer._memory.is_pinned()


def test_a_save_in_the_background_pins_no_more_than_it_has() -> None:
    assert on_one_gpu(as_large_as_asked_for) == (0, [20_000, 20_000], True)
