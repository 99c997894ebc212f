"""A checkpoint of any stage, scale, bucket size and dtype loads at any other, bit for bit.

``face/test_rules_on_topologies.py`` goes on from one, and so does ``random_programs``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cells import slow_after
from checkpoint_cases import Job, Seen, Zoo, assert_loaded, look, make_zoo, train_zoo
from checkpoint_files import read_contents
from harness import run_ranks
from small_jobs import Stateful
from zero_optim import GradScaler, checkpoint

LEG = range(3)


def save(rank: int, world_size: int, folder: str, job: Job) -> Seen:
    model, opt = make_zoo(job, seed=rank)
    train_zoo(model, opt, LEG, rank, world_size)
    assert checkpoint.save(folder, model, opt, extra={"leg": (1, 2)}) == Path(folder) / "step-3"
    return look(model, opt)


def load(rank: int, world_size: int, folder: str, job: Job) -> Seen:
    model, opt = make_zoo(job, seed=50 + rank)
    loaded = checkpoint.load(folder, model, opt)
    assert (loaded.folder, loaded.step, loaded.extra) == (Path(folder) / "step-3", 3, {"leg": (1, 2)})
    return look(model, opt)


def assert_evenly_written(folder: Path, ranks: int) -> None:
    """Replicated tensors are divided by bytes; rank 0 has buffers, too, and headers differ."""
    contents = read_contents(folder / "step-3")
    assert contents["aliases"] == {"head.weight": "embedding.weight"}
    sizes = list(contents["files"].values())
    assert len(sizes) == ranks and max(sizes) - min(sizes) < 20_000


@pytest.mark.parametrize(
    ("stage", "over"), slow_after(2, [(3, "shard"), (3, "all"), (1, "all"), (2, "shard"), (1, "shard"), (2, "all")])
)
def test_a_grid_loads_where_there_is_none_and_the_other_way_round(tmp_path: Path, stage: int, over: str) -> None:
    flat = Job(stage=stage, dtype=torch.bfloat16, cap=0.002)
    grid = replace(flat, replicas=2, state_over=over)
    saved = run_ranks(4, save, str(tmp_path / "grid"), grid)[0]
    for ranks in (1, 3):
        assert_loaded(saved, run_ranks(ranks, load, str(tmp_path / "grid"), flat)[0], torch.bfloat16)
    saved = run_ranks(3, save, str(tmp_path / "flat"), flat)[0]
    assert_loaded(saved, run_ranks(4, load, str(tmp_path / "flat"), grid)[0], torch.bfloat16)
    assert_evenly_written(tmp_path / "grid", 4)


# -- what is in it -----------------------------------------------------------------------------------------------------


def test_a_plain_model_and_adamw_read_it_and_write_one(tmp_path: Path) -> None:
    saved = run_ranks(3, save, str(tmp_path / "sharded"), Job(stage=3, dtype=torch.bfloat16))[0]
    model = Zoo().float()
    hidden = model.hidden.clone()
    checkpoint.load(tmp_path / "sharded", model)
    assert model.head.weight is model.embedding.weight
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name == "hidden":
            assert torch.equal(value, hidden), "state_dict leaves it out, and so does a checkpoint"
            continue
        assert torch.equal(value, saved.state.get(name, {}).get("master", saved.values[name]).to(value.dtype)), name

    named = list(model.named_parameters())
    opt = torch.optim.AdamW([{"params": named[:3]}, {"params": named[3:], "betas": (0.8, 0.95)}])
    checkpoint.load(tmp_path / "sharded", model, opt)
    assert [group["lr"] for group in opt.param_groups] == [3e-3, 1e-2]
    for name, parameter in named:
        entry = saved.state.get(name)
        if entry is not None:
            assert all(
                torch.equal(opt.state[parameter][kind], entry[kind]) for kind in ("step", "exp_avg", "exp_avg_sq")
            )
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    opt.step()

    checkpoint.save(tmp_path / "plain", model, opt)
    seen, _ = run_ranks(2, load_other, str(tmp_path / "plain"), Job(stage=3))
    for name, parameter in named:
        if name in seen.state:
            assert torch.equal(seen.values[name], parameter.detach()), name
            assert torch.equal(seen.state[name]["exp_avg"], opt.state[parameter]["exp_avg"]), name


def load_other(rank: int, world_size: int, folder: str, job: Job) -> Seen:
    model, opt = make_zoo(job, seed=50 + rank)
    assert checkpoint.load(folder, model, opt, strict=False).step == 4
    return look(model, opt)


def save_all(rank: int, world_size: int, folder: str) -> list[float]:
    model, opt = make_zoo(Job(dtype=torch.float16), seed=rank)
    scaler = GradScaler(init_scale=8.0, growth_interval=2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[1e-2, 2e-2], total_steps=9)
    torch.manual_seed(rank)
    for _ in LEG:
        scaler.scale(model(torch.zeros(2, 3, dtype=torch.int64)).float().square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        scheduler.step()
        opt.zero_grad()
    checkpoint.save(folder, model, opt, step=7, scaler=scaler, scheduler=scheduler, data=Stateful(10 + rank))
    scheduler.step()
    return [scaler.get_scale(), *scheduler.get_last_lr(), float(torch.rand(()))]


def load_all(rank: int, world_size: int, folder: str) -> tuple[list[float], int, tuple[str, ...]]:
    model, opt = make_zoo(Job(dtype=torch.float16), seed=rank)
    scaler, data = GradScaler(), Stateful(0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[1e-3, 1e-3], total_steps=5)
    loaded = checkpoint.load(folder, model, opt, scaler=scaler, scheduler=scheduler, data=data)
    assert loaded.step == 7 and scaler.get_growth_factor() == 2.0
    scheduler.step()
    return [scaler.get_scale(), *scheduler.get_last_lr(), float(torch.rand(()))], data.state, loaded.notes


def test_scaler_schedule_random_states_and_position_come_back(tmp_path: Path) -> None:
    before = run_ranks(2, save_all, str(tmp_path))
    assert before[0][0] > 8 and before[0][-1] != before[1][-1]
    for rank, (now, at, notes) in enumerate(run_ranks(2, load_all, str(tmp_path))):
        assert now == before[rank] and at == 10 + rank and notes == ()
    for now, at, notes in run_ranks(3, load_all, str(tmp_path)):
        assert now[:3] == before[0][:3] and at == 0
        assert notes == ("random states and positions in data were saved by 2 ranks, and are not loaded by 3",)
