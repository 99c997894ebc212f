"""``zero-optim bench``: contenders do the same work, figures follow from times, and what cannot be had is one line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from zero_optim import doctor
from zero_optim.bench import cases, record, run, timing
from zero_optim.bench.cases import (
    COPY,
    FUSED,
    PEERS,
    STATE_FORMS,
    STREAM,
    TORCH,
    TORCHS,
    Case,
    Setting,
    choose_backends,
)
from zero_optim.bench.timing import Clock, EventClock, Job, Spread, interleaved
from zero_optim.errors import UsageError
from zero_optim_cli.choices import parse_numel

import zero_kernels
from zero_kernels import ROW
from zero_kernels.codecs import FORMS

CPU = torch.device("cpu")
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
NUMEL = 5000  # no multiple of a row
SMALL = ["--device", "cpu", "--numel", "4096", "--rounds", "2"]


@pytest.fixture(params=[(device, dtype) for device in DEVICES for dtype in ("fp16", "bf16")], ids="-".join)
def setting(request: pytest.FixtureRequest) -> Setting:
    device, dtype = torch.device(request.param[0]), request.param[1]
    return Setting(device, dtype, NUMEL, choose_backends(device, None))


# -- the ops -----------------------------------------------------------------------------------------------------------


def same_shards(setting: Setting, count: int) -> list[cases.Shard]:
    shards = []
    for _ in range(count):
        torch.manual_seed(0)
        shards.append(cases.make_shard(setting))
    return shards


@pytest.mark.parametrize("peer", [FUSED, TORCHS["torch_foreach"]], ids=["fused", "foreach"])
def test_torchs_passes_make_the_update_that_adam_step_makes(setting, peer):
    (second,) = same_shards(setting, 1)
    wide_grad = torch.empty_like(second.master)
    (passes,), moved = cases.update_by_peer(second, wide_grad, peer)  # takes the first step
    assert moved == pytest.approx(28, abs=0.01)
    first = replace(second, **{name: getattr(second, name).clone() for name in vars(second)})
    before = first.master.clone()
    cases.update(first)()
    passes()
    assert (first.master - before).abs().max() > 1e-4
    for name in ("master", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(getattr(second, name), getattr(first, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second.param, first.param)
    assert torch.equal(wide_grad, second.grad.float() * 0.5)


class Quantized:
    """A moment as FlashOptim has it: no tensor, but an object with some."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.codes = torch.zeros_like(parameter, dtype=torch.uint8)
        self.scales = torch.zeros(parameter.numel() // 256)


class EightBit(torch.optim.Optimizer):
    """Another package's, played."""

    def __init__(self, params, **options) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        (parameter,) = self.param_groups[0]["params"]
        assert parameter.dtype == parameter.grad.dtype == torch.bfloat16
        self.state[parameter] = {"step": 1, "exp_avg": Quantized(parameter), "exp_avg_sq": Quantized(parameter)}


class Broken(EightBit):
    def step(self):
        raise RuntimeError("no kernel image\nis available")


def test_peers_have_rows_with_their_own_bytes_and_those_that_fail_are_left_out(bench, monkeypatch):
    modules = {"torchao.optim": {"AdamW8bit": EightBit}, "flashoptim": {"FlashAdamW": Broken}}
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    peers = {name: PEERS[name] for name in ("apex", "torchao", "flashoptim")} | TORCHS
    monkeypatch.setitem(run.CASES, "adam_step", lambda setting: cases.adam_step(replace(setting, peers=peers)))
    outcome = bench("adam_step", *SMALL, "--numel", "4096", "8192", "--dtypes", "bf16", "--out", ".")
    assert outcome.code == 0, outcome.err
    record = json.loads(next(Path().glob("*.json")).read_text())
    moved = {row["backend"]: row["bytes"] for row in record["rows"] if row["backend"] in PEERS | TORCHS}
    assert moved == pytest.approx(
        {"torchao": 2 + 2 * (2 + 2 * (1 + 4 / 256)), "torch_fused": 14, "torch_foreach": 28}, 1e-3
    )
    failed = "RuntimeError: no kernel image is available"
    assert outcome.err.count(f"left out: flashoptim: {failed}\n") == outcome.err.count("left out: apex: Module") == 1
    assert record["baselines"].keys() == {"torchao", "flashoptim", "apex"}
    assert record["baselines"]["torchao"] == (doctor.version_of("torchao") or "")
    assert f"flashoptim: {failed}" in outcome.out


@pytest.mark.parametrize("way", STATE_FORMS)
def test_smaller_state_is_updated_as_the_values_that_it_stands_for(way):
    """The parameter is written before the moments are rounded anew."""
    form = STATE_FORMS[way]
    first, second = same_shards(Setting(CPU, "bf16", NUMEL - NUMEL % ROW, choose_backends(CPU, None)), 2)
    moments = {}
    for name in ("exp_avg", "exp_avg_sq"):
        stored = FORMS[getattr(form, name)]
        moments[name] = stored.decode(*stored.encode(getattr(second, name).view(-1, ROW))).view(-1)
    second = replace(second, master=second.param.float() if form.low else second.master, **moments)
    before = second.param.clone()
    cases.update_in_form(first, form)()
    cases.update(second)()
    assert torch.equal(first.param, second.param) and not torch.equal(first.param, before)


def test_bytes_of_smaller_state_are_those_of_its_tensors():
    """Read and written of 128 elements: gradient 256, then parameter, master or low half, moments, scales."""
    assert {name: 128 * form.bytes for name, form in STATE_FORMS.items()} == {
        ", bf16": 256 + 256 + 1024 + 2 * 512,
        ", int8": 256 + 256 + 1024 + 2 * (256 + 8),
        ", split": 256 + 512 + 512 + 2 * 1024,
        ", split, int8": 256 + 512 + 512 + 2 * (256 + 8),
        ", split8": 256 + 512 + 256 + 2 * 1024,
        ", split8, int8": 256 + 512 + 256 + 2 * (256 + 8),
    }


def test_pack_and_torch_fill_the_same_bucket(setting):
    torch.manual_seed(0)
    case = cases.pack(setting)
    buckets = {}
    for name in (*setting.backends, TORCH):
        (work,) = case.jobs[name]
        work()
        buckets[name] = next(value for value in _closed_over(work) if value.shape == (NUMEL,)).clone()
    assert all(torch.equal(bucket, buckets[TORCH]) for bucket in buckets.values())
    assert buckets[TORCH].abs().sum() > 0


def _closed_over(work: Callable[[], object]) -> list[torch.Tensor]:
    """Find the tensors in the closures of a job."""
    found = []
    for cell in getattr(work, "func", work).__closure__ or ():
        if isinstance(cell.cell_contents, torch.Tensor):
            found.append(cell.cell_contents)
        elif callable(cell.cell_contents):
            found += _closed_over(cell.cell_contents)
    return found


def test_torchs_check_finds_what_grad_stats_finds(setting):
    jobs = cases.grad_stats(setting).jobs
    (ours,), (theirs,) = jobs[setting.backends[0]], jobs[TORCH]
    shard = next(value for value in _closed_over(theirs) if value.shape == (NUMEL,))  # of both
    norm, _ = theirs()
    assert float(norm) ** 2 == pytest.approx(float(ours()[0]), rel=1e-4)
    shard[3] = torch.inf
    assert bool(theirs()[1])


@pytest.mark.parametrize("op", run.CASES)
def test_every_job_of_a_case_runs_and_moves_the_bytes_of_the_op(setting, op):
    case = run.CASES[op](setting)
    for job in case.jobs.values():
        for lap in job:
            lap()
    assert case.bytes == {"adam_step": 28, "pack": 4, "grad_stats": 2}[op]
    streams = op == "adam_step" and "cpu" in setting.backends
    assert case.yardstick == (STREAM if streams else COPY) and {case.yardstick, TORCH} <= case.jobs.keys()
    (copy,) = case.jobs[COPY]
    copied = copy()
    assert copied.nbytes * 2 == case.bytes * NUMEL and copied.unique().numel() > 100, "zeros can be faster to copy"


@pytest.mark.parametrize("numel", [1, 7, 3000, 5000, 2**20, 2**30, 10**9 + 1])
def test_the_gradients_add_up_and_are_a_models(numel):
    numels = cases.gradient_numels(numel)
    assert sum(numels) == numel and min(numels) > 0 and len(numels) < 200
    assert len(numels) > 1 or numel < 12 * 16**2 + 2 * 16


def test_the_figures_of_a_row_follow_from_its_times():
    case = Case("pack", Setting(CPU, "bf16", 10**6, ("cpu",)), 4, {}, own_bytes={"small": 2})
    ours, torchs, small, copy = case.rows(
        {"cpu": [2.0, 1.0, 3.0], TORCH: [6.0] * 3, "small": [1.0] * 3, COPY: [1.6] * 3}
    )
    assert (ours["ms"], ours["p20"], ours["p80"], ours["rounds"]) == (2.0, 1.4, 2.6, 3)
    assert (ours["gbps"], ours["copy_gbps"], ours["fraction"], ours["vs_torch"]) == (2.0, 2.5, 0.8, 3.0)
    assert (small["bytes"], small["gbps"], small["fraction"]) == (2, 2.0, 0.8)
    assert (torchs["vs_torch"], copy["fraction"]) == (1.0, 1.0)


def test_which_backends_are_measured(monkeypatch):
    usable = ["cuda", "triton", "cpu", "reference"]
    monkeypatch.setattr(zero_kernels, "available_backends", lambda device: usable)
    assert choose_backends(torch.device("cuda"), None) == ("cuda", "triton", "cpu")
    assert choose_backends(CPU, None) == ("cuda", "cpu")
    with pytest.raises(UsageError, match="--backends metal: usable on cuda are cuda, triton, cpu, reference"):
        choose_backends(torch.device("cuda"), ["triton", "metal"])
    usable[:] = ["reference"]
    assert choose_backends(CPU, None) == ("reference",)


# -- timing ------------------------------------------------------------------------------------------------------------


class CountingClock:
    """Every lap takes one millisecond more than the one before it."""

    warm_up_seconds = 0.0
    laps = 0

    def time(self, job: Job) -> Callable[[], list[float]]:
        taken = []
        for lap in job:
            lap()
            self.laps += 1
            taken.append(float(self.laps))
        return lambda: taken


def test_every_round_runs_all_jobs_and_starts_at_the_next():
    calls: list[str] = []
    jobs = {name: [lambda name=name: calls.append(name)] for name in "abc"}
    times = interleaved(jobs, CountingClock(), 4)
    assert ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)] == ["abc", "bca", "cab", "abc", "bca", "cab"]
    assert timing.WARM_UP_ROUNDS == 2  # whose times are thrown away
    assert times["a"] == [[8.0], [10.0], [15.0], [17.0]]
    assert times["b"] == [[9.0], [11.0], [13.0], [18.0]]


def test_rounds_end_by_time_within_bounds(monkeypatch):
    for seconds, rounds in ((0.0, timing.LEAST), (1e9, timing.MOST)):
        monkeypatch.setattr(timing, "SECONDS", seconds)
        assert len(interleaved({"a": [lambda: None]}, CountingClock())["a"]) == rounds


def test_the_host_clock_times_laps_one_after_the_other():
    ticks = iter([10.0, 10.5, 12.0])
    assert Clock(lambda: next(ticks)).time([lambda: None, lambda: None])() == [500.0, 1500.0]


class FakeEvent:
    """Stands in for torch.cuda.Event: the log is the stream, a place in it the time."""

    log: list[object]
    synchronized: int

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.log.append(self)

    def synchronize(self) -> None:
        assert self.log[-1] is self, "the last event of the job covers all before it"
        FakeEvent.synchronized += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return float(self.log.index(end) - self.log.index(self))


def test_events_stand_between_the_laps_after_a_flush_and_the_host_does_not_wait(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "log", log := [], raising=False)
    monkeypatch.setattr(FakeEvent, "synchronized", 0, raising=False)
    clock = EventClock(CPU, flush_bytes=64)
    clock._flush = type("Flush", (), {"sum": lambda self: log.append("flush")})()
    read = clock.time([lambda: log.append("first"), lambda: log.extend(["second", "third"])])
    kinds = [entry if isinstance(entry, str) else "event" for entry in log]
    assert kinds == [*["flush"] * 4, "event", "first", "event", "second", "third", "event"]
    assert FakeEvent.synchronized == 0
    assert read() == [2.0, 3.0] and FakeEvent.synchronized == 1


def test_the_spread_of_times():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 100.0]) == Spread(3.5, 2.0, 5.0, 6)
    assert Spread.of([2.5]) == Spread(2.5, 2.5, 2.5, 1)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_record_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "580.159.04\n"))
    monkeypatch.setattr(record, "commit", lambda: "0123456789")
    made = record.facts_of(torch.device("cuda"))
    assert (made["device"], made["driver"], made["threads"], made["isa"]) == ("NVIDIA H200", "580.159.04", None, None)
    assert record.slug("Intel(R) Xeon(R) Processor, 2 threads") == "intel-xeon-processor-2-threads"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"ls-files": "a", "rev-parse": "0123456789", "status": ""}, "0123456789"),
        ({"ls-files": "a", "rev-parse": "0123456789", "status": " M setup.py"}, "0123456789-dirty"),
        ({"rev-parse": "feedfeedfe", "status": ""}, None),  # another project's checkout around an installed package
    ],
)
def test_the_commit(monkeypatch, answers, expected):
    def git(*words: str) -> str:
        if words[0] not in answers:
            raise subprocess.CalledProcessError(128, "git")
        return answers[words[0]]

    monkeypatch.delenv(doctor.COMMIT_ENVIRONMENT, raising=False)
    monkeypatch.setattr(doctor, "_git", git)
    assert doctor.commit() == expected
    monkeypatch.setenv(doctor.COMMIT_ENVIRONMENT, "abcdef0123" + 30 * "4")
    assert doctor.commit() == "abcdef0123"


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["adam"], ["'adam'", "adam_step, pack, grad_stats"]),
        (["--numel", "many"], ["--numel", "'many'", "64Mi"]),
        (["--rounds", "0"], ["--rounds", "'0'", "at least 1"]),
        (["--dtypes", "fp8"], ["--dtypes", "fp8"]),
        (["--device", "cpu", "--backends", "metal", "--out", "results"], ["--backends metal", "reference"]),
        pytest.param(
            ["--device", "cuda"], ["--device cuda"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="")
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_bad_arguments(refuses, arguments, parts):
    refuses(*arguments, saying=parts)


def test_a_folder_that_cannot_be_made_is_found_before_measuring(refuses, monkeypatch):
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("measured"))
    Path("file").touch()
    refuses("--device", "cpu", "--out", "file/results", saying=["--out file/results", "Not a directory"])


@pytest.mark.parametrize(
    ("text", "numel"),
    [("1000", 1000), ("2^20", 2**20), ("2**20", 2**20), ("64Mi", 2**26), ("1e6", 10**6), ("2.5e3", 2500)],
)
def test_sizes(text, numel):
    assert parse_numel(text) == numel


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1.5e0", "1e-3", "2^", "1M", "0x10", "Mi"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="2\\^20"):
        parse_numel(text)


def test_a_run_prints_a_table_and_leaves_a_file(bench):
    outcome = bench(*SMALL, "--numel", "4096", "2^13", "--out", "results")
    assert outcome.code == 0, outcome.err
    (file,) = Path("results").iterdir()
    assert file.suffix == ".json" and outcome.out.endswith(f"\n{file}\n")
    made = json.loads(file.read_text())
    assert file.stem == "-".join([made["date"], made["commit"] or f"v{made['version']}"])
    rows = made["rows"]
    groups = {(row["op"], row["dtype"], row["numel"]) for row in rows}
    assert groups == {(op, dtype, numel) for op in run.CASES for dtype in ("fp16", "bf16") for numel in (4096, 8192)}
    for group in groups:
        of_group = {row["backend"]: row for row in rows if (row["op"], row["dtype"], row["numel"]) == group}
        for row in of_group.values():
            assert row["rounds"] == 2 and row["p20"] <= row["ms"] <= row["p80"]
            assert row["gbps"] == pytest.approx(row["bytes"] * row["numel"] / row["ms"] / 1e6, abs=1e-3)
            assert row["copy_gbps"] == of_group[row["yardstick"]]["gbps"]
            assert row["vs_torch"] == pytest.approx(of_group[TORCH]["ms"] / row["ms"], abs=1e-4)
            assert f"{row['fraction']:.3f}" in outcome.out


def test_no_write_leaves_nothing(bench):
    outcome = bench("grad_stats", *SMALL, "--no-write")
    assert outcome.code == 0 and "grad_stats" in outcome.out and list(Path().iterdir()) == []


def test_a_size_that_does_not_fit_is_left_out(bench, monkeypatch):
    def small_memory(setting: Setting) -> Case:
        if setting.numel > 5000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cases.pack(setting)

    monkeypatch.setitem(run.CASES, "pack", small_memory)
    flags = ["--device", "cpu", "--rounds", "1", "--dtypes", "fp16", "--out", "."]
    outcome = bench("pack", "--numel", "4096", "8192", *flags)
    assert outcome.code == 0 and "left out: pack fp16, 8,192 elements" in outcome.err
    assert {row["numel"] for row in json.loads(next(Path().glob("*.json")).read_text())["rows"]} == {4096}
    outcome = bench("pack", "--numel", "8192", *flags)
    assert outcome.code == 1 and "nothing was measured" in outcome.err.splitlines()[-1]


def test_finished_cases_are_on_disk_when_the_run_is_ended(bench, monkeypatch):
    def ended(setting: Setting) -> Case:
        raise KeyboardInterrupt

    monkeypatch.setitem(run.CASES, "grad_stats", ended)
    assert bench("pack", "grad_stats", *SMALL, "--dtypes", "bf16", "--out", "results").code == 130
    (path,) = Path("results").glob("*.json")
    assert {row["op"] for row in json.loads(path.read_text())["rows"]} == {"pack"}
