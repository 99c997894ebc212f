"""A unit: the module whose parameters are gathered together, and what of them is in memory.

``tests/units/test_unit_cells.py`` has the table of events.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..comm.collectives import Comm
from ..comm.handle import Handle
from ..comm.spans import span
from ..errors import CollectiveError, ParameterError, ShardAccessError
from ..params.flat_params import FlatParams
from ..params.param_shard import ParamShard


class UnitState(enum.Enum):
    """What of a unit's parameters is in memory on a rank beside its 1/N, which is always there.

    ============  ======================  ============
    state         beside the 1/N          modules hold
    ============  ======================  ============
    SHARDED       nothing                 shards
    NODE_SHARDED  1/k                     shards
    UNSHARDING    all                     shards
    UNSHARDED     all                     plain
    GATHERED      all, of its own         plain
    ============  ======================  ============

    - *1/k*: this rank's part of what the k ranks of its node keep together.
    - *all*: every parameter. In UNSHARDING the memory is allocated, and the values are still arriving.
    - *all, of its own*: for ``gather_parameters``, in other memory than a forward uses. The user may keep it.
    """

    SHARDED = enum.auto()
    NODE_SHARDED = enum.auto()
    UNSHARDING = enum.auto()
    UNSHARDED = enum.auto()
    GATHERED = enum.auto()


@dataclass(frozen=True)
class Registration:
    """A place where a module registers a parameter."""

    module: nn.Module
    name: str
    plain: Tensor
    shard: ParamShard


class StandIn:
    """Replaces a module's method by ``around``, which is called with the method and the arguments."""

    def __init__(self, module: nn.Module, name: str, around: Callable[..., Any]) -> None:
        self._module, self._name, self._around = module, name, around
        # Python searches the module's ``__dict__`` before the class. This is what it had there before.
        self._own = module.__dict__.get(name)
        functools.update_wrapper(self, self._method(), updated=())  # clients look at a method's signature

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of its module is an ordinary one."""
        return functools.partial, (getattr(type(self._module), self._name), self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._method(), *args, **kwargs)

    def _method(self) -> Callable[..., Any]:
        return self._own or getattr(type(self._module), self._name).__get__(self._module)

    def watch(self) -> None:
        if self._module.__dict__.get(self._name) is self._own:  # else somebody has wrapped this, and calls it
            self._module.__dict__[self._name] = self

    def unwatch(self) -> None:
        if self._module.__dict__.get(self._name) is self:
            del self._module.__dict__[self._name]
            if self._own is not None:
                self._module.__dict__[self._name] = self._own


class Unit:
    """The parameters that a module holds outside the units within it, in one ``FlatParams`` for each kind.

    Args:
        name: of the module in the model; empty for the root.
        node: the ranks that keep the parameters between forward and backward, 1/k each; None: no rank does.

    Attributes:
        module: whose forward uses the parameters.
        keep: leave the parameters unsharded from the end of forward to backward.
        modules: ``module`` and those within it that are in no other unit.
        enclosing: the units that this one is in.
        parts: what stands in for methods of modules within it.
        given: by id, the tensors that the running forward finds in arguments and attributes, and their versions.
        began: the sequence number of the first node of autograd that this forward makes.
        ahead: the versions of the shards as they were gathered ahead of a forward; None: they were not.
    """

    def __init__(
        self, name: str, module: nn.Module, modules: Sequence[nn.Module], node: Comm | None, *, keep: bool
    ) -> None:
        self.name, self.module, self.modules = name, module, list(modules)
        self.node, self.keep = node, keep
        self.given: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.began = 0
        self.state = UnitState.SHARDED
        self.enclosing: set[Unit] = set()
        self.flats: list[FlatParams] = []
        self.registrations: list[Registration] = []
        self.parts: list[StandIn] = []
        self.ahead: list[int] | None = None
        self._pending: list[Handle] = []
        self._wholes: list[Tensor] = []  # of each of ``flats``, while gathered
        self._versions: list[int] = []

    @property
    def label(self) -> str:
        return f"unit {self.name!r}" if self.name else "the root unit"

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for flat in self.flats for parameter in flat.params]

    @property
    def of_experts(self) -> bool:
        return bool(self.flats) and self.flats[0].sharding.of_experts  # all of a unit have one sharding

    @property
    def split(self) -> list[FlatParams]:
        """Those of ``flats`` that are sharded: experts that one rank alone has are whole all the time."""
        return [flat for flat in self.flats if flat.sharded]

    def unshard(self, *, ahead: bool = False) -> None:
        """Start to bring in all parameters, where they are not here yet. ``ahead``: of a forward that has not begun, so
        that the user may write into the shards before ``wait``."""
        # Each gather is a collective. One that is in flight, or has arrived, must not be started again on this rank.
        if self.state in (UnitState.SHARDED, UnitState.NODE_SHARDED):
            # Where the ranks of the node keep all of it among them, no other rank needs to take part.
            node = self.node if self.state is UnitState.NODE_SHARDED else None
            with span("unshard", self.label):
                pending = [flat.unshard(node) for flat in self.split]
            self._pending = [gather for gather in pending if gather is not None]
            self.state = UnitState.UNSHARDING
            self.ahead = [flat.shard._version for flat in self.split] if ahead else None

    def wait(self) -> None:
        """Order later work after the parameters' arrival, and let the modules hold them."""
        if self.state is UnitState.UNSHARDING:
            self._wait_for_gathers()
            if self.ahead is not None and self.ahead != [flat.shard._version for flat in self.split]:
                self.state = UnitState.SHARDED  # the user has written since, on every rank
                self.unshard()
                self._wait_for_gathers()
            self.ahead = None
            for flat in self.split:
                # A shard that rests in host memory was copied on a lane of its own. On one rank no gather follows that.
                flat.memory.order_after_copy()
                flat.show()
            self.show(plain=True)
            self.state = UnitState.UNSHARDED

    def _wait_for_gathers(self) -> None:
        with span("wait for", self.label):
            for gather in self._pending:
                gather.of = self.label
                try:
                    gather.wait()
                except CollectiveError as error:
                    raise CollectiveError(f"gathering {self.label}: {error}") from error
        self._pending = []  # only now: parameters that failed to arrive must not be shown

    def moved(self) -> list[str]:
        """List the labels of parameters that were moved or cast since they arrived, and undo that."""
        return self._labels(flat.moved() for flat in self.split) if self.state is UnitState.UNSHARDED else []

    def _labels(self, parameters: Iterable[Iterable[Tensor]]) -> list[str]:
        chosen = {id(parameter) for some in parameters for parameter in some}
        return list(dict.fromkeys(place.shard.label for place in self.registrations if id(place.plain) in chosen))

    def reshard(self, *, to_node: bool = False) -> None:
        """Free all but this rank's shard; ``to_node``: and but its part of what its node keeps."""
        # The gather writes into the memory that is about to be freed, and the other ranks count on this one in it.
        if self.state is UnitState.UNSHARDING:
            self.ahead = None  # what is about to be freed may be stale
            self.wait()
        # From NODE_SHARDED to the node there is nothing to do: its part was kept when the unit was last resharded.
        if self.state is UnitState.UNSHARDED or (self.state is UnitState.NODE_SHARDED and not to_node):
            node = self.node if to_node else None
            with span("reshard", self.label):
                self.show(plain=False)  # first: it raises where a parameter was replaced, and then nothing was freed
                for flat in self.split:
                    flat.reshard(node)
            self.state = UnitState.SHARDED if node is None else UnitState.NODE_SHARDED

    def keep_edits(self, *, unseen: bool = False) -> None:
        """Copy edits of plain parameters into the shards. ``unseen``: also edits that no version shows."""
        if self.state is UnitState.UNSHARDED:
            for flat in self.split:
                flat.keep_edits(unseen=unseen)

    # -- what the modules hold, and calls of what is within ------------------------------------------------------

    def show(self, module: nn.Module | None = None, *, plain: bool) -> None:
        """Let ``module``, or every one, hold plain parameters, or else shards."""
        for place in self.registrations:
            if (module is not None and place.module is not module) or place.shard.flat is None:
                continue
            held = place.module._parameters
            # Somebody else's parameter there would be used, and trained, without being sharded.
            if held.get(place.name) is not place.plain and held.get(place.name) is not place.shard:
                raise ParameterError(
                    f"{place.shard.label} was replaced after zero_optim.shard_module: write into it instead, within "
                    "zero_optim.gather_parameters(model, writeback=True). torch.func.functional_call with other "
                    "parameters runs within zero_optim.gather_parameters(model)"
                )
            # setattr would check, and find that a shard is no nn.Parameter
            held[place.name] = place.plain if plain else place.shard  # type: ignore[assignment]

    def watch_parts(self) -> None:
        """Let a call of a part stand in for a forward of the unit: none is running."""
        for part in self.parts:
            part.watch()

    def unwatch_parts(self) -> None:
        """Leave calls of parts alone: a forward of the unit is running, and its parameters are here."""
        for part in self.parts:
            part.unwatch()

    # -- for the user --------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Collective. Give the modules whole parameters in memory of their own, whatever the unit's forward does."""
        # From here on forwards leave the unit as it is, and communicate nothing.
        self.state = UnitState.GATHERED
        self.unwatch_parts()
        self._wholes = [flat.copy_out() for flat in self.split]
        self.show(plain=True)
        self._versions = [parameter._version for flat in self.split for parameter in flat.params]

    def take_replaced(self) -> None:
        """Copy tensors that were assigned to ``.data`` into the whole parameters."""
        for flat, whole in zip(self.split, self._wholes, strict=True):
            if (odd := flat.take_replaced(whole)) is not None:
                raise ShardAccessError(
                    f"{self._labels([[odd]])[0]} was given data of shape {tuple(odd.shape)} within gather_parameters, "
                    "which is not its own: resize it before zero_optim.shard_module"
                )

    def write_back(self) -> None:
        """Collective. Keep the values that rank 0 has written."""
        for flat, whole in zip(self.split, self._wholes, strict=True):
            flat.write_back(whole)

    def written(self) -> list[str]:
        """List the labels of parameters that were written since ``gather``."""
        parameters = [parameter for flat in self.split for parameter in flat.params]
        versions = zip(parameters, self._versions, strict=True)
        written = [parameter for parameter, before in versions if parameter._version != before]
        return self._labels([written, *([flat.params[number] for number in flat.elsewhere()] for flat in self.split)])

    def drop(self) -> None:
        """Go back to shards. The whole parameters live for as long as somebody has them."""
        if self.state is UnitState.GATHERED:
            self.show(plain=False)
            for flat in self.split:
                flat.hide()  # the memory is not freed: what the user has taken out of the block views it
            self._wholes = []
            self.state = UnitState.SHARDED
            self.watch_parts()
