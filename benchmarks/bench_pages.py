"""The file of ``state_offload="nvme:DIR"`` against the disk itself: pages written, read, and both at once.

python benchmarks/bench_pages.py --numel 64Mi

Rows are those of ``offload``, in its part ``pages``. The file is in the folder for temporary files, which TMPDIR names.
"""

from __future__ import annotations

import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from script import run_script
from torch import Tensor
from zero_optim.bench.contest import Say
from zero_optim.bench.offload_contenders import PAGES
from zero_optim.bench.offload_links import DiskLink
from zero_optim.bench.request import Choices, Menu, Request
from zero_optim.bench.rows.offload import OffloadRow
from zero_optim.bench.run import Measured
from zero_optim.bench.timing import HostClock, Spread, TimedRounds, interleaved
from zero_optim.stores.disk_homes import LOOKAHEAD
from zero_optim.stores.extents import Extent
from zero_optim.stores.host_memory import HostMemory
from zero_optim.stores.offload import HOST_BUFFERS
from zero_optim.stores.page_file import PageFile, Transfer
from zero_optim.stores.patience import PATIENCE_SECONDS

WAYS = {"write": (False, True), "read": (True, False), "both": (True, True)}  # (read, written)

NUMEL, ROUNDS = 2**26, 11


class Pages:
    """The pages of a state of ``numel`` parameters, moved through as many buffers as the store has."""

    def __init__(self, folder: Path, numel: int) -> None:
        nbytes = 12 * numel // PAGES
        self.file = PageFile(folder, rank=0)
        self._extents = [self.file.allocate(nbytes) for _ in range(PAGES)]
        memory = HostMemory(pinned=False)
        self._buffers: Sequence[Tensor] = [memory.take(self._extents[0].space).fill_(1) for _ in range(HOST_BUFFERS)]
        self.move(read=False, written=True)

    def move(self, *, read: bool, written: bool) -> None:
        """Move each page once each way. Where pages are read and written, writes are half a file ahead of reads."""
        under_way: deque[Transfer] = deque()
        for number in range(PAGES):
            if read:
                under_way.append(self.file.read(self._extents[number], self._buffers[number % LOOKAHEAD]))
            if written:
                ahead: Extent = self._extents[(number + PAGES // 2) % PAGES]
                under_way.append(self.file.write(ahead, self._buffers[LOOKAHEAD + number % LOOKAHEAD]))
            while len(under_way) > (LOOKAHEAD - 1) * (read + written):
                under_way.popleft().wait(PATIENCE_SECONDS)
        for transfer in under_way:
            transfer.wait(PATIENCE_SECONDS)


def measure_pages(numel: int, dtype: str, folder: Path, rounds: int) -> list[OffloadRow]:
    """Make a row for each of ``WAYS``."""
    nbytes = 12 * numel
    disk, pages = DiskLink(folder, nbytes), Pages(folder, numel)
    jobs = {}
    for way, (read, written) in WAYS.items():
        jobs[f"disk {way}"] = [lambda r=read, w=written: disk.move(r * nbytes, w * nbytes)]
        jobs[f"pages {way}"] = [lambda r=read, w=written: pages.move(read=r, written=w)]
    try:
        times = interleaved(jobs, HostClock(), TimedRounds.exactly(rounds))
    finally:
        pages.file.close()
    laps = {name: [sum(of_round) for of_round in of_job] for name, of_job in times.items()}
    return [_row(way, laps, numel, dtype) for way in WAYS]


def _row(way: str, laps: dict[str, list[float]], numel: int, dtype: str) -> OffloadRow:
    spread, disk = Spread.of(laps[f"pages {way}"]), Spread.of(laps[f"disk {way}"])
    read, written = WAYS[way]
    return OffloadRow(
        op="offload",
        backend=f"pages {way}",
        dtype=dtype,
        numel=numel,
        ranks=1,
        rounds=spread.rounds,
        part="pages",
        time=spread.figures,
        versus=None,
        moved={"to_device": 0, "to_host": 0, "read": read * 12 * numel, "written": written * 12 * numel},
        held=None,
        peak=None,
        beside={"disk": disk.ms},
        hidden=None,
        bound="disk",
        fraction=round(disk.ms / spread.ms, 4),
        speculated=None,
    )


ABOUT = "Writes and reads the pages of a state in a file as state_offload=nvme does, and compares them with the disk."
TAKEN = {"numel": "64Mi", "rounds": str(ROUNDS)}
MENU = Menu({"pages": Choices(TAKEN, dtypes=("bf16",))})


def run(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    numel = request.numel[0] if request.numel else NUMEL
    say(f"pages of {numel:,} parameters")
    with tempfile.TemporaryDirectory(prefix="bench-pages-") as folder:
        return measure_pages(numel // PAGES * PAGES, dtype, Path(folder), request.rounds or ROUNDS), {}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("pages", ABOUT, MENU, alone={"pages": run}, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
