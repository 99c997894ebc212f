"""Checkpoints and state dicts of plain slices: by number, on any data-parallel ranks, and never on other slices."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cells import slow
from checkpoint_cases import assert_bits
from harness import run_ranks
from megatron_cases import HYPER, Block, Model, loss_of, make_model
from small_jobs import all_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from zero_optim import (
    CheckpointError,
    ParameterError,
    ShardedAdamW,
    StateMismatchError,
    checkpoint,
    full_model_state_dict,
    full_state_dict,
    gather_parameters,
    load_full_state_dict,
    shard_module,
)
from zero_optim.checkpoint.hugging_face import export


@dataclass(frozen=True)
class Mesh:
    data: int
    tensor: int
    stage: int

    @property
    def ranks(self) -> int:
        return self.data * self.tensor


SAVED = (Mesh(2, 2, 0), Mesh(2, 2, 2), Mesh(3, 2, 3))
LOADED = (Mesh(1, 2, 2), Mesh(2, 2, 1), Mesh(2, 2, 3), Mesh(3, 2, 2))


def make_job(mesh: Mesh, dtype: torch.dtype, seed: int = 0) -> tuple[Model, ShardedAdamW, dist.DeviceMesh]:
    of = init_device_mesh("cpu", (mesh.data, mesh.tensor), mesh_dim_names=("dp", "tp"))
    model = make_model(of["tp"].get_group(), dtype, seed)
    given = {"mesh": of["dp"], "tensor_parallel": of["tp"]}
    if mesh.stage == 3:
        shard_module(model, (Block,), **given)
        given = {}
    return model, ShardedAdamW(model.named_parameters(), **HYPER, **given, stage=mesh.stage), of


def train(model: Model, opt: ShardedAdamW, data_rank: int, step: int) -> None:
    loss_of(model, data_rank, step).backward()
    opt.step()
    opt.zero_grad()


def save(rank: int, world_size: int, mesh: Mesh, folder: str, dtype: torch.dtype) -> dict[str, Tensor]:
    model, opt, of = make_job(mesh, dtype)
    for step in range(2):
        train(model, opt, of.get_local_rank("dp"), step)
    checkpoint.save(f"{folder}/own", model, opt, step=2)
    first = of.get_local_rank("dp") == 0
    weights, state = full_model_state_dict(model), full_state_dict(opt)
    assert (bool(weights), bool(state)) == (first, first)  # one rank of each slice gets them
    if first:
        Path(f"{folder}/{of.get_local_rank('tp')}").write_bytes(pickle.dumps((weights, state)))
    found = all_of(model, opt)
    opt.close()
    return found


def load(rank: int, world_size: int, mesh: Mesh, folder: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """What is there after each way to load, whatever was there before."""
    found = []
    for how in ("own", "full"):
        model, opt, of = make_job(mesh, dtype, seed=rank + 1)
        if how == "own":
            checkpoint.load(f"{folder}/own", model, opt)
        else:
            weights, state = pickle.loads(Path(f"{folder}/{of.get_local_rank('tp')}").read_bytes())
            model.load_state_dict(weights)
            load_full_state_dict(opt, state if of.get_local_rank("dp") == 0 else None)
        found.append(all_of(model, opt))
        opt.close()
    return found


# In ``make test`` each of SAVED is loaded by half of the meshes.
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(saved, LOADED[turn::2], marks=() if turn == at % 2 else slow)
        for at, saved in enumerate(SAVED)
        for turn in range(2)
    ],
    ids=lambda of: str(of) if isinstance(of, Mesh) else "",
)
def test_loads_on_any_data_parallel_ranks_bit_for_bit(saved: Mesh, loaded: tuple[Mesh, ...], tmp_path: Path) -> None:
    dtype = torch.bfloat16 if saved.stage == 2 else torch.float32
    wanted = run_ranks(saved.ranks, save, saved, str(tmp_path), dtype, timeout=120)
    assert not torch.equal(wanted[0]["blocks.0.fused"], wanted[1]["blocks.0.fused"])
    for rank, other in enumerate(wanted):
        assert_bits(other, wanted[rank % 2], f"what ranks of one slice say, rank {rank}")
    for mesh in loaded:
        for rank, ways in enumerate(run_ranks(mesh.ranks, load, mesh, str(tmp_path), dtype, timeout=120)):
            for how, found in zip(("own", "full"), ways, strict=True):
                assert_bits(found, wanted[rank % 2], f"{how}, on {mesh}, rank {rank}")
    tensors = json.loads((tmp_path / "own" / "step-2" / "index.json").read_text())["contents"]["tensors"]
    stacks = {entry["name"]: entry["shape"] for entry in tensors if entry["kind"] == "parameter" and "cut" in entry}
    assert stacks == {
        f"blocks.{number}.{name}": shape
        for number in (0, 1)
        for name, shape in (("fused", [2, 8, 12]), ("inner", [2, 8]), ("down", [2, 12, 4]))
    }


def refused(rank: int, world_size: int, mesh: Mesh, folder: str) -> str:
    """Nothing is changed."""
    model, opt, _ = make_job(mesh, torch.float32, seed=1)
    before = all_of(model, opt)
    with pytest.raises(StateMismatchError) as error:
        checkpoint.load(f"{folder}/own", model, opt)
    assert_bits(all_of(model, opt), before, "after an error")
    opt.close()
    return str(error.value)


def refused_elsewhere(rank: int, world_size: int, folder: str) -> list[str]:
    """What does not know who has the other slices, or would take them for wholes."""
    model, opt, of = make_job(Mesh(2, 2, 2), torch.float32)
    told = []
    for optimizer in (None, torch.optim.AdamW(model.parameters())):
        with pytest.raises(ParameterError) as error:
            checkpoint.save(folder, model, optimizer)
        told.append(str(error.value))
    opt.close()
    slices = [p for p in model.parameters() if getattr(p, "tensor_model_parallel", False)]
    copies = [p for p in model.parameters() if not getattr(p, "tensor_model_parallel", False)]
    opt = ShardedAdamW(copies, mesh=of["dp"], tensor_parallel=of["tp"])
    with pytest.raises(ParameterError) as error:
        checkpoint.save(folder, model, [opt, torch.optim.AdamW(slices)])
    told.append(str(error.value))
    opt.close()
    convolution = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    convolution.weight.tensor_model_parallel = True
    opt = ShardedAdamW(convolution.named_parameters(), mesh=of["dp"], tensor_parallel=of["tp"])
    with pytest.raises(ParameterError) as error:
        checkpoint.save(folder, convolution, opt)
    told.append(str(error.value))
    opt.close()
    return told


def test_other_slices_are_refused(tmp_path: Path) -> None:
    run_ranks(4, save, Mesh(2, 2, 2), str(tmp_path), torch.float32)
    for mesh, here in (
        (Mesh(1, 4, 2), "exp_avg of 'blocks.0.down' is 4 slices of [12, 2] here, and 2 slices of [12, 4] there"),
        (Mesh(2, 1, 2), "exp_avg of 'blocks.0.down' is whole, [12, 8] here, and 2 slices of [12, 4] there"),
        (Mesh(2, 1, 3), "exp_avg of 'blocks.0.down' is whole, [12, 8] here, and 2 slices of [12, 4] there"),
    ):
        for told in run_ranks(mesh.ranks, refused, mesh, str(tmp_path)):
            assert here in told and "load on as many tensor-parallel ranks as saved them" in told
    with pytest.raises(CheckpointError, match="was saved as 2 slices of tensor-parallel ranks"):
        export(tmp_path / "own", tmp_path / "whole")
    for alone, of_torch, beside, convolution in run_ranks(4, refused_elsewhere, str(tmp_path / "none")):
        for told in (alone, of_torch):
            assert "which ranks have the same slice is not known: give its optimizer, too" in told
        assert "is in an optimizer of torch's" in beside
        assert "is a slice in channels_last" in convolution


def gather(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """At stage 3: what is shown, and what becomes of an edit."""
    model, opt, of = make_job(Mesh(2, 2, 3), torch.float32)
    wanted = dict(make_model(of["tp"].get_group()).named_parameters())
    with gather_parameters(model, writeback=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, wanted[name]), name
            with torch.no_grad():
                parameter.mul_(2.0)
    found = full_model_state_dict(model, rank=None)
    opt.close()
    return found, {name: 2 * parameter.detach() for name, parameter in wanted.items()}


def test_gathered_slices_are_those_of_each_rank() -> None:
    for found, wanted in run_ranks(4, gather):
        assert_bits(found, wanted, "after an edit")
