"""Compares the bits of parameters, and of optimizer state, on ranks that should hold the same.

In a step each rank of a group that should be equal adds the bits of a checksum to a sum over the world, and the first
one subtracts its own as often as there are others. Equal groups add up to 0, so 64 numbers serve all groups. With two
versions of a flat tensor in a group the sum is never 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.together import gathered
from ..errors import RankMismatchError
from ..grads.bucket import Bucket
from ..params.parameter_set import ParameterSet, Shardings
from ..params.tensor_slice import is_cut, local_of
from ..units.sharded_model import ShardedModel
from .alarms import HASH_BITS
from .optimizer_state import OptimizerState

_FACTOR = 0x1E3779B97F4A7C15  # odd: it loses no bit of what it multiplies


def terms_of(buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """[HASH_BITS] fp32: what this rank adds to the sum over the world, by the parameters in ``buckets``."""
    terms, bits = torch.zeros(HASH_BITS, device=device), torch.arange(HASH_BITS, device=device)
    factors = _odd_numbers(device)
    for number, bucket in enumerate(buckets):
        count, own, place = bucket.flat.sharding.equals(cut=bucket.flat.cut)
        if count == 1:
            continue
        memory = bucket.flat.memory
        with memory.recording(), memory.opened() as shard:  # a disk that fails has an alarm of its own
            values = shard if bucket.flat.sharded else bucket.flat.full
            checksum = _checksum(values.view(torch.int32), factors)  # of whole rows: 16 bits go in pairs
            distinct = checksum * (2 * (place * len(buckets) + number) + 1)  # else equal shards might cancel
            set_bits = torch.bitwise_and(torch.bitwise_right_shift(distinct, bits), 1)
            terms.add_(set_bits, alpha=1 if own else 1 - count)  # exact for up to 2^23 ranks times buckets
    return terms


def check(
    parameters: ParameterSet, shardings: Shardings, model: ShardedModel | None, states: OptimizerState | None = None
) -> None:
    """Collective. See ``check_replicas``. ``states``: None: compare parameters alone."""
    world = shardings.main.world
    groups: dict[tuple[int, str, int], dict[int, list[int]]] = {}  # of each the ranks by checksum
    every = gathered(world, lambda: _checksums(parameters, shardings, model, states), "check_replicas")
    for rank, checksums in zip(world.ranks, every, strict=True):
        for what, checksum in checksums.items():
            groups.setdefault(what, {}).setdefault(checksum, []).append(rank)
    found = []
    for (index, tensor, _), versions in groups.items():
        first, *others = sorted(versions.values(), key=len, reverse=True)
        name = f"{tensor} of " * bool(tensor) + parameters.labels[index]
        found += [f"{name} on ranks {other} differs from that on ranks {first}" for other in others]
    if found:
        more = f" and {len(found) - 5} more" if found[5:] else ""
        raise RankMismatchError(
            f"{'; '.join(found[:5])}{more}: these should be equal. To go on, load a checkpoint on all ranks, or make "
            "model and optimizer anew, which broadcasts rank 0's parameters"
        )


def _checksums(
    parameters: ParameterSet, shardings: Shardings, model: ShardedModel | None, states: OptimizerState | None
) -> dict[tuple[int, str, int], int]:
    """Make checksums of what other ranks hold, too: by parameter, tensor of its state or "", and group."""
    units = [] if model is None else model.units
    of_units = {} if model is None else model.shardings()
    factors, found = _odd_numbers(shardings.main.device), {}
    of_shards: dict[int, Tensor] = {}
    for flat in (flat for unit in units for flat in unit.flats if flat.sharding.equals(cut=flat.cut)[0] > 1):
        with flat.memory.opened() as whole:  # once for all of them, as on a disk
            of_shards |= {id(own.plain): _checksum(own.part_of(whole), factors) for own in flat.param_shards}
    for index, parameter in enumerate(parameters.all):
        sharding = of_units.get(id(parameter), shardings.of(index))
        count, _, place = sharding.equals(cut=is_cut(parameter))
        if count > 1:
            known = of_shards.get(id(parameter))
            whole = local_of(parameter).detach().reshape(-1)
            found[index, "", place] = _checksum(whole, factors) if known is None else known
    for shard in [] if states is None else states.shards:
        count, _, place = shard.bucket.sharding.equals(cut=shard.bucket.flat.cut, state=True)
        if count > 1:
            with shard.opened() as state:
                for tensor, piece in itertools.product(shard.stored, shard.bucket.pieces):
                    found[piece.slot.param, tensor.name, place] = _checksum(shard.values(tensor, state, piece), factors)
    return {what: int(checksum) for what, checksum in found.items()}


def _checksum(values: Tensor, factors: Tensor) -> Tensor:
    """[] int64: a sum of the bytes of ``values``, flat, as integers times odd factors, modulo 2^64."""
    words = values.to(factors.device).view(getattr(torch, f"int{8 * values.element_size()}"))
    total = torch.zeros((), dtype=torch.int64, device=factors.device)
    for part in words.split(len(factors)):
        total = total * _FACTOR + (part * factors[: len(part)]).sum()
    return total


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    """Make odd numbers without a pattern, the same on all ranks, for as many integers as are multiplied at once."""
    # Products stay in a CPU's cache. On a GPU they take 8 MiB: a launch should read some megabytes.
    numbers = torch.arange(2**20 if device.type == "cuda" else 2**16, device=device) * _FACTOR
    mixed = torch.bitwise_xor(numbers, torch.bitwise_right_shift(numbers, 32)) * _FACTOR
    return torch.bitwise_or(mixed, 1)
