"""Every update of an optimizer, compared with the same update in float64: on any topology, at any stage, in any store.

``watch(opt)`` reads state and reduced gradient before each update, updates a copy in float64, and compares. So each
update is judged by itself, from the live state on. Elements are compared in units in the last place of fp32, matrices
of Muon by their distance from the exact update: a product of bf16 matrices has an error that no ulp bounds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from zero_optim.params.layout import SlotPiece
from zero_optim.params.storage_order import view_of
from zero_optim.rules import Lion
from zero_optim.rules.muon import BUFFER, VIEW, Muon, blocks_of, matrices_of
from zero_optim.rules.newton_schulz import OPTIONS, Step, listed, phases
from zero_optim.rules.update_rule import MASTER, UpdateRule, master_of
from zero_optim.step.shard_state import ShardState

State = Mapping[str, Tensor]
"""By name, [n] float64, updated in place. The master is always in it."""
Group = Mapping[str, Any]

ULPS = {"AdamW": 18, "Lion": 4, "SGD": 16, "Muon": 8}
"""The largest rounding error of one update, of the master; for Muon of its momentum. AdamW rounds the decayed value and
the difference by half an ulp each, and forms what it subtracts, of the size of lr, in about ten operations."""
ULPS_OF_STORING = {"split": 1, "split8": 256}
"""By codec of a master: how far storing it moves it."""


def in_fp32(value: float) -> float:
    """Round a coefficient once, as docs/ops.md says."""
    return float(torch.tensor(value, dtype=torch.float32))


# -- rules that update element by element ------------------------------------------------------------------------------


def adamw(rule: Any, state: State, gradient: Tensor, group: Group, step: float) -> Tensor:
    """Update in place. Returns [n] or [], the magnitude that the update may subtract."""
    lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), float(group["weight_decay"])
    p, m, v = state[MASTER], state["exp_avg"], state["exp_avg_sq"]
    g = -gradient if group.get("maximize") else gradient
    if rule.decoupled:
        p.mul_(in_fp32(1 - lr * decay))
    else:
        g = g + in_fp32(decay) * p
    m.mul_(in_fp32(beta1)).add_(g * in_fp32(1 - beta1))
    v.mul_(in_fp32(beta2)).add_(g * g * in_fp32(1 - beta2))
    largest = v if "max_exp_avg_sq" not in state else torch.maximum(state["max_exp_avg_sq"], v)
    root = largest.sqrt() / in_fp32(math.sqrt(1 - beta2**step)) + in_fp32(float(group["eps"]))
    p.sub_(in_fp32(lr / (1 - beta1**step)) * (m / root))
    return p.new_tensor(lr)


def lion(rule: Any, state: State, gradient: Tensor, group: Group, step: float) -> Tensor:
    """As ``adamw``. Where rounding decides the sign, the master becomes NaN: it is not compared."""
    lr, (beta1, _), decay = float(group["lr"]), map(float, group["betas"]), float(group["weight_decay"])
    p, m = state[MASTER], state["exp_avg"]
    kept, new = m * in_fp32(beta1), (-gradient if group.get("maximize") else gradient) * in_fp32(1 - beta1)
    p.mul_(in_fp32(1 - lr * decay)).sub_(in_fp32(lr) * torch.sign(kept + new))
    p[(kept + new).abs() <= 2.0**-16 * (m.abs() + gradient.abs())] = math.nan
    return p.new_tensor(lr)


def sgd(rule: Any, state: State, gradient: Tensor, group: Group, step: float) -> Tensor:
    """As ``adamw``."""
    p, momentum, decay = state[MASTER], float(group["momentum"]), float(group["weight_decay"])
    buffer = state.get("momentum_buffer", torch.zeros_like(p))
    size = float(group["lr"]) * (1 + momentum) * (gradient.abs() + decay * p.abs() + buffer.abs())
    g = (-gradient if group.get("maximize") else gradient) + in_fp32(decay) * p
    first = step <= 1 or not momentum
    buffer = g if first else buffer * in_fp32(momentum) + g * in_fp32(1 - float(group["dampening"]))
    update = g + in_fp32(momentum) * buffer if group["nesterov"] else buffer
    p.sub_(in_fp32(float(group["lr"])) * (update if momentum else g))
    return size


ELEMENTWISE: dict[str, Callable[..., Tensor]] = {"AdamW": adamw, "Lion": lion, "SGD": sgd}


# -- Muon --------------------------------------------------------------------------------------------------------------


def muon_begins(state: State, gradient: Tensor, group: Group) -> Tensor:
    """Update the momentum, and let the master decay. Returns [n], of which the matrices are made."""
    lr, momentum, decay = (float(group[name]) for name in ("lr", "momentum", "weight_decay"))
    state[MASTER].mul_(in_fp32(1 - lr * decay))
    buffer = state[BUFFER].lerp_(gradient, in_fp32(1 - momentum))
    return torch.lerp(gradient, buffer, in_fp32(momentum)) if group["nesterov"] else buffer.clone()


def muon_matrices(rule: Muon, ahead: Tensor, live: Tensor, rounded: Tensor, group: Group) -> float:
    """The error of the worst matrix of a parameter, as a multiple of what rounding explains.

    Args, all float64 of the parameter's shape:
        ahead: what is made orthogonal.
        live: what the update has subtracted from the master.
        rounded: the most that storing the master may have rounded off.
    """
    cut = [
        [m for block in blocks_of(t.reshape(matrices_of(t.shape)), group.get(VIEW)) for m in block]
        for t in (ahead, live, rounded)
    ]
    return max((_of_bound(rule, *matrices, float(group["lr"])) for matrices in zip(*cut, strict=True)), default=0.0)


def _of_bound(rule: Muon, ahead: Tensor, live: Tensor, rounded: Tensor, lr: float) -> float:
    """Of one matrix [rows, columns]: the larger of its distance from the exact update, and of how much longer it is.

    Roundings do not even out in a small matrix; and rounding changes the length little, even where it is all of the
    distance. How much it makes of this very matrix is what the iteration makes of it with each product rounded to bf16.
    The most that was seen of 10,000 matrices is 1.12 times that.
    """
    if not ahead.to(torch.bfloat16).isfinite().all():  # one element that is not finite spreads over the whole matrix
        return math.inf if live.isfinite().any() else 0.0
    rate = in_fp32(lr) * _scale(rule.defaults["adjust_lr_fn"], *ahead.shape)
    exact, in_bf16 = rate * muon_exactly(rule, ahead), rate * _in_roundings(rule, ahead)
    off = (live - exact).nan_to_num(nan=math.inf)
    off = off - torch.minimum(torch.maximum(off, -rounded), rounded)
    norm, side = float(torch.linalg.vector_norm(exact)), math.sqrt(ahead.numel())
    if norm == 0:  # a matrix of zeros, or a rate of 0
        return math.inf if off.any() else 0.0

    def relative(error: Tensor) -> tuple[float, float]:
        return float(torch.linalg.vector_norm(error)) / norm, abs(float((error * exact).sum())) / norm**2

    (distance, longer), (by_rounding, longer_by_rounding) = relative(off), relative(in_bf16 - exact)
    bound = 0.02 + 0.5 / side + 3 * by_rounding
    return max(distance / bound, longer / (0.02 + 2 * bound / side + 3 * longer_by_rounding))


def muon_exactly(rule: Muon, matrix: Tensor) -> Tensor:
    """The matrix made orthogonal, by its singular values: a step of the iteration turns U S V^T into
    U (a S + b S^3 + c S^5) V^T."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / max(float(torch.linalg.matrix_norm(matrix)), rule.defaults["eps"])
    for a, b, c in _steps(rule):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def _in_roundings(rule: Muon, matrix: Tensor) -> Tensor:
    """The iteration itself, with the result of every product rounded to bf16."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = _bf16(matrix.mT if tall else matrix)
    x = _bf16(x / _bf16(torch.linalg.matrix_norm(x)).clamp(min=rule.defaults["eps"]))
    for phase in phases(len(matrix), matrix.shape[1], _steps(rule), rule.defaults["ns_gram"]):
        gram = _bf16(x @ x.mT)
        if len(phase) > 1:
            x = _bf16(_factor(gram, phase) @ x)
        else:
            ((a, b, c),) = phase
            x = _bf16(a * x + _bf16(b * gram + c * gram @ gram) @ x)
    return x.mT if tall else x


def _factor(gram: Tensor, steps: Sequence[Step]) -> Tensor:
    """The product of the factors of several steps; the next X X^T is this one between two such factors."""
    product = identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    for a, b, c in steps:
        factor = _bf16(a * identity + _bf16(b * gram + c * gram @ gram))
        product = _bf16(factor @ product)
        gram = _bf16(_bf16(gram @ factor) @ factor)
    return product


def _steps(rule: Muon) -> Sequence[Step]:
    return listed(*(rule.defaults[name] for name in OPTIONS[:2]))


def _scale(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(ratio, 1.0))


def _bf16(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16).double()


# -- an optimizer at work ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The worst update so far. ``of_bound``: its error as a multiple of what rounding explains; 1 or less is right."""

    of_bound: float = 0.0
    parameter: str = ""
    rank: int = 0
    step: int = 0


@dataclass(frozen=True)
class Report:
    """What all ranks found. ``elements``: masters, and Muon's momentum, element by element; ``matrices``: Muon's
    updates, None without any. ``compared``: elements, of each update. ``unrounded``: elements of 16-bit parameters that
    are not their master, rounded."""

    elements: Found = Found()
    matrices: Found | None = None
    compared: int = 0
    unrounded: int = 0


def assert_rounding_alone(report: Report) -> None:
    """Updates of matrices and of what else there is differ from the exact ones, by what rounding explains."""
    assert 0 < report.elements.of_bound <= 1, report
    assert report.matrices is not None and 0 < report.matrices.of_bound < 1, report
    assert report.unrounded == 0, report


@contextlib.contextmanager
def watch(opt: Any) -> Iterator[Watch]:
    """Compare every update within. Collective, where a matrix of Muon is cut over ranks."""
    watching = Watch(opt)
    with mock.patch.object(opt.engine.states, "to_update", watching.to_update):
        yield watching


class Watch:
    """See ``watch``."""

    def __init__(self, opt: Any) -> None:
        self._opt, self._engine, self._update = opt, opt.engine, opt.engine.states.to_update
        self._found = Report()

    def report(self) -> Report:
        """Collective. The same on every rank; in a pipeline, of one stage."""
        every = self._engine.sharding.world.gather_objects(self._found, "the report of the oracle")
        of_matrices = [found.matrices for found in every if found.matrices is not None]
        return Report(
            max((found.elements for found in every), key=_by_bound),
            max(of_matrices, key=_by_bound, default=None),
            sum(found.compared for found in every),
            sum(found.unrounded for found in every),
        )

    def to_update(self, by: Any) -> Iterator[Any]:
        """In the place of ``OptimizerState.to_update``."""
        with torch.no_grad():
            before = [
                _Before(shard, piece, by) for shard in self._engine.states.shards for piece in _updated_here(shard)
            ]
        yield from self._update(by)
        with torch.no_grad():
            for one in before:
                self._compare(one, by)

    def _compare(self, before: _Before, by: Any) -> None:
        index = before.piece.slot.param
        group = self._opt.param_groups[self._engine.parameters.group_of[index]]
        updates = bool(by.used[index]) and not bool(by.found_inf)
        elements, matrices = before.compare(group, float(self._engine.hyper.steps[index]) if updates else 0.0)
        at = Found(0.0, self._engine.parameters.name(index), self._engine.sharding.world.rank, self._engine.steps + 1)
        found = self._found
        self._found = Report(
            max(found.elements, replace(at, of_bound=elements), key=_by_bound),
            found.matrices
            if matrices is None
            else max(found.matrices or at, replace(at, of_bound=matrices), key=_by_bound),
            found.compared + before.piece.numel,
            found.unrounded + before.unrounded(),
        )


def _by_bound(found: Found) -> float:
    return found.of_bound


class _Before:
    """What this rank has of a parameter, as an update finds it."""

    def __init__(self, shard: ShardState, piece: SlotPiece, by: Any) -> None:
        self.shard, self.piece, self.rule = shard, piece, shard.rule
        self.master = master_of(shard.rule) or MASTER
        names = [tensor.name for tensor in shard.rule.tensors if tensor.name not in shard.rule.averages]
        self.state = {name: self._live(name).double() for name in dict.fromkeys((self.master, *names))}
        parameter = self._part(shard.bucket.memory.shard)
        was = self.state[self.master]
        # Edits of a parameter go into its master.
        self.state[self.master] = torch.where(was.to(parameter.dtype) == parameter, was, parameter.double())
        table, columns = by.hyper[shard.rule], shard.rule.columns
        scale = 1.0 if by.grad_scale is None else float(by.grad_scale)
        factor = abs(float(table[piece.slot.param, columns.index("grad_factor")]))  # its sign is the rule's
        self.gradient = self._part(shard.bucket.grad_shard).double() * (scale * factor)

    def compare(self, group: Group, step: float) -> tuple[float, float | None]:
        """The errors of elements and of matrices, as multiples of what rounding explains. ``step``: the number of this
        update of the parameter; 0: it has none, and nothing may change."""
        live = self._live(self.master).double()
        if isinstance(self.rule, Muon):
            return self._compare_matrices(self.rule, live, group, step)
        was = self.state[self.master].clone()
        if not step:
            return _bits_off(live, was), None
        size = ELEMENTWISE[self.rule.name](self.rule, self.state, self.gradient, group, step)
        exact = self.state[self.master]
        if isinstance(self.rule, Lion):
            live = torch.where(exact.isnan() & ~self.gradient.isnan(), math.nan, live)
        off = _ulps_off(live, exact, torch.maximum(was.abs(), size))
        return off / (ULPS[self.rule.name] + _of_storing(self.rule)), None

    def _compare_matrices(self, rule: Muon, live: Tensor, group: Group, step: float) -> tuple[float, float]:
        was, buffer = self.state[self.master], self._live(BUFFER).double()
        if not step:
            return _bits_off(buffer, self.state[BUFFER]), _bits_off(live, was)
        size = torch.maximum(self.state[BUFFER].abs(), self.gradient.abs())
        ahead = muon_begins(self.state, self.gradient, group)
        off = 0.0 if BUFFER in rule.codecs else _ulps_off(buffer, self.state[BUFFER], size) / ULPS[rule.name]
        decayed = self.state[self.master]
        rounded = _ulp_of(torch.maximum(decayed.abs(), live.abs())) * (2 + _of_storing(rule))
        given = _joined(torch.stack((ahead, decayed - live, rounded)), self.shard, self.piece)
        return off, muon_matrices(rule, *given, group)

    def unrounded(self) -> int:
        parameter, master = self._part(self.shard.bucket.memory.shard), self._live(self.master)
        return int(((master.to(parameter.dtype) != parameter) & ~master.isnan()).sum())

    def _part(self, along_shard: Tensor) -> Tensor:
        here = along_shard.narrow(0, self.piece.in_shard, self.piece.numel)
        return here.to(self.shard.bucket.device, copy=True)

    def _live(self, name: str) -> Tensor:
        with self.shard.opened() as state:
            tensor = next((tensor for tensor in self.shard.tensors if tensor.name == name), None)
            if name == self.master or tensor is None:
                of_shard = self.shard.master(state)
            else:
                of_shard = self.shard.values(tensor, state)
            return self._part(of_shard)


def _of_storing(rule: UpdateRule) -> int:
    return sum(ULPS_OF_STORING[codec.name] for codec in rule.codecs.values() if codec.reads_parameter)


def _ulp_of(magnitude: Tensor) -> Tensor:
    """The unit in the last place of fp32, float64."""
    exponent = torch.frexp(magnitude).exponent.clamp(min=-125)
    return torch.ldexp(torch.ones_like(magnitude), exponent - 24)


def _ulps_off(live: Tensor, exact: Tensor, size: Tensor) -> float:
    off = (live - exact).abs() / _ulp_of(torch.maximum(exact.abs(), size))
    same = (live == exact) | (live.isnan() & exact.isnan())
    return float(torch.where(same, 0.0, off.nan_to_num(nan=math.inf)).max()) if live.numel() else 0.0


def _bits_off(live: Tensor, exact: Tensor) -> float:
    return 0.0 if bool(((live == exact) | (live.isnan() & exact.isnan())).all()) else math.inf


# -- parameters that are cut over ranks --------------------------------------------------------------------------------


def _updated_here(shard: ShardState) -> list[SlotPiece]:
    """The pieces with elements here; of a rule of whole matrices also the empty pieces of a parameter that other ranks
    have parts of, as all of these join it."""
    if not isinstance(shard.rule, Muon):
        return [piece for piece in shard.bucket.pieces if piece.numel]
    here = {whole.param for whole in _wholes(shard) if math.prod((_joint(shard, whole) or whole).shape)}
    return [piece for piece in shard.bucket.pieces if piece.slot.param in here]


def _cuts(shard: ShardState) -> Sequence[Any]:
    return () if shard.to_join is None else shard.to_join.cuts


def _wholes(shard: ShardState) -> Sequence[Any]:
    return [*shard.wholes, *(cut.whole for cut in _cuts(shard))]


def _joint(shard: ShardState, whole: Any) -> Any:
    """How slices make the parameter whole; None: the slice has all that its matrices need."""
    return whole.joint if whole.joint is not None and shard.rule.needs_whole(whole.joint) else None


def _joined(own: Tensor, shard: ShardState, piece: SlotPiece) -> Tensor:
    """Collective, over the ranks that have parts of the parameter: ``own`` [tensors, piece.numel]. Returns
    [tensors, *shape], whole."""
    sharding, whole = shard.bucket.sharding, next(w for w in _wholes(shard) if w.param == piece.slot.param)
    if _cuts(shard):
        parts = sharding.shard_group.gather_objects((piece.in_param, own.cpu()), "the oracle")
        own = torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], dim=1)
    slices = torch.stack([view_of(flat, whole.shape, whole.order) for flat in own.to(shard.bucket.device)])
    joint = _joint(shard, whole)
    if joint is None or sharding.tensor_ranks is None:
        return slices
    joined = slices.new_empty(len(own), *joint.shape)
    for rank, of_rank in enumerate(sharding.tensor_ranks.slices.gather_objects(slices.cpu(), "the oracle")):
        for in_whole, in_slice, length in joint.slices_of(rank):
            to = joined.narrow(1 + joint.dim, in_whole, length)
            to.copy_(of_rank.narrow(1 + joint.dim, in_slice, length))
    return joined
