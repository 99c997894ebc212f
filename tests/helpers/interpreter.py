"""Runs tests in a second process, where Triton interprets its kernels on CPU tensors: it does one or the other."""

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

TIMEOUT_SECONDS = 120
SWITCH = "TRITON_INTERPRET"


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Have a module-level test, of arguments that pickle, run in that process; here where Triton already interprets."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        in_interpreter(test, *args, **kwargs)

    return run


def in_interpreter(test: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run a module-level test in that process."""
    if os.environ.get(SWITCH) == "1":
        test(*args, **kwargs)
    else:
        _process().submit(_call, test.__module__, test.__name__, args, kwargs).result(TIMEOUT_SECONDS)


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start, (tuple(sys.path),))


def _start(sys_path: tuple[str, ...]) -> None:
    sys.path[:] = sys_path
    os.environ[SWITCH] = "1"
    torch.set_num_threads(1)

    import numpy

    numpy.seterr(all="ignore")  # the tests overflow on purpose


def _call(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    __import__(module)
    test = getattr(sys.modules[module], name)
    getattr(test, "__wrapped__", test)(*args, **kwargs)
