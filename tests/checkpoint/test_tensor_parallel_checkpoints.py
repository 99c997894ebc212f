"""Checkpoints and state dicts of a model cut over tensor-parallel ranks: whole, and loaded on any other mesh."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zero_optim
from cells import slow_where
from checkpoint_cases import assert_bits
from harness import run_ranks
from small_jobs import all_of
from tensor_cases import HYPER, Block, Way, loss_of, losses, make_mesh, make_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from zero_optim import load_safetensors
from zero_optim.checkpoint.hugging_face import export


@dataclass(frozen=True)
class Mesh:
    """``tensor`` 1: plain parameters, and no tensor parallelism at all. ``replicas``: of the data-parallel ranks; 1:
    all of them share."""

    data: int
    tensor: int
    stage: int = 2
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    def dimensions(self) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        """Collective. Of slices, and of data-parallel ranks; None where there is no tensor parallelism."""
        if self.tensor == 1:
            return None, None
        if self.replicas == 1:
            both = make_mesh(self.data, self.tensor)
            return both["tp"], both["dp"]
        sizes = (self.replicas, self.data // self.replicas, self.tensor)
        three = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
        return three["tp"], three["replicate", "shard"]

    def way(self, dtype: torch.dtype, hidden: int) -> Way:
        return Way(stage=self.stage, dtype=dtype, hidden=hidden, sequence=hidden != UNEVEN and self.tensor > 1)


UNEVEN = 17  # the first of two slices of a weight then takes a row of a bucket more than the other
SAVED = (Mesh(2, 2, 0), Mesh(2, 2, 1), Mesh(2, 2, 3), Mesh(3, 1, 2))
REPLICAS = Mesh(4, 2, 2, replicas=2)
LOADED = (Mesh(1, 1), Mesh(2, 1, 3), Mesh(2, 2, 2), Mesh(2, 2, 3), Mesh(1, 4, 2), Mesh(3, 2, 1), Mesh(1, 2, 3))


def _job(mesh: Mesh, dtype: torch.dtype, hidden: int, seed: int = 0):
    way = mesh.way(dtype, hidden)
    slices, data = mesh.dimensions()
    model = make_model(way, slices, seed=seed)
    if mesh.stage == 3:
        zero_optim.shard_module(model, (Block,), mesh=data)
    given = {} if mesh.stage == 3 else {"mesh": data}
    opt = zero_optim.ShardedAdamW(model.named_parameters(), **HYPER, **given, stage=mesh.stage)
    return model, opt, way


def _step(rank: int, mesh: Mesh, way: Way, model, opt, number: int) -> None:
    with losses(sequence=way.sequence):
        loss_of(model, rank // mesh.tensor, number).backward()
    opt.step()
    opt.zero_grad()


def _save(
    rank: int, world_size: int, mesh: Mesh, folder: str, dtype: torch.dtype, hidden: int, hows: Iterable[str]
) -> dict[str, Tensor]:
    model, opt, way = _job(mesh, dtype, hidden)
    for number in range(2):
        _step(rank, mesh, way, model, opt, number)
    found = all_of(model, opt)
    if "own" in hows:
        zero_optim.checkpoint.save(f"{folder}/own", model, opt, step=2)
    if "dcp" in hows:
        dcp.save({"model": model.state_dict(), "state": opt.state_dict()["state"]}, checkpoint_id=f"{folder}/dcp")
    full = zero_optim.full_state_dict(opt) if "full" in hows else None
    if full is not None and rank == 0:
        weights = {name: found[name] for name, _ in model.named_parameters()}
        Path(f"{folder}/full").write_bytes(pickle.dumps((weights, full)))
    opt.close()
    return found


def _load(
    rank: int, world_size: int, mesh: Mesh, folder: str, dtype: torch.dtype, hidden: int, hows: Iterable[str]
) -> list[dict]:
    """What is there after each way to load."""
    found = []
    for how in hows:
        model, opt, way = _job(mesh, dtype, hidden, seed=rank + 1)
        if how == "own":
            zero_optim.checkpoint.load(f"{folder}/own", model, opt)
        elif how == "dcp":
            _step(rank, mesh, way, model, opt, 7)  # so that all state is there
            there = {"model": model.state_dict(), "state": opt.state_dict()["state"]}
            dcp.load(there, checkpoint_id=f"{folder}/dcp")
            model.load_state_dict(there["model"])
            opt.load_state_dict({"state": there["state"], "param_groups": opt.state_dict()["param_groups"]})
        else:
            weights, full = pickle.loads(Path(f"{folder}/full").read_bytes())
            _load_weights(model, weights)
            zero_optim.load_full_state_dict(opt, full if rank == 0 else None)
        found.append(all_of(model, opt))
        opt.close()
    return found


def _load_weights(model, weights: Mapping[str, Tensor]) -> None:
    """Whole tensors: a DTensor takes no plain one, so it is cut as torch cuts it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = weights[name]
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)


HOWS = ("own", "dcp", "full")


def _loads_of(saved: Mesh) -> dict[Mesh, tuple[str, ...]]:
    """Which meshes load what this one has saved, and how: every second mesh, in one way each."""
    at = SAVED.index(saved)
    return {mesh: (HOWS[(at + n) % 3],) for n, mesh in enumerate(LOADED) if (at + n) % 2}


@pytest.mark.parametrize("saved", slow_where(lambda mesh: mesh.stage == 1, SAVED), ids=str)
def test_loads_on_any_other_mesh_bit_for_bit(saved, tmp_path):
    every = [(torch.float32, 24), (torch.bfloat16, UNEVEN)]
    dtype, hidden = every[saved.stage % 2]
    wanted = run_ranks(saved.ranks, _save, saved, str(tmp_path), dtype, hidden, HOWS, timeout=120)
    for other in wanted[1:]:
        assert_bits(other, wanted[0], "what ranks say of one job")
    _load_on(_loads_of(saved), str(tmp_path), wanted[0], dtype, hidden)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        (replace(REPLICAS, stage=3), "own"),
        (Mesh(2, 2, 3), "dcp"),
    ],
    ids=str,
)
def test_what_replicas_of_shards_of_slices_have_saved_loads_bit_for_bit(mesh, how, tmp_path):
    """On replicas at another stage, and where there are none: by a checkpoint of either kind, and by whole tensors."""
    wanted = run_ranks(REPLICAS.ranks, _save, REPLICAS, str(tmp_path), torch.float32, 24, [how], timeout=120)
    _load_on({mesh: [how]}, str(tmp_path), wanted[0], torch.float32, 24)


def _load_on(
    loads: Mapping[Mesh, Iterable[str]], folder: str, wanted: Mapping[str, Tensor], dtype: torch.dtype, hidden: int
):
    for mesh, hows in loads.items():
        for rank, ways in enumerate(run_ranks(mesh.ranks, _load, mesh, folder, dtype, hidden, hows, timeout=120)):
            for how, found in zip(hows, ways, strict=True):
                assert_bits(found, wanted, f"{how}, on {mesh}, rank {rank}")


def _load_exported(rank: int, world_size: int, meshes: Iterable[Mesh], folder: str) -> list[dict[str, Tensor]]:
    found = []
    for mesh in meshes:
        model, opt, _ = _job(mesh, torch.float32, 24, seed=rank + 1)
        assert not load_safetensors(model, folder)
        found.append(zero_optim.full_model_state_dict(model, rank=None))
        opt.close()
    return found


def test_slices_are_exported_whole_and_read_from_whole_files(tmp_path):
    from safetensors.torch import load_file

    saved = Mesh(2, 2, 3)
    (wanted, *_) = run_ranks(4, _save, saved, str(tmp_path), torch.float32, 24, HOWS[:1], timeout=120)
    index = json.loads((tmp_path / "own" / "step-2" / "index.json").read_text())
    cuts = {entry["name"]: entry["cut"] for entry in index["contents"]["tensors"] if "cut" in entry}
    assert cuts == {f"blocks.{n}.{name}.weight": [1, [half] * 2] for n in (0, 1) for name, half in ROWWISE.items()}
    export(tmp_path / "own", tmp_path / "whole")
    exported = load_file(tmp_path / "whole" / "model.safetensors")
    for name, whole in exported.items():
        assert torch.equal(whole, wanted[name]), name
    meshes = (Mesh(2, 2, 2), Mesh(1, 4, 1), Mesh(2, 2, 3))
    for of_rank in run_ranks(4, _load_exported, meshes, str(tmp_path / "whole"), timeout=120):
        for mesh, found in zip(meshes, of_rank, strict=True):
            assert_bits(found, exported, f"read on {mesh}")


ROWWISE = {"out": 8, "down": 12}  # layers whose weights are cut along dimension 1, and columns of a half
