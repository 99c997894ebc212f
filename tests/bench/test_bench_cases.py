"""The jobs of a case do the same work, and a row's figures follow from its times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from zero_optim.bench import adam_step, case, fused_adams, grad_stats, pack
from zero_optim.bench.case import COPY, DTYPES, STREAM, TORCH, Case, Setting, choose_backends, copy_job
from zero_optim.bench.run import CASES
from zero_optim.errors import UsageError

import zero_kernels
from zero_kernels import ROW
from zero_kernels.codecs import FORMS

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
NUMEL = 5000  # no multiple of a row


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=DTYPES)
def setting(request: pytest.FixtureRequest, device: torch.device) -> Setting:
    return Setting(device, request.param, NUMEL, choose_backends(device, None))


def run_job(job: case.Job) -> object:
    (lap,) = job
    return lap()


# -- adam_step ---------------------------------------------------------------------------------------------------------


def same_shards(setting: Setting, count: int) -> list[adam_step.UpdateTensors]:
    shards = []
    for _ in range(count):
        torch.manual_seed(0)
        shards.append(adam_step.make_shard(setting))
    return shards


def test_every_baseline_makes_the_update_that_adam_step_makes(setting):
    makers = fused_adams.fused_adams(setting.device)
    first, *others = same_shards(setting, 2 + len(makers))
    before = first.master.clone()
    adam_step.ours(first)()
    pipelines = [adam_step.torch_pipeline(others[0])]
    pipelines += [
        adam_step.pipeline(shard, make, adam_step.STEP - 1)
        for shard, make in zip(others[1:], makers.values(), strict=True)
    ]
    assert (first.master - before).abs().max() > 1e-4
    for shard, pipeline in zip(others, pipelines, strict=True):
        pipeline()
        for name in ("master", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(getattr(shard, name), getattr(first, name), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(shard.param, first.param)
        assert torch.equal(shard.param, shard.master.to(shard.param.dtype))


def test_both_ways_to_widen_give_the_same(setting):
    first, second = same_shards(setting, 2)
    adam_step._widen_on_cpu(first)
    adam_step._widen_on_gpu(second)
    assert torch.equal(first.wide_grad, first.grad.float() * 0.5)
    assert torch.equal(first.wide_grad, second.wide_grad)


def test_zeros_stay_zeros(setting):
    shard = adam_step.make_shard(setting)
    zeros = adam_step.with_zeros(shard)
    for _ in range(2):
        adam_step.ours(zeros)()
    for name in ("grad", "exp_avg", "exp_avg_sq"):
        assert not getattr(zeros, name).any() and getattr(shard, name).any()
    assert zeros.master.isfinite().all() and zeros.master is shard.master


def test_parts_are_updated_as_the_whole(setting):
    whole, *others = same_shards(setting, 3)
    adam_step.ours(whole)()
    for shard, in_parts in zip(others, (adam_step.ours_in_parts, adam_step.ours_at_once), strict=True):
        parts = adam_step.parts_of(shard)
        assert len(parts) == 16 and sum(part.grad.numel() for part in parts) == setting.numel
        in_parts(shard)()
        for name in ("master", "exp_avg", "exp_avg_sq", "param"):
            assert torch.equal(getattr(shard, name), getattr(whole, name)), name


@pytest.mark.parametrize("form", adam_step.SMALLER)
def test_smaller_state_is_updated_as_what_it_stands_for(device, form):
    """The parameter is written before the moments are rounded anew."""
    of = adam_step.SMALLER[form]
    setting = Setting(device, "bf16", NUMEL - NUMEL % ROW, choose_backends(device, None))
    first, second = same_shards(setting, 2)
    moments = {}
    for name in ("exp_avg", "exp_avg_sq"):
        stored = FORMS[getattr(of, name)]
        values = getattr(second, name).view(-1, ROW)
        moments[name] = stored.decode(*stored.encode(values)).view(-1)
    master = second.param.float() if of.low else second.master
    second = replace(second, master=master, **moments)
    before = second.param.clone()
    adam_step.ours_smaller(first, of)()
    adam_step.ours(second)()
    assert torch.equal(first.param, second.param) and not torch.equal(first.param, before)


def test_bytes_of_smaller_state_are_those_of_its_tensors():
    """Read and written of 128 elements: gradient 256, then parameter, master or low half, moments, scales."""
    of_row = {name: 128 * of.bytes for name, of in adam_step.SMALLER.items()}
    assert of_row == {
        ", bf16": 256 + 256 + 1024 + 2 * 512,
        ", int8": 256 + 256 + 1024 + 2 * (256 + 8),
        ", split": 256 + 512 + 512 + 2 * 1024,
        ", split, int8": 256 + 512 + 512 + 2 * (256 + 8),
        ", split8": 256 + 512 + 256 + 2 * 1024,
        ", split8, int8": 256 + 512 + 256 + 2 * (256 + 8),
    }


def test_rows_of_smaller_state_count_their_own_bytes_and_are_held_to_fp32(device):
    made = adam_step.make_case(Setting(device, "bf16", NUMEL, choose_backends(device, None)))
    times = {name: [2.0] if name.endswith("int8") else [3.0] for name in made.jobs}
    rows = {row.backend: row for row in made.rows(times)}
    for name in made.setting.backends:
        row = rows[f"{name}, split, int8"]
        assert (row.bytes, row.vs["fp32"]) == (14.125, 1.5)
        assert row.gbps == round(14.125 * NUMEL / 2e6, 3)
        assert row.fraction == round(14.125 / 28 * 1.5, 4)
        assert rows[name].bytes == 28 and "fp32" not in rows[name].vs


def test_the_jobs_of_adam_step(setting):
    jobs = adam_step.make_case(setting)
    forms = [form for form, of in adam_step.SMALLER.items() if setting.dtype == "bf16" or not of.low]
    assert len(forms) == (6 if setting.dtype == "bf16" else 2)
    assert {f"{name}{form}" for form in forms for name in setting.backends} == {
        name for name in jobs.jobs if name in jobs.own_bytes
    }
    ours = [
        f"{name}{which}" for which in ("", ", zeros", ", 16 calls", ", 16 shards at once") for name in setting.backends
    ]
    assert list(jobs.jobs)[: len(ours)] == ours
    assert TORCH in jobs.jobs and COPY in jobs.jobs
    streams = setting.device.type == "cpu" and "cpu" in setting.backends
    assert jobs.yardstick == (STREAM if streams else COPY)
    assert jobs.yardstick in jobs.jobs


# -- pack --------------------------------------------------------------------------------------------------------------


def packed(setting: Setting, scale: float) -> dict[str, torch.Tensor]:
    """The bucket after each job."""
    torch.manual_seed(0)
    grads = [setting.random(numel) for numel in pack.gradient_numels(setting.numel)]
    results = {}
    for name in (*setting.backends, TORCH, "foreach_copy", "cat"):
        bucket = torch.full((setting.numel,), torch.nan, device=setting.device, dtype=setting.torch_dtype)
        works = {TORCH: pack.pipeline(grads, bucket, scale), "foreach_copy": pack.foreach_copy(grads, bucket)}
        works["cat"] = lambda bucket=bucket: torch.cat(grads, out=bucket)
        work = works.get(name) or case.on_backend(name, pack.ours(grads, bucket, scale))
        work()
        results[name] = bucket
    assert torch.equal(results["cat"], torch.cat(grads))
    return results


def test_the_pipeline_packs_the_same_bits(setting):
    results = packed(setting, pack.SCALE)
    for name in setting.backends:
        assert torch.equal(results[name], results[TORCH])
        assert not torch.equal(results[name], results["cat"])


def test_without_a_scale_all_pack_the_same_bits(setting):
    results = packed(setting, 1.0)
    for name, bucket in results.items():
        assert torch.equal(bucket, results["cat"]), name


@pytest.mark.parametrize("numel", [1, 7, 3000, 5000, 2**20, 2**30, 10**9 + 1])
def test_the_gradients_add_up_and_are_a_models(numel):
    numels = pack.gradient_numels(numel)
    assert sum(numels) == numel and min(numels) > 0
    assert len(numels) > 1 or numel < 12 * 16**2 + 2 * 16
    assert len(numels) < 200


def test_large_sizes_start_every_gradient_on_a_row():
    for power in range(20, 31):
        assert all(numel % zero_kernels.ROW == 0 for numel in pack.gradient_numels(2**power)[:-1])


# -- grad_stats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 3])
def test_the_pipeline_knows_what_grad_stats_tells(setting, bad):
    shard = setting.random(setting.numel)
    total, count = zero_kernels.grad_stats(shard).tolist()
    shard[:bad] = torch.inf
    kept = shard.clone()
    norm, found_inf = grad_stats.pipeline(shard)()
    assert torch.equal(shard, kept)
    assert bool(found_inf) == (zero_kernels.grad_stats(shard)[1] == bad != 0)
    if not bad:
        assert count == 0 and float(norm) ** 2 == pytest.approx(total, rel=1e-4)
        assert float(grad_stats.norm(shard)) == float(norm)


# -- yardsticks and rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_per_element", [2, 4, 28, 30])
def test_the_copy_moves_as_many_bytes_as_the_op(device, bytes_per_element):
    (copy,) = copy_job(Setting(device, "fp16", 1001, ()), bytes_per_element)
    target = copy()
    assert target.nbytes * 2 == bytes_per_element * 1001
    assert target.unique().numel() > 100, "zeros can be faster to copy"


@pytest.mark.parametrize("op", CASES)
def test_every_job_of_a_case_runs(setting, op):
    made = CASES[op](setting)
    for job in made.jobs.values():
        run_job(job)
    assert set(made.baselines) < set(made.jobs)
    assert made.bytes == {"adam_step": 28, "pack": 4, "grad_stats": 2}[op]


def test_a_rows_figures_follow_from_its_times():
    setting = Setting(torch.device("cpu"), "bf16", 10**6, ("cpu",))
    made = Case("pack", setting, 4, COPY, {}, ["cat"])
    times = {"cpu": [2.0, 1.0, 3.0], TORCH: [6.0] * 3, "cat": [3.0] * 3, COPY: [1.6] * 3}
    ours, pipeline, cat, copy = made.rows(times)
    assert (ours.op, ours.backend, ours.dtype, ours.numel, ours.rounds) == ("pack", "cpu", "bf16", 10**6, 3)
    assert (ours.ms, ours.p20, ours.p80) == (2.0, 1.4, 2.6)
    assert (ours.bytes, ours.gbps, ours.yardstick, ours.copy_gbps, ours.fraction) == (4, 2.0, COPY, 2.5, 0.8)
    assert (ours.vs_torch, ours.vs) == (3.0, {"cat": 1.5})
    assert (pipeline.gbps, pipeline.vs_torch, pipeline.vs) == (0.667, 1.0, {"cat": 0.5})
    assert (cat.vs_torch, cat.vs) == (2.0, {"cat": 1.0})
    assert (copy.gbps, copy.fraction) == (2.5, 1.0)


def test_which_backends_are_measured(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    usable = ["cuda", "triton", "cpu", "reference"]
    monkeypatch.setattr(zero_kernels, "available_backends", lambda device: usable)
    assert choose_backends(cuda, None) == ("cuda", "triton", "cpu")
    assert choose_backends(cpu, None) == ("cuda", "cpu")
    assert choose_backends(cuda, ["reference", "triton"]) == ("reference", "triton")
    with pytest.raises(UsageError, match="--backends metal: usable on cuda are cuda, triton, cpu, reference"):
        choose_backends(cuda, ["triton", "metal"])
    usable[:] = ["reference"]
    assert choose_backends(cpu, None) == ("reference",)


def test_a_job_runs_on_its_backend_alone():
    seen = []
    with zero_kernels.use_backend("reference"):
        for name in zero_kernels.available_backends("cpu"):
            case.on_backend(name, lambda: seen.append(zero_kernels.dispatch._forced))()
        assert zero_kernels.dispatch._forced == "reference"
    assert seen == zero_kernels.available_backends("cpu")


# -- the other packages ------------------------------------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch):
    def use(module: str, load) -> None:
        package = fused_adams.Package(module, "no-such-distribution", frozenset({"cpu"}), load)
        monkeypatch.setattr(fused_adams, "PACKAGES", {"other": package})
        fused_adams.why_unusable.cache_clear()

    yield use
    fused_adams.why_unusable.cache_clear()


def test_a_package_that_is_not_there_is_said_to_be_missing(packages):
    packages("no_such_module", None)
    assert fused_adams.fused_adams(torch.device("cpu")) == {}
    assert fused_adams.describe(torch.device("cpu")) == {"other": "not installed"}
    assert fused_adams.describe(torch.device("cuda")) == {"other": "not for cuda"}


def test_a_package_that_fails_is_tried_once_and_said_why(packages):
    tries = []

    def load(device_type: str):
        tries.append(device_type)
        raise RuntimeError("nvcc:\n  not found")

    packages("torch", load)
    for _ in range(2):
        assert fused_adams.fused_adams(torch.device("cpu")) == {}
    assert fused_adams.describe(torch.device("cpu")) == {"other": "does not work: nvcc: not found"}
    assert tries == ["cpu"]


def test_a_package_that_works_gets_a_row_and_a_ratio(packages):
    packages("torch", lambda device_type: lambda p: torch.optim.AdamW([{"params": p}], **fused_adams.HYPER))
    made = adam_step.make_case(Setting(torch.device("cpu"), "fp16", NUMEL, ("reference",)))
    assert made.baselines == ["other"] and "other" in made.jobs
    assert {row.backend: set(row.vs) for row in made.rows({name: [1.0] for name in made.jobs})} == {
        name: {"other", "fp32"} if name in made.fp32 else {"other"} for name in made.jobs
    }
