"""``verify``: shadows the updates of some parameters in float64, to check that the optimizer computes them right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero_kernels import is_capturing

from .errors import ParameterError, ZeroOptimError
from .optimizer import ShardedOptimizer
from .params.layout import SlotPiece
from .params.parameter_set import ParameterSet
from .rules.update_rule import UpdateRule
from .shadows import Compared, Difference, Shadow, followed, shadow_of, spread, stored_ulps
from .step.shard_state import ShardState


@dataclass(frozen=True)
class Direction:
    """The matrix update that was furthest off, as a multiple of its bounds.

    Attributes:
        difference: how far it was off.
        parameter, rank, step: as in ``VerifyReport``.
    """

    difference: Difference
    parameter: str
    rank: int
    step: int

    @property
    def of_bound(self) -> float:
        """How far it was off, as a multiple of the most that rounding explains. More than 1 is a wrong update."""
        return self.difference.of_bound


@dataclass(frozen=True)
class VerifyReport:
    """The largest difference so far, and how much was looked at.

    Attributes:
        ulps: |live - shadow| in units in the last place of fp32. The unit is that of the largest magnitude so far of
            the value, or of what an update may subtract from it, which for Adam is lr. For Muon the value is the
            momentum, and the largest magnitude that of momentum or gradient.
        parameter, rank, step: where and when it was: the name, the rank that holds the shard, the call of ``step``.
        updates: how many updates the shadow had followed by then.
        compared: elements compared, each time and on every rank counted.
        unrounded: elements of 16-bit parameters that were not their master, rounded.
        edited: elements of parameters found changed between two steps; the shadow takes them over.
        ulps_an_update: the most that rounding makes of one update by the rule of that parameter, and of storing the
            master. Where several rules are followed, the largest difference is that with most ulps over this.
        direction: the worst update of a matrix; None: no matrix was followed.
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
    direction: Direction | None = None

    @property
    def bound(self) -> int:
        """The most ulps that rounding alone can have made of so many updates."""
        return self.ulps_an_update * self.updates


def verify(
    opt: ShardedOptimizer, every: int = 1, parameters: Iterable[Tensor | str] | None = None, samples: int = 8
) -> Verifier:
    """Shadow some parameters by their rules in float64, and compare at every ``every``-th step.

    For debugging: it reads device values on the host in every step and keeps 40 bytes for each of at most 1024 elements
    of each shadowed parameter. The result is a context manager; ``close()`` ends it, ``report()`` says what was found.

    For a rule of whole matrices, such as Muon, all elements that this rank has of a shadowed parameter are followed,
    with 40 bytes for each. There ``ulps`` are of the momentum, and ``direction`` is of what a single update has
    subtracted: the shadow's master begins every step as the live one. So of the master only updates of compared steps
    are judged. A comparison makes a singular value decomposition of each matrix in float64. A matrix that is cut over
    ranks is joined on all of these, so all ranks make the same call of ``verify``; else ``step`` raises
    RankMismatchError.

    The shadow starts from the live state and is then given only what the optimizer is given: the reduced gradient, its
    coefficient (scale and clip), which parameters were used, whether the step was skipped, and ``param_groups``. Step
    counts, bias corrections and all coefficients are its own; these it rounds to fp32 as docs/ops.md says. So it
    differs from the live fp32 master by the rounding of the operations: at most ``report().bound``, in practice like a
    random walk (seen of AdamW: 2 ulps after one update, 17 after 100, 48 after 1000). More is a wrong update, or state
    that was overwritten between steps.

    State that is stored by a codec is rounded in every update, so its shadow starts anew from it in each. The shadow of
    a split master does not: the rounding of storing it is in the bound.

    It follows changed options, added groups, new layouts and skipped steps. Parameters edited between steps are taken
    over and counted; ``load_state_dict`` and ``load_full_state_dict`` start it anew, and ``resync()`` does when
    masters were changed by other means, such as ``opt.refresh_master()``.

    Args:
        parameters: those to shadow, or their names. None: for each rule ``samples`` parameters, evenly spread over
            those of which this rank holds elements. Each rank shadows the elements that it holds.

    Raises ValueError for ``every`` or ``samples`` below 1, ParameterError for one that the optimizer does not train,
    ZeroOptimError for a rule that has no float64 counterpart.
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
        wanted = self._engine.parameters.trained if self._chosen is None else self._chosen
        rules = list(dict.fromkeys(map(self._engine.rules.of, wanted))) or self._engine.rules.all[:1]
        ulps = [_ulps_an_update(rule) for rule in rules]
        self._found = VerifyReport(rank=self._engine.sharding.rank, ulps_an_update=ulps[0])
        self.resync()
        self._on_load = opt.register_load_state_dict_post_hook(lambda opt: self.resync())
        self._engine.watchers.append(self)

    def resync(self) -> None:
        """Start the shadows anew from the live state of the next step; the report goes on."""
        self._shadows: dict[int, Shadow] = {}
        # [parameters] float64: the shadow's own from here on
        self._steps = self._engine.hyper.steps.to("cpu", copy=True)
        self._tracked: list[tuple[ShardState, SlotPiece, Shadow]] = []

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
        """Collective. Report the largest difference of all ranks, and the counts added up: the same on every rank."""
        found = self._engine.sharding.everyone.gather_objects(self._found, "the report of verify")
        worst = max(found, key=_by_one_update)
        directions = [report.direction for report in found if report.direction is not None]
        furthest = max(directions, key=lambda direction: direction.of_bound, default=None)
        totals = {name: sum(getattr(r, name) for r in found) for name in ("compared", "unrounded", "edited")}
        return replace(worst, direction=furthest, **totals)

    # -- a step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_update(self, grad_scale: Tensor | None, found_inf: Tensor) -> None:
        """Take over edits, then update the shadows with the gradients that the shards are about to be updated with."""
        if self._chosen is None:  # a group may have brought another rule; all ranks know it
            for rule in self._engine.rules.all:
                _ulps_an_update(rule)
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
            compared = shadow.end_step(shard, piece, compare=step % self._every == 0)
            if compared is not None:
                self._note(compared, piece.slot.param, shadow.updates, step)

    def _note(self, compared: Compared, index: int, updates: int, step: int) -> None:
        name, rank = self._engine.parameters.name(index), self._found.rank
        self._count(compared=compared.elements, unrounded=compared.unrounded)
        ulps = _ulps_an_update(self._engine.rules.of(index))
        found = replace(
            self._found, ulps=compared.ulps, parameter=name, step=step, updates=updates, ulps_an_update=ulps
        )
        if _by_one_update(found) > _by_one_update(self._found):
            self._found = found
        if compared.matrix is not None:
            direction = Direction(compared.matrix, name, rank, step)
            if self._found.direction is None or direction.of_bound > self._found.direction.of_bound:
                self._found = replace(self._found, direction=direction)

    def _count(self, **more: int) -> None:
        self._found = replace(self._found, **{name: getattr(self._found, name) + n for name, n in more.items()})

    # -- what is shadowed ----------------------------------------------------------------------------------------

    def _track(self) -> list[tuple[ShardState, SlotPiece, Shadow]]:
        """List the shadowed pieces where they are now, and bring each shadow up to date with layout and edits."""
        here = {piece.slot.param: (shard, piece) for shard in self._engine.states.shards for piece in followed(shard)}
        # Each rule by itself: ranks that share matrices choose the same, whatever they have of other parameters.
        of_rules: dict[UpdateRule, list[int]] = {}
        for index in sorted(here):
            of_rules.setdefault(here[index][0].rule, []).append(index)
        chosen = [index for indices in of_rules.values() for index in self._choose(indices)]
        # Shadows of parameters that have left this rank are dropped: if one comes back, it has a newer state.
        self._shadows = {index: self._shadows.get(index) or shadow_of(*here[index]) for index in chosen}
        tracked = [(*here[index], shadow) for index, shadow in self._shadows.items()]
        take_over = self._engine.states.takes_edits_over
        self._count(edited=sum(shadow.follow(shard, piece, take_over) for shard, piece, shadow in tracked))
        return tracked

    def _choose(self, indices: list[int]) -> list[int]:
        return spread(indices, self._samples) if self._chosen is None else sorted(self._chosen.intersection(indices))


def _ulps_an_update(rule: UpdateRule) -> int:
    """Bound the rounding of one update, in units in the last place of the value that is compared by these."""
    if rule.ulps_an_update is None:
        raise ZeroOptimError(
            f"verify cannot follow {rule.name}: give the rule update_in_float64 or matrices_in_float64, and "
            "ulps_an_update, its bound; or choose parameters of another rule by parameters="
        )
    return rule.ulps_an_update + (stored_ulps(rule) if rule.matrices_in_float64() is None else 0)


def _by_one_update(report: VerifyReport) -> float:
    """Divide the difference by the rounding of one update, so that differences of several rules compare."""
    return report.ulps / max(report.ulps_an_update, 1)


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
