"""A case: one op on one dtype and size, the jobs that do its work, and the yardstick that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import zero_kernels

from ..errors import UsageError
from .rows.op import Row
from .timing import Job, Spread

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

TORCH = "torch_pipeline"
COPY = "copy"
STREAM = "stream"


@dataclass(frozen=True)
class Setting:
    """The device, the dtype, the size and the backends that a case is measured with."""

    device: torch.device
    dtype: str
    numel: int
    backends: tuple[str, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal values: on zeros memory and arithmetic may be faster than on the values of a training."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.torch_dtype)


@dataclass(frozen=True)
class Case:
    """Jobs that work on the same tensors, by the name that their rows have as ``backend``.

    ``bytes``: the fewest bytes an element that the op must move, read plus written. ``yardstick``: the job that moves
    as many and computes nothing. ``baselines``: jobs that every row is compared with, besides ``torch_pipeline``.
    ``own_bytes``: ``bytes`` of jobs that move another number. ``fp32``: for jobs with state in another form, the same
    job in fp32.
    """

    op: str
    setting: Setting
    bytes: int
    yardstick: str
    jobs: Mapping[str, Job]
    baselines: Sequence[str] = ()
    own_bytes: Mapping[str, float] = field(default_factory=dict)
    fp32: Mapping[str, str] = field(default_factory=dict)

    def rows(self, times: Mapping[str, Sequence[float]]) -> list[Row]:
        """Make a row of each job. ``times``: milliseconds of each job in each round."""
        spreads = {name: Spread.of(values) for name, values in times.items()}
        ceiling = self._gbps(self.yardstick, spreads)
        return [
            Row(
                op=self.op,
                backend=name,
                dtype=self.setting.dtype,
                numel=self.setting.numel,
                **vars(spread),
                bytes=self._bytes(name),
                gbps=round(self._gbps(name, spreads), 3),
                yardstick=self.yardstick,
                copy_gbps=round(ceiling, 3),
                fraction=round(self._gbps(name, spreads) / ceiling, 4),
                vs_torch=round(spreads[TORCH].ms / spread.ms, 4),
                vs={shown: round(spreads[other].ms / spread.ms, 4) for shown, other in self._others(name).items()},
            )
            for name, spread in spreads.items()
        ]

    def _others(self, name: str) -> dict[str, str]:
        """List the jobs that this one is compared with, by their names in ``Row.vs``."""
        fp32 = {"fp32": self.fp32[name]} if name in self.fp32 else {}
        return {baseline: baseline for baseline in self.baselines} | fp32

    def _bytes(self, name: str) -> float:
        return self.own_bytes.get(name, self.bytes)

    def _gbps(self, name: str, spreads: Mapping[str, Spread]) -> float:
        return self._bytes(name) * self.setting.numel / spreads[name].ms / 1e6


def copy_job(setting: Setting, bytes_per_element: int) -> Job:
    """Make a job ``dst.copy_(src)`` that reads and writes, together, as many bytes as the op."""
    nbytes = bytes_per_element * setting.numel // 2
    source, target = (torch.empty(-(-nbytes // 8), dtype=torch.int64, device=setting.device) for _ in range(2))
    source.random_()
    source, target = source.view(torch.uint8)[:nbytes], target.view(torch.uint8)[:nbytes]
    return [lambda: target.copy_(source)]


def on_backend(name: str, work: Callable[[], object]) -> Callable[[], object]:
    """Wrap ``work`` so that its ops run on the backend ``name``."""

    def run() -> object:
        with zero_kernels.use_backend(name):
            return work()

    return run


def backend_jobs(setting: Setting, work: Callable[[], object]) -> dict[str, Job]:
    """Make a job of the same work for each backend."""
    return {name: [on_backend(name, work)] for name in setting.backends}


def choose_backends(device: torch.device, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Choose the backends to measure: those asked for, else all fast ones of the device. Raises UsageError.

    Slow is the reference, plain torch an operation at a time, which is taken where there is nothing else. So is
    Triton on a CPU, where it runs in an interpreter.
    """
    usable = zero_kernels.available_backends(device)
    for name in asked or ():
        if name not in usable:
            raise UsageError(f"--backends {name}: usable on {device.type} are {', '.join(usable)}")
    slow = {"reference", "triton"} if device.type == "cpu" else {"reference"}
    return tuple(asked or [name for name in usable if name not in slow] or ["reference"])
