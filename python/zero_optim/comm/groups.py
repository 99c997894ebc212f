"""Process groups for one use alone: made on all ranks at once, or taken over from a closed optimizer.

torch names a group after its ranks and the number of groups. So a group that is made where another was destroyed could
get its name, and find its addresses: therefore a group that is not needed any more is kept here for the next use. And
ranks in different numbers of groups would wait for each other under different names: they must not make a group.

All groups are held weakly: gloo's threads end only when ``destroy_process_group`` drops the last reference, and one
that lets go of a tensor while the interpreter shuts down aborts the process. (In ``abandon`` they wait for what never
comes, so they let go of nothing.)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ..errors import ClosedError, CollectiveError, RankMismatchError
from . import transport
from .together import Ranks

Reference = weakref.ref[dist.ProcessGroup]

_left: dict[tuple[int, ...], list[Reference]] = {}  # by the ranks, as the whole job numbers them
# All of them. Nobody else may hold these references: the garbage collector clears them before it closes a model.
_made: list[Reference] = []
_abandoned: set[int] = set()  # the ids of groups that are never freed
_host_groups: dict[tuple[int, ...], Reference] = {}  # by the ranks
_parts: dict[tuple[str, object, str], Reference] = {}  # by the name of a group, what its parts are, and are for


def alive(group: Reference | None) -> dist.ProcessGroup | None:
    """The group, if it was not destroyed."""
    found = group() if group is not None else None
    return found if found is not None and found in dist.distributed_c10d._world.pg_names else None


class Groups:
    """The process groups of one ``Comm``, of the same ranks each.

    - *given*: for what every rank calls at the same place in its program, such as loading.
    - *own*: for what the optimizer sends of its own accord, reductions above all. A collective of the user's, or of
      another optimizer, that stands between two calls of ours cannot meet ours there. At first the given one.
    - *channels*: more of them, under gloo. Gloo ends the process where one rank sends more than another expects in the
      n-th broadcast, or the n-th all-reduce, of a group. Ranks that are out of step would come to that. So tensors of
      different sizes go over different groups: such ranks wait instead, and ``deadlock`` finds them.
    """

    def __init__(self, given: dist.ProcessGroup | None) -> None:
        self.exist = given is not None  # else there is one rank, without ``torch.distributed``
        self._given = weakref.ref(given) if given is not None else None
        self._numbers = tuple(self.ranks)
        self._several = given is not None and dist.get_world_size(given) > 1
        self._own = self._given
        self.channels: dict[object, Reference] = {}
        self.own_name = ""  # where the own group is another than the given one

    @property
    def given(self) -> dist.ProcessGroup | None:
        """The given group; None: there is one rank, without a group. Raises ClosedError where it was destroyed."""
        return self._alive(self._given)

    @property
    def own(self) -> dist.ProcessGroup | None:
        return self._alive(self._own)

    def channel(self, key: object) -> dist.ProcessGroup | None:
        """The channel for ``key``; the own group where there is none."""
        return self._alive(self.channels.get(key, self._own))

    @property
    def existing(self) -> list[dist.ProcessGroup]:
        return [*filter(None, map(alive, (self._given, self._own, *self.channels.values())))]

    @property
    def ranks(self) -> list[int]:
        """The ranks, as the whole job numbers them; none where the given group was destroyed, or there is none."""
        group = alive(self._given) if dist.is_initialized() else None
        return dist.get_process_group_ranks(group) if group is not None else []

    @property
    def has_own(self) -> bool:
        """Whether there is a living group of its own. A new group can have the name of one that was destroyed."""
        return bool(self.own_name) and alive(self._own) is not None

    def use_own(self, group: dist.ProcessGroup) -> None:
        self._own, self.own_name = weakref.ref(group), group.group_name

    def abandon(self) -> None:
        """Never free the groups that are in use, in which ranks may be deadlocked."""
        # A thread of gloo's waits in each, up to the time-out, by default for half an hour. Who frees the group waits
        # for the thread: ``destroy_process_group`` does, and so does the end of the process. So each group gets a
        # reference that nobody gives back. A variable would not do: the interpreter clears all variables as it ends.
        for group in filter(None, map(alive, (self._own, *self.channels.values()))):
            if id(group) not in _abandoned:
                _abandoned.add(id(group))
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def leave(self, *, reusable: bool) -> None:
        """Go back to the given group. ``reusable``: leave the own ones, in which nothing may be in flight, to later
        optimizers."""
        own = [*self.channels.values()]
        if self._own is not None and self._own is not self._given:
            own.append(self._own)
        if own and reusable:
            # By numbers of its own: the garbage collector may have cleared ``_given`` by now.
            _left.setdefault(self._numbers, []).extend(own)
        self._own, self.own_name = self._given, ""
        self.channels.clear()

    def _alive(self, reference: Reference | None) -> dist.ProcessGroup | None:
        group = reference() if reference is not None else None
        if group is None and self._several:
            raise ClosedError("the process group was destroyed: close the optimizer before, or make a new one")
        return group


def take(ranks: Ranks, make: Callable[[], dist.ProcessGroup], where: str, *, needed: bool) -> dist.ProcessGroup | None:
    """Collective. Take a group of all ``ranks`` that nobody else uses: one that was left, or a new one.

    Args:
        make: collective; gives a new group of them.
        needed: raise RankMismatchError where none can be made. Else None is returned then, on every rank.
    """
    spare = {group.group_name: group for group in filter(None, map(alive, _left.get(tuple(ranks.ranks), ())))}
    reports = ranks.gather_objects((needed, set(spare), len(dist.distributed_c10d._world.pg_names)), where)
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
    _left[tuple(ranks.ranks)] = [weakref.ref(group) for group in spare.values()]
    return own


def _noted(group: dist.ProcessGroup) -> dist.ProcessGroup:
    _made[:] = [other for other in _made if alive(other) is not None] + [weakref.ref(group)]
    return group


@atexit.register  # as this is imported, so that it runs after what users have registered since
def _end() -> None:
    """Destroy what nobody has destroyed, under gloo, before the interpreter ends."""
    # A thread of gloo's needs the interpreter to free a tensor. Where that ends meanwhile, the process aborts.
    for group in filter(None, map(alive, _made)):
        if id(group) not in _abandoned and {*transport.backends(group).values()} == {"gloo"}:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group(group)


def part_of(
    whole: dist.ProcessGroup, parts: Sequence[Sequence[int]], name: str, make: Callable[[], dist.ProcessGroup]
) -> dist.ProcessGroup:
    """Collective over ``whole``. Find the group of this rank's part, which is made once for each ``name``."""
    # Two uses of the same ranks need two groups. The second leg of a reduction over a grid leaves when the first has
    # arrived, so ranks come to it at different times: before an expert's reduction on one, and after it on another.
    key = (whole.group_name, tuple(map(tuple, parts)), name)
    found = alive(_parts.get(key))
    if found is None:
        found = _noted(make())
        _parts[key] = weakref.ref(found)
    return found


def _give_same_name(counts: Sequence[int]) -> bool:
    """``counts``: by rank, of the groups that it is in."""
    # torch names a group of all ranks by another rule: there the counts may differ.
    return len({*counts}) == 1 or len(counts) == dist.get_world_size()


def forget_group(comm: Ranks) -> None:
    """Let the next that needs a host group of these ranks make a new one. Call it on every rank, where one failed."""
    _host_groups.pop(tuple(comm.ranks), None)


class HostRanks:
    """The ranks of a ``Comm``, for a thread that agrees with the same thread of other ranks while the program goes on.

    They communicate over a gloo group of their own, whatever serves the devices: collectives of a thread have no place
    in the order of the program's. The deadlock detector does not look at them: the thread may wait for a slow disk.
    """

    def __init__(self, comm: Ranks, group: dist.ProcessGroup | None) -> None:
        """Collective, where these ranks have no such group yet. ``group``: any of these ranks; None: there is one."""
        self.rank, self.world_size, self.ranks = comm.rank, comm.world_size, comm.ranks
        self._group = _host_groups.get(tuple(self.ranks)) if self.world_size > 1 else None
        # The program may have destroyed its process group, and made another of the same ranks.
        if self.world_size == 1 or alive(self._group) is not None:
            return
        count = len(dist.distributed_c10d._world.pg_names)
        if not _give_same_name(comm.gather_objects(count, "making a process group")):
            raise RankMismatchError(
                "a process group for saving in the background cannot be made here: some ranks are in more groups than "
                "others. Save without background=True"
            )
        assert group is not None
        made = (transport.used() or transport.GLOO).host_group(group)
        self._group = _host_groups[tuple(self.ranks)] = weakref.ref(made)

    def gather_objects(self, value: Any, where: str) -> list[Any]:
        """Every rank's ``value``, in rank order. Raises CollectiveError where a rank has died."""
        if self._group is None:
            return [value]
        group = self._group()
        if group is None:
            raise ClosedError(f"the process group was destroyed during {where}: call checkpoint.wait() before")
        try:
            return transport.GLOO.gather_objects(value, group)
        except RuntimeError as error:
            raise CollectiveError(f"{where}: {error}. Another rank died, or was too slow") from error
