"""A census of a process: resident memory, and counts of things that could pile up over many steps."""

from __future__ import annotations

import gc
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

PROC = Path("/proc/self")
_HOOKS_OF_A_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")
_COLLECTIONS = 20  # the most in a row: another thread may make garbage without end


@dataclass(frozen=True)
class Census:
    """Counts of a process.

    Attributes:
        resident: bytes.
        objects: objects that Python's garbage collector tracks, without frozen ones.
        tensors: tensors among the objects.
        nodes: nodes of the autograd graphs that those tensors keep.
        hooks: hooks of those tensors, and of the modules among the objects.
        files: open file descriptors.
        threads: of the process, libraries' own included.
    """

    resident: int
    objects: int
    tensors: int
    nodes: int
    hooks: int
    files: int
    threads: int


def can_count() -> bool:
    return PROC.exists()


def take() -> Census:
    """Collect garbage, then count. Two calls in a row give the same, except for ``resident``.

    Collecting is repeated, as it may leave new garbage: a graph in C++ frees Python objects, a finalizer makes some.
    """
    for _ in range(_COLLECTIONS):
        if not gc.collect():
            break
    resident = int((PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files, threads = (len(os.listdir(PROC / name)) for name in ("fd", "task"))
    types = Counter(map(type, gc.get_objects()))
    tensors = sum(count for kind, count in types.items() if issubclass(kind, Tensor))
    nodes, hooks = _nodes(), _hooks()
    return Census(resident, sum(types.values()), tensors, nodes, hooks, files, threads)


def _nodes() -> int:
    """Count the nodes of graphs that a live tensor keeps."""
    found: set[Node] = set()
    ahead = [node for tensor in _live(Tensor) if (node := tensor.grad_fn) is not None]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
    return len(found)


def _hooks() -> int:
    of_tensors = sum(len(getattr(tensor, name) or ()) for tensor in _live(Tensor) for name in _HOOKS_OF_A_TENSOR)
    return of_tensors + sum(
        len(hooks) for module in _live(nn.Module) for name, hooks in vars(module).items() if name.endswith("_hooks")
    )


def _live(kind: type) -> list[Any]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
