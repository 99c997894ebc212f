"""Meshes of two dimensions, and what gradients average to on them: for tests of every room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from oracle import pack_rounded
from torch import Tensor


def make_mesh(replicas: int, shards: int, device: str = "cpu") -> dist.DeviceMesh:
    """Collective. All ranks of the test, row by row."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def grid_averages(
    per_rank: Sequence[Sequence[Tensor | None]], replicas: int, reduce_dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """The averaged gradient of every parameter on ``replicas`` rows: ``per_rank[rank][index]`` are the local ones.

    Each row sums in rank order in fp32 and rounds once; the sum of the rows, two of them, is rounded once more.
    """
    assert replicas == 2, "the sum of more has no one order"
    return [_average(grads, reduce_dtype) for grads in zip(*per_rank, strict=True)]


def _average(grads: Sequence[Tensor | None], reduce_dtype: torch.dtype | None) -> Tensor | None:
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        return None
    dtype, half = reduce_dtype or like.dtype, len(grads) // 2
    rows = []
    for row in (grads[:half], grads[half:]):
        total = torch.zeros(like.shape)
        for grad in row:
            if grad is not None:
                total = total + pack_rounded(grad, len(grads), dtype).float()
        rows.append(total.to(dtype))
    return (rows[0].float() + rows[1].float()).to(dtype)


def on_mesh(run: Any, mesh: dist.DeviceMesh) -> Any:
    """A ``sharded_cases.Run`` on this mesh, which the model of stage 3 is given, and the optimizer before it."""
    options = dict(run.options)
    if run.stage < 3:
        options["mesh"] = mesh
    shard = {**run.shard, "mesh": mesh}
    return type(run)(**{**vars(run), "options": options, "shard": shard})
