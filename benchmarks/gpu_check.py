"""The proof on a GPU in one command: build, test, train, measure; one JSON record, one plot, one table of outcomes.

    make gpu-check PYTHON=python3
    make gpu-check PYTHON=python3 ARGS="--nccl /path/to/libnccl.so.2"
    python benchmarks/gpu_check.py --only build test_capture

Each phase is a process with a limit of its own, and all share SECONDS: one that hangs is ended with its children, one
that fails does not stop those after it, and what was measured is on disk after each. <date>-<commit>.json and .png go
to $OUT, else to benchmarks/results/<device>; the whole output, gpu-check.log, to $OUT, else to build/.

Tests of several NCCL ranks need as many GPUs, or an NCCL that lets ranks share one (2.30). Where neither is there, they
are skipped, and the reason is told behind the phase. --nccl PATH preloads a newer NCCL for them.

Exit codes: 0, 1 when a phase failed or found no time, 2 without torch or a CUDA device, or for a bad flag.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_nccl

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
SECONDS = 530.0
LEAST = 5.0  # a phase with fewer seconds left is not started
KEPT = 15.0  # seconds for the plot and the table at the end
GRACE = 5.0  # between asking a phase to end and ending it
TAIL = 30  # lines shown of a phase that failed
CHOICES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OUT", "PYTEST_ADDOPTS")
CHOICES += ("ZERO_KERNELS_BACKEND", "ZERO_KERNELS_ISA", "TRITON_INTERPRET")
CHOICES += (
    "TORCH_CUDA_SANITIZER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "ZERO_KERNELS_ORDER_PROGRAMS",
)
ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # which may have no other interface
TOOLKIT = "/usr/local/cuda/bin"  # nvcc and compute-sanitizer, where the PATH lacks them
REHEARSED = ("adam_step", "step")  # of the benchmarks
STORES = ("paged 0", "cpu", "torchao")  # of the contenders of offload
FEW = {"ZERO_KERNELS_ORDER_PROGRAMS": "few"}  # of the programs of test_work_order
SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # all streams share one queue to the device
TWO_RANKS = "test_programs and 2-"

OWN_RESULTS = ("trainer", "memory")  # phases whose JSON is no table of rows

OK, FAILED, TIMED_OUT, NOT_RUN = "ok", "failed", "timed out", "not run"


@dataclass(frozen=True)
class Phase:
    """A command and the most seconds that it may take. Rows and results that it writes lie in ``folder``."""

    name: str
    command: Sequence[str]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How a phase ended; ``note`` is its last line, or why it did not run; ``skipped``: why tests of it did not run."""

    phase: str
    result: str
    seconds: float
    note: str
    skipped: Sequence[str] = ()


# ---- the phases ------------------------------------------------------------------------------------------------------


def phases(scratch: Path, *, rehearse: bool, nccl: Path | None = None) -> list[Phase]:
    """In the order of what is most worth knowing, should the time run out."""
    device = "cpu" if rehearse else "cuda"
    build = Phase("build", [sys.executable, str(HERE / "gpu_build.py"), device], 150)
    if rehearse:
        trainer = _trainer(scratch, device, "--tiny", "--steps", "3", "--stages", "0", "--dtypes", "bf16")
        tiny = "--numel", "4096", "--rounds", "2"
        return [
            build,
            _tests("test_large", 60, device),
            _tests("test_work_order", 120, device),
            _tests("test_nccl_ranks", 300, device),
            trainer,
            _memory(scratch, device, "--params", "4e6"),
            *(_bench(scratch, op, 60, device, *tiny) for op in REHEARSED),
            _bench(scratch, "offload", 120, device, *tiny, "--contenders", "paged 0"),
        ]
    ranks = {} if nccl is None else {"LD_PRELOAD": os.pathsep.join(filter(None, [str(nccl), _preloaded()]))}
    return [
        build,
        _tests("test_bit_contract", 170, device),
        _tests("test_no_sync", 60, device),
        _tests("test_capture", 60, device),
        _tests("test_optimizer", 120, device, ranks),
        _tests("test_units", 120, device, ranks),
        _tests("test_checkpoints", 60, device),
        _tests("test_buffers", 60, device, ranks),
        _tests("test_stores", 90, device),
        _tests("test_work_order", 90, device),
        _order("order_sanitized", "test_work_order", 90, SANITIZER | FEW),
        _tests("test_nccl_ranks", 150, device, ranks),
        _trainer(scratch, device),
        _memory(scratch, device),
        _bench(scratch, "adam_step", 80, device),
        _bench(scratch, "step", 100, device),
        _bench(scratch, "offload", 90, device, "--numel", "2^27", "--rounds", "5", "--contenders", *STORES),
        _tests("test_large", 60, device),
        _tests("test_memcheck", 160, device),
        _order("order_one_queue", "test_work_order", 90, SANITIZER | ONE_QUEUE | FEW),
        _order("nccl_one_queue", "test_nccl_ranks", 90, ranks | ONE_QUEUE, "-k", TWO_RANKS),
        _order("nccl_sanitized", "test_nccl_ranks", 120, ranks | SANITIZER, "-k", TWO_RANKS),
        _bench(scratch, "pack", 60, device),
        _bench(scratch, "grad_stats", 60, device),
    ]


def _preloaded() -> str | None:
    return os.environ.get("LD_PRELOAD")


def _tests(name: str, limit: float, device: str, environment: Mapping[str, str] | None = None) -> Phase:
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=5"]
    command = [*pytest, str(ROOT / "tests" / "gpu" / f"{name}.py")]
    return Phase(name, command, limit, {"ZERO_KERNELS_GPU_TESTS_ON": device, **(environment or {})})


def _order(name: str, tests: str, limit: float, environment: Mapping[str, str], *flags: str) -> Phase:
    """Tests that another phase runs as well, under another environment."""
    phase = _tests(tests, limit, "cuda", environment)
    return replace(phase, name=name, command=[*phase.command, *flags])


def _trainer(scratch: Path, device: str, *flags: str) -> Phase:
    folder = scratch / "trainer"
    out = ["--device", device, "--out", str(folder / "trainer.json")]
    return Phase("trainer", [sys.executable, str(HERE / "gpu_trainer.py"), *out, *flags], 90, folder=folder)


def _memory(scratch: Path, device: str, *flags: str) -> Phase:
    folder = scratch / "memory"
    out = ["--device", device, "--out", str(folder / "memory.json")]
    return Phase("memory", [sys.executable, str(HERE / "gpu_memory.py"), *out, *flags], 60, folder=folder)


def _bench(scratch: Path, op: str, limit: float, device: str, *flags: str) -> Phase:
    folder = scratch / f"bench_{op}"
    command = [sys.executable, "-m", "zero_optim", "bench", op, "--device", device, "--out", str(folder), *flags]
    return Phase(f"bench_{op}", command, limit, folder=folder)


# ---- running them ----------------------------------------------------------------------------------------------------


def run_phase(phase: Phase, limit: float, log: Path) -> Outcome:
    """Run the phase for at most ``limit`` seconds, its output at the end of ``log``; nothing of it outlives this."""
    begin = time.monotonic()
    if phase.folder is not None:
        phase.folder.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        out.write(f"\n==== {phase.name} (at most {limit:.0f} s): {' '.join(phase.command)}\n".encode())
        out.flush()
        start = out.tell()
        process = subprocess.Popen(
            phase.command,
            cwd=ROOT,
            env=environment(phase.environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            end(process)
    result = TIMED_OUT if code is None else FAILED if code else OK
    with log.open("rb") as written:
        written.seek(start)
        said = [line for line in written.read().decode(errors="replace").splitlines() if line.strip()]
    if result != OK:
        print("\n".join(f"    {line[:200]}" for line in said[-TAIL:]), flush=True)
    note = said[-1].strip() if said else "it said nothing"
    return Outcome(phase.name, result, round(time.monotonic() - begin, 1), note[:160], reasons(said))


def reasons(said: Sequence[str]) -> list[str]:
    """Why pytest has skipped tests: each reason once, in the order of its summary."""
    told = (re.fullmatch(r"SKIPPED \[\d+\] \S+?:\d+: (.*)", line.strip()) for line in said)
    return list(dict.fromkeys(match[1] for match in told if match))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's, with the checkout importable, and without what would choose ranks or backends for a phase."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    modules = [str(ROOT), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    paths = {"PYTHONPATH": os.pathsep.join(modules), "PATH": os.pathsep.join((os.environ.get("PATH", ""), TOOLKIT))}
    here = ONE_MACHINE if sys.platform == "linux" else {}
    return {**here, **kept, **paths, "PYTHONUNBUFFERED": "1", **more}


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process, where it still runs, and all that it started, in whatever sessions they are."""
    children = descendants(process.pid) if process.poll() is None else []
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    _signal_group(process.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    process.wait()


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(OSError):  # all of it has ended
        os.killpg(leader, number)


def descendants(pid: int) -> list[int]:
    """Processes started by ``pid`` or by one of its descendants, on a system that has /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


# ---- the record ------------------------------------------------------------------------------------------------------


class Results:
    """What the phases have given so far; ``save`` after each, so that nothing is lost to what comes later."""

    def __init__(self, device: Any, folder: Path) -> None:
        from zero_optim.bench import record

        self.folder = folder
        self.record: dict[str, Any] = {**record.make_record([], device, {}), "phases": []}
        self.path: Path | None = None
        self._write = record.write

    def take(self, phase: Phase, outcome: Outcome) -> Outcome:
        """Add the outcome, and the rows or the results that the phase has written, which then make its note."""
        for path in sorted(phase.folder.glob("*.json")) if phase.folder else []:
            try:
                given = json.loads(path.read_text())
            except ValueError:  # the phase was ended while it wrote
                continue
            if phase.name in OWN_RESULTS:
                self.record[phase.name] = given
            else:
                self.record["rows"] += given["rows"]
                self.record["baselines"].update(given["baselines"])
                outcome = replace(outcome, note=headline(given["rows"]))
        self.record["phases"].append(asdict(outcome))
        return outcome

    def save(self) -> Path:
        """Write the record: under a new name the first time, over it from then on."""
        if self.path is None:
            self.path = self._write(self.record, self.folder)
        else:
            self.path.write_text(json.dumps(self.record, indent=1) + "\n")
        return self.path

    def draw(self) -> str:
        """The plot's path, or why there is none."""
        if not self.record["rows"]:
            return "no plot: nothing was measured"
        try:
            return " ".join(map(str, self._draw_all()))
        except Exception as error:  # the figures are on disk: a drawing must not hide them
            return f"no plot: {type(error).__name__}: {error}"

    def _draw_all(self) -> Iterator[Path]:
        """One of speed under the roof, and one of stores."""
        from zero_optim.bench.bars import draw_bars
        from zero_optim.bench.panels import offload_sheet
        from zero_optim.bench.roofline import draw

        path = self.save().with_suffix(".png")
        of_stores = [row for row in self.record["rows"] if row["op"] == "offload"]
        under_the_roof = [row for row in self.record["rows"] if row["op"] != "offload"]
        if under_the_roof:
            draw({**self.record, "rows": under_the_roof}, path)
            yield path
        if of_stores:
            beside = path.with_name(f"{path.stem}-offload.png")
            draw_bars(offload_sheet(self.record), self.record, beside)
            yield beside


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Each backend's share of the yardstick, and its speed against torch, at the largest size of the first dtype."""
    from zero_optim.bench.table import elements

    if any(row["op"] == "offload" for row in rows):
        held = [row for row in rows if row["part"] == "step" and row["fraction"] is not None]
        return "of bound: " + ", ".join(f"{row['backend']} {row['fraction']:.2f} ({row['bound']})" for row in held)
    measured = [row for row in rows if row["fraction"] is not None and row["backend"] != row["yardstick"]]
    if not measured:
        return "no rows"
    dtype, numel = measured[0]["dtype"], max(row["numel"] for row in measured)
    shown = [row for row in measured if (row["dtype"], row["numel"]) == (dtype, numel)]
    figures = [f"{row['backend']} {row['fraction']:.2f} ({row['vs_torch']:.2f}x)" for row in shown]
    return f"{dtype}, {elements(numel)}, of {shown[0]['yardstick']} (vs torch): {', '.join(figures)}"


def summary(outcomes: Sequence[Outcome]) -> str:
    width = max([len(outcome.phase) for outcome in outcomes], default=5)
    lines = [f"{'phase':{width}}  {'':9}  {'seconds':>7}"]
    lines += [f"{o.phase:{width}}  {o.result:9}  {o.seconds:7.1f}  {o.note[:110]}" for o in outcomes]
    return "\n".join(lines)


# ---- the whole -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    sys.path[:0] = [str(ROOT), str(ROOT / "python")]
    try:
        import torch
    except ImportError as error:
        print(f"gpu-check: {sys.executable} can't import torch ({error}); name another by PYTHON=", file=sys.stderr)
        return 2
    if not options.rehearse and not torch.cuda.is_available():
        why = "torch sees no CUDA device" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        print(f"gpu-check: {why}", file=sys.stderr)
        return 2
    from zero_optim.bench.record import results_folder

    device = torch.device("cpu" if options.rehearse else "cuda")
    folder = results_folder(device, options.out)
    log = (options.out or ROOT / "build") / "gpu-check.log"
    for needed in (folder, log.parent):
        needed.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a phase is ended too
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        known = phases(Path(scratch), rehearse=options.rehearse, nccl=options.nccl)
        wanted = [phase for phase in known if phase.name in (options.only or [phase.name])]
        return check(wanted, Results(device, folder), log, options.seconds)


def check(wanted: Sequence[Phase], results: Results, log: Path, seconds: float) -> int:
    """Run the phases within ``seconds``, saving as they end; then the plot and the table. The exit code."""
    deadline = time.monotonic() + seconds
    log.unlink(missing_ok=True)
    outcomes = []
    for phase in wanted:
        left = deadline - KEPT - time.monotonic()
        if left < LEAST:
            outcome = Outcome(phase.name, NOT_RUN, 0.0, f"no time left of {seconds:.0f} s")
        else:
            print(f"{phase.name} ...", flush=True)
            outcome = run_phase(phase, min(phase.limit, left), log)
        outcomes.append(results.take(phase, outcome))
        results.save()
        print(f"{phase.name} {outcome.result}, {outcome.seconds:.1f} s: {outcomes[-1].note}", flush=True)
        for reason in outcome.skipped:
            print(f"    skipped: {reason}", flush=True)
    plot = results.draw()
    print(f"\n{summary(outcomes)}\n\n{results.save()}\n{plot}\n{log}", flush=True)
    return 0 if all(outcome.result == OK for outcome in outcomes) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="build, test, train and measure on this machine's GPU")
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=Path(out) if out else None, help="folder of the files ($OUT)")
    names = [phase.name for phase in phases(Path(), rehearse=False)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PHASE", help=f"of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for all phases ({SECONDS:.0f})")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU at tiny sizes: shows that the phases run")
    parser.add_argument(
        "--nccl", type=_nccl_library, metavar="PATH", help="a libnccl.so.2 of 2.30 or later, for tests of several ranks"
    )
    return parser.parse_args(arguments)


def _nccl_library(text: str) -> Path:
    """The file, as an absolute path. Raises ArgumentTypeError, for argparse, which puts the flag's name before it."""
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file; the wheel has it in nvidia/nccl/lib/{gpu_nccl.SONAME}")
    if {" ", ":"} & {*str(path)}:
        raise argparse.ArgumentTypeError(f"{path} has a space or a colon in it, at which LD_PRELOAD would part it")
    try:
        version = gpu_nccl.version_of(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if version < gpu_nccl.SHARES_A_GPU:
        have, need = gpu_nccl.dotted(version), gpu_nccl.dotted(gpu_nccl.SHARES_A_GPU)
        raise argparse.ArgumentTypeError(f"{path} is NCCL {have}; ranks share a GPU from {need} on")
    return path


if __name__ == "__main__":
    sys.exit(main())
