"""``sleep`` and ``wake`` of an optimizer against one plain copy of as many bytes, and the memory freed on the device.

python benchmarks/bench_sleep.py --numel 64Mi

Rows are those of ``offload``, in its part ``sleep``. Without a GPU both are copies from memory to memory, and ``wake``
touches memory that it has allocated anew for the first time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from script import run_script
from torch import Tensor, nn
from zero_optim import ShardedAdamW
from zero_optim.asleep import MOVES_STORAGES
from zero_optim.bench.contest import Say, settle
from zero_optim.bench.request import Choices, Menu, Request
from zero_optim.bench.rows.offload import OffloadRow
from zero_optim.bench.run import Measured
from zero_optim.bench.timing import HostClock, Spread, TimedRounds, interleaved
from zero_optim.stores.host_memory import HostMemory

NUMEL, ROUNDS = {"cpu": 2**26, "cuda": 2**30}, 11
PARAMETER = 2**22  # elements of a parameter, as of a layer's
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WHAT = {"state": False, **({"all": True} if MOVES_STORAGES else {})}  # whether the parameters sleep, too


class Sleeper:
    """An optimizer of one rank that has made a step.

    Attributes:
        nbytes: bytes copied out, and in again, by what sleeps.
        left: bytes that it still takes on the device when asleep, by what sleeps.
        freed: share of the bytes to be freed that are free when asleep, by what sleeps.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        sizes = [PARAMETER] * (numel // PARAMETER) + [rest for rest in (numel % PARAMETER,) if rest]
        before = _taken(device)
        self._params = [nn.Parameter(torch.randn(size, device=device).to(dtype)) for size in sizes]
        self.opt = ShardedAdamW(self._params, lr=1e-3)
        for parameter in self._params:
            parameter.grad = torch.ones_like(parameter)
        self.opt.step()
        self.opt.zero_grad()
        self.nbytes: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.freed: dict[str, float] = {}
        for what, parameters in WHAT.items():
            awake = _taken(device) - before
            self.opt.sleep(parameters=parameters)
            self.left[what] = _taken(device) - before
            self.nbytes[what] = self.opt.stats()["sleep"]["host"]
            self.opt.wake()
            kept = 0 if parameters else sum(parameter.nbytes for parameter in self._params)
            self.freed[what] = (awake - self.left[what]) / (awake - kept)

    def laps(self, what: str) -> list[Callable[[], object]]:
        def wake() -> None:
            self.opt.wake()
            settle(self._device)

        return [lambda: self.opt.sleep(parameters=WHAT[what]), wake]


class Copies:
    """Plain copies between one flat tensor on the device and host memory of its size, pinned for a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device, self._there = device, torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._here = HostMemory(pinned=device.type == "cuda", device=device).take(nbytes).zero_()

    def laps(self, nbytes: int) -> list[Callable[[], object]]:
        """Make two laps: copy out to the host, and copy in to the device."""
        here, there = self._here[:nbytes], self._there[:nbytes]
        return [lambda: self._copy(here, there), lambda: self._copy(there, here)]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        settle(self._device)


def _taken(device: torch.device) -> int:
    """Count the bytes of all tensors on the device."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    dense = (v for v in gc.get_objects() if type(v) in (Tensor, nn.Parameter) and v.layout is torch.strided)
    storages = (value.untyped_storage() for value in dense)
    # Storages that cannot be resized are left out: parts of others, as parameters have, and host memory of sleepers.
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage.resizable()}.values())


def measure(numel: int, dtype: str, device: torch.device, rounds: int) -> list[OffloadRow]:
    """Make a row for ``sleep`` and one for ``wake``, for each choice of what sleeps."""
    sleeper = Sleeper(numel, DTYPES[dtype], device)
    copies = Copies(max(sleeper.nbytes.values()), device)
    jobs = {}
    for what, nbytes in sleeper.nbytes.items():
        jobs[f"opt {what}"] = sleeper.laps(what)
        jobs[f"copy {what}"] = copies.laps(nbytes)
    times = interleaved(jobs, HostClock(), TimedRounds.exactly(rounds))
    sleeper.opt.close()
    return [row for what in WHAT for row in _rows(what, sleeper, times, numel, dtype)]


def _rows(
    what: str, sleeper: Sleeper, times: dict[str, list[list[float]]], numel: int, dtype: str
) -> Iterator[OffloadRow]:
    nbytes = sleeper.nbytes[what]
    for lap, call in enumerate(("sleep", "wake")):
        spread, copy = (Spread.of([laps[lap] for laps in times[f"{who} {what}"]]) for who in ("opt", "copy"))
        yield OffloadRow(
            op="offload",
            backend=f"{call}, {what}",
            dtype=dtype,
            numel=numel,
            ranks=1,
            rounds=spread.rounds,
            part="sleep",
            time=spread.figures,
            versus=None,
            moved={"to_device": nbytes * lap, "to_host": nbytes * (1 - lap), "read": 0, "written": 0},
            held={"device": sleeper.left[what], "host": nbytes, "disk": 0},
            peak=None,
            beside={"copy": copy.ms},
            hidden=None,
            bound="copy",
            fraction=round(copy.ms / spread.ms, 4),
            speculated=None,
            freed=round(sleeper.freed[what], 4),
        )


ABOUT = "Has an optimizer sleep and wake, and compares it with one copy of as many bytes."
MENU = Menu({"sleep": Choices({"numel": "64Mi; GPU: 1Gi", "rounds": str(ROUNDS)}, gpu=True)})


def run(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    numel = request.numel[0] if request.numel else NUMEL[device.type]
    of_what = "" if device.type == "cuda" else "; there is no GPU: all copies are from memory to memory"
    say(f"an optimizer of {numel:,} parameters{of_what}")
    return measure(numel, dtype, device, request.rounds or ROUNDS), {}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("sleep", ABOUT, MENU, alone={"sleep": run}, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
