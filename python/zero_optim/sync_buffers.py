"""What ranks should have alike: ``sync_buffers`` makes buffers the same, and ``check_replicas`` compares parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import validate
from .comm.collectives import Comm, make_comm
from .comm.sharding import runs
from .comm.together import check_same
from .errors import ParameterError
from .optimizer import ShardedOptimizer, optimizers_of
from .params.parameter_set import plain_name
from .step import replicas
from .units.sharded_model import sharded_model_of

_HOW = ("broadcast", "mean")


@torch.no_grad()
def sync_buffers(model: nn.Module, how: str = "broadcast", *, process_group: dist.ProcessGroup | None = None) -> None:
    """Collective. Make the buffers of ``model`` the same on every rank, in place. On one rank it does nothing.

    Neither the optimizer nor ``shard_module`` sends a buffer: each rank has the values of its own batches. Call it
    where ranks are to agree, such as before an evaluation or a save, and between steps. All buffers travel together: a
    collective for each dtype and 25 MiB.

    Args:
        how: "broadcast": rank 0's values. "mean": floating-point buffers are averaged in fp64, and rounded once to
            their own dtype, so that an fp32, bf16 or fp16 buffer that is equal on all ranks keeps its bits; all
            others, such as ``num_batches_tracked``, have rank 0's values.
        process_group: the ranks; None: those of the model's optimizer or of ``shard_module``, else the default group
            where ``torch.distributed`` is initialised, else one rank.

    Raises, on every rank and before a buffer is changed:
        ValueError: ``how`` is neither; or no ``process_group`` is given, and parts of the model train on other ranks.
        ParameterError: a buffer that is on ``meta`` or not dense.
        RankMismatchError: ranks disagree on ``how``, or on the names, shapes or dtypes of buffers.
    """
    comm = _comm(model, process_group)
    with comm.raising_together("sync_buffers"):
        if how not in _HOW:
            raise ValueError(f"how must be one of {_HOW}, got {how!r}")
        buffers = _buffers(model)
    if comm.world_size == 1:
        return
    device = _device(comm, list(buffers.values()))
    description = [f"how={how}", f"buffers that travel on {device.type}"]
    description += [f"{name!r}: {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers.items()]
    check_same(comm, description, "sync_buffers", "give sync_buffers the same model, with")
    for mean in (True, False):
        for run in runs([of for of in buffers.values() if (how == "mean" and of.is_floating_point()) is mean]):
            _send(comm, run, device, mean=mean)


def _comm(model: nn.Module, process_group: dist.ProcessGroup | None) -> Comm:
    """Find the ranks of the buffers, over the group that was given and not over one of the optimizer's own."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)  # None: all of the model is on the CPU
    if process_group is not None:
        return make_comm(process_group, gpu)
    known = [sharded.sharding.world for sharded in sharded_model_of(model.parameters())]
    known += [opt.engine.sharding.world for opt in optimizers_of(model)]
    of_ranks = {tuple(comm.ranks): comm for comm in known}
    if len(of_ranks) > 1:
        raise ValueError(f"parts of the model are trained on ranks {list(of_ranks)}: give sync_buffers a process_group")
    return Comm(known[0].group, known[0].device) if known else make_comm(device=gpu)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """List every buffer once, as memory to write to. Raises ParameterError for one that cannot be sent."""
    buffers = {plain_name(name): buffer for name, buffer in model.named_buffers()}
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ParameterError(f"buffer {name!r} is on the meta device, without values: materialise the model first")
        if buffer.layout is not torch.strided:
            raise ParameterError(f"buffer {name!r} is {buffer.layout}; only dense buffers can be sent: .to_dense() it")
        for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
            if stride == 0 and size > 1:  # expanded: torch does not write where one element is in several places
                buffers[name] = buffers[name].narrow(dim, 0, 1)
    return buffers


def _device(comm: Comm, buffers: Sequence[Tensor]) -> torch.device:
    """Choose where buffers are put together: the first of their devices that the group serves, else another."""
    devices = dict.fromkeys(buffer.device for buffer in buffers)
    gpu = [comm.device] if comm.device is not None else []
    gpu += [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return next((device for device in (*devices, *gpu) if validate.serves(comm, device)), torch.device("cpu"))


def _send(comm: Comm, buffers: Sequence[Tensor], device: torch.device, *, mean: bool) -> None:
    """Collective. Average the buffers, or broadcast rank 0's, as one flat tensor."""
    # In fp64 the sum of equal fp32 values, and its quotient, are exact.
    dtype = torch.float64 if mean else buffers[0].dtype
    flat = torch.cat([buffer.reshape(-1).to(device, dtype) for buffer in buffers])
    if mean and flat.numel():
        comm.exchange(flat, kind="buffers")
        flat.div_(comm.world_size)
    elif flat.numel():
        comm.broadcast(flat.view(torch.uint8), "buffers")  # as bytes: no back-end has every dtype
    for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view(buffer.shape))


@torch.no_grad()
def check_replicas(model_or_opt: nn.Module | ShardedOptimizer) -> None:
    """Collective. Raise RankMismatchError, on every rank, where ranks hold different bits of what should be equal.

    Compared are parameters: at stages 0 to 2 over all ranks with the same slice or experts; at stage 3 shards over
    replicas; what is not cut, along tensor-parallel ranks, too; and the optimizer state that several ranks hold, with
    masters. Not compared are buffers, and copies of a tied embedding on two stages of a pipeline. Ranks exchange some
    20 bytes for each tensor, and the host waits.

    ``model_or_opt``: an optimizer, or a model: what its open optimizers hold is compared.

    Raises, on every rank:
        RankMismatchError: names what differs and the ranks; on other stages of a pipeline, a rank.
        ParameterError: no open optimizer holds a parameter of the model.
        ZeroOptimError: within ``swap_to_ema``, asleep, or closed.
    """
    if not isinstance(model_or_opt, nn.Module | ShardedOptimizer):
        raise TypeError(f"check_replicas was given a {type(model_or_opt).__name__}: give a model or a ShardedOptimizer")
    found = optimizers_of(model_or_opt) if isinstance(model_or_opt, nn.Module) else [model_or_opt]
    if not found:
        raise ParameterError("check_replicas: no open optimizer of zero_optim holds the model: make one before")
    for opt in found:
        opt.check_usable()
        engine, stages = opt.engine, opt.engine.pipeline
        with nullcontext() if stages is None else stages.comm.raising_together("check_replicas", opt.device):
            opt.settle()
            engine.states.refresh_edited()
            replicas.check(engine.parameters, engine.shardings, engine.sharded_model, engine.states)
