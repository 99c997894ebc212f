"""The phases of `make gpu-check`, in five parts, each of at most nine minutes and useful by itself.

A part is a list of groups, and the phases of a group run at the same time. A group's limit is the longest limit of its
phases. The sum of a part's groups, and KEPT, are no more than SECONDS.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TESTS = ROOT / "tests" / "gpu"

SECONDS = 530.0  # of a part
KEPT = 15.0  # of it for the plot and the table at the end
REHEARSED_SLOWER = 4  # factor of the limits on a CPU, which has few cores and no GPU

SIZES = tuple(f"2^{power}" for power in range(20, 31, 2))
STORES = ("paged 0", "cpu", "torchao")  # of the contenders of offload
FEW = {"ZERO_KERNELS_ORDER_PROGRAMS": "few"}  # of the order programs: all of them take longer than there is time
SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # all streams share one queue to the device
INTERPRETED = {"TRITON_INTERPRET": "1"}  # so that a CPU has Triton's kernels
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}  # ranks on one GPU; NVLS can't be had there
ON_RANKS, ALONE = "gpu and ranks", "gpu and not ranks"  # marks of tests
TWO_RANKS = "test_programs and 2-"
SLOW = 50  # seconds after which pytest dumps the threads of a test that still runs
BITS_IN = 5  # processes: one takes too long. Not 4, the number of backends: one process would get all of Triton's
SMOKE_IN = {"triton": 6}  # processes, as Triton has to compile most of its kernels
ORDER_IN, ORDER_AGAIN_IN, NCCL_IN, NCCL_AGAIN_IN = 4, 5, 3, 2  # processes

PARTS = {
    "a": "the kernels: build, smoke, figures, one profiled launch each, no waits, capture",
    "b": "the same bits, stores, units, checkpoints; compute-sanitizer; more than 2^31 elements",
    "c": "NCCL: several ranks on one GPU, and every collective on one rank",
    "d": "the order of work under the sanitizer, memory, training, a training step, stores, sleep",
    "e": "Muon's symmetric products in Triton: right, and where they are faster than torch's; curves of smaller state",
}


@dataclass(frozen=True)
class Phase:
    """A command and the most seconds that it may take. It writes rows and results into ``folder``.

    ``after``: a phase without whose success this one is not run. ``told``: whether its output is shown as it comes;
    else only the last lines are, if it fails.
    """

    name: str
    command: Sequence[str]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    after: str | None = None
    told: bool = False


Group = Sequence[Phase]


def groups_of(part: str, scratch: Path, *, rehearse: bool, nccl: Path | None = None) -> list[Group]:
    """Make a part's groups. ``nccl``: a library that phases of several ranks on one GPU preload."""
    device = "cpu" if rehearse else "cuda"
    preloaded = os.pathsep.join(filter(None, [str(nccl) if nccl else "", os.environ.get("LD_PRELOAD")]))
    ranks = SHARED | ({"LD_PRELOAD": preloaded} if nccl else {})
    groups: list[Group] = {
        "a": lambda: kernels(scratch, device),
        "b": lambda: bits(scratch, device),
        "c": lambda: nccl_ranks(scratch, device, ranks),
        "d": lambda: training(scratch, device),
        "e": lambda: products(scratch, device),
    }[part]()
    if not rehearse:
        return groups
    return [[replace(phase, limit=REHEARSED_SLOWER * phase.limit) for phase in group] for group in groups]


def all_groups(scratch: Path, *, rehearse: bool, nccl: Path | None = None) -> list[Group]:
    return [group for part in PARTS for group in groups_of(part, scratch, rehearse=rehearse, nccl=nccl)]


def seconds_of(groups: Sequence[Group]) -> float:
    """Sum the limits of the groups, in seconds."""
    return sum(max(phase.limit for phase in group) for group in groups)


# ---- the parts -------------------------------------------------------------------------------------------------------


def kernels(scratch: Path, device: str) -> list[Group]:
    on_gpu = device == "cuda"
    build = Phase("build", [sys.executable, str(HERE / "gpu_build.py"), device], 100, told=True)
    sizes = ("--numel", *SIZES) if on_gpu else ("--numel", "4096", "--rounds", "2")
    return [
        [build],
        [phase for backend in (("cuda", "triton") if on_gpu else ("cpu",)) for phase in _smoke(backend, device)],
        [_bench(scratch, "adam_step", 80, device, "--dtypes", "bf16", *sizes)],
        [_bench(scratch, "pack", 40, device, "--dtypes", "bf16", *sizes)],
        [_bench(scratch, "grad_stats", 40, device, "--dtypes", "bf16", *sizes)],
        [_script(scratch, "host_time", "gpu_host_time.py", 30, device)],
        [_script(scratch, "profile", "gpu_profile.py", 50, device)],
        [_tests(name, 60, device) for name in ("test_no_sync", "test_capture", "test_muon_steps")],
    ]


def bits(scratch: Path, device: str) -> list[Group]:
    of_bits = _in_parts(_tests("test_bit_contract", 240, device), BITS_IN)
    alone = [_tests(f"test_{name}", 240, device) for name in ("checkpoints", "stores")]
    alone += [_tests(f"test_{name}", 240, device, {}, "-m", ALONE) for name in ("optimizer", "units")]
    together = [*of_bits, *alone]
    at_once = [together] if device == "cuda" else [[phase] for phase in together]  # a CPU has too few cores
    return [*at_once, [_tests("test_memcheck", 170, device)], [_tests("test_large", 80, device)]]


def nccl_ranks(scratch: Path, device: str, ranks: Mapping[str, str]) -> list[Group]:
    """Make part c. Its first phase tries whether two ranks can share the GPU; where not, phases on ranks do not run."""

    def on_ranks(name: str, tests: str, limit: float, more: Mapping[str, str], *flags: str) -> Phase:
        phase = _tests(tests, limit, device, {**ranks, **more}, *flags)
        return replace(phase, name=name, after="nccl_two_ranks")

    pair = Phase("nccl_two_ranks", [sys.executable, str(HERE / "gpu_two_ranks.py"), device], 30, ranks, told=True)
    programs = on_ranks("test_nccl_ranks", "test_nccl_ranks", 130, FEW)
    topologies = on_ranks("test_nccl_topologies", "test_nccl_topologies", 80, {})
    groups: list[Group] = [
        [pair],
        [_tests("test_each_collective", 50, device, {}, "-m", ALONE)],
        [
            *(
                [on_ranks("collectives_ranks", "test_each_collective", 80, {}, "-m", ON_RANKS)]
                if device == "cuda"
                else []
            ),
            on_ranks("test_buffers", "test_buffers", 80, {}),
            on_ranks("optimizer_ranks", "test_optimizer", 80, {}, "-m", ON_RANKS),
            on_ranks("units_ranks", "test_units", 80, {}, "-m", ON_RANKS),
        ],
        *([phase] if device == "cpu" else _in_parts(phase, NCCL_IN) for phase in (programs, topologies)),
        [replace(_script(scratch, "overlap", "gpu_overlap.py", 40, device), environment=ranks, after=pair.name)],
    ]
    if device == "cpu":
        return groups
    again = [
        on_ranks("nccl_one_queue", "test_nccl_ranks", 100, ONE_QUEUE | FEW, "-k", TWO_RANKS),
        on_ranks("nccl_sanitized", "test_nccl_ranks", 100, SANITIZER | FEW, "-k", TWO_RANKS),
    ]
    return [*groups, [part for phase in again for part in _in_parts(phase, NCCL_AGAIN_IN)]]


def training(scratch: Path, device: str) -> list[Group]:
    if device == "cpu":
        tiny = "--numel", "4096", "--rounds", "2"
        small = "--tiny", "--steps", "3", "--stages", "0", "--dtypes", "bf16"
        return [
            [_tests("test_work_order", 100, device)],
            [_script(scratch, "memory", "gpu_memory.py", 60, device, "--params", "4e6")],
            [_script(scratch, "stages", "gpu_stages.py", 60, device)],
            [_script(scratch, "trainer", "gpu_trainer.py", 100, device, *small)],
            [_bench(scratch, "step", 90, device, *tiny, script="bench_gpt_step.py")],
            [_bench(scratch, "offload", 60, device, *tiny, "--contenders", STORES[0])],
            [_bench(scratch, "sleep", 60, device, *tiny, script="bench_sleep.py")],
        ]
    sanitized = _again("order_sanitized", "test_work_order", 150, SANITIZER | FEW)
    one_queue = _again("order_one_queue", "test_work_order", 150, SANITIZER | ONE_QUEUE | FEW)
    return [
        [
            *_in_parts(_tests("test_work_order", 150, device), ORDER_IN),
            *_in_parts(sanitized, ORDER_AGAIN_IN),
            *_in_parts(one_queue, ORDER_AGAIN_IN),
        ],
        [_script(scratch, "memory", "gpu_memory.py", 30, device)],
        [_script(scratch, "stages", "gpu_stages.py", 60, device)],
        [_script(scratch, "trainer", "gpu_trainer.py", 90, device)],
        [_bench(scratch, "step", 90, device, "--dtypes", "bf16", script="bench_gpt_step.py")],
        [_bench(scratch, "offload", 65, device, "--numel", "2^27", "--rounds", "5", "--contenders", *STORES)],
        [_bench(scratch, "sleep", 30, device, "--numel", "2^28", "--rounds", "5", script="bench_sleep.py")],
    ]


def products(scratch: Path, device: str) -> list[Group]:
    how = {} if device == "cuda" else INTERPRETED
    measured = replace(_script(scratch, "products", "gpu_products.py", 200, device), environment=how)
    groups: list[Group] = [[_tests("test_symmetric_product", 120, device, how)], [measured]]
    return groups if device == "cpu" else [*groups, [_curves(scratch)]]


# ---- a phase ---------------------------------------------------------------------------------------------------------


def _tests(name: str, limit: float, device: str, environment: Mapping[str, str] | None = None, *flags: str) -> Phase:
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=5"]
    pytest += ["-o", f"faulthandler_timeout={SLOW}"]
    command = [*pytest, *_in_this_process(), str(TESTS / f"{name}.py"), *flags]
    return Phase(name, command, limit, {"ZERO_KERNELS_GPU_TESTS_ON": device, **(environment or {})})


def _in_this_process() -> Iterator[str]:
    """Turn pytest-xdist off, where it is installed: phases already run at the same time."""
    if importlib.util.find_spec("xdist") is not None:
        yield "-n0"


def _again(name: str, tests: str, limit: float, environment: Mapping[str, str]) -> Phase:
    """Make a phase of tests that another phase runs too, under another environment."""
    return replace(_tests(tests, limit, "cuda", environment), name=name)


def _in_parts(phase: Phase, count: int) -> list[Phase]:
    """Split the tests of a phase into ``count`` phases, to run at the same time."""
    numbers = range(1, count + 1)
    parts = {number: {"ZERO_KERNELS_GPU_TESTS_PART": f"{number}/{count}"} for number in numbers}
    return [
        replace(phase, name=f"{phase.name}_{number}", environment={**phase.environment, **parts[number]})
        for number in numbers
    ]


def _smoke(backend: str, device: str) -> list[Phase]:
    """Make phases that run every op once at small and odd sizes, to see that it runs at all."""
    command = [sys.executable, str(TESTS / "memcheck_ops.py"), backend, device]
    if (count := SMOKE_IN.get(backend)) is None:
        return [Phase(f"smoke_{backend}", command, 100, told=True)]
    parts = [f"{number}/{count}" for number in range(1, count + 1)]
    return [Phase(f"smoke_{backend}_{part[0]}", [*command, part], 100, told=True) for part in parts]


def _curves(scratch: Path) -> Phase:
    """Make the phase that trains by each form of state, many at a time."""
    folder = scratch / "convergence"
    flags = ["--device", "cuda", "--ranks", "1", "--at-once", "8", "--lr", "0.001", "--out", str(folder)]
    command = [sys.executable, str(HERE / "bench_convergence.py"), *flags]
    return Phase("convergence", command, 180, folder=folder, told=True)


def _script(scratch: Path, name: str, script: str, limit: float, device: str, *flags: str) -> Phase:
    folder = scratch / name
    out = ["--device", device, "--out", str(folder / f"{name}.json")]
    return Phase(name, [sys.executable, str(HERE / script), *out, *flags], limit, folder=folder, told=True)


def _bench(scratch: Path, op: str, limit: float, device: str, *flags: str, script: str | None = None) -> Phase:
    """Make the phase of an op, by ``zero-optim bench`` or by the script that has the op."""
    folder = scratch / f"bench_{op}"
    program = [str(HERE / script)] if script else ["-m", "zero_optim", "bench", op]
    command = [sys.executable, *program, "--device", device, "--out", str(folder), *flags]
    return Phase(f"bench_{op}", command, limit, folder=folder, told=True)
