"""Seeded faults: copies of ``zero_optim`` in which one wait is missing or misplaced. The simulation must notice each.

A simulation that finds nothing in the package means little by itself. These faults differ in kind: who should wait for
whom, and for what. ``check`` runs a fault's program on the faulty copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from harness import RankFailure, RankPool
from order_programs import DEFAULT, SIDE, OrderProgram, train_all

from .switch import LATE, ON_GPU_1

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "python" / "zero_optim"
COLLECTIVE_SECONDS = 8  # ranks that start on a busy machine take that long to connect
PROGRAM_SECONDS = 60  # with the start of a rank


@dataclass(frozen=True)
class Fault:
    """In ``file`` of the package, the text ``old``, which is there once, becomes ``new``.

    Attributes:
        name: what is wrong then.
        program: reveals it.
        shows: what the failure of a rank must contain.
    """

    name: str
    file: str
    old: str
    program: OrderProgram
    new: str = "pass"
    shows: str = "RaceFound: "
    simulated: str = LATE

    def applied(self) -> str:
        """The faulty text of the file. Raises ValueError where ``old`` is not there exactly once."""
        text = (PACKAGE / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name!r}: {self.old!r} is in {self.file} {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


FAULTS = (
    Fault(
        "a bucket is packed before autograd's stream has added up its gradients",
        "grads/bucket.py",
        "streams.join()\n        if may_wait:",
        OrderProgram(3, "no_sync", DEFAULT, SIDE),
        new="if may_wait:",
    ),
    Fault(
        "a communication buffer is packed again while its last reduction reads it",
        "comm/handle.py",
        "self._lent_for[0].wait()",
        OrderProgram(2),
    ),
    Fault(
        "a gradient is overwritten while it is reduced as it is",
        "grads/bucket.py",
        "handle.then(partial(keep_for_current_stream, full))",
        OrderProgram(2),
        new="full.zero_()",
    ),
    Fault(
        "nobody waits for a collective",
        "comm/handle.py",
        "self._work.wait()  # the current stream waits; the host goes on",
        OrderProgram(2),
        new="pass",
    ),
    Fault(
        "p.grad.local is read before its reduction arrives",
        "params/flat_shard.py",
        "self.arrivals.wait()",
        OrderProgram(2, "read"),
    ),
    Fault(
        "a gradient is zeroed before the reduction into it arrives",
        "comm/handle.py",
        "self._handles[-1].then(action)\n",
        OrderProgram(2, "zeroed in place"),
        new="action()\n",
    ),
    Fault(
        "the host reads found_inf and the norm before their copy arrives",
        "comm/streams.py",
        "self._event.synchronize()",
        OrderProgram(2),
    ),
    Fault(
        "parameters are gathered before they are updated",
        "engine.py",
        "for batch, here in self.states.to_update(by):\n            batch.update(here)",
        OrderProgram(2),
        new="for shard in self.states.shards[::-1]:\n            shard.bucket.unsharding.start()\n"
        "        for batch, here in self.states.to_update(by):\n            batch.update(here)\n            continue",
    ),
    Fault(
        "units of the next forward are gathered before they are updated",
        "engine.py",
        "stale = {shard.bucket.flat for shard in self.states.shards}",
        OrderProgram(3),
        new="stale = {shard.bucket.flat for shard in self.states.shards}\n"
        "        if self._ahead is not None:\n            self._ahead.gather_ahead(())",
    ),
    Fault(
        "a forward reads parameters before their gather arrives",
        "grads/bucket.py",
        "self.pending.wait()\n                    self.end()",
        OrderProgram(2, "overlapped"),
        new="self.end()",
    ),
    Fault("a unit is used before its gather arrives", "units/unit.py", "gather.wait()", OrderProgram(3)),
    Fault(
        "a unit is resharded while another stream uses it",
        "comm/streams.py",
        "keep_for_current_stream(tensor)\n        storage.resize_(0)",
        OrderProgram(3, "kept, on two streams"),
        new="storage.resize_(0)",
        shows="is freed, and may be used again there",
    ),
    Fault(
        "a buffer is freed while the stream that trains reads it",
        "comm/handle.py",
        "keep_for_current_stream(buffer)",
        OrderProgram(2, "two optimizers", DEFAULT, SIDE),
        shows="is freed, and may be used again there",
    ),
    Fault(
        "a unit is copied from host memory before its storage is free",
        "params/flat_params.py",
        "self._lane.after(self._allocated)",
        OrderProgram(3, "parameters on the host"),
        shows="whose earlier work may still use it",
    ),
    Fault(
        "a gather does not wait for its read from the disk",
        "stores/disk_pages.py",
        'self.backing.wait_for(self, "reading")',
        OrderProgram(3, "parameters on a disk"),
    ),
    Fault(
        "a unit is read from the disk into a buffer that is still copied to the device",
        "stores/disk_pages.py",
        "mark.wait()  # else",
        OrderProgram(3, "parameters on a disk"),
        new="pass  # else",
    ),
    Fault(
        "a page of state is updated before it arrives from host memory",
        "stores/paged_store.py",
        "page.arrived.order_current()",
        OrderProgram(2, "paged"),
    ),
    Fault(
        "a page of state is overwritten by the next one before it has left",
        "stores/paged_store.py",
        "lane.after(frame.free)",
        OrderProgram(2, "paged"),
    ),
    Fault(
        "the host updates parameters before they arrive",
        "step/workplace.py",
        "self._brought.wait()",
        OrderProgram(2, "updated on the host"),
        shows="the host (",
    ),
    Fault(
        "the host waits on the current GPU, which is another rank's",
        "stores/host_memory.py",
        "with on_device(self._device):\n            self.event.synchronize()",
        OrderProgram(2, "updated on the host"),
        new="self.event.synchronize()",
        shows="GPU 0 is used, and not GPU 1",
        simulated=ON_GPU_1,
    ),
)


def check(fault: Fault, seconds: float = PROGRAM_SECONDS) -> str:
    """What shows the fault, in a line. Empty: nothing. Raises RankFailure where ranks fail for another reason."""
    with _faulty_package(fault) as folder, _found_in(folder):
        pool = RankPool(fault.simulated)
        try:
            pool.run(2, train_all, ([fault.program],), seconds)
        except RankFailure as failure:
            shown = [line for line in str(failure).splitlines() if fault.shows in line]
            if not shown:
                raise
            return shown[0].strip()
        finally:
            pool.end()
    return ""


@contextlib.contextmanager
def _faulty_package(fault: Fault) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder, PACKAGE.name)
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / fault.file).write_text(fault.applied())
        yield Path(folder)


@contextlib.contextmanager
def _found_in(folder: Path) -> Iterator[None]:
    """Processes that are started within it import the package in ``folder``."""
    path = [str(folder), str(PACKAGE.parent), str(TESTS.parent), str(TESTS)]
    given = {
        "PYTHONPATH": os.pathsep.join(path),
        "GLOO_TIMEOUT_SECONDS": str(COLLECTIVE_SECONDS),
        "ZERO_KERNELS_BACKEND": "reference",
    }
    with mock.patch.dict(os.environ, given), mock.patch.object(sys, "path", [*path, *sys.path]):
        yield
