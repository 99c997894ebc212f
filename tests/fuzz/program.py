"""What a random program is: data. ``repr`` of one, evaluated with this module's names, is the program again.

A program makes optimizers over parameters of their own and then runs operations, on all ranks, one after another. All
that differs between ranks is written out, rank by rank, in the operation (a backward's chains, an assigned gradient).
A backward is one chain of links, ``x = link(x)``: backward goes through it from its last link to its first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf  # noqa: F401  repr writes it
from typing import Any

Shape = tuple[int, ...]

STORES = {  # of the state, and what each is as arguments
    "": "",
    "paged": "state_offload='paged', device_budget=0",
    "partly paged": "state_offload='paged', device_budget=3072",
    "cpu": "state_offload='cpu'",
    "cpu, not ahead": "state_offload='cpu', speculate=False",
    "nvme": "state_offload='nvme:/tmp'",
}


RULES = {  # of the update, and the optimizer and its arguments
    "": ("ShardedAdamW", "eps=0.25"),
    "amsgrad": ("ShardedAdamW", "eps=0.25, amsgrad=True"),
    "nesterov": ("ShardedSGD", "momentum=0.5, nesterov=True"),
    "sgd": ("ShardedSGD", ""),
    "lion": ("ShardedLion", ""),
    "muon": ("ShardedMuon", "momentum=0.5, ns_gram=False"),  # the operations are torch's then
}


@dataclass(frozen=True)
class Group:
    """``rule``: one of RULES that it brings; None: it has the optimizer's. ``view``: what of Muon's matrices is cut,
    and into how many equal blocks.
    """

    params: tuple[int, ...]
    lr: float = 0.125
    weight_decay: float = 0.0
    rule: str | None = None
    view: tuple[str, int] | None = None


@dataclass(frozen=True)
class Optim:
    """An optimizer and its parameters: at stage 3 a module's, in the ``units`` of that number; -1: the root's."""

    shapes: tuple[Shape, ...]
    stage: int = 2
    groups: tuple[Group, ...] = ()
    late: tuple[Group, ...] = ()  # for AddGroup, one after another
    frozen: tuple[int, ...] = ()  # at the start
    units: tuple[int, ...] = ()
    dtype: str = "float32"
    bucket_cap_mb: float = 0.002
    overlap_grad_reduce: bool = True
    grad_reduce_dtype: str | None = None
    max_grad_norm: float | None = None
    prefetch: int = 1
    reshard_after_forward: bool = True
    mesh: bool = False  # of two replicas; where not, all ranks share
    # Of each parameter the dimension that two tensor-parallel ranks cut; WHOLE: a DTensor that both have; NO_DTENSOR: a
    # plain one. Then ranks are a matrix: of two rows that average, and two columns, each with a slice.
    cut: tuple[int, ...] = ()
    store: str = ""  # one of STORES
    param_offload: bool = False  # at stage 3
    rule: str = ""  # one of RULES
    ema_decay: float | None = None
    split: str = ""  # where a bf16 parameter is the high half of its master: "split" or "split8"

    @property
    def given(self) -> set[int]:
        return {p for group in self.groups for p in group.params}

    def rule_of(self, group: Group) -> str:
        return self.rule if group.rule is None else group.rule

    @property
    def rules(self) -> set[str]:
        """Those of all groups, the late ones among them."""
        return {self.rule_of(group) for group in (*self.groups, *self.late)}

    @property
    def unit_count(self) -> int:
        return max(self.units, default=-1) + 1


WHOLE, NO_DTENSOR = -1, -2

# Links of a chain.


@dataclass(frozen=True)
class Use:
    """``x + (parameter * c * pattern).sum()``: its gradient is ``c * pattern``, on a coarse binary grid."""

    o: int
    p: int
    c: float = 1.0


@dataclass(frozen=True)
class Boom:
    """Raises: in backward, when the gradient comes by; or in the forward."""

    forward: bool = False


@dataclass(frozen=True)
class Unit:
    """A call of one unit of a stage 3 model. ``uses`` are parameter and coefficient."""

    k: int
    uses: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Net:
    """The one forward of a stage 3 model: ``Use`` of the root's parameters, ``Unit``, ``Boom``."""

    o: int
    links: tuple[Use | Unit | Boom, ...]


Link = Use | Boom | Net
Chain = tuple[Link, ...] | None  # None: this rank does no backward


# Operations. Every rank makes them, in this order.


@dataclass(frozen=True)
class Backward:
    """``roots``: how many tensors it begins at, each with a part of the chain: ``torch.autograd.backward``."""

    ranks: tuple[Chain, ...]
    no_sync: tuple[int, ...] = ()
    roots: int = 1


@dataclass(frozen=True)
class Enter:
    """A ``no_sync`` block begins, which ends with ``Leave``: for calls within it. No random program has one."""

    o: int


@dataclass(frozen=True)
class Leave:
    o: int


@dataclass(frozen=True)
class Evaluate:
    """A forward without gradients of a stage 3 model."""

    ranks: tuple[Net, ...]


@dataclass(frozen=True)
class Step:
    """With what its closure does, if it has one, and hooks of the optimizer before it and after it."""

    o: int
    closure: tuple[Any, ...] = ()
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()

    @property
    def inner(self) -> tuple[Any, ...]:
        return (*self.before, *self.closure, *self.after)


@dataclass(frozen=True)
class Zero:
    o: int
    to_none: bool = True


@dataclass(frozen=True)
class ModuleZero:
    """``zero_grad`` of a module that holds all of an optimizer's parameters."""

    o: int
    to_none: bool = True


@dataclass(frozen=True)
class Clip:
    o: int
    max_norm: float
    norm_type: float = 2.0
    params: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SetLr:
    o: int
    group: int
    lr: float


@dataclass(frozen=True)
class Save:
    """``state_dict``, kept until ``Load``. At once after another they change nothing."""

    o: int


@dataclass(frozen=True)
class Load:
    o: int


@dataclass(frozen=True)
class SaveFull:
    o: int


@dataclass(frozen=True)
class LoadFull:
    o: int


@dataclass(frozen=True)
class Observe:
    o: int


@dataclass(frozen=True)
class Renew:
    """``close``, no gradients, and a new optimizer on the same parameters, with another store."""

    o: int
    stage: int
    store: str = ""


@dataclass(frozen=True)
class AddGroup:
    o: int


@dataclass(frozen=True)
class Thaw:
    o: int
    p: int


@dataclass(frozen=True)
class Freeze:
    o: int
    p: int


@dataclass(frozen=True)
class Edit:
    """The parameter times a number, in place."""

    o: int
    p: int
    factor: float


@dataclass(frozen=True)
class Drop:
    o: int
    p: int


@dataclass(frozen=True)
class Assign:
    o: int
    p: int
    ranks: tuple[float, ...]


@dataclass(frozen=True)
class ScaleGrad:
    """The averaged gradient, which stage 0 lets one edit, times a number."""

    o: int
    p: int
    factor: float


@dataclass(frozen=True)
class AllReduce:
    """The user's own, on the default group: ``value * (rank + 1)``."""

    value: float


@dataclass(frozen=True)
class Read:
    """All parameters of a stage 3 model, by ``gather_parameters``."""

    o: int


@dataclass(frozen=True)
class Average:
    """``ema_state_dict``, and all parameters within ``swap_to_ema``."""

    o: int


@dataclass(frozen=True)
class Look:
    """What must change nothing: ``stats``, ``state_dict``, and gradients by ``torch.autograd.grad``."""

    o: int


@dataclass(frozen=True)
class Unscale:
    o: int


@dataclass(frozen=True)
class Update:
    """``scaler.update()``."""


Op = Any  # one of the above


@dataclass(frozen=True)
class Program:
    world: int
    optims: tuple[Optim, ...]
    ops: tuple[Op, ...] = field(default=())
    scale: float | None = None  # that of a GradScaler; then every step is the scaler's


def without_stores(program: Program) -> Program:
    """The same with all state on the device."""
    optims = tuple(replace(optim, store="", param_offload=False) for optim in program.optims)
    ops = tuple(replace(op, store="") if isinstance(op, Renew) else op for op in program.ops)
    return replace(program, optims=optims, ops=ops)


# What a chain does.


def flat(chain: Chain) -> Iterator[tuple[str, int, int, float]]:
    """``("use", o, p, c)``, ``("boom", ...)`` and ``("boom forward", ...)``, in the order of the forward."""
    for link in chain or ():
        if isinstance(link, Use):
            yield "use", link.o, link.p, link.c
        elif isinstance(link, Boom):
            yield "boom forward" if link.forward else "boom", -1, -1, 0.0
        else:
            for inner in link.links:
                if isinstance(inner, Unit):
                    for p, c in inner.uses:
                        yield "use", link.o, p, c
                else:
                    yield from flat((inner,))


@dataclass(frozen=True)
class Arrivals:
    """Gradients in the order in which a rank's backward makes them, and whether something raised."""

    grads: tuple[tuple[int, int, float], ...]  # optimizer, parameter, coefficient
    raised: str = ""  # "", "forward" or "backward"

    def of(self, o: int) -> list[int]:
        return [p for optimizer, p, _ in self.grads if optimizer == o]


def arrivals(chain: Chain, trainable: Any) -> Arrivals:
    """What autograd does with a chain. ``trainable(o, p)``: does it require a gradient?

    A parameter that is used several times gets one gradient, once backward is through with its first use.
    """
    steps = list(flat(chain))
    if any(kind == "boom forward" for kind, *_ in steps):
        return Arrivals((), "forward")
    first: dict[tuple[int, int], int] = {}
    total: dict[tuple[int, int], float] = {}
    for position, (kind, o, p, c) in enumerate(steps):
        if kind == "use" and trainable(o, p):
            first.setdefault((o, p), position)
            total[o, p] = total.get((o, p), 0.0) + c
    came = []
    for position, (kind, o, p, _) in reversed(list(enumerate(steps))):
        if kind == "boom":
            return Arrivals(tuple(came), "backward")
        if first.get((o, p)) == position:
            came.append((o, p, total[o, p]))
    return Arrivals(tuple(came))


def elements(shape: Shape) -> int:
    return math.prod(shape)
