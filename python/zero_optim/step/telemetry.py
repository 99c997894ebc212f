"""Numbers of each parameter: measurements of the last update, row by row, added up by parameter.

An update writes five numbers for each row that it updates; see ``row_stats`` in docs/ops.md. Nothing more is done in a
step. Rows are added up only when the numbers are read: 32 neighbours at a time, until each parameter has one left, in
float64. That order is the same in every run. The sums of all ranks are gathered, and added up in the order of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zero_kernels import ROW, ROW_STATS

from ..comm.streams import deallocate
from ..params.parameter_set import ParameterSet, Shardings
from .exchange import own_places, to_device
from .optimizer_state import OptimizerState
from .shard_state import ShardState

_TOGETHER = 32
"""Rows, or sums of rows, that are added up at a time."""

_LARGEST, _ZEROS = ROW_STATS.index("largest_update"), ROW_STATS.index("grad_zeros")
_ELEMENTS = len(ROW_STATS)
"""The column behind those of ``ROW_STATS``: how many elements were measured."""


@dataclass(frozen=True)
class ParameterNumbers:
    """Numbers of one parameter in the last step. Each is a tensor [] on the optimizer's device, fp32 but the last.

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
    """Measurements of an optimizer's shards in the last step.

    Args:
        on_host: whether they are updated, and measured, in host memory.

    Attributes:
        updated: [parameters] bool, which ones the step has updated; None: there was no step.
    """

    def __init__(
        self, states: OptimizerState, parameters: ParameterSet, shardings: Shardings, *, on_host: bool
    ) -> None:
        self._states, self._parameters, self._shardings, self._on_host = states, parameters, shardings, on_host
        self.updated: Tensor | None = None
        self._chunks: WeakKeyDictionary[ShardState, list[tuple[Tensor, Tensor]]] = WeakKeyDictionary()

    def row_stats(self, *, on_host: bool) -> list[Tensor]:
        """List the measurements on the device, or in host memory."""
        if on_host != self._on_host:
            return []
        return [shard.row_stats for shard in self._states.shards if shard.row_stats is not None]

    def free(self) -> None:
        """Free the device's memory: the optimizer falls asleep. The measurements are lost."""
        self.updated = None
        for stats in self.row_stats(on_host=False):
            deallocate(stats)

    def read(self, *, over_ranks: bool) -> Telemetry:
        """Collective with ``over_ranks``. See ``ShardedOptimizer.telemetry``."""
        count, device = len(self._parameters.all), self._shardings.main.device
        sums = torch.zeros(count, _ELEMENTS + 1, dtype=torch.float64, device=device)
        here: set[int] = set()
        for shard in self._states.shards:
            held = [piece for piece in shard.bucket.pieces if piece.numel]
            if held and (shard.bucket.counted_in_norm or not over_ranks):
                indices = [piece.slot.param for piece in held]
                numels = to_device(device, [piece.numel for piece in held], torch.float64)
                of_shard = torch.cat([self._sums_of(shard).to(device), numels[:, None]], dim=1)
                # No row has two pieces. The gap behind a piece in its last row has zero gradients: not counted.
                between = to_device(device, [-piece.numel % ROW for piece in held], torch.float64)
                of_shard[:, _ZEROS].sub_(between).clamp_(min=0)
                sums.index_copy_(0, to_device(device, indices, torch.int64), of_shard)
                here.update(indices)
        if over_ranks:
            # One small message. The sums of all ranks are added up in the order of their numbers. Where ranks have
            # different experts under one name, each of these has a place of its own.
            world, places = self._shardings.main.world, [self._shardings.places_of_use(index) for index in range(count)]
            own = to_device(device, own_places(places), torch.int64)
            every = sums.new_zeros(world.world_size, sum(number for number, _ in places), _ELEMENTS + 1)
            every[world.rank].index_copy_(0, own, sums)
            if world.world_size > 1:
                world.all_gather(every.view(-1), "telemetry").wait()
            sums, here = _joined(every).index_select(0, own), set(self._parameters.trained)
        updated = torch.zeros(count, dtype=torch.bool, device=device)
        if self.updated is not None:  # without the parameters that were added since that step
            updated[: len(self.updated)].copy_(self.updated)
        numbers = torch.cat([sums[:, :_LARGEST].sqrt(), sums[:, _LARGEST:_ELEMENTS]], dim=1)
        numbers[:, _ZEROS] /= sums[:, _ELEMENTS].clamp(min=1)
        wanted = sorted(here)
        at, names = to_device(device, wanted, torch.int64), [self._parameters.name(index) for index in wanted]
        return Telemetry(names, numbers.float().index_select(0, at), updated.index_select(0, at))

    def _sums_of(self, shard: ShardState) -> Tensor:
        """[parameters that it has a piece of, 5] float64."""
        assert shard.row_stats is not None
        if shard not in self._chunks:
            # Starts and lengths of what is added up, level by level, until each piece has one row left.
            levels: list[tuple[Tensor, Tensor]] = []
            runs = [(piece.in_shard // ROW, -(-piece.numel // ROW)) for piece in shard.bucket.pieces if piece.numel]
            while not levels or any(count > 1 for _, count in runs):
                firsts = [range(first, first + count, _TOGETHER) for first, count in runs]
                flat = [(start, min(_TOGETHER, of.stop - start)) for of in firsts for start in of]
                table = to_device(shard.device, flat, torch.int64).view(-1, 2)
                levels.append((table[:, 0], table[:, 1]))
                sizes = [len(of) for of in firsts]
                runs = list(zip(itertools.accumulate(sizes[:-1], initial=0), sizes, strict=True))
            self._chunks[shard] = levels
        values, place = shard.row_stats, torch.arange(_TOGETHER, device=shard.device)[:, None]
        for starts, counts in self._chunks[shard]:
            zeros = len(values)  # the place of a row of zeros behind all others, which fills up short chunks
            index = torch.where(place < counts, starts + place, zeros)  # [32, chunks]
            padded = torch.cat([values, values.new_zeros(1, len(ROW_STATS))])
            # Twice as fast on a CPU as padded[index], for a table.
            values = _joined(padded.index_select(0, index.view(-1)).view(*index.shape, len(ROW_STATS)))
        return values


def _joined(parts: Tensor) -> Tensor:
    """Combine [parts, n, columns] into [n, columns]: sums, and the largest of the largest. NaN stays."""
    joined = parts.sum(0, dtype=torch.float64)
    joined[:, _LARGEST] = parts[:, :, _LARGEST].amax(0)
    return joined
