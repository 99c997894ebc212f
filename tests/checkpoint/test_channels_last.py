"""Checkpoints of channels_last models: logical tensors, whichever format saves them and whichever loads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zero_optim
from cells import slow_after
from harness import run_ranks
from memory_formats import given_net, strides
from safetensors.torch import load_file
from sharded_cases import Given, Run, full_state, gathered, make
from torch import Tensor, nn
from training_cases import assert_bitwise, copies, make_gradients
from zero_optim import checkpoint
from zero_optim.checkpoint.folder import inspect
from zero_optim.checkpoint.hugging_face import export

FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class _Job:
    """``stage`` None: ``torch.optim.AdamW``."""

    channels_last: bool
    stage: int | None
    dtype: torch.dtype = FP32


Seen = tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]


def _make(job: _Job, seed: int) -> tuple[nn.Module, Any]:
    net = given_net(job.channels_last, job.dtype, seed)
    if job.stage is None:
        return net, torch.optim.AdamW(net.parameters())
    # Buckets in which shards end in the midst of the slices of a convolution's weight.
    options = {} if job.stage == 3 else {"bucket_cap_mb": 0.008}
    return make(Run(stage=job.stage, dtype=job.dtype, options=options), net, units=(Given,))


def _look(model: nn.Module, opt: Any) -> Seen:
    if isinstance(opt, torch.optim.AdamW):
        return {name: p.detach().clone() for name, p in model.named_parameters()}, opt.state_dict()["state"]
    return gathered(model), full_state(opt)


def _trained(rank: int, world_size: int, job: _Job) -> tuple[nn.Module, Any]:
    model, opt = _make(job, seed=0)
    like = copies(given_net(False, job.dtype).parameters())
    for step in range(2):
        model(make_gradients(like, rank, step, grid=world_size)).backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def _save(rank: int, world_size: int, folder: str, job: _Job) -> Seen:
    model, opt = _trained(rank, world_size, job)
    checkpoint.save(folder, model, opt, step=2)
    return _look(model, opt)


def _load(rank: int, world_size: int, folder: str, job: _Job) -> Seen:
    model, opt = _make(job, seed=1)
    before = strides(model)
    checkpoint.load(folder, model, opt)
    assert strides(model) == before
    return _look(model, opt)


def _assert_loaded(saved: Seen, loaded: Seen) -> None:
    assert saved[0].keys() == loaded[0].keys() and saved[1].keys() == loaded[1].keys() and len(saved[1]) == 9
    assert_bitwise([*loaded[0].values()], [*saved[0].values()], "parameters")
    for index, entry in loaded[1].items():
        assert entry.keys() == saved[1][index].keys() >= {"step", "exp_avg", "exp_avg_sq"}
        assert_bitwise([*entry.values()], [saved[1][index][kind] for kind in entry], f"state of {index}")


SAVED = {
    "2 ranks, bf16": (2, _Job(True, 1, BF16)),
    "3 ranks, stage 3": (3, _Job(True, 3)),
    "contiguous": (2, _Job(False, 3)),
    "2 ranks": (2, _Job(True, 2)),
    "1 rank": (1, _Job(True, 2)),
    "AdamW": (1, _Job(True, None)),
}


@pytest.mark.parametrize("how", slow_after(3, SAVED))
def test_any_format_loads_into_any(tmp_path: Path, how: str) -> None:
    ranks, job = SAVED[how]
    saved = run_ranks(ranks, _save, str(tmp_path), job)[0]
    jobs = [(1, _Job(False, 2)), (3, _Job(True, 2)), (2, _Job(True, 3)), (3, _Job(False, 3)), (1, _Job(True, None))]
    for ranks_then, then in jobs:
        if then.stage is not None or job.dtype is FP32:
            job_then = _Job(then.channels_last, then.stage, job.dtype)
            for loaded in run_ranks(ranks_then, _load, str(tmp_path), job_then):
                _assert_loaded(saved, loaded)


def test_the_index_says_what_lies_permuted(tmp_path: Path) -> None:
    for name, channels_last in (("contiguous", False), ("last", True)):
        run_ranks(2, _save, str(tmp_path / name), _Job(channels_last, 2))
        index = json.loads((tmp_path / name / "step-2" / "index.json").read_text())
        orders = {(of["kind"], of["name"]): of.get("order") for of in index["contents"]["tensors"]}
        weight = ("exp_avg", "weights.0")
        assert orders[weight] == ([0, 2, 3, 1] if channels_last else None)
        assert len([order for order in orders.values() if order]) == (2 * 6 if channels_last else 0)
        assert inspect(tmp_path / name, quick=False)[1] == []


# -- Hugging Face's safetensors --------------------------------------------------------------------------------------


def _load_safetensors(rank: int, world_size: int, folder: str, job: _Job) -> dict[str, Tensor]:
    model, _ = _make(job, seed=1)
    before = strides(model)
    zero_optim.load_safetensors(model, folder)
    assert strides(model) == before
    return gathered(model)


def test_weights_are_exported_and_read(tmp_path: Path) -> None:
    (values, state), *_ = run_ranks(2, _save, str(tmp_path / "saved"), _Job(True, 3))
    export(tmp_path / "saved", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.is_contiguous() for tensor in exported.values()) and len(exported) == 9
    assert_bitwise([exported[name] for name in values], [*values.values()])
    for ranks, job in ((3, _Job(True, 3)), (2, _Job(True, 2)), (2, _Job(False, 3))):
        for loaded in run_ranks(ranks, _load_safetensors, str(tmp_path / "out"), job):
            assert_bitwise([*loaded.values()], [*values.values()])


def test_masters_are_exported(tmp_path: Path) -> None:
    (_, state), *_ = run_ranks(2, _save, str(tmp_path / "saved"), _Job(True, 2, BF16))
    export(tmp_path / "saved", tmp_path / "out", dtype=FP32)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    names = [name for name, _ in given_net(False).named_parameters()]
    assert_bitwise([exported[name] for name in names], [state[index]["master"] for index in range(9)])


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def _dcp_save(rank: int, world_size: int, folder: str, job: _Job, wait: bool) -> Seen:
    model, opt = _trained(rank, world_size, job)
    content = {"model": model, "optim": opt}
    if wait:
        dcp.save(content, checkpoint_id=folder)
    else:
        dcp.async_save(content, checkpoint_id=folder, process_group=torch.distributed.new_group()).result()
    return _look(model, opt)


def _dcp_load(rank: int, world_size: int, folder: str, job: _Job) -> Seen:
    model, opt = _make(job, seed=1)
    before = strides(model)
    dcp.load({"model": model, "optim": opt}, checkpoint_id=folder)
    assert strides(model) == before
    return _look(model, opt)


@pytest.mark.parametrize(
    ("ranks", "job", "wait"),
    slow_after(
        2,
        [(2, _Job(True, 2), True), (2, _Job(True, 3), False), (3, _Job(True, 3), True), (2, _Job(False, 3), True)],
    ),
)
def test_dcp_has_logical_tensors(tmp_path: Path, ranks: int, job: _Job, wait: bool) -> None:
    saved = run_ranks(ranks, _dcp_save, str(tmp_path), job, wait)[0]
    for ranks_then, then in [(1, _Job(False, 2)), (3, _Job(True, 3)), (2, _Job(True, 1))]:
        for loaded in run_ranks(ranks_then, _dcp_load, str(tmp_path), then):
            _assert_loaded(saved, loaded)
