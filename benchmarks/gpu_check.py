"""The check on a GPU: build, ``pytest -m gpu`` and the benchmarks, in parts of at most nine minutes.

    make gpu-check PYTHON=python3 ARGS="--part a"
    make gpu-check PYTHON=python3 ARGS="--part c --nccl /path/to/libnccl.so.2"
    python benchmarks/gpu_check.py --only build test_capture

Without --part all parts run, one after another. Each phase is a process with a limit of its own: one that hangs is
ended with its children, and one that fails does not stop those after it. Benchmarks write their results to $OUT, else
to benchmarks/results/<device>. So does the check: <date>-<commit>-gpu-<part>.json has the outcome of each phase. The
output of all of them is in gpu-check-<part>.log, in $OUT or in build/.

Tests of several NCCL ranks need as many GPUs, or an NCCL that lets ranks use one together (2.30): --nccl PATH preloads
it for them. Without either they are skipped, with the reason.

Exit codes: 0, 1 when a phase failed or found no time, 2 without torch or a CUDA device, or for a bad flag.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_ranks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SECONDS, KEPT = 530.0, 10.0  # of a part; of it for the end
REHEARSED_SLOWER = 4  # factor of the limits on a CPU
GRACE = 5.0  # seconds between asking a phase to end and killing it
SKIP_CODE, NO_TESTS = 77, 5  # exit codes: of a script that cannot do its work here, and of pytest without tests
OK, SKIPPED, FAILED, TIMED_OUT, NOT_RUN = "ok", "skipped", "failed", "timed out", "not run"

SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # all streams go through one queue to the device
FEW = {"ZERO_KERNELS_ORDER_PROGRAMS": "few"}  # of the order programs: all of them take longer than there is time
ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}  # several ranks on it, where NVLS can't be had
CHOICES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OUT", "PYTEST_ADDOPTS", "ZERO_KERNELS_BACKEND")
CHOICES += ("ZERO_KERNELS_ISA", "TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING", *SANITIZER, *ONE_QUEUE)
TOOLKIT = "/usr/local/cuda/bin"  # nvcc, ncu and compute-sanitizer, where the PATH lacks them

PARTS = {
    "a": "the kernels: build, smoke, figures, one profiled launch each, no host syncs, capture",
    "b": "bits on every backend, stores, units, checkpoints; compute-sanitizer; more than 2^31 elements",
    "c": "NCCL: several ranks on one GPU, and every collective on one rank",
    "d": "stream order under the sanitizer; memory, training, stores, sleep",
    "e": "Muon's symmetric products in Triton; curves of smaller state",
}


@dataclass(frozen=True)
class Phase:
    """A command and the most seconds that it may take. ``after``: a phase without whose success it is not run."""

    name: str
    command: Sequence[str]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    after: str | None = None


@dataclass(frozen=True)
class Outcome:
    """``note``: the last line of output, or why it did not run. ``skipped``: pytest's reasons."""

    phase: str
    result: str
    seconds: float
    note: str
    skipped: Sequence[str] = ()


# -- the parts: lists of groups, whose phases run at the same time -----------------------------------------------------


@dataclass(frozen=True)
class Maker:
    """Makes phases. ``device``: cuda, or cpu for a rehearsal at tiny sizes. ``nccl``: a library that ranks preload."""

    device: str
    out: Path
    nccl: Path | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def tiny(self) -> tuple[str, ...]:
        return () if self.on_gpu else ("--numel", "4096", "--rounds", "2")

    @property
    def on_one_gpu(self) -> Mapping[str, str]:
        """The environment of several ranks on one GPU."""
        if self.nccl is None:
            return ONE_GPU
        return {**ONE_GPU, "LD_PRELOAD": os.pathsep.join(filter(None, [str(self.nccl), os.environ.get("LD_PRELOAD")]))}

    def script(self, name: str, limit: float, file: str, *flags: str) -> Phase:
        command = [sys.executable, str(HERE / file), *flags, "--device", self.device, "--out", str(self.out)]
        return Phase(name, command, limit)

    def bench(self, op: str, limit: float) -> Phase:
        flags = ["--dtypes", "bf16", *self.tiny, "--device", self.device, "--out", str(self.out)]
        return Phase(f"bench_{op}", [sys.executable, "-m", "zero_optim", "bench", op, *flags], limit)

    def tests(self, file: str, limit: float, *flags: str, name: str = "", more: Mapping[str, str] = {}) -> Phase:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=5"]
        folder = ROOT / "tests" / ("kernels" if file == "test_bit_contract" else "gpu")
        command += ["-o", "faulthandler_timeout=50", str(folder / f"{file}.py"), *flags]
        if importlib.util.find_spec("xdist"):
            command.append("-n0")  # phases already run at the same time
        return Phase(name or file, command, limit, {"ZERO_KERNELS_GPU_TESTS_ON": self.device, **more})

    def ranks(self, file: str, limit: float, *flags: str, name: str = "", more: Mapping[str, str] = {}) -> Phase:
        made = self.tests(file, limit, *flags, name=name, more={**self.on_one_gpu, **more})
        return replace(made, after="nccl_two_ranks")

    def smoke(self, backend: str, count: int = 1) -> list[Phase]:
        """Run every op once at small and odd sizes."""
        command = [sys.executable, str(ROOT / "tests" / "gpu" / "memcheck_ops.py"), backend, self.device]
        return [Phase(f"smoke_{backend}_{n}", [*command, f"{n}/{count}"], 100) for n in range(1, count + 1)]

    def split(self, phase: Phase, count: int) -> list[Phase]:
        """Split the tests of a phase into ``count`` phases; not on a CPU, which has too few cores."""
        if not self.on_gpu:
            return [phase]
        return [
            replace(
                phase,
                name=f"{phase.name}_{number}",
                environment={**phase.environment, "ZERO_KERNELS_GPU_TESTS_PART": f"{number}/{count}"},
            )
            for number in range(1, count + 1)
        ]


Groups = list[list[Phase]]
ALONE, SEVERAL = ("-m", "gpu and not ranks"), ("-m", "gpu and ranks")


def kernels(make: Maker) -> Groups:
    build = Phase("build", [sys.executable, str(HERE / "gpu_build.py"), make.device], 100)
    return [
        [build],
        [*make.smoke("cuda"), *make.smoke("triton", 6)] if make.on_gpu else make.smoke("cpu"),
        *([make.bench(op, limit)] for op, limit in (("adam_step", 80), ("pack", 40), ("grad_stats", 40))),
        [make.script("profile", 60, "gpu_profile.py")],
        [make.tests(name, 60) for name in ("test_no_sync", "test_capture", "test_muon_steps")],
    ]


def bits(make: Maker) -> Groups:
    # In five parts, as with four, the number of backends, one would get all of Triton. A CPU has it in its suite.
    together = make.split(make.tests("test_bit_contract", 240), 5) if make.on_gpu else []
    together += [make.tests(f"test_{name}", 240) for name in ("checkpoints", "stores")]
    together += [make.tests(f"test_{name}", 240, *ALONE) for name in ("optimizer", "units")]
    at_once = [together] if make.on_gpu else [[phase] for phase in together]
    return [*at_once, [make.tests("test_memcheck", 170)], [make.tests("test_large", 80)]]


def nccl_ranks(make: Maker) -> Groups:
    pair = Phase("nccl_two_ranks", [sys.executable, str(HERE / "gpu_ranks.py"), make.device], 30, make.on_one_gpu)
    of_ranks = [make.ranks("test_each_collective", 80, *SEVERAL, name="collectives_ranks")] if make.on_gpu else []
    of_ranks += [make.ranks("test_buffers", 80)]
    of_ranks += [make.ranks(f"test_{name}", 80, *SEVERAL, name=f"{name}_ranks") for name in ("optimizer", "units")]
    again: list[Phase] = []
    for name, more in (("nccl_one_queue", ONE_QUEUE), ("nccl_sanitized", SANITIZER)) if make.on_gpu else ():
        pairs = ("-k", "test_programs and 2-")
        again += make.split(make.ranks("test_nccl_ranks", 100, *pairs, name=name, more={**more, **FEW}), 2)
    return [
        [pair],
        [make.tests("test_each_collective", 50, *ALONE)],
        of_ranks,
        make.split(make.ranks("test_nccl_ranks", 130, more=FEW), 3),
        make.split(make.ranks("test_nccl_topologies", 80), 3),
        again,
    ]


def training(make: Maker) -> Groups:
    order = make.split(make.tests("test_work_order", 150), 4)
    sanitized = (("order_sanitized", SANITIZER), ("order_one_queue", {**SANITIZER, **ONE_QUEUE}))
    for name, more in sanitized if make.on_gpu else ():
        order += make.split(make.tests("test_work_order", 150, name=name, more={**more, **FEW}), 5)
    one_rank = ("--ranks", "1", *make.tiny)
    stages = ("stages", "--contenders", "stage0", "stage2", "stage3", *one_rank)
    stores = ("--numel", "2^27", "--rounds", "5") if make.on_gpu else make.tiny
    return [
        order,
        [make.script("memory", 60, "gpu_memory.py")],
        [make.script("trainer", 100, "gpu_trainer.py")],
        [make.script("train_step", 60, "bench_training.py", "train_step", "--contenders", "stage2", *one_rank)],
        [make.script("stages", 85, "bench_training.py", *stages)],
        [make.script("offload", 65, "bench_offload.py", *stores)],
    ]


def products(make: Maker) -> Groups:
    interpreted = {} if make.on_gpu else {"TRITON_INTERPRET": "1"}
    curves = make.script("convergence", 180, "bench_convergence.py", "--at-once", "8", "--lr", "0.001")
    return [
        [make.tests("test_symmetric_product", 120, more=interpreted)],
        [make.script("link", 100, "bench_link.py", *(() if make.on_gpu else make.tiny))],
        *([[curves]] if make.on_gpu else []),
    ]


MAKE = {"a": kernels, "b": bits, "c": nccl_ranks, "d": training, "e": products}


def groups_of(part: str, device: str, out: Path, nccl: Path | None = None) -> Groups:
    """Make the groups of a part."""
    return MAKE[part](Maker(device, out, nccl))


# -- running them ------------------------------------------------------------------------------------------------------


class Run:
    """The run of a part: its log, and its record, which is written after each phase."""

    def __init__(self, part: str, result: Any, logs: Path, seconds: float) -> None:
        self.outcomes: list[Outcome] = []
        self._deadline = time.monotonic() + seconds - KEPT
        self._log, self._result = logs / f"gpu-check-{part}.log", result
        self._log.unlink(missing_ok=True)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def group(self, phases: Sequence[Phase]) -> None:
        """Run the phases at the same time."""
        with ThreadPoolExecutor(max(1, len(phases))) as pool:
            try:
                list(pool.map(lambda phase: self._take(self._outcome(phase, len(phases))), phases))
            except BaseException:  # Ctrl-C, or SIGTERM: the threads would wait for their phases
                for process in list(self._running):
                    end(process)
                raise

    def say(self, line: str, *, show: bool = True) -> None:
        with self._lock, self._log.open("a") as out:
            out.write(f"{line}\n")
            if show:
                print(line[:300], flush=True)

    def _take(self, outcome: Outcome) -> None:
        self.say(f"{outcome.phase} {outcome.result}, {outcome.seconds:.1f} s: {outcome.note}")
        for reason in outcome.skipped:
            self.say(f"    skipped: {reason}")
        with self._lock:
            self.outcomes.append(outcome)
            self._result.add([{"op": "phase", "backend": outcome.phase, **asdict(outcome)}])

    def _outcome(self, phase: Phase, at_once: int) -> Outcome:
        needed = next((of for of in self.outcomes if of.phase == phase.after), None)
        if needed is not None and needed.result != OK:
            return Outcome(
                phase.name, SKIPPED if needed.result == SKIPPED else NOT_RUN, 0, f"{phase.after} {needed.result}"
            )
        limit = min(phase.limit, self._deadline - time.monotonic())
        if limit < GRACE:
            return Outcome(phase.name, NOT_RUN, 0, "no time left")
        begin, lines = time.monotonic(), list[str]()
        self.say(f"{phase.name} ... (at most {limit:.0f} s)\n{phase.name}| {' '.join(phase.command)}", show=False)
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))} if at_once > 1 else {}
        process = subprocess.Popen(
            phase.command,
            cwd=ROOT,
            env=environment({**threads, **phase.environment}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._running.add(process)
        listener = threading.Thread(target=self._listen, args=(process, phase.name, lines), daemon=True)
        listener.start()
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            end(process)
            self._running.discard(process)
            listener.join(GRACE)
        result = verdict(code, lines)
        if result in (FAILED, TIMED_OUT):
            print("\n".join(f"    {line[:200]}" for line in lines[-30:]), flush=True)
        skipped = (
            match[1] for line in lines if (match := re.fullmatch(r"SKIPPED \[\d+\] \S+?:\d+: (.*)", line.strip()))
        )
        note = lines[-1].strip()[:160] if lines else "no output"
        return Outcome(phase.name, result, round(time.monotonic() - begin, 1), note, list(dict.fromkeys(skipped)))

    def _listen(self, process: subprocess.Popen[bytes], name: str, lines: list[str]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            if line := raw.decode(errors="replace").rstrip():
                lines.append(line)
                self.say(f"{name}| {line}", show=False)


def verdict(code: int | None, lines: Sequence[str]) -> str:
    """Judge by exit code (None: ended at its limit) and output. A phase whose tests were all skipped is not ok."""
    last = lines[-1] if lines else ""
    skipped, ran = re.search(r"\b\d+ skipped", last), re.search(r"\b\d+ (passed|failed|xfailed|error)", last)
    if code is None:
        return TIMED_OUT
    if code == SKIP_CODE or (code in (0, NO_TESTS) and skipped and not ran):
        return SKIPPED
    return FAILED if code else OK


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Make a phase's environment: this process's without CHOICES, and with the checkout on PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    modules = [str(ROOT), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    paths = {"PYTHONPATH": os.pathsep.join(modules), "PATH": os.pathsep.join((os.environ.get("PATH", ""), TOOLKIT))}
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**local, **kept, **paths, "PYTHONUNBUFFERED": "1", **more}


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs, and all its descendants, also those in other sessions.

    SIGINT comes first, as by Ctrl-C, so that pytest reports the failures so far.
    """
    children = list(descendants(process.pid)) if process.poll() is None else []
    for number in (signal.SIGINT, signal.SIGTERM):
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    for kill, pid in ((os.killpg, process.pid), *((os.kill, child) for child in children)):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> Iterator[int]:
    """Find the processes started by ``pid`` or by one of its descendants, on a system that has /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    for child in [child for child, parent in parents.items() if parent == pid]:
        yield child
        yield from descendants(child)


# -- the command -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
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
    from zero_optim.bench.record import Result, results_folder

    device = torch.device("cpu" if options.rehearse else "cuda")
    folder, logs = results_folder(device, options.out), options.out or ROOT / "build"
    logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a phase is ended, too
    slower = REHEARSED_SLOWER if options.rehearse else 1
    passed = True
    for part in options.part or PARTS:
        run = Run(part, Result(device, folder, about=f"gpu-{part}"), logs, (options.seconds or SECONDS) * slower)
        for group in groups_of(part, device.type, folder, options.nccl):
            chosen = [phase for phase in group if not options.only or phase.name in options.only]
            run.group([replace(phase, limit=phase.limit * slower) for phase in chosen])
        for of in run.outcomes:
            print(f"{of.phase:24} {of.result:9} {of.seconds:7.1f} s  {of.note[:110]}")
        passed &= all(of.result in (OK, SKIPPED) for of in run.outcomes)
    return 0 if passed else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "; ".join(f"{part}: {what}" for part, what in PARTS.items())
    parser = argparse.ArgumentParser(description="build, test, train and measure on a GPU", epilog=f"parts: {about}")
    out = os.environ.get("OUT")
    groups = (group for device in ("cuda", "cpu") for part in PARTS for group in groups_of(part, device, Path()))
    names = dict.fromkeys(phase.name for group in groups for phase in group)
    flag = parser.add_argument
    flag("--part", nargs="+", choices=PARTS, help="which parts (all)")
    flag("--out", type=Path, default=Path(out).absolute() if out else None, help="folder of the files ($OUT)")
    flag(
        "--only", nargs="+", choices=dict.fromkeys(names), metavar="PHASE", help=f"of {', '.join(dict.fromkeys(names))}"
    )
    flag("--seconds", type=float, help=f"time for a part ({SECONDS:.0f})")
    flag("--rehearse", action="store_true", help="on the CPU at tiny sizes: shows that the phases run")
    flag("--nccl", type=gpu_ranks.nccl_library, metavar="PATH", help="a libnccl.so.2 of 2.30 or later, to preload")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
