"""Finds when a backward begins and ends, from the hooks that fire within it.

A backward may run others inside it: re-entrant checkpointing runs one a segment, and all hooks may fire in those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

NO_TASK = -1
current_task = torch._C._current_graph_task_id


class BackwardWatch:
    """Calls ``on_begin`` at the first hook of a backward and ``on_end`` when the whole of it is over.

    A backward that raises never ends: it is found dead when the next one begins.

    Attributes:
        task: the id of the graph task that was entered last, and has not ended; else NO_TASK. A hook within this task
            need not call ``enter``.
    """

    def __init__(self, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._on_begin, self._on_end = on_begin, on_end
        # By graph task. autograd holds the callback for as long as the task lives.
        self._open: dict[int, weakref.ref[_EndOfTask]] = {}
        self._outer_runs = False  # an inner backward has ended, and nothing of the outer one has been seen yet
        self.task = NO_TASK

    def enter(self) -> None:
        """Note that a hook runs. Every hook calls this first."""
        task = current_task()
        if task in self._open:
            self.task = task
            return
        self._open = {task: end for task, end in self._open.items() if end() is not None}
        if not self._open and not self._outer_runs:
            self._on_begin()
        self._outer_runs = False
        end = _EndOfTask(self, task)
        self._open[task] = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)
        self.task = task

    @property
    def running(self) -> bool:
        """True if a backward that was entered goes on; False outside of all backwards.

        There a task that lives proves nothing: after a raise, autograd's thread of a GPU may hold it a moment longer.
        """
        if current_task() == NO_TASK:
            return False
        return self._outer_runs or any(end() is not None for end in self._open.values())

    def forget(self) -> None:
        """Forget the tasks so far: the next hook belongs to another backward."""
        self.task = NO_TASK
        self._open.clear()
        self._outer_runs = False

    def task_ended(self, task: int) -> None:
        self._open.pop(task, None)
        self.task = NO_TASK
        running = torch._C._current_autograd_node()
        if running is None:
            self.forget()  # whatever else is open has raised
            self._on_end()
        elif not self._open:
            self._outer_runs = True
            self._enter_at(running)

    def _enter_at(self, running: Node) -> None:
        """``enter`` the backward that ``running`` is a node of, at the nodes that follow: a callback can be queued only
        from within, and this code runs within the inner one."""
        hooks: list[torch.utils.hooks.RemovableHandle] = []

        def enter(grads: tuple[torch.Tensor, ...]) -> None:
            for hook in hooks:
                hook.remove()
            self.enter()

        hooks += [node.register_prehook(enter) for node, _ in running.next_functions if node is not None]


class _EndOfTask:
    """A callback for autograd's engine, called when a graph task is through."""

    def __init__(self, watch: BackwardWatch, task: int) -> None:
        self._watch, self._task = watch, task

    def __call__(self) -> None:
        self._watch.task_ended(self._task)
