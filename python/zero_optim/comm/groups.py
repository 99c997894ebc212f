"""Process groups for one use alone: made on all ranks at once, or taken over from a closed optimizer.

torch names a group after its ranks and the number of groups. So a group that is made where another was destroyed could
get its name, and find its addresses: therefore a group that is not needed any more is kept here for the next use. And
ranks in different numbers of groups would wait for each other under different names: they must not make a group.

All groups are held weakly; see ``Comm``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from ..errors import RankMismatchError
from . import transport
from .together import Ranks

Reference = weakref.ref[dist.ProcessGroup]

_left: dict[tuple[int, ...], list[Reference]] = {}  # by the ranks, as the whole job numbers them
_made: list[Reference] = []  # all of them
_abandoned: set[int] = set()  # the ids of groups that are never freed
_parts: dict[tuple[str, object, str], Reference] = {}  # by the name of a group, what its parts are, and are for


def alive(group: Reference | None) -> dist.ProcessGroup | None:
    """The group, if it was not destroyed."""
    found = group() if group is not None else None
    return found if found is not None and found in dist.distributed_c10d._world.pg_names else None


def take(
    ranks: Ranks, numbers: Sequence[int], make: Callable[[], dist.ProcessGroup], where: str, *, needed: bool
) -> dist.ProcessGroup | None:
    """Collective. Take a group of all ``ranks`` that nobody else uses: one that was left, or a new one.

    Args:
        numbers: those ranks, as the whole job numbers them.
        make: collective; gives a new group of them.
        needed: raise RankMismatchError where none can be made. Else None is returned then, on every rank.
    """
    there = [group for group in map(alive, _left.get(tuple(numbers), ())) if group is not None]
    spare = {group.group_name: group for group in there}
    reports = ranks.gather_objects((needed, set(spare), _count()), where)
    # Only a group that every rank has left is free: on another rank its optimizer may not be closed yet.
    common = sorted(set.intersection(*(names for _, names, _ in reports)))
    if not common and not _give_same_name([count for _, _, count in reports]):
        if any(of_rank for of_rank, _, _ in reports):
            raise RankMismatchError(
                "another optimizer, or a sharded model, communicates between these ranks, and a process group of "
                "its own cannot be made here: some of them are in more groups than others. Make one on all ranks, "
                "dist.new_group(ranks), and give it"
            )
        return None
    own = spare.pop(common[0]) if common else _noted(make())
    _left[tuple(numbers)] = [weakref.ref(group) for group in spare.values()]
    return own


def leave(numbers: Sequence[int], groups: Iterable[Reference]) -> None:
    """Keep these groups for later optimizers. Nothing may be under way over them."""
    _left.setdefault(tuple(numbers), []).extend(groups)


def _noted(group: dist.ProcessGroup) -> dist.ProcessGroup:
    _made[:] = [other for other in _made if alive(other) is not None] + [weakref.ref(group)]
    return group


@atexit.register  # as this is imported, so that it runs after what users have registered since
def _end() -> None:
    """Destroy what nobody has destroyed, under gloo, before the interpreter ends.

    A thread of gloo's that lets go of a tensor wants the interpreter. Where that ends meanwhile, the process aborts.
    """
    for group in filter(None, map(alive, _made)):
        if id(group) not in _abandoned and {*transport.backends(group).values()} == {"gloo"}:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group(group)


def abandon(groups: Iterable[Reference | None]) -> None:
    """Never free these groups, in which ranks may wait for each other in vain.

    A thread of gloo's waits in each, up to the time-out, by default for half an hour. Who frees the group waits for the
    thread: ``destroy_process_group`` does, and so does the end of the process. So each group gets a reference that
    nobody gives back. A variable would not do: the interpreter clears all variables as it ends.
    """
    for group in filter(None, map(alive, groups)):
        if id(group) not in _abandoned:
            _abandoned.add(id(group))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def part_of(
    whole: dist.ProcessGroup, parts: Sequence[Sequence[int]], name: str, make: Callable[[], dist.ProcessGroup]
) -> dist.ProcessGroup:
    """Collective over ``whole``. Find the group of this rank's part, which is made once for each ``name``.

    Two uses of the same ranks need two groups. The second leg of a reduction over a grid leaves when the first has
    arrived, so ranks come to it at different times: before an expert's reduction on one, and after it on another.
    """
    key = (whole.group_name, tuple(map(tuple, parts)), name)
    found = alive(_parts.get(key))
    if found is None:
        found = _noted(make())
        _parts[key] = weakref.ref(found)
    return found


def can_be_made(ranks: Ranks) -> bool:
    """Collective. Whether a new group of these ranks would have the same name on all of them."""
    return _give_same_name(ranks.gather_objects(_count(), "making a process group"))


def _count() -> int:
    """Number of groups that this rank is in."""
    return len(dist.distributed_c10d._world.pg_names)


def _give_same_name(counts: Sequence[int]) -> bool:
    # torch names a group of all ranks by another rule: there the counts may differ.
    return len({*counts}) == 1 or len(counts) == dist.get_world_size()
