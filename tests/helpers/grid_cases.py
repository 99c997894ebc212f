"""Meshes of two dimensions: for tests of every room."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def make_mesh(replicas: int, shards: int, device: str = "cpu") -> dist.DeviceMesh:
    """Collective. All ranks of the test, row by row."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def on_mesh(run: Any, mesh: dist.DeviceMesh, **given: Any) -> Any:
    """A ``sharded_cases.Run`` on this mesh, which the model of stage 3 is given, and the optimizer before it; and with
    the options ``given`` beside it."""
    options = dict(run.options)
    if run.stage < 3:
        options |= {"mesh": mesh, **given}
    shard = {**run.shard, "mesh": mesh, **given}
    return type(run)(**{**vars(run), "options": options, "shard": shard})
