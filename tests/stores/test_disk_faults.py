"""A disk that fails under an optimizer: every rank raises, and names the loss."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from guards import open_files_in
from harness import run_ranks
from sharded_cases import full_state
from torch import nn
from training_cases import bits, error_of, make_gradients, make_parameters

SHAPES = ((33, 40), (7,), (129, 3))


def _parameters() -> list[nn.Parameter]:
    return make_parameters(SHAPES, torch.bfloat16)


def _make(folder: str, params: list[nn.Parameter], **options: Any) -> Any:
    return zero_optim.ShardedAdamW(params, lr=0.02, bucket_cap_mb=0.0005, state_offload=f"nvme:{folder}", **options)


def _step(opt: Any, params: list[nn.Parameter], rank: int, step: int, order: tuple[int, ...] = (0, 1, 2)) -> None:
    """``order``: in which the parameters are used."""
    grads = make_gradients(params, rank, step)
    sum((params[i].float() * grads[i].float()).sum() for i in order).backward()
    opt.step()
    opt.zero_grad()


def _end_writes(opt: Any) -> None:
    while opt.engine.store._backing.writing:
        opt.engine.store._backing.writing[0].end_write()


def _page_file(opt: Any) -> Path:
    """It has no name: this is how its own process may open it once more."""
    return Path(f"/proc/self/fd/{opt.engine.store._backing.file.file}")


# ---- at construction -------------------------------------------------------------------------------------------------


def _on_disk(argument: str, folder: str) -> Any:
    if argument == "state_offload":
        return _make(folder, _parameters())
    return zero_optim.shard_module(nn.Sequential(nn.Linear(9, 9)), (nn.Linear,), param_offload=f"nvme:{folder}")


def _constructed(rank: int, world_size: int, argument: str, folder: str) -> tuple[str, str]:
    return error_of(lambda: _on_disk(argument, folder))


@pytest.mark.parametrize("argument", ("state_offload", "param_offload"))
@pytest.mark.parametrize("ranks", (1, 2))
def test_a_missing_folder_is_named_on_every_rank(ranks: int, argument: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    for kind, message in run_ranks(ranks, _constructed, argument, missing):
        assert kind == "OffloadError"
        assert missing in message
        assert argument in message


def _with_a_full_disk(rank: int, world_size: int, argument: str, folder: str) -> tuple[str, str]:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch("os.posix_fallocate", full) if rank == world_size - 1 else contextlib.nullcontext():
        kind, message = error_of(lambda: _on_disk(argument, folder))
        return kind, message if not open_files_in(folder) else f"{message}; a file is left open"


@pytest.mark.parametrize("argument", ("state_offload", "param_offload"))
@pytest.mark.parametrize("ranks", (1, 2))
def test_a_full_disk_is_found_at_construction_and_leaves_nothing(ranks: int, argument: str, tmp_path: Path) -> None:
    *others, last = run_ranks(ranks, _with_a_full_disk, argument, str(tmp_path))
    assert last[0] == "OffloadError"
    for word in (str(tmp_path), "No space left", "bytes free"):
        assert word in last[1]
    for kind, message in others:
        assert kind == "RankMismatchError"
        assert "rank 1" in message
        assert "OffloadError" in message
    assert not any("left open" in message for _, message in (*others, last))
    assert not list(tmp_path.iterdir())


# ---- afterwards ------------------------------------------------------------------------------------------------------


def _cut_off(path: Path) -> None:
    os.truncate(path, 4096)


def _corrupt(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(64)
        byte = file.read(1)[0]
        file.seek(64)
        file.write(bytes([byte ^ 1]))


def failing(*_: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def _fault(kind: str, opt: Any) -> Iterator[None]:
    """Have the disk of ``opt`` fail within. A fault of the file stays."""
    goes_on, read = threading.Event(), os.preadv

    def hanging(*arguments: Any) -> int:
        assert goes_on.wait(60)
        return read(*arguments)

    if kind == "cut off":
        _cut_off(_page_file(opt))
    elif kind == "corrupted":
        _corrupt(_page_file(opt))
    elif kind == "time-out":
        opt.engine.store._backing._timeout = 0.0
    replaced = {
        "read error": ("preadv", failing),
        "write error": ("pwritev", failing),
        "time-out": ("preadv", hanging),
    }
    with mock.patch.object(os, *replaced[kind]) if kind in replaced else contextlib.nullcontext():
        try:
            yield
        finally:
            goes_on.set()


CAUSES = {
    "read error": "reading .* failed: Input/output error",
    "write error": "writing .* failed: Input/output error",
    "cut off": "reading .* ended after",
    "corrupted": "corrupted",
    "time-out": "reading .* is not over after 0 s",
}


def _after_a_fault(rank: int, world_size: int, folder: str, kind: str) -> dict[str, Any]:
    params = _parameters()
    opt = _make(folder, params)
    _step(opt, params, rank, 0)
    full_state(opt)  # the writes are over
    _end_writes(opt)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _fault(kind, opt) if rank == world_size - 1 else contextlib.nullcontext():
            _step(opt, params, rank, 1)
            found["read"] = error_of(lambda: full_state(opt))
    found["warned"] = [str(warning.message) for warning in caught if "next step" in str(warning.message)]
    found["parameters"] = [p.detach().clone() for p in params]
    for again in ("step", "the step after"):
        opt.zero_grad()
        found[again] = error_of(lambda: _step(opt, params, rank, 2))
    found["state"] = error_of(opt.state_dict)
    found["untouched"] = all(
        torch.equal(bits(p.detach()), bits(q)) for p, q in zip(params, found["parameters"], strict=True)
    )
    opt.close()
    return found


@pytest.mark.parametrize("kind", CAUSES)
@pytest.mark.parametrize("ranks", (1, 2))
def test_a_fault_raises_on_every_rank_from_the_next_step_on(ranks: int, kind: str, tmp_path: Path) -> None:
    found = run_ranks(ranks, _after_a_fault, str(tmp_path), kind)
    *others, last = found
    assert len(last["warned"]) == 1
    for what in ("read", "step", "the step after", "state"):
        name, message = last[what]
        assert name == "OffloadError", (what, message)
        assert re.search(CAUSES[kind], message), message
        for word in (f"rank {ranks - 1} in {tmp_path}", " bytes at ", "state is lost", "load a checkpoint"):
            assert word in message
    for other in others:
        assert other["read"][0] in ("OffloadError", "RankMismatchError")
        for what in ("step", "the step after"):
            assert other[what][0] == "OffloadError", what
            assert "another rank has lost the state of" in other[what][1]
    for each in found:
        assert each["untouched"]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(each["parameters"], last["parameters"], strict=True))
    assert not list(tmp_path.iterdir())


def _step_after_state_dict(opt: Any, params: list[nn.Parameter], rank: int, world_size: int) -> None:
    """Each rank calls ``state_dict`` for itself: the one that has lost state raises, and all do in the next step."""
    if rank == world_size - 1:
        assert error_of(opt.state_dict)[0] == "OffloadError"
    _step(opt, params, rank, 1)


def _found_elsewhere(rank: int, world_size: int, folder: str) -> dict[str, tuple[str, str]]:
    """A loss that is found by something else than an update."""
    found = {}
    for what in ("full state", "state dict", "load", "load of a part", *(["layout"] if world_size > 1 else [])):
        params = _parameters()
        opt = _make(folder, params, master="fp32")  # a split one follows edits by itself: no page is read
        if what == "layout":  # state that has begun moves to other buckets in the first step
            zero_optim.load_full_state_dict(opt, zero_optim.full_state_dict(opt))
        else:
            _step(opt, params, rank, 0)
        state = zero_optim.full_state_dict(opt, rank=None)  # the writes are over
        if what == "load":
            zero_optim.load_full_state_dict(opt, state)  # the next step looks at every master, before it exchanges
            _end_writes(opt)
        for of_parameter in state["state"].values() if what == "load of a part" else ():
            del of_parameter["master"]  # it is taken from the parameter: each page is read
        if rank == world_size - 1:
            _cut_off(_page_file(opt))
        looks = {
            "full state": partial(zero_optim.full_state_dict, opt),
            "state dict": partial(_step_after_state_dict, opt, params, rank, world_size),
            "load of a part": partial(zero_optim.load_full_state_dict, opt, state),
        }.get(what, partial(_step, opt, params, rank, 1, (1, 0, 2)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[what] = error_of(looks)
        opt.close()
    return found


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_loss_is_raised_on_every_rank_whatever_finds_it(ranks: int, tmp_path: Path) -> None:
    *others, last = run_ranks(ranks, _found_elsewhere, str(tmp_path))
    for what, (kind, message) in last.items():
        assert kind == "OffloadError", (what, message)
        assert "lost" in message, what
        for other in others:
            assert other[what][0] in ("OffloadError", "RankMismatchError"), (what, other[what])
    assert not list(tmp_path.iterdir())
