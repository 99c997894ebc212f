"""Recovery from an exception in backward: a rank completes what it owes the others, with zeros for what did not come.

A backward launches gathers of a model's units, and reductions of an optimizer's buckets, in a fixed order. Where it
raises on one rank, that rank launches the rest in the next call that all ranks make::

    rank 0   backward raises half-way     zero_grad: launches the rest, then clears
    rank 1   backward                     zero_grad: clears
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.autograd import Variable

from .user_thread import UserThread

NO_TASK = -1
current_task = torch._C._current_graph_task_id


class BackwardWatch:
    """Calls ``on_begin`` at the first hook of a backward and ``on_end`` when the whole of it is over.

    A backward may run others inside it: re-entrant checkpointing runs one a segment, and all hooks may fire in those.
    One that raises never ends: it is found dead when the next one begins.

    ``task`` is the id of the graph task that was entered last, and runs; else NO_TASK. Its hooks need not ``enter``.
    """

    def __init__(self, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._on_begin, self._on_end = on_begin, on_end
        # By graph task, the callback that ends it. Autograd holds that for as long as the task lives.
        self._open: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._outer_runs = False  # an inner backward has ended, and nothing of the outer one has been seen yet
        self.task = NO_TASK

    def enter(self) -> None:
        """Record that a hook runs. Every hook calls this first."""
        task = current_task()
        if task in self._open:
            self.task = task
            return
        self._open = {task: end for task, end in self._open.items() if end() is not None}
        if not self._open and not self._outer_runs:
            self._on_begin()
        self._outer_runs = False
        end = partial(self._task_ended, task)
        self._open[task] = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)
        self.task = task

    @property
    def running(self) -> bool:
        """True if a backward that was entered goes on; False outside of all backwards."""
        # Outside a task that lives proves nothing: after a raise, autograd's thread of a GPU may hold it for a moment.
        if current_task() == NO_TASK:
            return False
        return self._outer_runs or any(end() is not None for end in self._open.values())

    def forget(self) -> None:
        """Forget the tasks so far: the next hook belongs to another backward."""
        self.task = NO_TASK
        self._open.clear()
        self._outer_runs = False

    def _task_ended(self, task: int) -> None:
        self._open.pop(task, None)
        self.task = NO_TASK
        outer = torch._C._current_autograd_node()
        if outer is None:
            self.forget()  # whatever else is open has raised
            self._on_end()
        elif not self._open:
            self._outer_runs = True
            # The outer backward is entered at the nodes that follow: a callback can be queued only from within its
            # task, and this code runs within that of the inner one.
            hooks: list[torch.utils.hooks.RemovableHandle] = []

            def enter(grads: tuple[torch.Tensor, ...]) -> None:
                for hook in hooks:
                    hook.remove()
                self.enter()

            hooks += [node.register_prehook(enter) for node, _ in outer.next_functions if node is not None]


class Owing:
    """What owes collectives to other ranks: the rounds of an optimizer, or the schedule of a model's units.

    Attributes:
        thread: the thread of the program that uses it.
        watch: finds the backwards that go through it.
        turn: the place in the order in which several are completed.
    """

    turn = 0

    def __init__(self, thread: UserThread, watch: BackwardWatch) -> None:
        self.thread, self.watch = thread, watch
        _owing[id(self)] = self

    @property
    def out_of_step(self) -> bool:
        """True if a collective has failed: the other ranks are at another one, and nothing can be completed."""
        raise NotImplementedError

    def complete_raised(self) -> None:
        """Collective, where a backward has raised: launch what it has left."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave what is open here to nobody."""
        _owing.pop(id(self), None)


_owing: weakref.WeakValueDictionary[int, Owing] = weakref.WeakValueDictionary()
AnyOwing = TypeVar("AnyOwing", bound=Owing)


def all_of(kind: type[AnyOwing], left_to: UserThread | None = None) -> list[AnyOwing]:
    """List all of this kind, in the order in which they were made; or those that are left to a thread to complete."""
    alive = [reference() for reference in _owing.valuerefs()]  # a copy: another thread may make one meanwhile
    found = [owing for owing in alive if isinstance(owing, kind)]
    if left_to is None:
        return found
    return [owing for owing in found if left_to.may_complete(owing.thread) and not owing.out_of_step]


def complete_raised(thread: UserThread) -> list[Owing]:
    """Collective. Complete what raised backwards of the thread have left open, before it waits for anything else::

        rank 0   backward of A: raises in unit 2                       forward of B: joins A's gathers first
        rank 1   backward of A: waits for rank 0 to gather unit 1      forward of B

    Returns all that no running backward uses.
    """
    idle = [owing for owing in all_of(Owing, left_to=thread) if not owing.watch.running]
    idle.sort(key=lambda owing: owing.turn)
    for owing in idle:
        owing.complete_raised()
    return idle
