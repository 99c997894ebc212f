"""Counts what a rank holds and has sent, from its storages and its collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from .comm.collectives import described_groups
from .comm.streams import is_there
from .engine import Engine
from .params.layout import BucketLayout, SlotPiece
from .rules.codec import StateTensor
from .rules.update_rule import UpdateRule, stored_names
from .stores.state_store import DeviceStore

PAGES = "pages"


@dataclass(frozen=True)
class FlatBytes:
    """A flat tensor as long as a bucket, or as its shard: its use, its elements with padding, and the bytes of each."""

    kind: str
    numel: int
    itemsize: int


def stats_of(engine: Engine) -> dict[str, Any]:
    """See ``ShardedOptimizer.stats``."""
    sharding, model, taken = engine.sharding, engine.sharded_model, dict(engine.store.footprint())
    off_device: dict[str, int] = {}
    if model is not None and (rests := model.backing) is not None:
        off_device = {"host": rests.memory.in_use, "disk": rests.disk_bytes, "read": rests.copied.read}
    return {
        "stage": sharding.stage,
        "world_size": sharding.world_size,
        "buckets": len(engine.reducer.buckets),
        "steps": engine.steps,
        "skipped_steps": int(engine.exchange.skipped),
        "collectives": sharding.world.stats(),
        "process_groups": ({} if model is None else described_groups(model.sharding.world))
        | described_groups(sharding.world),
        "memory": memory_by_kind(engine),
        "non_finite": engine.first_non_finite(),
        "state_offload": {**taken, **asdict(engine.store.copied)},
        "param_offload": off_device,
        "sleep": {"mode": engine.mode.now.name, "host": engine.asleep.rest.memory.in_use},
    }


def memory_by_kind(engine: Engine) -> dict[str, int]:
    """Count the bytes on this rank's device by their use, for parameters that are in a bucket: without frozen ones, and
    without modules' buffers. ``padding`` is what rows and equal shards add to all the others. At stage 3
    ``parameters`` are the shards, and ``unsharded`` what is there beside them now, of frozen ones too.

    All is 0 while the optimizer sleeps, but for parameters that stay awake. State that is off the device between steps
    is in none of these: ``pages`` has what its store takes of the device.

    Gradients are the buffers of the buckets, at stage 2 the shard, and every ``main_grad``. The memory that autograd
    allocates for a gradient until its bucket leaves is not counted.
    """
    store, rules = engine.store, engine.rules.all
    memory, on_device = no_memory(rules), isinstance(store, DeviceStore) and all(map(is_there, store.residents()))
    for shard in engine.states.shards:
        bucket = shard.bucket
        parameters = bucket.flat.shard if bucket.flat.sharded else bucket.flat.full
        params = [] if bucket.flat.offloaded else _flat_bytes("parameters", parameters)
        # At stage 3 a shard of parameters may be larger than one of gradients and state.
        count_bucket(memory, bucket.flat.layout, bucket.flat.pieces, params, ())
        grads = _flat_bytes("gradients", bucket.grad_buffer)
        count_bucket(memory, bucket.layout, bucket.pieces, grads, shard.stored if on_device else ())
    if not isinstance(store, DeviceStore):
        memory[PAGES] = store.footprint()["device"]
    memory["gradients"] += sum(main.nbytes for main in engine.reducer.main_grads.values() if is_there(main))
    memory["communication"] = engine.reducer.rounds.buffers.nbytes()
    if engine.sharded_model is not None:
        memory["unsharded"] = sum(flat.nbytes() for unit in engine.sharded_model.units for flat in unit.flats)
    return memory


def _flat_bytes(kind: str, tensor: Tensor) -> list[FlatBytes]:
    return [FlatBytes(kind, tensor.numel(), tensor.element_size())] if is_there(tensor) else []


def no_memory(rules: Iterable[UpdateRule]) -> dict[str, int]:
    """Make the kinds of memory that every stage has, at 0 bytes."""
    states = [name for rule in rules for name in stored_names(rule)]
    return dict.fromkeys(("parameters", "gradients", *states, "communication", "padding"), 0)


def count_bucket(
    memory: dict[str, int],
    layout: BucketLayout,
    pieces: Sequence[SlotPiece],
    flats: Iterable[FlatBytes],
    states: Iterable[StateTensor],
    *,
    ranks: int = 1,
) -> None:
    """Add the memory of a bucket to ``memory``: bytes in use by kind, and the rest to ``padding``.

    Args:
        pieces: this rank's piece of every slot.
        flats: the tensors of parameters and of gradients, whole or this rank's shard.
        states: the tensors of state, as they are stored.
        ranks: how many ranks ``pieces`` are of; of several, the mean is added.
    """
    whole = sum(slot.numel for slot in layout.slots)
    own = sum(piece.numel for piece in pieces) // ranks
    for flat in flats:
        used = whole if flat.numel == layout.numel else own
        memory[flat.kind] += used * flat.itemsize
        memory["padding"] += (flat.numel - used) * flat.itemsize
    for state in states:
        used = sum(state.span(piece.in_shard, piece.numel)[1] for piece in pieces) // ranks
        memory[state.name] += used * state.dtype.itemsize
        memory["padding"] += state_nbytes(state, layout) - used * state.dtype.itemsize


def state_nbytes(state: StateTensor, layout: BucketLayout) -> int:
    """Count the bytes of a state tensor of one shard, padding included."""
    _, there = state.span(0, layout.shard_numel)
    return there * state.dtype.itemsize
