"""Compiles what the ops launch, without a GPU: a driver that only names an architecture, launches that only compile."""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

ARCHS = (80, 90, 100)


class _Driver:
    """As much of a driver as choosing and compiling a kernel asks for. Each architecture is a device of its own."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 1000 + self.arch  # no real device: what Triton keeps for that one stays untouched

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@dataclass(frozen=True)
class Launch:
    """One launch that an op would make."""

    kernel: str
    grid: tuple[int, ...]
    ttir: str
    ptx: str
    cubin: bytes
    shared: int  # bytes of shared memory that the launch asks for

    @functools.cached_property
    def sass(self) -> str:
        """The machine code. Disassembling takes a third of a second."""
        return self._cuobjdump("-sass")

    @functools.cached_property
    def resources(self) -> dict[str, int]:
        """REG, STACK, SHARED, LOCAL and others: registers, or bytes."""
        usage = self._cuobjdump("-res-usage").partition("Function ")[2]
        return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}

    def _cuobjdump(self, what: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def compiling_for(arch: int, **options: Any) -> Iterator[list[Launch]]:
    """Inside, launches are compiled for the architecture instead of made. `options` override the launcher's own."""
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs | options)
        asm = kernel.asm
        launches.append(Launch(kernel.name, grid, asm["ttir"], asm["ptx"], asm["cubin"], kernel.metadata.shared))

    before = driver._active
    driver.set_active(_Driver(arch))
    try:
        with mock.patch.object(JITFunction, "run", compile_only):
            yield launches
    finally:
        driver._active = before


@functools.cache
def compiled(arch: int, call: Callable[[], object]) -> tuple[Launch, ...]:
    """What `call`, a call of an op, launches."""
    with compiling_for(arch) as launches:
        call()
    return tuple(launches)
