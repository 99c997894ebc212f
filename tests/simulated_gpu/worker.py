"""A process that has the device, for tests to run in. It loads the device before it imports a test's module."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from .device import Race, clear, install, load, races, set_arrival

TIMEOUT_SECONDS = 120

Call = Callable[..., tuple[Any, list[Race]]]
"""``call(body, *args)``: what the body returns in the process, and the races seen there."""


@contextlib.contextmanager
def worker(number: int = 0) -> Iterator[Call]:
    """Starts the process. A body is a function of a module; it and its results travel by pickle. ``number``: of the
    device; the current one is GPU 0.

    Each call begins with an idle device, ``set_arrival("never")`` and the seed 0. What the body raises is raised here.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_start, initargs=(number,)) as pool:

        def call(body: Callable[..., Any], *args: Any) -> tuple[Any, list[Race]]:
            try:
                return pool.submit(_call, body, args).result(timeout=TIMEOUT_SECONDS)
            except TimeoutError:
                for process in [*pool._processes.values()]:
                    process.kill()  # else the pool would wait for it
                raise

        yield call


def _start(number: int) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "SIMULATED_GPU_NUMBER": str(number)}
    load()
    install()
    import torch

    torch.set_num_threads(1)


def _call(body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, list[Race]]:
    import torch

    clear()
    set_arrival("never")
    torch.manual_seed(0)
    result = body(*args)
    return result, races()
