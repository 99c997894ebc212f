"""A disk that fails under an optimizer: every rank raises, and names the loss."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from guards import open_files_in
from harness import run_ranks
from sharded_cases import full_state
from torch import nn
from training_cases import bits, error_of, make_gradients, make_parameters

SHAPES = ((33, 40), (7,), (129, 3))


def _parameters() -> list[nn.Parameter]:
    return make_parameters(SHAPES, torch.bfloat16)


def _make(folder: str | None, params: list[nn.Parameter], stage: int = 2) -> Any:
    import zero_optim

    store = {} if folder is None else {"state_offload": f"nvme:{folder}"}
    return zero_optim.ShardedAdamW(params, lr=0.02, stage=stage, bucket_cap_mb=0.0005, **store)


def _step(opt: Any, params: list[nn.Parameter], rank: int, step: int, order: tuple[int, ...] = (0, 1, 2)) -> None:
    """``order``: in which the parameters are used."""
    grads = make_gradients(params, rank, step)
    sum((params[i].float() * grads[i].float()).sum() for i in order).backward()
    opt.step()
    opt.zero_grad()


def _page_file(opt: Any) -> Path:
    """It has no name: this is how its own process may open it once more."""
    return Path(f"/proc/self/fd/{opt.engine.store._homes.file._file.file}")


# ---- at construction -------------------------------------------------------------------------------------------------


def _constructed(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    return error_of(lambda: _make(folder, _parameters()))


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_missing_folder_is_named_on_every_rank(ranks: int, tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    for kind, message in run_ranks(ranks, _constructed, missing):
        assert kind == "OffloadError"
        assert missing in message
        assert "state_offload" in message


def _with_a_full_disk(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch("os.posix_fallocate", full) if rank == world_size - 1 else contextlib.nullcontext():
        kind, message = error_of(lambda: _make(folder, _parameters()))
        return kind, message if not open_files_in(folder) else f"{message}; a file is left open"


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_full_disk_is_found_at_construction_and_leaves_nothing(ranks: int, tmp_path: Path) -> None:
    *others, last = run_ranks(ranks, _with_a_full_disk, str(tmp_path))
    assert last[0] == "OffloadError"
    for word in (str(tmp_path), "No space left", "bytes free"):
        assert word in last[1]
    for kind, message in others:
        assert kind == "RankMismatchError"
        assert "rank 1" in message
        assert "OffloadError" in message
    assert not any("left open" in message for _, message in (*others, last))
    assert not list(tmp_path.iterdir())


# ---- pages that cannot be read ---------------------------------------------------------------------------------------


def _cut_off(path: Path) -> None:
    os.truncate(path, 4096)


def _damaged(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(64)
        byte = file.read(1)[0]
        file.seek(64)
        file.write(bytes([byte ^ 1]))


def _after_a_loss(rank: int, world_size: int, folder: str, damage: Callable[[Path], None]) -> dict[str, Any]:
    params = _parameters()
    opt = _make(folder, params)
    _step(opt, params, rank, 0)
    full_state(opt)  # the writes are over
    if rank == world_size - 1:
        damage(_page_file(opt))
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _step(opt, params, rank, 1)
    found["warned"] = [str(warning.message) for warning in caught if "next step" in str(warning.message)]
    found["parameters"] = [p.detach().clone() for p in params]
    found["read"] = error_of(lambda: full_state(opt))
    found["step"] = error_of(lambda: _step(opt, params, rank, 2))
    found["untouched"] = all(
        torch.equal(bits(p.detach()), bits(q)) for p, q in zip(params, found["parameters"], strict=True)
    )
    opt.zero_grad()
    found["again"] = error_of(lambda: _step(opt, params, rank, 2))
    opt.close()
    return found


@pytest.mark.parametrize("damage", (_cut_off, _damaged))
@pytest.mark.parametrize("ranks", (1, 2))
def test_a_lost_page_is_told_on_every_rank(ranks: int, damage: Callable[[Path], None], tmp_path: Path) -> None:
    found = run_ranks(ranks, _after_a_loss, str(tmp_path), damage)
    last = found[-1]
    assert len(last["warned"]) >= 1
    for what in ("step", "again", "read"):
        kind, message = last[what]
        assert kind == "OffloadError", what
        for word in (str(tmp_path), "bytes", "lost", "checkpoint"):
            assert word in message
        for other in found[:-1]:
            assert other[what][0] in ("OffloadError", "RankMismatchError"), what
    for other in found:
        assert other["untouched"]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(other["parameters"], last["parameters"], strict=True))
    assert not list(tmp_path.iterdir())


def _found_elsewhere(rank: int, world_size: int, folder: str) -> dict[str, tuple[str, str]]:
    """A loss that is found by something else than an update."""
    import zero_optim

    found = {}
    for what in ("full state", "load", "load of a part", *(["layout"] if world_size > 1 else [])):
        params = _parameters()
        opt = _make(folder, params)
        if what == "layout":  # state that has begun moves to other buckets in the first step
            zero_optim.load_full_state_dict(opt, zero_optim.full_state_dict(opt))
        else:
            _step(opt, params, rank, 0)
        state = zero_optim.full_state_dict(opt, rank=None)  # the writes are over
        if what == "load":
            zero_optim.load_full_state_dict(opt, state)  # the next step looks at every master, before it exchanges
            opt.engine.store.wait()
        for of_parameter in state["state"].values() if what == "load of a part" else ():
            del of_parameter["master"]  # it is taken from the parameter: each page is read
        if rank == world_size - 1:
            _cut_off(_page_file(opt))
        looks = {
            "full state": partial(zero_optim.full_state_dict, opt),
            "load of a part": partial(zero_optim.load_full_state_dict, opt, state),
        }.get(what, partial(_step, opt, params, rank, 1, (1, 0, 2)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[what] = error_of(looks)
        opt.close()
    return found


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_loss_is_told_on_every_rank_whoever_finds_it(ranks: int, tmp_path: Path) -> None:
    *others, last = run_ranks(ranks, _found_elsewhere, str(tmp_path))
    for what, (kind, message) in last.items():
        assert kind == "OffloadError", (what, message)
        assert "lost" in message, what
        for other in others:
            assert other[what][0] in ("OffloadError", "RankMismatchError"), (what, other[what])
    assert not list(tmp_path.iterdir())


# ---- pages that cannot be written ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _failing_writes(active: bool) -> Iterator[None]:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mock.patch("os.pwritev", failing) if active else contextlib.nullcontext():
        yield


def _after_failed_writes(rank: int, world_size: int, folder: str) -> tuple[tuple[str, str], bool]:
    params = _parameters()
    opt = _make(folder, params)
    _step(opt, params, rank, 0)
    full_state(opt)  # the writes of this step have ended: none fails below, of which the next step would tell
    with _failing_writes(rank == 0):
        _step(opt, params, rank, 1)
        full_state(opt)  # reads every page, after its write
    before = [p.detach().clone() for p in params]
    told = error_of(lambda: _step(opt, params, rank, 2))
    untouched = all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    opt.close()
    return told, untouched


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_page_that_cannot_be_written_is_told_on_every_rank(ranks: int, tmp_path: Path) -> None:
    for rank, ((kind, message), untouched) in enumerate(run_ranks(ranks, _after_failed_writes, str(tmp_path))):
        assert kind == "OffloadError"
        assert "Input/output error" in message if rank == 0 else "another rank" in message
        assert untouched
    assert not list(tmp_path.iterdir())
