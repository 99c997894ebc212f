"""What a rank holds and has sent, counted from its storages and its collectives."""

from __future__ import annotations

from collections.abc import Sequence

from .comm.buffers import CommBuffers
from .rules.update_rule import UpdateRule
from .step.shard_state import ShardState
from .units.sharded_model import ShardedModel


def memory_by_kind(
    rule: UpdateRule, shards: Sequence[ShardState], buffers: CommBuffers, sharded: ShardedModel | None
) -> dict[str, int]:
    """Bytes on this rank by what they are for, of parameters that have a place in a bucket: not of frozen ones, nor of
    modules' buffers. ``padding`` is what rows and equal shards add to all the others. At stage 3 parameters are the
    shards, and ``unsharded`` what is there beside them now, of frozen ones too.

    Gradients count the buffers of the buckets, which at stage 2 is the shard; what autograd allocates for a
    gradient until its bucket leaves is not in it.
    """
    memory = dict.fromkeys(("parameters", "gradients", *(tensor.name for tensor in rule.tensors)), 0)
    padding = 0
    for shard in shards:
        bucket = shard.bucket
        whole = sum(slot.numel for slot in bucket.layout.slots)
        own = sum(piece.numel for piece in bucket.pieces)
        parameters = bucket.param_shard if bucket.flat.sharded else bucket.flat.full
        for kind, tensor in (("parameters", parameters), ("gradients", bucket.grad_buffer)):
            if tensor.untyped_storage().nbytes() == 0:
                continue
            used = whole if tensor.numel() == bucket.layout.numel else own
            memory[kind] += used * tensor.element_size()
            padding += (tensor.numel() - used) * tensor.element_size()
        for state in shard.tensors:
            used = sum(state.span(piece.in_shard, piece.numel)[1] for piece in bucket.pieces)
            _, there = state.span(0, bucket.layout.shard_numel)
            memory[state.name] += used * state.dtype.itemsize
            padding += (there - used) * state.dtype.itemsize
    memory["communication"] = buffers.nbytes()
    memory["padding"] = padding
    if sharded is not None:
        memory["unsharded"] = sum(flat.nbytes() for unit in sharded.units for flat in unit.flats)
    return memory
