"""Shadows: the update of a parameter in float64, which ``verify`` compares with the real one.

There are two kinds, with one face. The rule decides which:

- ``ElementShadow``: some elements, for a rule that updates element by element.
- ``MatrixShadow``: whole matrices, for a rule that updates these (``UpdateRule.matrices_in_float64``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .params.joint import Joint
from .params.layout import SlotPiece
from .params.storage_order import view_of
from .rules.update_rule import CutParameter, MatricesInFloat64, UpdateRule, Whole, master_of
from .step.shard_state import ShardState
from .step.workplace import PARAMETER

POSITIONS = 1024
"""The most elements of one parameter that an ``ElementShadow`` has, spread evenly over the parameter."""

LEAST, SMALL, ROUNDINGS = 0.02, 0.5, 3.0
"""The fraction of itself by which a matrix's update may differ from the exact one is a sum of three: ``LEAST``;
``SMALL`` / sqrt(elements), as roundings do not even out in a small matrix; and ``ROUNDINGS`` times the rounding that
the rule predicts for this matrix. The most that was seen is 1.12 times that prediction: see docs/muon.md."""


class Difference(NamedTuple):
    """How far the update of one matrix is from the exact one, as fractions of the exact one, with their bounds.

    Attributes:
        distance: ||live - shadow|| / ||shadow||, by Frobenius' norm, of what was subtracted.
        length: |<live, shadow> / ||shadow||^2 - 1|, how much the update is too long or too short along the exact one.
            Rounding changes it little, even where the distance is all rounding.
    """

    distance: float = 0.0
    distance_bound: float = LEAST
    length: float = 0.0
    length_bound: float = LEAST

    @property
    def of_bound(self) -> float:
        """The larger of the two, as a multiple of its bound: more than 1 is a wrong update."""
        return max(self.distance / self.distance_bound, self.length / self.length_bound)


class Compared(NamedTuple):
    """The findings of a shadow in one step.

    Attributes:
        ulps: the largest difference of elements, in fp32 units in the last place; inf where one is not finite.
        elements: how many elements were compared; ``unrounded`` of them are not their master, rounded.
        matrix: the matrix whose update is furthest off; None: no matrix was compared.
    """

    ulps: float
    elements: int
    unrounded: int
    matrix: Difference | None = None


class Shadow:
    """Some elements of one parameter in float64, with the state that has a value an element.

    A step goes ``follow``, then ``update`` if the step updates the parameter, then ``end_step``.

    Attributes:
        held: the range of elements that this rank holds; the others are meaningless here.
        state: by name, [n] float64.
        scale: [n] float64, the largest magnitude so far of the compared value: rounding errors are units of it.
        parameter: [n] the parameter's dtype, as the last step left it.
        updates: how many were followed since the shadow was started.
    """

    def __init__(self, shard: ShardState, places: Sequence[int]) -> None:
        self.device = shard.bucket.device
        self.held = slice(0, 0)
        self._rule, self._master = shard.rule, master_of(shard.rule) or PARAMETER
        self._places = places  # flat indices in the parameter, ascending
        own = {tensor.name for tensor in self._rule.tensors} - {*self._rule.averages}
        self.state = {name: self._zeros(torch.float64) for name in (self._master, *own)}
        self.scale, self.parameter = self._zeros(torch.float64), self._zeros(shard.bucket.dtype)
        self.updates = 0

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(self._places), dtype=dtype, device=self.device)

    def held_of(self, shard: Tensor, piece: SlotPiece) -> Tensor:
        """Copy the shadowed elements of a flat shard."""
        raise NotImplementedError

    def update(self, gradient: Tensor, group: Mapping[str, Any], step: float) -> None:
        """Update by the rule's own arithmetic. ``gradient``: [held] float64, as the update is given it. ``step``: the
        number of this update of the parameter, from 1."""
        raise NotImplementedError

    def end_step(self, shard: ShardState, piece: SlotPiece, *, compare: bool) -> Compared | None:
        """Read the parameter as the step has left it. ``compare``: return how far it is from the shadow."""
        raise NotImplementedError

    def follow(self, shard: ShardState, piece: SlotPiece, take_over: bool) -> int:
        """Take over elements that are new on this rank, and masters of edited ones. Returns how many were edited.

        ``take_over``: the next update, too, takes masters from parameters that are not their master, rounded.
        """
        before = self.held
        start, stop = (bisect_left(self._places, at) for at in (piece.in_param, piece.in_param + piece.numel))
        self.held = slice(start, stop)
        places = torch.arange(start, stop, device=self.device)
        came = (places < before.start) | (places >= before.stop)
        parameter = self.held_of(shard.bucket.param_shard, piece)
        edited = (parameter != self.parameter[self.held]) & ~came
        with shard.opened() as state:
            for name, mine in self.state.items():
                master = name == self._master
                live = self._live_in(state, shard, piece, name)
                if master and take_over:
                    live = torch.where(live.to(parameter.dtype) == parameter, live, parameter.to(live.dtype))
                live = live.double()
                taken = came | edited if master else came | (name in self._rule.codecs)
                mine[self.held] = torch.where(taken, live, mine[self.held])
        self.scale[self.held] = torch.where(came, 0.0, self.scale[self.held])
        return int(edited.sum())

    def _of_held(self) -> dict[str, Tensor]:
        """Views of the state of the elements that this rank holds."""
        return {name: tensor[self.held] for name, tensor in self.state.items()}

    def _live(self, shard: ShardState, piece: SlotPiece, name: str) -> Tensor:
        """Read one state tensor of these elements as it is now."""
        with shard.opened() as state:
            return self._live_in(state, shard, piece, name)

    def _live_in(self, state: Mapping[str, Tensor], shard: ShardState, piece: SlotPiece, name: str) -> Tensor:
        whole = shard.master(state) if name == self._master else shard.values_named(name, state)
        return self.held_of(whole, piece)

    def _count_unrounded(self, master: Tensor) -> int:
        parameter = self.parameter[self.held]
        return int(((master.to(parameter.dtype) != parameter) & ~master.isnan()).sum())

    def _ulps_off(self, name: str, live: Tensor) -> float:
        """The largest difference of ``live`` values from the shadow's; see ``Compared``."""
        shadow, live = self.state[name][self.held], live.double()
        unit = _units_of(torch.maximum(self.scale[self.held], shadow.abs()))
        off = (live - shadow).abs() / unit
        same = (live == shadow) | (live.isnan() & shadow.isnan())
        return float(torch.where(same, 0.0, off.nan_to_num(nan=math.inf)).max()) if live.numel() else 0.0


class ElementShadow(Shadow):
    """Elements spread over a parameter. Its master is compared, which the shadow updates for itself, step after step.

    Attributes:
        positions: [n] int64, flat indices in the parameter; the state has that length on every rank.
    """

    def __init__(self, shard: ShardState, piece: SlotPiece) -> None:
        super().__init__(shard, spread(range(piece.slot.numel), POSITIONS))
        self.positions = torch.tensor(self._places, dtype=torch.int64, device=self.device)
        self._undecided: Tensor | None = None  # [held] bool, what the last update has returned

    def held_of(self, shard: Tensor, piece: SlotPiece) -> Tensor:
        places = self.positions[self.held] + (piece.in_shard - piece.in_param)
        return shard[places.to(shard.device)].to(places.device)

    def update(self, gradient: Tensor, group: Mapping[str, Any], step: float) -> None:
        """Update by the rule's own arithmetic, exact but for coefficients rounded once to fp32."""
        held = self._of_held()
        size = torch.maximum(held[self._master].abs(), self._rule.size_of_update(held, gradient, group))
        self.updates += 1
        self.scale[self.held] = torch.maximum(self.scale[self.held], size)
        self._undecided = self._rule.update_in_float64(held, gradient, group, step)

    def end_step(self, shard: ShardState, piece: SlotPiece, *, compare: bool) -> Compared | None:
        """See ``Shadow.end_step``. Where rounding decided the update, the live master is taken over."""
        self.parameter[self.held] = self.held_of(shard.bucket.param_shard, piece)
        undecided, self._undecided = self._undecided, None
        decided = undecided is not None and bool(undecided.any())
        if not decided and not compare:
            return None
        live = self._live(shard, piece, self._master)
        if undecided is not None and decided:
            master = self.state[self._master]
            master[self.held] = torch.where(undecided, live.double(), master[self.held])
        if not compare:
            return None
        return Compared(self._ulps_off(self._master, live), live.numel(), self._count_unrounded(live))


class MatrixShadow(Shadow):
    """All elements that this rank has of a parameter: all of it, or a slice, or at stage 3 a part of either.

    State that is updated element by element, above all the rule's ``buffer``, is followed step after step. The update
    of the master is judged in each step by itself: the shadow's master begins every step as the live one. Otherwise
    the differences of many steps, each of about a percent, would add up.

    A matrix that is cut is joined to be judged, on all ranks that share it. So these ranks shadow the same parameters.
    """

    def __init__(self, shard: ShardState, piece: SlotPiece) -> None:
        super().__init__(shard, range(piece.in_param, piece.in_param + piece.numel))
        exact = shard.rule.matrices_in_float64()
        assert exact is not None
        self._exact = exact
        # [held] float64, the values that the matrices are made of; and the live group. None: nothing was updated.
        self._ahead: tuple[Tensor, Mapping[str, Any]] | None = None

    def held_of(self, shard: Tensor, piece: SlotPiece) -> Tensor:
        return shard.narrow(0, piece.in_shard, piece.numel).to(self.device, copy=True)

    def update(self, gradient: Tensor, group: Mapping[str, Any], step: float) -> None:
        held = self._of_held()
        size = torch.maximum(held[self._exact.buffer].abs(), gradient.abs())
        self.updates += 1
        self.scale[self.held] = torch.maximum(self.scale[self.held], size)
        self._ahead = self._exact.begin(held, gradient, group), group

    def end_step(self, shard: ShardState, piece: SlotPiece, *, compare: bool) -> Compared | None:
        self.parameter[self.held] = self.held_of(shard.bucket.param_shard, piece)
        live, ahead = self._live(shard, piece, self._master), self._ahead
        self._ahead = None
        found = self._compare(shard, piece, live, ahead) if compare else None
        self.state[self._master][self.held] = live.double()
        return found

    def _compare(
        self, shard: ShardState, piece: SlotPiece, live: Tensor, ahead: tuple[Tensor, Mapping[str, Any]] | None
    ) -> Compared:
        ulps = 0.0
        # An encoded buffer is taken over in every step, so its update is not compared; without an update it must stay.
        if ahead is None or self._exact.buffer not in self._rule.codecs:
            ulps = self._ulps_off(self._exact.buffer, self._live(shard, piece, self._exact.buffer))
        master = self.state[self._master][self.held]
        if ahead is None:
            same = (live == master) | (live.isnan() & master.isnan())
            matrix = Difference(distance=0.0 if bool(same.all()) else math.inf)
        else:
            rounded = _units_of(torch.maximum(master.abs(), live.double().abs())) * (2 + stored_ulps(self._rule))
            given = torch.stack((ahead[0], master - live.double(), rounded))
            matrix = furthest(_joined(given, shard, piece), self._exact, ahead[1])
        return Compared(ulps, live.numel(), self._count_unrounded(live), matrix)


def furthest(given: Tensor, exactly: MatricesInFloat64, group: Mapping[str, Any]) -> Difference:
    """Find the worst matrix of a whole parameter. ``given``: [3, *shape], the first arguments of ``_difference``."""
    of_each = zip(*(exactly.matrices(tensor, group) for tensor in given), strict=True)
    found = [_difference(ahead, live, rounded, exactly, group) for ahead, live, rounded in of_each]
    return max(found, key=lambda difference: difference.of_bound)


def _difference(
    ahead: Tensor, live: Tensor, rounded: Tensor, exactly: MatricesInFloat64, group: Mapping[str, Any]
) -> Difference:
    """Judge one matrix, [rows, columns] float64.

    Args:
        ahead: the matrix that is to be made orthogonal.
        live: the update, as it was subtracted from the master.
        rounded: the most that storing the master may have rounded off.
    """
    if not ahead.to(torch.bfloat16).isfinite().all():  # one element that is not finite spreads over the whole matrix
        return Difference(distance=math.inf if live.isfinite().any() else 0.0)
    exact, in_bf16 = exactly.subtracted(ahead, group)
    off = (live - exact).nan_to_num(nan=math.inf)
    off = off - torch.minimum(torch.maximum(off, -rounded), rounded)
    norm, side = float(torch.linalg.vector_norm(exact)), math.sqrt(ahead.numel())
    if norm == 0:  # a matrix of zeros, or a rate of 0
        return Difference(distance=math.inf if off.any() else 0.0)

    def beside_exact(error: Tensor) -> tuple[float, float]:
        """Measure the norm of ``error``, and its length along the exact update, as fractions of that."""
        return float(torch.linalg.vector_norm(error)) / norm, abs(float((error * exact).sum())) / norm**2

    (distance, length), (of_rounding, longer) = beside_exact(off), beside_exact(in_bf16 - exact)
    bound = LEAST + SMALL / side + ROUNDINGS * of_rounding
    return Difference(distance, bound, length, LEAST + 2 * bound / side + ROUNDINGS * longer)


def shadow_of(shard: ShardState, piece: SlotPiece) -> Shadow:
    """Make the kind of shadow that the shard's rule wants."""
    return (ElementShadow if shard.rule.matrices_in_float64() is None else MatrixShadow)(shard, piece)


def followed(shard: ShardState) -> list[SlotPiece]:
    """List the pieces of a shard that can be shadowed here: those that have elements. For a rule of whole matrices also
    empty pieces of parameters that this rank shares: all ranks that share one have to join it."""
    if shard.rule.matrices_in_float64() is None:
        return [piece for piece in shard.bucket.pieces if piece.numel]
    here = {whole.param for whole in _wholes(shard) if math.prod((_joint(shard, whole) or whole).shape)}
    return [piece for piece in shard.bucket.pieces if piece.slot.param in here]


def stored_ulps(rule: UpdateRule) -> int:
    """Bound the error of storing a master, in units in the last place."""
    return sum(codec.ulps for codec in rule.codecs.values() if codec.reads_parameter)


def spread(values: Sequence[int], count: int) -> list[int]:
    """Pick at most ``count`` of ``values``, evenly, the first and the last among them."""
    last = len(values) - 1
    if count > last:
        return list(values)
    return [values[i * last // max(count - 1, 1)] for i in range(count)]


def _units_of(magnitude: Tensor) -> Tensor:
    """The unit in the last place of fp32, float64."""
    exponent = torch.frexp(magnitude).exponent.clamp(min=-125)
    return torch.ldexp(torch.ones_like(magnitude), exponent - 24)


# -- parameters that are cut -------------------------------------------------------------------------------------------


def _wholes(shard: ShardState) -> Iterator[Whole]:
    """Yield the parameters that this rank has, or slices of them, or at stage 3 parts of either."""
    yield from shard.wholes
    yield from (cut.whole for cut in _cuts(shard))


def _cuts(shard: ShardState) -> Sequence[CutParameter]:
    return () if shard.to_join is None else shard.to_join.cuts


def _joint(shard: ShardState, whole: Whole) -> Joint | None:
    """Find how slices make the parameter whole; None: this rank's column has all that its matrices need."""
    return whole.joint if whole.joint is not None and shard.rule.needs_whole(whole.joint) else None


def _joined(own: Tensor, shard: ShardState, piece: SlotPiece) -> Tensor:
    """Collective, over the ranks that share the parameter. Join several tensors of its shape: ``own`` [tensors,
    piece.numel]. Returns [tensors, *shape], whole, on every rank that shares the parameter."""
    sharding, whole = shard.bucket.sharding, next(w for w in _wholes(shard) if w.param == piece.slot.param)
    where = f"verify, which brings {shard.bucket.label(shard.parameters.index(whole.param))} together"
    if _cuts(shard):
        parts = sharding.sharers.gather_objects((piece.in_param, own.cpu()), where)
        own = torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], dim=1)
    slices = torch.stack([view_of(flat, whole.shape, whole.order) for flat in own.to(shard.bucket.device)])
    joint = _joint(shard, whole)
    if joint is None or sharding.tensor_ranks is None:
        return slices
    joined = slices.new_empty(len(own), *joint.shape)
    for rank, of_rank in enumerate(sharding.tensor_ranks.slices.gather_objects(slices.cpu(), where)):
        for in_whole, in_slice, length in joint.shares(rank):
            to = joined.narrow(1 + joint.dim, in_whole, length)
            to.copy_(of_rank.narrow(1 + joint.dim, in_slice, length))
    return joined
