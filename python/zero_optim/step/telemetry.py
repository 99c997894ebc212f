"""Numbers of each parameter: measurements before and after an update, added up over ranks when they are read.

A measured step takes, for a batch of shards at a time, a copy of their masters in fp32, and three passes of norms. The
sums of all ranks are gathered, and added up in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..params.parameter_set import ParameterSet, Shardings
from .exchange import own_places, to_device
from .optimizer_state import OptimizerState

_NORMS, _LARGEST, _NONZERO, _ELEMENTS = range(3), 3, 4, 5
"""The columns of ``batches.measured``."""


@dataclass(frozen=True)
class ParameterNumbers:
    """Numbers of one parameter in the last measured step. Tensors [] on the optimizer's device, fp32 but the last.

    Attributes:
        grad_norm: 2-norm of the gradient that the update was given: averaged, unscaled and clipped.
        update_norm: 2-norm of what the update has added to the fp32 master.
        param_norm: 2-norm of the master after it.
        largest_update: the largest magnitude in what was added.
        grad_zeros: the fraction of elements whose gradient is 0, from 0 to 1.
        updated: bool, whether the step has updated it. All others are 0 where it has not: the step was skipped, or no
            rank had a gradient for it.
    """

    grad_norm: Tensor
    update_norm: Tensor
    param_norm: Tensor
    largest_update: Tensor
    grad_zeros: Tensor
    updated: Tensor


_NAMES = tuple(field.name for field in fields(ParameterNumbers))[:-1]


class Telemetry(Mapping[str, ParameterNumbers]):
    """The numbers of each parameter, by its name. ``floats`` reads them on the host."""

    def __init__(self, names: Sequence[str], numbers: Tensor, updated: Tensor) -> None:
        """
        Args:
            numbers: [names, 5] fp32, in the order of ``ParameterNumbers``.
            updated: [names] bool.
        """
        self._numbers, self._updated = numbers, updated
        self._by_name = {name: number for number, name in enumerate(names)}

    def __getitem__(self, name: str) -> ParameterNumbers:
        number = self._by_name[name]
        values = dict(zip(_NAMES, self._numbers[number].unbind(), strict=True))
        return ParameterNumbers(**values, updated=self._updated[number])

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def floats(self) -> dict[str, float]:
        """Read all on the host, as TensorBoard and Weights & Biases want them: by ``grad_norm/NAME`` and so on.

        The host waits for the device, once. What the last step has not updated is left out: after a skipped step the
        dict is empty.
        """
        read = torch.cat([self._numbers, self._updated[:, None]], dim=1).tolist()
        return {
            f"{kind}/{name}": values[column]
            for column, kind in enumerate(_NAMES)
            for name, (*values, updated) in zip(self._by_name, read, strict=True)
            if updated
        }


class Measured:
    """Measurements of an optimizer's shards.

    Args:
        every: how many steps there are from one that is measured to the next.

    Attributes:
        updated: [parameters] bool, which ones that step has updated; None: none was measured.
    """

    def __init__(self, states: OptimizerState, parameters: ParameterSet, shardings: Shardings, every: int) -> None:
        self._states, self._parameters, self._shardings, self._every = states, parameters, shardings, every
        self.updated: Tensor | None = None

    def wants(self, step: int) -> bool:
        """True if the step of that number, from 1 on, is to be measured."""
        return step % self._every == 0

    def free(self) -> None:
        """Drop the measurements: the optimizer falls asleep."""
        self.updated = None
        for shard in self._states.shards:
            shard.numbers = None

    def read(self, *, over_ranks: bool) -> Telemetry:
        """Collective with ``over_ranks``. See ``ShardedOptimizer.telemetry``."""
        count, device = len(self._parameters.all), self._shardings.main.device
        sums = torch.zeros(count, _ELEMENTS + 1, dtype=torch.float64, device=device)
        here: set[int] = set()
        for shard in self._states.shards:
            indices = [piece.slot.param for piece in shard.bucket.pieces if piece.numel]
            if indices and (shard.bucket.counted_in_norm or not over_ranks):
                if shard.numbers is not None:
                    sums.index_copy_(0, to_device(device, indices, torch.int64), shard.numbers.to(device))
                here.update(indices)
        sums[:, : len(_NORMS)].square_()
        if over_ranks:
            # One small message. The sums of all ranks are added up in the order of their numbers. Where ranks have
            # different experts under one name, each of these has a place of its own.
            world, places = self._shardings.main.world, [self._shardings.places_of_use(index) for index in range(count)]
            own = to_device(device, own_places(places), torch.int64)
            every = sums.new_zeros(world.world_size, sum(number for number, _ in places), _ELEMENTS + 1)
            every[world.rank].index_copy_(0, own, sums)
            if world.world_size > 1:
                world.all_gather(every.view(-1), "telemetry").wait()
            joined = every.sum(0)
            joined[:, _LARGEST] = every[:, :, _LARGEST].amax(0)
            sums, here = joined.index_select(0, own), set(self._parameters.trained)
        updated = torch.zeros(count, dtype=torch.bool, device=device)
        if self.updated is not None:  # without the parameters that were added since that step
            updated[: len(self.updated)].copy_(self.updated)
        zeros = 1 - sums[:, _NONZERO] / sums[:, _ELEMENTS].clamp(min=1)
        numbers = torch.cat([sums[:, : len(_NORMS)].sqrt(), sums[:, _LARGEST, None], zeros[:, None]], dim=1)
        numbers = torch.where(updated[:, None], numbers, 0.0)
        wanted = sorted(here)
        at, names = to_device(device, wanted, torch.int64), [self._parameters.name(index) for index in wanted]
        return Telemetry(names, numbers.float().index_select(0, at), updated.index_select(0, at))
