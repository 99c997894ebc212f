"""Makes a failing program short: what can be left out is, as long as it is legal and fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from fuzz.execute import Failure, run_alone
from fuzz.law import why_not
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

SECONDS = 150.0  # for one failure: a program that hangs costs its time-out at each attempt
HANGS_AFTER = 2.0
STANDSTILL = 15.0  # until the optimizer has noticed itself that ranks wait for each other
ATTEMPTS = 3  # to see it again


def shrink(failure: Failure, seconds: float = SECONDS) -> Failure:
    """The shortest program found that fails in the same way (alone: else the failure as it was)."""
    end = time.monotonic() + seconds
    best = next((again for _ in range(ATTEMPTS) if (again := run_alone(failure.program))), None)
    if best is None:
        return failure if failure.kind == "in company" else replace(failure, kind=f"{failure.kind}, not alone")
    best = _shorter(best, end)
    if best.kind == "hangs" and (patient := run_alone(best.program, STANDSTILL)):
        best = replace(best, message=f"{best.message}\nlater: {patient.kind}: {patient.message}")
    return best


def _shorter(best: Failure, end: float) -> Failure:
    tried: set[Program] = {best.program}
    shorter = True
    while shorter:
        shorter = False
        for candidate in candidates(best.program):
            if time.monotonic() > end:
                return best
            if candidate in tried or why_not(candidate) is not None:
                continue
            tried.add(candidate)
            again = run_alone(candidate, HANGS_AFTER)
            if again and again.kind == best.kind:
                best, shorter = again, True
                break
    return best


def candidates(program: Program) -> Iterator[Program]:
    """Simpler programs, the much simpler first. They need not be legal."""
    ops = program.ops
    size = (len(ops) + 1) // 2
    while size >= 1:
        for start in range(len(ops) - size, -1, -1 if size == 1 else -size):
            yield replace(program, ops=ops[:start] + ops[start + size :])
        size //= 2
    for first in range(len(ops)):  # what is legal only together
        for second in range(first + 2, min(first + 6, len(ops))):
            yield replace(program, ops=tuple(op for i, op in enumerate(ops) if i not in (first, second)))
    for o in range(len(program.optims)):
        if len(program.optims) > 1:
            yield without_optim(program, o)
    if program.world == 3:
        for rank in range(3):
            yield without_rank(program, rank)
    if program.scale is not None:
        yield replace(program, scale=None, ops=tuple(op for op in ops if not isinstance(op, Unscale | Update)))
    for o, optim in enumerate(program.optims):
        for p in range(len(optim.shapes)):
            yield without_parameter(program, o, p)
        for simpler in simpler_optims(optim):
            yield replace(program, optims=_with(program.optims, o, simpler))
    for i, op in enumerate(ops):
        if isinstance(op, Renew):
            begun = replace(program.optims[op.o], stage=op.stage)
            yield replace(program, optims=_with(program.optims, op.o, begun), ops=ops[:i] + ops[i + 1 :])
        for simpler_op in simpler_ops(op):
            yield replace(program, ops=_with(ops, i, simpler_op))


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


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

    return replace(program, optims=_with(program.optims, o, smaller), ops=_each(program.ops, change))


def simpler_optims(optim: Optim) -> Iterator[Optim]:
    plain = Optim(shapes=optim.shapes, stage=optim.stage, groups=optim.groups, late=optim.late, units=optim.units)
    for field in fields(Optim):
        if getattr(optim, field.name) != getattr(plain, field.name):
            yield replace(optim, **{field.name: getattr(plain, field.name)})
    if len(optim.groups) > 1 or optim.groups[0] != Group(optim.groups[0].params):
        yield replace(optim, groups=(Group(tuple(p for g in optim.groups for p in g.params)),))
    if optim.late:
        first = Group(optim.groups[0].params + tuple(p for g in optim.late for p in g.params))
        yield replace(optim, groups=(first, *optim.groups[1:]), late=())
    for p, shape in enumerate(optim.shapes):
        for smaller in ((1,), (300,)):
            if shape != smaller and not (shape == (1,) and smaller == (300,)):
                yield replace(optim, shapes=_with(optim.shapes, p, smaller))


def simpler_ops(op: Op) -> Iterator[Op]:
    if isinstance(op, Clip):
        for simple in (Clip(op.o, op.max_norm), Clip(op.o, 1.0, op.norm_type, op.params)):
            if simple != op:
                yield simple
    for name in ("closure", "before", "after") if isinstance(op, Step) else ():
        of = getattr(op, name)
        for i, inner in enumerate(of):
            yield replace(op, **{name: of[:i] + of[i + 1 :]})
            for simple in simpler_ops(inner):
                yield replace(op, **{name: _with(of, i, simple)})
    if not isinstance(op, Backward):
        return
    if op.roots > 1:
        yield replace(op, roots=1)
    for rank in range(1, len(op.ranks)):
        if op.ranks[rank] != op.ranks[0]:
            yield replace(op, ranks=_with(op.ranks, rank, op.ranks[0]))
            yield replace(op, ranks=_with(op.ranks, 0, op.ranks[rank]))
    for i in range(len(op.no_sync)):
        yield replace(op, no_sync=op.no_sync[:i] + op.no_sync[i + 1 :])
    ones = _links(op, _one)
    if ones != op:
        yield ones
    for rank, chain in enumerate(op.ranks):
        for i, link in enumerate(chain or ()):
            assert chain is not None
            yield replace(op, ranks=_with(op.ranks, rank, chain[:i] + chain[i + 1 :]))
            everywhere = tuple(None if c is None else tuple(k for k in c if k != link) for c in op.ranks)
            yield replace(op, ranks=everywhere)
            if isinstance(link, Net):
                for j, part in enumerate(link.links):
                    shorter = replace(link, links=link.links[:j] + link.links[j + 1 :])
                    yield replace(op, ranks=_with(op.ranks, rank, _with(chain, i, shorter)))
                    if isinstance(part, Unit) and part.uses:
                        unused = replace(link, links=_with(link.links, j, Unit(part.k, ())))
                        yield replace(op, ranks=_with(op.ranks, rank, _with(chain, i, unused)))


def _one(link: Link) -> Link:
    if isinstance(link, Use):
        return replace(link, c=1.0)
    if isinstance(link, Net):
        inner = [Unit(i.k, tuple((p, 1.0) for p, _ in i.uses)) if isinstance(i, Unit) else i for i in link.links]
        return replace(link, links=tuple(replace(i, c=1.0) if isinstance(i, Use) else i for i in inner))
    return link
