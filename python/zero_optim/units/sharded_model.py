"""A model given to ``shard_module``: its units, and what the optimizer asks of them."""

from __future__ import annotations

import weakref
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.sharding import Sharding
from ..params.flat_params import FlatParams
from ..params.layout import one_bucket
from ..params.param_shard import plain_parameter
from ..params.parameter_set import is_apart, would_lose
from ..params.tensor_slice import local_of, room_of
from ..stores.disk_pages import DiskBacking
from ..stores.host_memory import Lanes
from ..stores.paged_store import HostBacking
from .hooks import register_hooks, sync_generation, watch_parts
from .schedule import UnitSchedule
from .unit import Unit

# The ShardedModel of every plain parameter. The model keeps it alive.
_model_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class ShardedModel:
    """The units of ``model``, the root first. On one rank, without offload, nothing is sharded, and there is no hook.

    Attributes:
        sharding: of all parameters but experts, whose flat tensors have theirs. It has a group of its own: while
            backward runs, reductions are in flight in another.
        sharded: whether a unit is: one rank has all of a model, and experts that no other rank has.
        backing: where shards rest; None: on the device.
        lanes: those on which shards are copied from there.
        disk: ``backing``, where it is a disk; else None.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        sharding: Sharding,
        schedule: UnitSchedule,
        process_group: dist.ProcessGroup | None,
        backing: HostBacking | DiskBacking | None,
        lanes: Lanes | None,
    ) -> None:
        self._process_group = weakref.ref(process_group) if process_group is not None else None
        self.model, self.units, self.sharding, self.schedule = model, list(units), sharding, schedule
        self.backing, self.lanes = backing, lanes
        self.disk = schedule.disk = backing if isinstance(backing, DiskBacking) else None
        self.sharded = any(unit.split for unit in units)
        for unit in units:
            for parameter in unit.parameters:
                _model_of[parameter] = weakref.ref(self)
        # It lives as long as any of its modules: one may be taken out of ``model``, as a merged adapter's base is.
        model._zero_optim_sharded = schedule.owner = self  # type: ignore[assignment]  # any attribute
        if self.sharded:
            register_hooks(units, schedule)
            watch_parts(units, schedule)
            sync_generation(model, units, sharding.world.ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model is an ordinary model."""
        return type(None), ()

    def __del__(self) -> None:
        self.sharding.world.close()
        if self.backing is not None:
            self.backing.close()

    def shardings(self) -> dict[int, Sharding]:
        """The sharding of each parameter, by its id."""
        flats = (flat for unit in self.units for flat in unit.flats)
        return {id(parameter): flat.sharding for flat in flats for parameter in flat.params}

    def check_whole(self, where: str, ids: Container[int]) -> None:
        """See ``Shardings.check_whole``."""
        shardings = self.shardings()
        for place in (place for unit in self.units for place in unit.registrations):
            if id(place.plain) in ids and is_apart(place.plain, shardings[id(place.plain)]):
                raise would_lose(place.shard.label, where, sharded=True)

    # -- what the optimizer asks for -----------------------------------------------------------------------------

    def process_group(self) -> dist.ProcessGroup | None:
        """The group that ``shard_module`` was given, or the default one; None for one rank without any."""
        return self._process_group() if self._process_group is not None else None

    def flats_to_train(self, wanted: Mapping[int, Hashable]) -> list[FlatParams]:
        """List the flat tensors of the ``wanted`` parameters, in the order in which backward is through with them.

        Collective where a flat tensor is split: it was made of frozen parameters, or holds some that must not mix.

        Args:
            wanted: by id of the parameter, what must not mix in a flat tensor: its rule, and the divisor
                of its gradients.
        """
        for unit in self.units:
            for flat in list(unit.flats):
                kinds = [wanted.get(id(parameter)) for parameter in flat.params]
                if len(set(kinds)) > 1 or (kinds[0] is not None and not flat.trained):
                    self._split(unit, flat, kinds)
        flats = [flat for unit in self.schedule.orders.over for flat in unit.flats]
        return [flat for flat in flats if any(id(parameter) in wanted for parameter in flat.params)]

    def _split(self, unit: Unit, flat: FlatParams, kinds: Sequence[Hashable]) -> None:
        """Collective. Give the parameters of each kind in ``flat`` a flat tensor of their own; None: frozen ones."""
        self.schedule.reshard_all()
        shards = dict(zip(map(id, flat.params), flat.param_shards, strict=False))
        whole = flat.copy_out() if flat.sharded else flat.full  # to live until all have moved
        unit.flats.remove(flat)
        if flat.memory.page is not None:
            flat.memory.page.release()
        for kind in sorted(dict.fromkeys(kinds), key=lambda kind: kind is not None):
            params = [parameter for parameter, own in zip(flat.params, kinds, strict=True) if own == kind]
            new = flatten(params, flat.sharding, trained=kind is not None)
            if flat.sharded:
                new.split([shards[id(p)] for p in params], backing=self.backing, lanes=self.lanes)
            unit.flats.append(new)
        del whole


def flatten(params: Sequence[Tensor], sharding: Sharding, *, trained: bool) -> FlatParams:
    """Lay parameters of one kind out in one flat tensor."""
    layout = one_bucket([*map(room_of, params)], sharding.shard_count, sharding.parts_of_shard)
    numels = {index: local_of(parameter).numel() for index, parameter in enumerate(params)}
    return FlatParams(layout.holding(numels), params, sharding, trained=trained)


def sharded_model_of(parameters: Iterable[Tensor]) -> list[ShardedModel]:
    """List the sharded models that hold some of these parameters, plain or as modules have them."""
    if not len(_model_of):  # without stage 3 nothing is looked up for each parameter
        return []
    references = [_model_of.get(plain_parameter(parameter)) for parameter in parameters]
    return list(dict.fromkeys(model for of in references if of is not None and (model := of()) is not None))
