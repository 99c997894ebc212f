"""Where the backend runs, why not elsewhere, what its launches ask for, how a table gets to a device."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guards import no_host_reads
from interpreter import interpreted
from kernel_cases import awkward, dominated, same_bits

import zero_kernels
from zero_kernels import reference, triton
from zero_kernels.reference import STATS_BLOCK

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    """What a new process prints, in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_no_triton() -> None:
    assert (
        python("import sys, zero_kernels; zero_kernels.available_backends(); print('triton' in sys.modules)") == "False"
    )


def test_without_triton_the_reason_is_said() -> None:
    said = python(
        "import sys; sys.modules['triton'] = None\n"
        "from zero_kernels import triton; print(len(triton.OPS), triton.why_unusable())"
    )
    assert said.startswith("0 triton can't be imported or is too old: ")


def test_every_op_is_there() -> None:
    assert triton.OPS.keys() == reference.OPS.keys()


@interpreted
def test_under_the_interpreter_it_runs_on_cpu_tensors() -> None:
    assert triton.why_unusable() is None
    assert "triton" in zero_kernels.available_backends("cpu")
    assert "triton" not in zero_kernels.available_backends("cuda")


def test_a_gpu_that_will_not_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    def why(target: Callable[[], object]) -> str | None:
        monkeypatch.setattr(triton.driver, "_active", SimpleNamespace(get_current_target=target))
        return triton.why_unusable.__wrapped__()

    monkeypatch.setattr(triton.common, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why(lambda: SimpleNamespace(backend="cuda", arch=90)) is None
    assert why(lambda: SimpleNamespace(backend="cuda", arch=80)) is None
    assert why(lambda: SimpleNamespace(backend="cuda", arch=75)) == "needs compute capability 8.0, the GPU has 7.5"
    assert why(lambda: SimpleNamespace(backend="hip", arch="gfx942")) == "not tried on hip, where the bits may differ"
    assert why(no_compiler) == "triton can't drive the GPU: Failed to find C compiler."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why(no_compiler) == "torch sees no CUDA device"


class Recorder:
    """In place of a kernel: keeps the options of its launches."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.options.append(options)


def test_no_launch_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the process's default is: the option is said at every launch. Nor does a launch read a value."""
    modules = (triton.step, triton.ema, triton.pack, triton.grad_stats, triton.hyper_table, triton.symmetric)
    recorders: dict[str, Recorder] = {}
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, recorders.setdefault(name, Recorder()))
    x, rows, fp64 = torch.ones(128), torch.zeros(1, dtype=torch.int32), torch.zeros(7, 1, dtype=torch.float64)
    with no_host_reads():
        triton.OPS["foreach_step"]("adamw", [x], [x], [x, x], [], [rows], torch.zeros(1, 12), x[:1], x[:1], rows)
        triton.OPS["foreach_step"](
            "sgd_plain", [x, x], [x, x], [], [], [rows, rows], torch.zeros(1, 12), None, None, None
        )
        triton.OPS["ema"]([x, x], [x], [], [rows], torch.zeros(1, 2))
        triton.OPS["pack"]([x], [0], torch.ones(128), 1.0, rows)
        triton.OPS["unpack"](torch.ones(128), [0], [x], 1.0)
        triton.OPS["grad_stats"]([x], 2.0)
        triton.OPS["hyper_table"](fp64, rows, fp64[0], rows == 0, torch.zeros(1, 12))
        triton.symmetric.symmetric_product(torch.ones(2, 3), torch.ones(3, 2), None, 1.0, 1.0)
    launches = {name: len(recorder.options) for name, recorder in recorders.items()}
    assert launches == {
        "_step_kernel": 3,
        "_ema_kernel": 1,
        "_slots_kernel": 2,
        "_block_kernel": 1,
        "_large_kernel": 0,
        "_shard_kernel": 1,
        "_hyper_table_kernel": 1,
        "_symmetric_kernel": 1,
    }
    assert all(asked["enable_fp_fusion"] is False for recorder in recorders.values() for asked in recorder.options)


def test_tables_tell_what_is_aligned() -> None:
    """16 bytes, for the gradient and for the element of the bucket that it goes to."""

    def at(element: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(100, dtype=dtype)[element:]

    cases = {(0, 0, 0): True, (4, 4, 0): True, (0, 4, 0): True, (1, 1, 0): True, (0, 0, 4): True}
    cases |= {(1, 0, 0): False, (0, 1, 0): False, (0, 0, 1): False, (1, 1, 1): False}
    for (grad, offset, bucket), aligned in cases.items():
        rows = list(triton.pack._slots([at(grad)[:50]], [offset], at(bucket)))
        assert [row[4] for row in rows if row[3] >= 0] == [aligned], (grad, offset, bucket)
    shards = [at(0), at(1), at(4), at(4, torch.float16), at(8, torch.bfloat16)]
    assert [row[4] for row in triton.grad_stats._rows(shards)] == [True, False, True, False, True, 0]


def test_the_table_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    table, pinned = torch.arange(6), torch.arange(6)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: (self, device, non_blocking))
    sent, device, non_blocking = triton.table.upload(table, torch.device("cuda"))
    assert sent is pinned and device == torch.device("cuda") and non_blocking
    assert triton.table.upload(table, torch.device("cpu")) is table


@pytest.mark.parametrize("op", ["pack", "unpack", "grad_stats"])
def test_a_recorded_graph_has_no_table(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to record a copy from memory that is not pinned, and pinned memory would have to stay for good."""
    bucket, x = torch.arange(8.0), torch.arange(5.0)
    arguments = {"pack": ([x], [2], bucket, 0.5, None), "unpack": (bucket, [2], [x], 0.5), "grad_stats": ([x], 2.0)}
    ran = []
    for module in (triton.pack, triton.grad_stats):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
        monkeypatch.setattr(module.reference, op, lambda *given: ran.append(given))
    triton.OPS[op](*arguments[op])
    assert len(ran) == 1 and all(got is given for got, given in zip(ran[0], arguments[op], strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize(("wild", "norm"), [(False, 1.0), (True, 2.0), (False, math.inf), (True, math.inf)])
@interpreted
def test_partials_are_added_in_order(wild: bool, norm: float) -> None:
    """The launches after the first by themselves, for shards too large to interpret that on; two shards are large. They
    add alike for the norms 1 and 2. Counts of finite partials are undefined."""
    sizes = [1, 0, 1024, 16 * 1024 + 1, 1025, 0, STATS_BLOCK + 1, 16 * 1024, 35 * 1024 + 7, 3, 0]
    rows = [(0, 0, sum(sizes[:i]), 0, 0) for i in range(len(sizes) + 1)]
    partials = awkward(rows[-1][2], torch.float32, 1).abs() if wild else dominated(rows[-1][2], 2)
    counts = torch.arange(len(partials), dtype=torch.int32) % STATS_BLOCK
    want = []
    for of_shard, of_count in zip(partials.split(sizes), counts.split(sizes), strict=True):
        lanes = torch.nn.functional.pad(of_shard, (0, -len(of_shard) % 1024)).view(1, -1, 1024)
        total = reference._max_abs(of_shard) if norm == math.inf else reference._fold(lanes)[0]
        want.append(torch.stack([total, of_count[~of_shard.isfinite()].sum().float()]))
    out = torch.empty(len(sizes), 2)
    partials = partials.view(torch.int32) if norm == math.inf else partials
    norm = triton.grad_stats.INF if norm == math.inf else int(norm)
    triton.grad_stats._combine(rows, torch.tensor(rows), partials.clone(), counts.clone(), out, norm)
    assert all(map(same_bits, want, out))
