"""The update rule in float64 beside the real one, for some elements: is what the optimizer computes what it should?"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zero_kernels import is_capturing

from .errors import ParameterError, ZeroOptimError
from .optimizer import ShardedOptimizer
from .params.layout import SlotPiece
from .params.parameter_set import ParameterSet
from .rules.update_rule import master_of
from .step.shard_state import ShardState
from .step.workplace import PARAMETER

POSITIONS = 1024
"""Elements of one parameter that are shadowed at most, spread evenly over it."""


@dataclass(frozen=True)
class VerifyReport:
    """The largest difference so far, and how much was looked at.

    Attributes:
        ulps: |live - shadow| in units in the last place of fp32, of the largest that the value, or what an update may
            subtract from it, has been until then. Of Adam that is lr.
        parameter, rank, step: where and when it was: the name, the rank that holds the shard, the call of ``step``.
        updates: how many updates the shadow had followed by then.
        compared: elements compared, each time and on every rank counted.
        unrounded: elements of 16-bit parameters that were not their master, rounded.
        edited: elements of parameters found changed between two steps; the shadow takes them over.
        ulps_an_update: the most that rounding makes of one update by this rule, and of the master as it is stored.
    """

    ulps: float = 0.0
    parameter: str | None = None
    rank: int = 0
    step: int = 0
    updates: int = 0
    compared: int = 0
    unrounded: int = 0
    edited: int = 0
    ulps_an_update: int = 0

    @property
    def bound(self) -> int:
        """The most ulps that rounding alone can have made of so many updates."""
        return self.ulps_an_update * self.updates


def verify(
    opt: ShardedOptimizer, every: int = 1, parameters: Iterable[Tensor | str] | None = None, samples: int = 8
) -> Verifier:
    """Shadow some parameters by the rule in float64, and compare at every ``every``-th step.

    For debugging: it reads device values on the host in every step and keeps 40 bytes for each of at most 1024 elements
    of each shadowed parameter. The result is a context manager; ``close()`` ends it, ``report()`` says what was found.

    The shadow starts from the live state and is then given only what the optimizer is given: the reduced gradient, its
    coefficient (scale and clip), which parameters were used, whether the step was skipped, and ``param_groups``. Step
    counts, bias corrections and all coefficients are its own; these it rounds to fp32 as docs/ops.md says. So it
    differs from the live fp32 master by the rounding of the operations: at most ``report().bound``, in practice like a
    random walk (seen of AdamW: 2 ulps after one update, 17 after 100, 48 after 1000). More is a wrong update, or state
    that was overwritten between steps.

    State that is stored by a codec is rounded in every update. So its shadow starts anew from it in each. That of a
    split master does not: what storing it makes of an update is in the bound.

    It follows changed options, added groups, new layouts and skipped steps. Parameters edited between steps are taken
    over and counted; ``load_state_dict`` and ``load_full_state_dict`` start it anew, and ``resync()`` does when
    masters were changed by other means, such as ``opt.refresh_master()``.

    Args:
        parameters: those to shadow, or their names; None: ``samples`` of those that this rank holds elements of,
            evenly spread. Each rank shadows the elements that it holds.

    Raises ValueError for ``every`` or ``samples`` below 1, ParameterError for one that the optimizer does not train,
    ZeroOptimError for a rule that has no float64 counterpart, and for parameters of several rules.
    """
    return Verifier(opt, every, parameters, samples)


class Verifier:
    """The watcher that ``verify`` returns. The engine tells it of updates until it is closed."""

    def __init__(
        self, opt: ShardedOptimizer, every: int, parameters: Iterable[Tensor | str] | None, samples: int
    ) -> None:
        if every < 1 or samples < 1:
            raise ValueError(f"every and samples must be 1 or more, got {every} and {samples}")
        opt.check_usable()
        self._opt, self._engine, self._every, self._samples = opt, opt.engine, every, samples
        self._chosen = None if parameters is None else _indices(opt.engine.parameters, parameters)
        ulps = self._ulps_of(self._engine.parameters.trained if self._chosen is None else self._chosen)
        self._found = VerifyReport(rank=self._engine.sharding.rank, ulps_an_update=ulps)
        self.resync()
        self._on_load = opt.register_load_state_dict_post_hook(lambda opt: self.resync())
        self._engine.watchers.append(self)

    def _ulps_of(self, indices: Iterable[int]) -> int:
        """The most that rounding makes of an update of these parameters, which are to be followed."""
        rules = list(dict.fromkeys(map(self._engine.rules.of, indices))) or self._engine.rules.all[:1]
        if len(rules) > 1:
            names = " and ".join(rule.name for rule in rules)
            raise ZeroOptimError(
                f"verify follows the parameters of one rule, and these are of {names}: choose some by parameters=, and "
                "verify those of another rule beside it"
            )
        ulps = rules[0].ulps_an_update
        if ulps is None:
            raise ZeroOptimError(
                f"verify cannot follow {rules[0].name}: give the rule update_in_float64, and ulps_an_update, its "
                "bound; or choose parameters of another rule by parameters="
            )
        return ulps + sum(codec.ulps for codec in rules[0].codecs.values() if codec.reads_parameter)

    def resync(self) -> None:
        """Start the shadow anew from the live state of the next step; the report goes on."""
        self._shadows: dict[int, _Shadow] = {}
        # [parameters] float64: the shadow's own from here on
        self._steps = self._engine.hyper.steps.to("cpu", copy=True)
        self._tracked: list[tuple[ShardState, SlotPiece, _Shadow]] = []

    def close(self) -> None:
        """Stop looking. ``report()`` still works."""
        if self in self._engine.watchers:
            self._engine.watchers.remove(self)
            self._on_load.remove()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def report(self) -> VerifyReport:
        """Collective: the same on every rank, with the largest difference of all and the counts added up."""
        found = self._engine.sharding.everyone.gather_objects(self._found, "the report of verify")
        worst = max(found, key=lambda report: report.ulps)
        totals = {name: sum(getattr(r, name) for r in found) for name in ("compared", "unrounded", "edited")}
        return replace(worst, **totals)

    # -- a step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_update(self, grad_scale: Tensor | None, found_inf: Tensor) -> None:
        """Take over edits, then update the shadow by what the shards are about to be updated by."""
        if is_capturing(self._engine.sharding.device):
            raise ZeroOptimError("verify reads device values: close() it before capturing a step")
        used = self._engine.exchange.used.cpu()
        self._steps = torch.cat((self._steps, self._steps.new_zeros(len(used) - len(self._steps))))
        self._tracked = self._track()
        if bool(found_inf):
            return
        self._steps += used
        scale = 1.0 if grad_scale is None else float(grad_scale)
        for shard, piece, shadow in self._tracked:
            index = piece.slot.param
            if used[index]:
                # The table's factor carries the clip and the sign; the sign is the shadow's own.
                factor = abs(float(self._engine.hyper.grad_factors(shard.rule)[index]))
                gradient = shadow.held_of(shard.bucket.grad_shard, piece).double() * (scale * factor)
                group = self._opt.param_groups[self._engine.parameters.group_of[index]]
                shadow.update(gradient, group, float(self._steps[index]))

    @torch.no_grad()
    def after_update(self, found_inf: Tensor) -> None:
        step = self._engine.steps + 1
        for shard, piece, shadow in self._tracked:
            shadow.remember(shard, piece)
            if step % self._every == 0:
                self._compare(shard, piece, shadow, step)

    def _compare(self, shard: ShardState, piece: SlotPiece, shadow: _Shadow, step: int) -> None:
        with shard.opened() as state:
            master = shadow.held_of(shard.master(state), piece)
        ulps = shadow.ulps_off(master)
        unrounded = (master.to(shard.bucket.dtype) != shadow.parameter[shadow.held]) & ~master.isnan()
        self._count(compared=master.numel(), unrounded=int(unrounded.sum()))
        if ulps > self._found.ulps:
            name = self._engine.parameters.name(piece.slot.param)
            self._found = replace(self._found, ulps=ulps, parameter=name, step=step, updates=shadow.updates)

    def _count(self, **more: int) -> None:
        self._found = replace(self._found, **{name: getattr(self._found, name) + n for name, n in more.items()})

    # -- what is shadowed ----------------------------------------------------------------------------------------

    def _track(self) -> list[tuple[ShardState, SlotPiece, _Shadow]]:
        """The shadowed pieces where they are now, each shadow brought up to date with layout and edits."""
        pieces = {
            piece.slot.param: (shard, piece)
            for shard in self._engine.states.shards
            for piece in shard.bucket.pieces
            if piece.numel
        }
        here = sorted(pieces)
        chosen = _spread(here, self._samples) if self._chosen is None else sorted(self._chosen.intersection(here))
        # Those that have left this rank are forgotten: if they come back, it is with a newer state.
        self._shadows = {i: self._shadows.get(i) or _Shadow(pieces[i][1].slot.numel, pieces[i][0]) for i in chosen}
        tracked = [(*pieces[index], shadow) for index, shadow in self._shadows.items()]
        take_over = self._engine.states.takes_edits_over
        self._count(edited=sum(shadow.follow(shard, piece, take_over) for shard, piece, shadow in tracked))
        return tracked


class _Shadow:
    """Some elements of one parameter in float64. For state that has a value an element.

    Attributes:
        positions: [n] int64, flat indices in the parameter; the state has that length on every rank.
        held: the part of it that this rank holds; the rest is meaningless.
        state: by name, [n] float64.
        scale: [n] float64, the largest magnitude that lr or the master had so far: rounding errors are units of it.
        parameter: [n] the parameter's dtype, as the last step left it.
        updates: followed since it was started.
    """

    def __init__(self, numel: int, shard: ShardState) -> None:
        device = shard.bucket.device
        self._rule, self._master = shard.rule, master_of(shard.rule) or PARAMETER
        self._places = _spread(range(numel), POSITIONS)
        self.positions = torch.tensor(self._places, dtype=torch.int64, device=device)
        self.held = slice(0, 0)
        n = len(self._places)
        names = {self._master, *(tensor.name for tensor in self._rule.tensors)}
        self.state = {name: torch.zeros(n, dtype=torch.float64, device=device) for name in names}
        self.scale = torch.zeros(n, dtype=torch.float64, device=device)
        self.parameter = torch.zeros(n, dtype=shard.bucket.dtype, device=device)
        self.updates = 0
        self._undecided: Tensor | None = None  # [held] bool, what the last update has returned

    def held_of(self, shard: Tensor, piece: SlotPiece) -> Tensor:
        """The elements of a flat shard that are shadowed, a copy."""
        places = self.positions[self.held] + (piece.in_shard - piece.in_param)
        return shard[places.to(shard.device)].to(places.device)

    def follow(self, shard: ShardState, piece: SlotPiece, take_over: bool) -> int:
        """Take over elements that have come to this rank, and masters of edited ones. Returns how many were edited.

        ``take_over``: the update that follows does so too, from parameters that are not their master, rounded.
        """
        before = self.held
        start, stop = (bisect_left(self._places, at) for at in (piece.in_param, piece.in_param + piece.numel))
        self.held = slice(start, stop)
        places = torch.arange(start, stop, device=self.positions.device)
        came = (places < before.start) | (places >= before.stop)
        parameter = self.held_of(shard.bucket.param_shard, piece)
        edited = (parameter != self.parameter[self.held]) & ~came
        with shard.opened() as state:
            tensors = {tensor.name: tensor for tensor in shard.tensors}
            for name, mine in self.state.items():
                master = name == self._master
                live = self.held_of(shard.master(state) if master else shard.values(tensors[name], state), piece)
                if master and take_over:
                    live = torch.where(live.to(parameter.dtype) == parameter, live, parameter.to(live.dtype))
                live = live.double()
                taken = came | edited if master else came | (name in self._rule.codecs)
                mine[self.held] = torch.where(taken, live, mine[self.held])
        self.scale[self.held] = torch.where(came, 0.0, self.scale[self.held])
        return int(edited.sum())

    def update(self, gradient: Tensor, group: Mapping[str, Any], step: float) -> None:
        """The rule's own arithmetic, exact but for coefficients rounded once to fp32."""
        held = {name: tensor[self.held] for name, tensor in self.state.items()}
        size = torch.maximum(held[self._master].abs(), self._rule.size_of_update(held, gradient, group))
        self.updates += 1
        self.scale[self.held] = torch.maximum(self.scale[self.held], size)
        self._undecided = self._rule.update_in_float64(held, gradient, group, step)

    def remember(self, shard: ShardState, piece: SlotPiece) -> None:
        """Note the parameter as the step has left it: what differs before the next was edited. Take over what rounding
        has decided."""
        undecided, self._undecided = self._undecided, None
        if undecided is not None and undecided.any():
            with shard.opened() as state:
                live = self.held_of(shard.master(state), piece).double()
            master = self.state[self._master]
            master[self.held] = torch.where(undecided, live, master[self.held])
        self.parameter[self.held] = self.held_of(shard.bucket.param_shard, piece)

    def ulps_off(self, live: Tensor) -> float:
        """The largest difference of ``live`` masters, in fp32 units in the last place; inf where one is not finite."""
        shadow, live = self.state[self._master][self.held], live.double()
        scale = torch.maximum(self.scale[self.held], shadow.abs())
        exponent = torch.frexp(scale).exponent.clamp(min=-125)
        off = (live - shadow).abs() / torch.ldexp(torch.ones_like(scale), exponent - 24)
        same = (live == shadow) | (live.isnan() & shadow.isnan())
        return float(torch.where(same, 0.0, off.nan_to_num(nan=math.inf)).max()) if live.numel() else 0.0


def _spread(values: Sequence[int], count: int) -> list[int]:
    """Pick at most ``count`` of ``values``, evenly, the first and the last among them."""
    last = len(values) - 1
    if count > last:
        return list(values)
    return [values[i * last // max(count - 1, 1)] for i in range(count)]


def _indices(known: ParameterSet, parameters: Iterable[Tensor | str]) -> set[int]:
    of_names = {known.name(index): index for index in known.trained}
    of_tensors = {id(parameter): index for index, parameter in known.trained.items()}
    chosen: set[int] = set()
    for wanted in parameters:
        index = of_names.get(wanted) if isinstance(wanted, str) else of_tensors.get(id(wanted))
        if index is None:
            name = wanted if isinstance(wanted, str) else f"a parameter of shape {tuple(wanted.shape)}"
            raise ParameterError(f"verify cannot shadow {name}: this optimizer does not train it")
        chosen.add(index)
    return chosen
