"""The check on a GPU: build, test, train and measure. Each part gives a JSON record, a plot and a table of outcomes.

    make gpu-check PYTHON=python3 ARGS="--part a"
    make gpu-check PYTHON=python3 ARGS="--part c --nccl /path/to/libnccl.so.2"
    python benchmarks/gpu_check.py --only build test_capture
    python benchmarks/gpu_check.py --at-once --seconds 120 --only test_capture test_no_sync test_stores

There are five parts, of at most nine minutes each; `gpu_phases.py` says what is in them. Without --part all of them
run, one after another. Each phase is a process with a limit of its own: one that hangs is ended with its children, and
one that fails does not stop those after it. A phase's output is logged at once, and its figures are on disk within a
second, whatever ends the run. <date>-<commit>-gpu-<part>.json and .png go to $OUT, else to benchmarks/results/<device>;
the whole output, gpu-check-<part>.log, to $OUT, else to build/.

Tests of several NCCL ranks need as many GPUs, or an NCCL that lets ranks share one (2.30). Without either they are
skipped, with the reason. --nccl PATH preloads a newer NCCL for them. --wheel FILE unpacks a wheel for the phases, such
as google_crc32c's, without which no checkpoint is saved.

Exit codes: 0, 1 when a phase failed or found no time, 2 without torch or a CUDA device, or for a bad flag.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gpu_nccl
from gpu_phases import KEPT, PARTS, REHEARSED_SLOWER, SECONDS, Group, Phase, all_groups, groups_of
from gpu_results import Outcome, Results, Verdict, reports, skips, summary, verdict

ROOT = Path(__file__).resolve().parents[1]
LEAST = 5.0  # a group with fewer seconds left is not started
GRACE = 5.0  # seconds between asking a phase to end and killing it
LOOK = 1.0  # seconds between two reads of the files that a phase writes
TAIL = 30  # lines shown of a phase that failed
CHOICES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OUT", "PYTEST_ADDOPTS")
CHOICES += ("ZERO_KERNELS_BACKEND", "ZERO_KERNELS_ISA", "TRITON_INTERPRET")
CHOICES += ("TORCH_CUDA_SANITIZER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING")
ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # which may have no other interface
TOOLKIT = "/usr/local/cuda/bin"  # nvcc, ncu and compute-sanitizer, where the PATH lacks them


# ---- running them ----------------------------------------------------------------------------------------------------


class Log:
    """The output of all phases in one file, written at once. Each line begins with its phase, as several may run at the
    same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.unlink(missing_ok=True)

    def say(self, line: str, *, show: bool = True) -> None:
        with self._lock:
            with self.path.open("a") as out:
                out.write(f"{line}\n")
            if show:
                print(line[:300], flush=True)


running: set[subprocess.Popen[bytes]] = set()


def run_phase(phase: Phase, limit: float, log: Log, look: Callable[[], object] = lambda: None) -> Outcome:
    """Run the phase for at most ``limit`` seconds; none of its processes outlives that. Calls ``look`` every second."""
    begin = time.monotonic()
    if phase.folder is not None:
        phase.folder.mkdir(parents=True, exist_ok=True)
    log.say(f"{phase.name} ... (at most {limit:.0f} s)")
    log.say(f"{phase.name}| {' '.join(phase.command)}", show=False)
    said: list[str] = []
    process = subprocess.Popen(
        phase.command,
        cwd=ROOT,
        env=environment(phase.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    running.add(process)
    listener = threading.Thread(target=_listen, args=(process, phase, log, said), daemon=True)
    listener.start()
    code = None
    try:
        while code is None and (left := begin + limit - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(LOOK, left))
            look()
    finally:
        end(process)
        running.discard(process)
        listener.join(GRACE)
    result = verdict(code, said)
    if not result.passes and not phase.told:
        print("\n".join(f"    {line[:200]}" for line in said[-TAIL:]), flush=True)
    note = said[-1].strip() if said else "it said nothing"
    seconds = round(time.monotonic() - begin, 1)
    return Outcome(phase.name, result, seconds, note[:160], skips(said), reports(said))


def _listen(process: subprocess.Popen[bytes], phase: Phase, log: Log, said: list[str]) -> None:
    assert process.stdout is not None
    for raw in process.stdout:
        line = raw.decode(errors="replace").rstrip()
        if line:
            said.append(line)
            log.say(f"{phase.name}| {line}", show=phase.told)


def run_group(group: Group, left: float, log: Log, results: Results) -> list[Outcome]:
    """Run the phases of a group at the same time, each up to its own limit and at most ``left`` seconds."""

    cores = max(1, (os.cpu_count() or 1) // len(group))
    shared = {"OMP_NUM_THREADS": str(cores)} if len(group) > 1 else {}

    def run(phase: Phase) -> Outcome:
        phase = replace(phase, environment={**shared, **phase.environment})
        needed = results.result_of(phase.after) if phase.after is not None else None
        if needed not in (None, Verdict.OK):  # None: it is not among the phases that were asked for
            result = needed if needed is Verdict.SKIPPED else Verdict.NOT_RUN
            outcome = Outcome(phase.name, result, 0.0, f"{phase.after} {needed.value}")
        elif left < LEAST:
            outcome = Outcome(phase.name, Verdict.NOT_RUN, 0.0, "no time left")
        else:
            outcome = run_phase(phase, min(phase.limit, left), log, lambda: results.look(phase))
        outcome = results.take(phase, outcome)
        log.say(f"{phase.name} {outcome.result.value}, {outcome.seconds:.1f} s: {outcome.note}")
        for reason in outcome.skipped:
            log.say(f"    skipped: {reason}")
        for text in outcome.reported:
            log.say(f"    reported, as no GPU has been measured for it: {text}")
        return outcome

    with ThreadPoolExecutor(len(group)) as pool:
        try:
            return list(pool.map(run, group))
        except BaseException:  # Ctrl-C, or SIGTERM: the threads would wait for their phases
            for process in list(running):
                end(process)
            raise


unpacked: list[Path] = []  # folders of wheels


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Make a phase's environment: this process's without ``CHOICES``, and with the checkout on PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    modules = [str(ROOT), str(ROOT / "python"), *map(str, unpacked), *filter(None, [os.environ.get("PYTHONPATH")])]
    paths = {"PYTHONPATH": os.pathsep.join(modules), "PATH": os.pathsep.join((os.environ.get("PATH", ""), TOOLKIT))}
    here = ONE_MACHINE if sys.platform == "linux" else {}
    return {**here, **kept, **paths, "PYTHONUNBUFFERED": "1", **more}


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs, and all its descendants, also those in other sessions.

    SIGINT comes first, as by Ctrl-C, so that pytest reports the failures so far. A process that ignores it, as one
    started in the background may, gets SIGTERM, and then SIGKILL.
    """
    children = descendants(process.pid) if process.poll() is None else []
    for request in (signal.SIGINT, signal.SIGTERM):
        if process.poll() is None:
            _signal_group(process.pid, request)
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
    """List the processes started by ``pid`` or by one of its descendants, on a system that has /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


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
    folder, logs = results_folder(device, options.out), options.out or ROOT / "build"
    for needed in (folder, logs):
        needed.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a phase is ended too
    codes = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        unpacked[:] = [_unpack(wheel, Path(scratch, "wheels")) for wheel in options.wheel]
        for name, groups in _chosen(options, Path(scratch)):
            results = Results(device, folder, f"gpu-{name}")
            codes.append(check(groups, results, Log(logs / f"gpu-check-{name}.log"), options.seconds))
    return max(codes)


def _chosen(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, list[Group]]]:
    """Give for each part, or for the phases named without a part, a name for its files and its groups."""
    how = {"rehearse": options.rehearse, "nccl": options.nccl}
    if options.only and not options.part:
        yield "some", _only(all_groups(scratch, **how), options)
        return
    for part in options.part or PARTS:
        yield part, _only(groups_of(part, scratch / part, **how), options)


def _only(groups: Sequence[Group], options: argparse.Namespace) -> list[Group]:
    kept = ([phase for phase in group if not options.only or phase.name in options.only] for group in groups)
    found = [group for group in kept if group]
    if not options.at_once:
        return found
    together = [phase for group in found for phase in group]
    names = {phase.name for phase in together}
    first = [phase for phase in together if phase.after not in names]
    return [group for group in (first, [phase for phase in together if phase not in first]) if group]


def check(groups: Sequence[Group], results: Results, log: Log, seconds: float) -> int:
    """Run the groups within ``seconds``, saving as they go, then draw and print the table. Returns the exit code."""
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for group in groups:
        outcomes += run_group(group, deadline - KEPT - time.monotonic(), log, results)
    plot = results.draw()
    log.say(f"\n{summary(outcomes)}\n\n{results.save()}\n{plot}\n{log.path}", show=False)
    print(f"\n{summary(outcomes)}\n\n{results.save()}\n{plot}\n{log.path}", flush=True)
    return 0 if all(outcome.result.passes for outcome in outcomes) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="build, test, train and measure on this machine's GPU",
        epilog="parts: " + "; ".join(f"{part}: {what}" for part, what in PARTS.items()),
    )
    out = os.environ.get("OUT")
    parser.add_argument("--part", nargs="+", choices=PARTS, help="which parts (all)")
    parser.add_argument("--out", type=Path, default=Path(out) if out else None, help="folder of the files ($OUT)")
    every = (phase.name for how in (False, True) for group in all_groups(Path(), rehearse=how) for phase in group)
    names = list(dict.fromkeys(every))
    parser.add_argument("--only", nargs="+", choices=names, metavar="PHASE", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--at-once", action="store_true", help="all of these phases at the same time: for tests; figures need it quiet"
    )
    parser.add_argument("--seconds", type=float, help=f"time for a part ({SECONDS:.0f})")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU at tiny sizes: shows that the phases run")
    parser.add_argument(
        "--nccl", type=_nccl_library, metavar="PATH", help="a libnccl.so.2 of 2.30 or later, for tests of several ranks"
    )
    parser.add_argument("--wheel", type=_wheel, nargs="+", default=[], metavar="FILE", help="wheels for the phases")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or SECONDS * (REHEARSED_SLOWER if options.rehearse else 1)
    return options


def _wheel(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not zipfile.is_zipfile(path):
        raise argparse.ArgumentTypeError(f"{path} is no wheel")
    return path


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder


def _nccl_library(text: str) -> Path:
    """Give the file's absolute path. Raises ArgumentTypeError, before which argparse puts the flag's name."""
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
