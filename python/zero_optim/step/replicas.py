"""Whether ranks that should hold the same parameters, and the same state, hold the same bits.

In a step, each rank of a group that should be equal adds the digits of a checksum to a sum over the world, and the
first one subtracts them as often as there are others. Where a group is equal it adds up to 0, so a few numbers serve
all groups. Of two versions in a group the sum is never 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from zero_kernels import is_capturing

from ..comm.together import gathered
from ..errors import RankMismatchError
from ..params.parameter_set import ParameterSet, Shardings
from ..params.tensor_slice import is_cut, local_of
from ..units.sharded_model import ShardedModel
from .alarms import DIGITS, REPLICAS_REMEDY
from .optimizer_state import OptimizerState

_FACTOR = 0x1E3779B97F4A7C15  # odd: it loses no bit of what it multiplies
_MOST_NAMED = 5


class Replicas:
    """Compares the parameters of one optimizer over the ranks.

    Args:
        wait: orders later work after the parameters that are in flight.
        every: of so many steps one compares; None: none does.

    Attributes:
        in_steps: whether steps compare. They do not where no rank holds what another has.
    """

    def __init__(
        self,
        parameters: ParameterSet,
        shardings: Shardings,
        states: OptimizerState,
        sharded_model: ShardedModel | None,
        wait: Callable[[], None],
        every: int | None,
    ) -> None:
        self._parameters, self._shardings, self._states = parameters, shardings, states
        self._sharded_model, self._wait, self._every = sharded_model, wait, every
        self._device, of_all = shardings.main.device, (shardings.main, *shardings.of_groups.values())
        self.in_steps = every is not None and any(of.equals(cut=cut)[0] > 1 for of in of_all for cut in (False, True))

    def wants(self, step: int) -> bool:
        """True if the step of that number, from 1 on, compares. A captured one does not: it has no host to raise."""
        return self.in_steps and step % (self._every or 1) == 0 and not is_capturing(self._device)

    def terms(self) -> Tensor:
        """[DIGITS] fp32: what this rank adds to the sum over the world, by all that is trained."""
        self._wait()
        totals: dict[tuple[int, bool], Tensor] = {}
        groups: dict[tuple[int, bool], tuple[int, int, int]] = {}
        for shard in self._states.shards:
            flat, sharding = shard.bucket.flat, shard.bucket.sharding
            kind = id(sharding), flat.cut
            groups[kind] = sharding.equals(cut=flat.cut)
            if groups[kind][0] > 1:
                own = (flat.shard if flat.sharded else flat.full).view(torch.int32)  # whole rows: of 16 bits, too
                totals[kind] = self._checksum(own, totals.get(kind))
        # Up to 2^17 ranks fp32 adds up these integers without rounding.
        terms = torch.zeros(DIGITS, dtype=torch.float32, device=self._device)
        shifts = torch.arange(0, 64, 64 // DIGITS, device=self._device)
        for kind, total in totals.items():
            count, number, place = groups[kind]
            distinct = total * (2 * place + 1)  # groups of equal shards should not cancel
            digits = torch.bitwise_and(torch.bitwise_right_shift(distinct, shifts), 2 ** (64 // DIGITS) - 1)
            terms.add_(digits, alpha=1 if number else 1 - count)
        return terms

    def check(self, *, state: bool = True) -> None:
        """Collective. See ``check_replicas``. ``state``: compare the state of the optimizer, too."""
        self._wait()
        world = self._shardings.main.world
        every = gathered(world, lambda: self._checksums(state=state), "check_replicas")
        of_groups: dict[tuple[int, str, int], dict[int, list[int]]] = {}  # by checksum the ranks
        for rank, checksums in zip(world.ranks, every, strict=True):
            for what, checksum in checksums.items():
                of_groups.setdefault(what, {}).setdefault(checksum, []).append(rank)
        found = []
        for (index, tensor, _), versions in of_groups.items():
            first, *others = sorted(versions.values(), key=len, reverse=True)
            name = f"{tensor} of {self._parameters.labels[index]}" if tensor else self._parameters.labels[index]
            found += [f"{name} on ranks {other} differs from that on ranks {first}" for other in others]
        if found:
            more = f" and {len(found) - _MOST_NAMED} more" if found[_MOST_NAMED:] else ""
            raise RankMismatchError(f"{'; '.join(found[:_MOST_NAMED])}{more}. {REPLICAS_REMEDY}")

    def _checksums(self, *, state: bool) -> dict[tuple[int, str, int], int]:
        """Make a checksum of each parameter, and tensor of its state, that another rank holds: by index, name of the
        tensor and the group that should be equal."""
        units, shards = () if self._sharded_model is None else self._sharded_model.units, {}
        for flat in (flat for unit in units for flat in unit.flats if flat.sharded):
            for parameter, piece in zip(flat.params, flat.pieces, strict=True):
                shards[id(parameter)] = flat.shard.narrow(0, piece.in_shard, piece.numel)
        found: dict[tuple[int, str, int], Tensor] = {}
        for index, parameter in enumerate(self._parameters.all):
            count, _, place = self._shardings.of(index).equals(cut=is_cut(parameter))
            if count > 1:
                own = shards.get(id(parameter))
                own = local_of(parameter).detach().reshape(-1) if own is None else own
                found[index, "", place] = self._checksum(own)
        if state:
            self._states.refresh_edited()
        for shard in self._states.shards if state else ():
            count, _, place = shard.bucket.sharding.equals(cut=shard.bucket.flat.cut, state=True)
            if count > 1:
                with self._states.lost.opened(shard) as tensors:
                    for tensor in shard.stored:
                        for piece in shard.bucket.pieces:
                            own = shard.values(tensor, tensors, piece)
                            found[piece.slot.param, tensor.name, place] = self._checksum(own)
        return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}

    def _checksum(self, values: Tensor, before: Tensor | None = None) -> Tensor:
        """[] int64: of the bytes of ``values``, flat, after those of ``before``: a sum of integers, each times an odd
        number of its place, modulo 2^64. So a change of one integer always changes it."""
        weights, products = self._room
        words = values.to(self._device).view(getattr(torch, f"int{8 * values.element_size()}"))
        total = torch.zeros((), dtype=torch.int64, device=self._device) if before is None else before
        for part in words.split(len(weights)):
            total = total * _FACTOR + torch.mul(part, weights[: len(part)], out=products[: len(part)]).sum()
        return total

    @cached_property
    def _room(self) -> tuple[Tensor, Tensor]:
        """Odd numbers, the same on all ranks, and memory for products."""
        # Products stay in a CPU's cache. On a GPU they take 8 MiB: a launch should read some megabytes.
        count, generator = 2**20 if self._device.type == "cuda" else 2**16, torch.Generator("cpu").manual_seed(0)
        weights = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64, device="cpu") | 1
        return weights.to(self._device), torch.empty(count, dtype=torch.int64, device=self._device)
