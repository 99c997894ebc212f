"""What is simpler than a program of the face, for ``programs.shrink``: numbers of what is left out close up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from programs.shrink import cuts, put, simpler

from fuzz.program import (
    Backward,
    Clip,
    Evaluate,
    Group,
    Link,
    Net,
    Op,
    Optim,
    Program,
    Renew,
    Step,
    Unit,
    Unscale,
    Update,
    Use,
)

KEPT = ("stage", "forward")  # with another stage, or where something raises in the forward, it is another failure


def candidates(program: Program) -> Iterator[Program]:
    """Simpler programs, the much simpler first. They need not be legal."""
    ops = program.ops
    for fewer in cuts(ops):
        yield replace(program, ops=fewer)
    for first in range(len(ops)):  # what is legal only together
        for second in range(first + 2, min(first + 6, len(ops))):
            yield replace(program, ops=tuple(op for i, op in enumerate(ops) if i not in (first, second)))
    for o in range(len(program.optims)):
        if len(program.optims) > 1:
            yield without_optim(program, o)
    if program.world > 2:
        for rank in range(program.world):
            yield without_rank(program, rank)
    if program.scale is not None:
        yield replace(program, scale=None, ops=tuple(op for op in ops if not isinstance(op, Unscale | Update)))
    for o, optim in enumerate(program.optims):
        for p in range(len(optim.shapes)):
            yield without_parameter(program, o, p)
        for merged in simpler_optims(optim):
            yield replace(program, optims=put(program.optims, o, merged))
    for i, op in enumerate(ops):
        if isinstance(op, Renew):
            begun = replace(program.optims[op.o], stage=op.stage, store=op.store)
            yield replace(program, optims=put(program.optims, op.o, begun), ops=ops[:i] + ops[i + 1 :])
        if isinstance(op, Backward):
            for like_another in simpler_backwards(op):
                yield replace(program, ops=put(ops, i, like_another))
    yield from simpler(program, needed=KEPT)


def without_rank(program: Program, rank: int) -> Program:
    def cut(op: Op) -> Op:
        return replace(op, ranks=op.ranks[:rank] + op.ranks[rank + 1 :]) if hasattr(op, "ranks") else op

    return replace(program, world=program.world - 1, ops=_each(program.ops, cut))


def _each(ops: Iterable[Op], change: Callable[[Op], Op | None]) -> tuple[Op, ...]:
    """What ``change`` makes of each, and of those in closures and hooks; without those of which it makes None."""
    new = []
    for op in ops:
        if isinstance(op, Step):
            parts = {name: _each(getattr(op, name), change) for name in ("closure", "before", "after")}
            op = replace(op, **parts)
        if (changed := change(op)) is not None:
            new.append(changed)
    return tuple(new)


def without_optim(program: Program, gone: int) -> Program:
    def number(o: int) -> int:
        return o - (o > gone)

    def link(old: Link) -> Link | None:
        if isinstance(old, Use):
            return None if old.o == gone else replace(old, o=number(old.o))
        if isinstance(old, Net):
            if old.o == gone:
                return None
            inner = tuple(replace(i, o=number(i.o)) if isinstance(i, Use) else i for i in old.links)
            return Net(number(old.o), inner)
        return old

    def change(op: Op) -> Op | None:
        if isinstance(op, Backward | Evaluate):
            op = _links(op, link)
            if isinstance(op, Evaluate) and None in op.ranks:
                return None
            if isinstance(op, Backward):
                op = replace(op, no_sync=tuple(number(o) for o in op.no_sync if o != gone))
        elif getattr(op, "o", None) == gone:
            return None
        elif hasattr(op, "o"):
            op = replace(op, o=number(op.o))
        return op

    optims = program.optims[:gone] + program.optims[gone + 1 :]
    return replace(program, optims=optims, ops=_each(program.ops, change))


def _links(op: Any, link: Any) -> Any:
    if isinstance(op, Evaluate):
        return replace(op, ranks=tuple(link(net) for net in op.ranks))
    chains = []
    for chain in op.ranks:
        chains.append(None if chain is None else tuple(new for old in chain if (new := link(old)) is not None))
    return replace(op, ranks=tuple(chains))


def without_parameter(program: Program, o: int, gone: int) -> Program:
    def number(p: int) -> int:
        return p - (p > gone)

    def group(old: Group) -> Group:
        return replace(old, params=tuple(number(p) for p in old.params if p != gone))

    def link(old: Link) -> Link | None:
        if isinstance(old, Use) and old.o == o:
            return None if old.p == gone else replace(old, p=number(old.p))
        if isinstance(old, Net) and old.o == o:
            inner: list[Any] = []
            for part in old.links:
                if isinstance(part, Unit):
                    part = Unit(part.k, tuple((number(p), c) for p, c in part.uses if p != gone))
                elif isinstance(part, Use):
                    if part.p == gone:
                        continue
                    part = replace(part, p=number(part.p))
                inner.append(part)
            return Net(o, tuple(inner))
        return old

    optim = program.optims[o]
    smaller = replace(
        optim,
        shapes=optim.shapes[:gone] + optim.shapes[gone + 1 :],
        groups=tuple(g for g in map(group, optim.groups) if g.params),
        late=tuple(g for g in map(group, optim.late) if g.params),
        cut=optim.cut[:gone] + optim.cut[gone + 1 :],
        frozen=tuple(number(p) for p in optim.frozen if p != gone),
        units=optim.units[:gone] + optim.units[gone + 1 :],
    )

    def change(op: Op) -> Op | None:
        if isinstance(op, Backward | Evaluate):
            return _links(op, link)
        if getattr(op, "o", None) == o:
            if getattr(op, "p", None) == gone:
                return None
            if hasattr(op, "p"):
                op = replace(op, p=number(op.p))
            if isinstance(op, Clip) and op.params is not None:
                op = replace(op, params=tuple(number(p) for p in op.params if p != gone))
        return op

    return replace(program, optims=put(program.optims, o, smaller), ops=_each(program.ops, change))


def simpler_optims(optim: Optim) -> Iterator[Optim]:
    if len(optim.groups) > 1 or optim.groups[0] != Group(optim.groups[0].params):
        yield replace(optim, groups=(Group(tuple(p for g in optim.groups for p in g.params)),))
    if optim.late:
        first = Group(optim.groups[0].params + tuple(p for g in optim.late for p in g.params))
        yield replace(optim, groups=(first, *optim.groups[1:]), late=())
    for p, shape in enumerate(optim.shapes):
        for smaller in ((1,), (300,)):
            if shape != smaller and not (shape == (1,) and smaller == (300,)):
                yield replace(optim, shapes=put(optim.shapes, p, smaller))


def simpler_backwards(op: Backward) -> Iterator[Backward]:
    """Ranks that do the same, coefficients of one, and links that are left out on all ranks."""
    for rank in range(1, len(op.ranks)):
        if op.ranks[rank] != op.ranks[0]:
            yield replace(op, ranks=put(op.ranks, rank, op.ranks[0]))
            yield replace(op, ranks=put(op.ranks, 0, op.ranks[rank]))
    yield _links(op, _one)
    for link in dict.fromkeys(link for chain in op.ranks for link in chain or ()):
        yield replace(op, ranks=tuple(None if c is None else tuple(k for k in c if k != link) for c in op.ranks))


def _one(link: Link) -> Link:
    if isinstance(link, Use):
        return replace(link, c=1.0)
    if isinstance(link, Net):
        inner = [Unit(i.k, tuple((p, 1.0) for p, _ in i.uses)) if isinstance(i, Unit) else i for i in link.links]
        return replace(link, links=tuple(replace(i, c=1.0) if isinstance(i, Use) else i for i in inner))
    return link
