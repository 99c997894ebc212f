"""``bench_gpt_step.py``: contenders do the same training, and their rows hold what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import bench_gpt_step as gpt_step
import launches
import pytest
import torch
from zero_optim.bench.case import COPY, TORCH, Setting, choose_backends
from zero_optim.bench.contenders import model_config
from zero_optim.bench.timing import HostClock, TimedRounds
from zero_optim.errors import ZeroOptimError

CPU = torch.device("cpu")
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def tiny(device: str = "cpu", dtype: str = "bf16") -> Setting:
    return Setting(torch.device(device), dtype, 50_000, choose_backends(torch.device(device), None)[:1])


def make(setting: Setting) -> dict[str, gpt_step.Contender]:
    model = gpt_step.make_model(model_config(setting.numel, setting.device), setting)
    return gpt_step.make_contenders(model, setting)


def parameters_of(contender: gpt_step.Contender) -> list[torch.Tensor]:
    """Out of the backward's closure, through the backend that it may be bound to."""
    work = contender.laps["backward"]
    free = dict(zip(work.__code__.co_freevars, work.__closure__, strict=True))
    if "work" in free:
        work = free["work"].cell_contents
        free = dict(zip(work.__code__.co_freevars, work.__closure__, strict=True))
    return list(free["model"].cell_contents.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_contenders_train_the_same_model_alike(device, dtype):
    torch.manual_seed(0)
    contenders = make(tiny(device, dtype))
    starts = {name: [p.detach().clone() for p in parameters_of(c)] for name, c in contenders.items()}
    for contender in contenders.values():
        for _ in range(3):
            for lap in contender.job:
                lap()
        assert contender.skipped() == 0
    (ours,) = set(contenders) - {TORCH}
    for start, mine, theirs in zip(
        starts[ours], parameters_of(contenders[ours]), parameters_of(contenders[TORCH]), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
        assert mine.ndim < 2 or not torch.equal(mine, start)
    assert torch.equal(starts[ours][0], starts[TORCH][0])


def test_the_norm_that_both_clip_to_is_the_same():
    torch.manual_seed(0)
    norms = {}
    for name, contender in make(tiny(dtype="fp16")).items():
        contender.laps["backward"]()
        contender.laps["unscale"]()
        norms[name] = float(contender.laps["clip"]())
    (ours,) = set(norms) - {TORCH}
    assert norms[ours] == pytest.approx(norms[TORCH], rel=1e-4)
    assert norms[ours] > 0.1


def test_rows_of_the_step_and_of_the_whole():
    setting = tiny()
    rows = gpt_step.measure(setting, HostClock(), TimedRounds.exactly(2))
    ours = setting.backends[0]
    assert [(row.op, row.backend) for row in rows] == [
        ("step", ours),
        ("step", TORCH),
        ("step", COPY),
        ("train_step", ours),
        ("train_step", TORCH),
    ]
    model = gpt_step.make_model(model_config(setting.numel, CPU), setting)
    assert {row.numel for row in rows} == {sum(p.numel() for p in model.parameters())}
    step, recipe, copy, whole, whole_recipe = rows
    assert list(step.phases) == list(recipe.phases) == ["unscale", "clip", "update"]
    assert list(whole.phases) == ["backward", "unscale", "clip", "update", "zero_grad"]
    assert copy.phases is None and copy.fraction == 1.0 and step.bytes == 30
    assert whole.ms > step.ms and whole_recipe.ms > recipe.ms
    assert whole.vs_torch == pytest.approx(whole_recipe.ms / whole.ms, abs=1e-4)
    for value in (whole.bytes, whole.gbps, whole.yardstick, whole.copy_gbps, whole.fraction, step.launches):
        assert value is None


def test_phases_are_medians_and_totals_are_of_rounds():
    """The sum of medians is not the median of sums: the total must come from whole rounds."""
    case = gpt_step.Case("step", Setting(CPU, "fp16", 10**6, ("cpu",)), 30, COPY, {})
    rounds = [[9.0, 1.0, 2.0, 3.0, 0.0], [9.0, 5.0, 1.0, 2.0, 0.0], [9.0, 2.0, 6.0, 1.0, 1.0]]
    laps = {"cpu": gpt_step._by_lap(rounds), TORCH: gpt_step._by_lap([[9.0, 4.0, 4.0, 4.0, 4.0]] * 3)}
    ours, recipe, copy = gpt_step._step_rows(case, laps, [[3.0]] * 3, {"cpu": {"kernels": 7}, TORCH: None})
    assert ours.ms == 8.0 and ours.phases == {"unscale": 2.0, "clip": 2.0, "update": 2.0}
    assert (recipe.ms, ours.vs_torch) == (12.0, 1.5)
    assert ours.launches == {"kernels": 7} and recipe.launches is None and copy.launches is None
    assert (copy.gbps, ours.fraction) == (10.0, 0.375)
    whole, _ = gpt_step._train_step_rows(case, laps)
    assert whole.ms == 17.0 and whole.vs_torch == round(25.0 / 17.0, 4)


def test_a_run_with_skipped_steps_gives_no_figures(monkeypatch):
    monkeypatch.setattr(gpt_step, "SCALE", 2.0**40)
    with pytest.raises(ZeroOptimError, match="overflowed and were skipped"):
        gpt_step.measure(tiny(dtype="fp16"), HostClock(), TimedRounds.exactly(1))


@pytest.mark.parametrize(("numel", "tolerance"), [(10**9, 0.01), (2**24, 0.1), (125_000_000, 0.05)])
def test_the_model_has_about_the_parameters_asked_for(numel, tolerance):
    config = model_config(numel, torch.device("cuda"))
    blocks = config.layers * (12 * config.hidden**2 + 4 * config.hidden)
    assert blocks + 258 * config.hidden == pytest.approx(numel, rel=tolerance)
    assert config.hidden % config.heads == 0 and (config.hidden // config.heads) % 2 == 0


def test_the_model_of_a_billion():
    config = model_config(10**9, torch.device("cuda"))
    assert (config.layers, config.hidden, config.seq) == (20, 2048, 1024)


def test_launches_are_told_by_category():
    trace = [
        {"ph": "X", "cat": "kernel", "name": "adam"},
        {"ph": "X", "cat": "kernel", "name": "pack"},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD"},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset"},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "Optimizer.step"},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel"},
        {"ph": "M", "name": "process_name"},
    ]
    assert launches.tally(trace) == {"kernels": 2, "memcpys": 1, "memsets": 1}
    assert launches.tally([]) == {"kernels": 0, "memcpys": 0, "memsets": 0}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_launches_are_counted_in_the_second_step_without_its_backward(monkeypatch):
    """The device is a fake, the profiler is real: its trace has no GPU rows here, and opens and closes all the same."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    calls: list[str] = []
    fake = SimpleNamespace(type="cuda")
    counts = launches.count_launches(fake, lambda: calls.append("prepare"), lambda: calls.append("work"))
    assert calls == ["prepare", "synchronize", "work", "synchronize"] * 2
    assert counts == {"kernels": 0, "memcpys": 0, "memsets": 0}
    assert launches.count_launches(CPU, calls.clear, calls.clear) is None and calls


def test_a_run_of_the_script(run_here):
    flags = ["--device", "cpu", "--numel", "50000", "--rounds", "2", "--dtypes", "fp16", "--out", "."]
    outcome = run_here(gpt_step.main)(*flags)
    assert outcome.code == 0, outcome.err
    record = json.loads(next(Path().glob("*.json")).read_text())
    assert {row["op"] for row in record["rows"]} == {"step", "train_step"}
    assert "unscale" in outcome.out and "update" in outcome.out
