"""What a program should do: all ranks in one process, torch's own optimizers on gradients averaged by hand.

A gradient is the mean over the ranks of what each has accumulated since the last zeroing, and absent where no rank has
any. Where parameters are cut, ranks of a row have the same gradients, of which each sees its slice: rows are averaged.
16-bit parameters are roundings of fp32 masters, which is what torch updates. ``ANY`` stands where the documents
promise nothing.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from programs.compare import bits, first_difference, short

from fuzz.prelude import pattern, start
from fuzz.program import (
    WHOLE,
    AddGroup,
    AllReduce,
    Arrivals,
    Assign,
    Average,
    Backward,
    Clip,
    Drop,
    Edit,
    Enter,
    Evaluate,
    Freeze,
    Group,
    Leave,
    Load,
    LoadFull,
    Look,
    ModuleZero,
    Op,
    Optim,
    Program,
    Read,
    Renew,
    Save,
    SaveFull,
    ScaleGrad,
    SetLr,
    Step,
    Thaw,
    Unscale,
    Update,
    Zero,
    arrivals,
    flat,
)

ANY = "anything"


class _Lion(torch.optim.Optimizer):
    """By its paper, Chen et al., 2023, with its betas. ``ahead``: of each parameter, what the last update went by."""

    def __init__(self, params: Any, **_: Any) -> None:
        self.ahead: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(params, {"lr": 1e-4, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                self.ahead[p] = 0.9 * momentum + 0.1 * p.grad
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * self.ahead[p].sign())
                momentum.mul_(0.99).add_(0.01 * p.grad)


class _Muon(torch.optim.Muon):
    """torch's of the matrices of parameters: views of them, each with a momentum of its own. ``ahead``: as of Lion."""

    def __init__(self, groups: Any, **_: Any) -> None:
        self.ahead: dict[torch.Tensor, torch.Tensor] = {}
        (group,) = groups
        self.wholes, self.view = group["params"], group.pop("view", None)
        self.matrices = {p: [torch.nn.Parameter(block) for block in self.cut(p.data)] for p in self.wholes}
        every = [matrix for matrices in self.matrices.values() for matrix in matrices]
        super().__init__([{**group, "params": every}], momentum=0.5)

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Of four dimensions it is a convolution, [out, the rest]; of three a stack."""
        stack = whole.unbind() if whole.dim() == 3 else [whole.reshape(len(whole), -1)]
        if self.view is None:
            return [*stack]
        dim = ("rows", "columns").index(self.view[0])
        return [block for matrix in stack for block in matrix.chunk(self.view[1], dim)]

    def step(self) -> None:
        for p, matrices in self.matrices.items():
            for matrix, grad in zip(
                matrices, [None] * len(matrices) if p.grad is None else self.cut(p.grad), strict=True
            ):
                matrix.grad = grad
        super().step()
        for p in (p for p in self.wholes if p.grad is not None):
            self.ahead[p] = torch.lerp(p.grad, self.momentum(p), 0.5)

    def momentum(self, p: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros_like(p)
        for block, matrix in zip(self.cut(whole), self.matrices[p], strict=True):
            block.copy_(self.state[matrix]["momentum_buffer"])
        return whole


TORCH = {
    "": partial(torch.optim.AdamW, eps=0.25),
    "amsgrad": partial(torch.optim.AdamW, eps=0.25, amsgrad=True),
    "nesterov": partial(torch.optim.SGD, momentum=0.5, nesterov=True),
    "sgd": torch.optim.SGD,
    "lion": _Lion,
    "muon": _Muon,
}
KINDS = True  # whether to check what .grad is; --no-kinds looks for the rest alone

Seen = list[list[Any]]  # for each rank, what it sees of one operation


class Loose(np.ndarray):
    """What Muon has updated. The iteration begins in bf16 with a norm that torch may round to another neighbour."""


class _Optimizer:
    def __init__(self, optim: Optim, world: int) -> None:
        self.optim, self.world, self.stage = optim, world, optim.stage
        self.averaged = range(0, world, 2) if optim.cut else range(world)  # of a row one
        self.dtype = getattr(torch, optim.dtype)
        self.masters = [torch.nn.Parameter(start(shape, p)) for p, shape in enumerate(optim.shapes)]
        self.patterns = [pattern(shape, p) for p, shape in enumerate(optim.shapes)]
        self.requires_grad = set(range(len(optim.shapes))) - set(optim.frozen)
        self.groups = list(optim.groups)
        self.added = 0
        self.largest: dict[int, float] = {}  # norm of a gradient that any rank has had
        self.noise: set[int] = set()  # parameters with a direction that was made of rounding errors
        self.saved: dict[str, Any] = {}
        self.saved_full: dict[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """A new optimizer on the same parameters."""
        with torch.no_grad():
            for master in self.masters:
                master.copy_(self.rounded(master))
        self.torchs = [self._torchs(group) for group in self.groups]
        self.updates: dict[int, int] = {}
        self.averages: dict[int, torch.Tensor] = {}
        self.own: list[dict[int, torch.Tensor]] = [{} for _ in range(self.world)]
        self.clips: dict[int, torch.Tensor] = {}
        self.clip_called = False
        self.in_block = False  # of no_sync
        self.unscaled = False
        self.met = {p for g in self.groups for p in g.params} & self.requires_grad  # trained, and known to be
        self.settled = False  # since the last zeroing
        self.kinds = ["zero"] * self.world  # of .grad: "zero", "own", "reduced" or "unknown"

    def average(self, p: int) -> None:
        """It follows an update of its parameter."""
        self.updates[p] = self.updates.get(p, 0) + 1
        if self.optim.ema_decay is not None:
            now = self.masters[p].detach()
            before = self.averages.get(p, now) if self.updates[p] > 1 else now
            self.averages[p] = before + (1 - self.optim.ema_decay) * (now - before)

    def _torchs(self, group: Group) -> torch.optim.Optimizer:
        """Torch's optimizer of one group, by its rule."""
        made = {"params": [self.masters[p] for p in group.params], "lr": group.lr, "weight_decay": group.weight_decay}
        if group.view is not None:
            made["view"] = group.view
        return TORCH[self.optim.rule_of(group)]([made], foreach=False)

    def orthogonal(self, p: int) -> bool:
        """Whether its updates have gone through an iteration in bf16."""
        return any(p in group.params and self.optim.rule_of(group) == "muon" for group in self.groups)

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.dtype).float()

    def part(self, rank: int, p: int, whole: torch.Tensor) -> np.ndarray:
        """What the rank has of it. A slice is as large as the first, as long as there is something left."""
        dim = self.optim.cut[p] if self.optim.cut else WHOLE
        if dim >= 0:
            first = -(-whole.shape[dim] // 2)
            whole = whole.narrow(dim, *((0, first) if rank % 2 == 0 else (first, whole.shape[dim] - first)))
        return whole.numpy().copy().reshape(-1)

    def values(self, rank: int) -> list[np.ndarray]:
        return [self.shown(rank, p, self.rounded(m)) for p, m in enumerate(self.masters)]

    def shown(self, rank: int, p: int, whole: torch.Tensor) -> Any:
        if p in self.noise:
            return ANY
        part = self.part(rank, p, whole)
        return part.view(Loose) if self.orthogonal(p) else part

    # Gradients

    def accumulate(self, rank: int, p: int, gradient: torch.Tensor) -> None:
        before = self.own[rank].get(p)
        self.own[rank][p] = gradient if before is None else before + gradient
        if (norm := float(gradient.norm())) < math.inf:
            self.largest[p] = max(self.largest.get(p, 0.0), norm)

    def mean(self, p: int) -> torch.Tensor | None:
        present = [self.own[rank][p] for rank in self.averaged if p in self.own[rank]]
        return sum(present[1:], present[0]) / len(self.averaged) if present else None

    def with_gradient(self) -> list[int]:
        return [p for p in sorted(self.requires_grad) if self.mean(p) is not None]

    def clipped(self, p: int, scale: float = 1.0) -> torch.Tensor:
        mean = self.mean(p)
        assert mean is not None
        return mean * self.clips.get(p, torch.ones(())) / scale

    def norm(self, params: list[int], norm_type: float, scale: float) -> torch.Tensor:
        norms = [torch.linalg.vector_norm(self.clipped(p, scale), norm_type) for p in params if self.masters[p].numel()]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())

    def clip(self, max_norm: float, norm_type: float, params: tuple[int, ...] | None, scale: float) -> float:
        chosen = [p for p in self.with_gradient() if params is None or p in params]
        norm = self.norm(chosen, norm_type, scale)
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in chosen:
            self.clips[p] = self.clips.get(p, torch.ones(())) * coefficient
        return float(norm)

    def zero(self, to_none: bool) -> None:
        for rank in range(self.world):
            own = self.own[rank]
            self.own[rank] = {} if to_none else {p: torch.zeros_like(g) for p, g in own.items()}
            if to_none:
                self.kinds[rank] = "zero"
            elif self.kinds[rank] != "zero":
                self.kinds[rank] = "unknown"
        self.clips, self.clip_called, self.unscaled = {}, False, False
        self.settled = not to_none

    def settle(self) -> None:
        """After a step or a clip what was this rank's own is reduced, and zeros may be where no rank had a gradient."""
        self.settled = True
        for rank in range(self.world):
            if self.kinds[rank] != "reduced" or (self.stage == 1 and not self.optim.overlap_grad_reduce):
                self.kinds[rank] = "unknown"

    def finite(self) -> bool:
        return all(bool(self.clipped(p).isfinite().all()) for p in self.with_gradient())

    def step(self, scale: float) -> bool:
        """Whether it was skipped, for a gradient that is not finite."""
        if self.optim.max_grad_norm is not None and not self.clip_called:
            self.clip(self.optim.max_grad_norm, 2.0, None, scale)
        skip = not self.finite()
        trained = self.requires_grad & {p for g in self.groups for p in g.params}
        self.met |= trained
        if not skip:
            for p, master in enumerate(self.masters):
                has = p in self.requires_grad and self.mean(p) is not None
                master.grad = self.clipped(p, scale) if has else None
            for of_group in self.torchs:
                of_group.step()
                if isinstance(of_group, _Lion | _Muon):
                    self.note_noise(of_group.ahead)
            for p in trained & {*self.with_gradient()}:
                self.average(p)
        self.clips, self.clip_called, self.unscaled = {}, False, False
        self.settle()
        return skip

    def note_noise(self, ahead: dict[torch.Tensor, torch.Tensor]) -> None:
        """Gradients of ranks, or of steps, may cancel but for what was rounded. Muon and Lion make much of that."""
        least = 1e-5 if self.dtype == torch.float32 else 5e-2
        for p, master in enumerate(self.masters):
            if master in ahead and float(ahead[master].norm()) <= least * self.largest.get(p, 0.0):
                self.noise.add(p)

    def grads(self, rank: int) -> list[Any]:
        """What ``.grad`` of each parameter should be."""
        return [self._kind(rank, p) for p in range(len(self.masters))]

    def _kind(self, rank: int, p: int) -> Any:
        kind, own = self.kinds[rank], self.own[rank].get(p)
        if kind == "unknown" or not KINDS:
            return ANY
        if p not in self.requires_grad:
            return ANY if p in self.met else "none"
        if kind == "zero":
            return "none"
        if kind == "own" and own is not None and self.comes_in_terms(p):
            return ANY
        if kind == "own":
            return "none" if own is None else self.part(rank, p, own)
        mean = self.mean(p)
        if mean is None or p not in self.met:
            return ANY
        if self.stage == 0 or self.world == 1:
            return self.part(rank, p, self.rounded(mean))
        if self.stage == 1 and not self.optim.overlap_grad_reduce:
            unknown = own is None or self.settled or self.comes_in_terms(p)
            return ANY if unknown else self.part(rank, p, own)
        return "shard"

    def comes_in_terms(self, p: int) -> bool:
        """Whether each rank of a row has a part of the gradient, until they are added up."""
        return bool(self.optim.cut) and self.optim.cut[p] == WHOLE and p % 2 == 1

    # State

    def full(self) -> dict[int, list[Any]]:
        found = {}
        owners = [of_group for of_group, group in zip(self.torchs, self.groups, strict=True) for _ in group.params]
        for index, (p, owner) in enumerate(zip(self.in_order(), owners, strict=True)):
            if p in self.updates:
                own = owner.state.get(self.masters[p], {})
                tensors = [own[k] for k in sorted(own) if k != "step" and own[k] is not None]
                tensors = [owner.momentum(self.masters[p]).detach()] if isinstance(owner, _Muon) else tensors
                found[index] = [float(self.updates[p]), *(t.numpy().copy().reshape(-1) for t in tensors)]
        return found

    def in_order(self) -> list[int]:
        return [p for group in self.groups for p in group.params]

    def shown_averages(self, rank: int) -> list[Any]:
        """Whole ones, by number over all groups; and the parameters while they are shown."""
        own = [self.averages[p] if p in self.updates else self.rounded(m) for p, m in enumerate(self.masters)]
        whole = {n: self.shown(rank, p, own[p]) for n, p in enumerate(self.in_order()) if p in self.met}
        return [whole, [self.shown(rank, p, self.rounded(value)) for p, value in enumerate(own)]]

    def snapshot(self) -> dict[str, Any]:
        return {
            "torchs": [copy.deepcopy(of_group.state_dict()) for of_group in self.torchs],
            "masters": [m.detach().clone() for m in self.masters],
            "updates": dict(self.updates),
            "averages": {p: average.clone() for p, average in self.averages.items()},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        for of_group, old in zip(self.torchs, saved["torchs"], strict=True):
            of_group.load_state_dict(copy.deepcopy(old))
        self.updates = dict(saved["updates"])
        self.averages = {p: average.clone() for p, average in saved["averages"].items()}
        with torch.no_grad():
            for master, old in zip(self.masters, saved["masters"], strict=True):
                now = self.rounded(master)
                master.copy_(torch.where(self.rounded(old) == now, old, now))


class Oracle:
    def __init__(self, program: Program) -> None:
        self.program, self.world = program, program.world
        self.optims = [_Optimizer(optim, program.world) for optim in program.optims]
        self.scale = program.scale or 1.0
        self.good = 0  # updates without overflow
        self.overflow = False

    def trainable(self, o: int, p: int) -> bool:
        return p in self.optims[o].requires_grad

    def everywhere(self, *seen: Any) -> Seen:
        return [list(seen) for _ in range(self.world)]

    def forward(self, chain: Any) -> Any:
        rounded = any(optim.dtype != torch.float32 or "muon" in optim.optim.rules for optim in self.optims)
        if rounded or any(optim.optim.cut for optim in self.optims):
            return ANY  # roundings add up, and of slices each rank adds up its own
        total = 1.0
        for _, o, p, c in (use for use in flat(chain) if use[0] == "use"):
            optim = self.optims[o]
            total += float((optim.rounded(optim.masters[p]) * (optim.patterns[p] * c)).sum())
        return total

    def backward(self, op: Backward) -> Seen:
        came = [arrivals(chain, self.trainable) for chain in op.ranks]
        seen: Seen = []
        for chain, a in zip(op.ranks, came, strict=True):
            seen.append([None if chain is None else f"in {a.raised}" if a.raised else self.forward(chain)])
        for o, optim in enumerate(self.optims):
            self._accumulate(optim, o, came, o not in op.no_sync and not optim.in_block)
            for rank in range(self.world):
                seen[rank].append(optim.grads(rank))
        return seen

    def _accumulate(self, optim: _Optimizer, o: int, came: list[Arrivals], synchronised: bool) -> None:
        reached = any(a.of(o) for a in came)
        if reached or not synchronised:  # a no_sync block discards the clip, whatever was in it
            optim.clips, optim.clip_called = {}, False
        if optim.stage == 3 and any(a.raised for a in came):
            optim.kinds = ["unknown"] * self.world  # a round may have begun, with nothing in it
        if not reached:
            return
        if not synchronised:  # a rank that was not reached has the averaged gradient without these
            optim.kinds = ["unknown" if kind == "reduced" else kind for kind in optim.kinds]
        raised = any(a.raised for a in came)
        for rank, a in enumerate(came):
            for optimizer, p, c in a.grads:
                if optimizer == o:
                    optim.accumulate(rank, p, optim.patterns[p] * (c * self.scale))
            known = any(p in optim.met for p in a.of(o))
            if synchronised:
                optim.kinds[rank] = "reduced" if known and not raised else "unknown"
            elif a.of(o):
                optim.kinds[rank] = "own" if optim.kinds[rank] in ("zero", "own") else "unknown"

    def operation(self, op: Op) -> Seen:
        if isinstance(op, Backward):
            return self.backward(op)
        if isinstance(op, Evaluate):
            return [[self.forward((net,))] for net in op.ranks]
        if isinstance(op, AllReduce):
            return self.everywhere(op.value * sum(range(1, self.world + 1)))
        if isinstance(op, Update):
            return self.update()
        optim = self.optims[op.o]
        match op:
            case Step():
                for inner in (*op.before, *op.closure):
                    self.operation(inner)
                skipped = optim.step(self.scale)
                self.overflow |= skipped
                for inner in op.after:
                    self.operation(inner)
                return [[None if optim.stage == 3 else optim.values(rank)] for rank in range(self.world)]
            case Zero() | ModuleZero():
                optim.zero(op.to_none)
                return [[optim.grads(rank)] for rank in range(self.world)]
            case Clip():
                optim.clip_called = True
                optim.settle()
                divisor = self.scale if optim.unscaled else 1.0
                return self.everywhere(optim.clip(op.max_norm, op.norm_type, op.params, divisor))
            case Unscale():
                optim.unscaled = True
                optim.settle()
                optim.kinds = ["unknown"] * self.world  # divided, where they can be read
            case Enter():
                optim.in_block = True
            case Leave():
                optim.in_block = False
                optim.clips, optim.clip_called = {}, False
            case SetLr():
                optim.torchs[op.group].param_groups[0]["lr"] = op.lr
            case Save():
                optim.saved = optim.snapshot()
            case Load():
                optim.restore(optim.saved)
            case SaveFull():
                optim.saved_full = optim.snapshot()
                return [[optim.full() if rank == 0 else None] for rank in range(self.world)]
            case LoadFull():
                optim.restore(optim.saved_full)
            case Renew():
                optim.stage = op.stage
                optim.begin()
            case AddGroup():
                group = optim.optim.late[optim.added]
                optim.added += 1
                optim.groups.append(group)
                optim.torchs.append(optim._torchs(group))
                optim.met |= set(group.params) & optim.requires_grad
            case Thaw():
                optim.requires_grad.add(op.p)
            case Freeze():
                optim.requires_grad.discard(op.p)
            case Edit():
                with torch.no_grad():
                    optim.masters[op.p].copy_(optim.rounded(optim.rounded(optim.masters[op.p]) * op.factor))
            case Drop():
                for own in optim.own:
                    own.pop(op.p, None)
                return [[optim.grads(rank)] for rank in range(self.world)]
            case Assign():
                for rank, c in enumerate(op.ranks):
                    optim.own[rank][op.p] = optim.patterns[op.p] * c
                    optim.kinds[rank] = "unknown"
            case ScaleGrad():
                for own in optim.own:
                    if op.p in own:
                        own[op.p] = own[op.p] * op.factor
            case Look():
                return [[optim.grads(rank)] for rank in range(self.world)]
            case Average():
                return [optim.shown_averages(rank) for rank in range(self.world)]
            case Read():
                return [[optim.values(rank)] for rank in range(self.world)]
        return self.everywhere()

    def update(self) -> Seen:
        if self.overflow:
            self.scale, self.good = self.scale * 0.5, 0
        else:
            self.good += 1
            if self.good == 2:
                self.scale, self.good = self.scale * 2.0, 0
        self.overflow = False
        return self.everywhere(self.scale)

    def run(self) -> list[Seen]:
        """For each operation and the end, for each rank, what it sees."""
        seen = [self.operation(op) for op in self.program.ops]
        seen.append([[optim.values(rank) for optim in self.optims] for rank in range(self.world)])
        return seen


def expected(program: Program) -> list[Seen]:
    return Oracle(program).run()


# Comparing


def difference(want: Any, have: Any, tight: bool, size: float = 1.0) -> str | None:
    """In words; None: as it should be. ``tight``: fp32 throughout. ``size``: of terms, which may cancel."""

    def of_leaves(want: Any, have: Any) -> str | None:
        if isinstance(want, str) and want == ANY:
            return None
        if isinstance(want, np.ndarray) and isinstance(have, np.ndarray) and want.shape == have.shape:
            return _arrays(want, have, tight, size)
        if isinstance(want, float) and isinstance(have, float):
            if not math.isfinite(want):
                return None if not math.isfinite(have) else f"{have} where {want} is right"
            far = abs(want - have) > (1e-3 if tight else 0.05) * max(1.0, abs(want))
            return f"{have!r} where {want!r} is right" if far else None
        plain = isinstance(want, str | int | None) and type(want) is type(have)
        return None if plain and want == have else f"{short(have)} where {short(want)} is right"

    return first_difference(want, have, of_leaves)


def _arrays(want: np.ndarray, have: np.ndarray, tight: bool, size: float) -> str | None:
    loose = isinstance(want, Loose)
    relative = 2e-5 if tight and not loose else 2e-2
    absolute = 0.1 if loose else relative * size
    both = np.isfinite(want) & np.isfinite(have)
    odd = np.isfinite(want) != np.isfinite(have)
    with np.errstate(invalid="ignore"):
        off = odd | (both & (np.abs(want - have) > absolute + relative * np.abs(want)))
    if not off.any():
        return None
    first, last = np.flatnonzero(off)[[0, -1]]
    where = f"{int(off.sum())} of {off.size} elements, from {first} to {last}"
    return f"{where}: {have[first]} where {want[first]} is right"


def compare(program: Program, want: list[Seen], have: list[list[Any]]) -> str | None:
    """The first difference, by operation; ``have`` is by rank what each saw."""
    tight = all(optim.dtype == "float32" for optim in program.optims)
    for index, by_rank in enumerate(want):
        for rank, should in enumerate(by_rank):
            saw = next((entry[1:] for entry in have[rank] if entry[0] == index), None)
            if saw is None:
                return f"rank {rank} saw nothing of operation {index}"
            op = program.ops[index] if index < len(program.ops) else "the end"
            scaled = 4 * (program.scale or 0.25) if isinstance(op, Backward | Zero | ModuleZero | Drop | Look) else 1.0
            if found := difference(should, list(saw), tight, scaled):
                return f"operation {index} ({op}), rank {rank}: {found}"
    return None


def other_bits(program: Program, plain: list[list[Any]], have: list[list[Any]]) -> str | None:
    """The first difference from what the ranks saw without stores: every store gives the bits of none."""
    for rank, (want, got) in enumerate(zip(plain, have, strict=True)):
        for (index, *should), (_, *saw) in zip(want, got, strict=True):
            if found := first_difference(should, saw, bits):
                op = program.ops[index] if index < len(program.ops) else "the end"
                return f"operation {index} ({op}), rank {rank}, where nothing is in a store: {found}"
    return None
