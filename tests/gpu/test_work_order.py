"""Programs whose result depends on the order of work, on one NCCL rank: streams, hooks, gathers, host copies.

Under TORCH_CUDA_SANITIZER=1 torch raises where a kernel uses a tensor that another stream may not be through with. It
knows a tensor by its address, and a collective as a kernel of the stream on which it was called. So it sees neither an
overlap of two views that begin apart, nor a collective that nobody waited for: numbers have to show these.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chosen_programs import FEW, few_objects, of_one_rank
from order_programs import (
    DEFAULT,
    STREAMS,
    OrderProgram,
    Part,
    Streams,
    check,
    difference,
    expected,
    train,
)
from places import DEVICE, ON_GPU

pytestmark = pytest.mark.gpu

SECONDS = 60


def _device() -> torch.device:
    return torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


_group: list[str] = []  # the name of the default process group, while there is one


def _leave_group() -> None:
    if _group:
        dist.destroy_process_group()
        _group.clear()


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    _leave_group()


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    """A default process group of this rank alone, which tests share. ``bound``: NCCL has the GPU as ``device_id``."""
    if _group != [request.param]:
        _leave_group()
        bound = {"device_id": torch.device("cuda", 0)} if request.param and ON_GPU else {}
        backend, seconds = "nccl" if ON_GPU else "gloo", timedelta(seconds=SECONDS)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=seconds, **bound)
        _group.append(request.param)
        if ON_GPU:
            dist.all_reduce(torch.ones(1, device=_device()))  # else NCCL begins with the first collective, if any
        few_objects()
    return request.param


def _cases() -> list[tuple[str, OrderProgram]]:
    bound = [] if FEW or not ON_GPU else [("bound", program) for program in of_one_rank(few=True)]
    return [*(("", program) for program in of_one_rank()), *bound]


@pytest.mark.parametrize(("group", "program"), _cases(), indirect=["group"], ids=str)
def test_one_rank(group: str, program: OrderProgram) -> None:
    assert not check([train(0, 1, program, _device())], program)


@pytest.mark.skipif(not ON_GPU, reason=f"there are no streams on {DEVICE}")
def test_the_sanitizer_finds_a_missing_wait() -> None:
    """Where it is on. Else this shows nothing."""
    if "TORCH_CUDA_SANITIZER" not in os.environ:
        pytest.skip("TORCH_CUDA_SANITIZER is not set")
    from torch.cuda._sanitizer import CUDASanitizerErrors

    x, side = torch.zeros(2**20, device=_device()), torch.cuda.Stream()
    x.add_(1)
    with pytest.raises(CUDASanitizerErrors), torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.synchronize()


class _Noted(Streams):
    """Notes what is asked of it. On a device without streams that is all it does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls: list[tuple[str, ...]] = []

    def on(self, name: str) -> contextlib.AbstractContextManager[Any]:
        self.calls.append(("on", name))
        return super().on(name)

    def follow(self, name: str, before: str) -> None:
        self.calls.append((name, "follows", before))


@pytest.mark.parametrize(("made_on", "trained_on"), STREAMS)
def test_a_program_orders_its_own_streams(made_on: str, trained_on: str) -> None:
    """What was made on one stream is used on another after a wait, and results are read on the default stream."""
    streams = _Noted()
    train(0, 1, OrderProgram(2, "plain", made_on, trained_on), torch.device("cpu"), streams=streams)
    first = [(made_on, "follows", DEFAULT), ("on", made_on)]
    then = [(trained_on, "follows", made_on), ("on", trained_on), (DEFAULT, "follows", trained_on)]
    assert streams.calls == [*first, *then]


def test_a_wrong_number_is_told() -> None:
    program = OrderProgram(2, "read")
    right, other_rank = expected(program, 2), expected(program, 2, rank=1)
    assert difference(right, right) == ""
    name = "0.stem.weight"
    assert f"{name}: off by" in difference({**right, name: Part(right[name].values + 1e-5)}, right)
    assert difference({**right, "losses": other_rank["losses"]}, right).startswith("losses: off by")
    early = {**right, f"gradient {name} of step 1": right[f"gradient {name} of step 0"]}
    assert difference(early, right).startswith(f"gradient {name} of step 1: off by")
    assert difference({}, right)


def test_programs_differ_where_their_results_must() -> None:
    """What a program drops, or takes twice, does not go unnoticed because it gives the same numbers anyway."""
    plain = expected(OrderProgram(2), 2)
    for what in ("micro-batches", "zeroed locally", "used twice", "two optimizers", "clipped"):
        assert difference(expected(OrderProgram(2, what), 2), plain), what
    for what in ("zeroed at once", "raised", "saved and loaded", "overlapped"):
        assert not difference(expected(OrderProgram(2, what), 2), plain), what
    assert difference(expected(OrderProgram(2, "zeroed locally"), 2), expected(OrderProgram(2, "micro-batches"), 2))
