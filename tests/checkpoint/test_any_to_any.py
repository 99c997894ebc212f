"""A checkpoint of any stage, scale, bucket size and dtype loads at any other, bit for bit; and training goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_optim
from cells import slow_after, slow_where
from checkpoint_cases import (
    DTYPES,
    Job,
    Seen,
    Zoo,
    assert_bits,
    assert_loaded,
    drawn,
    look,
    make_zoo,
    train_zoo,
)
from checkpoint_files import read_contents, read_tensors
from harness import run_ranks
from zero_optim import GradScaler, checkpoint

LEG = range(3)
REST = range(3, 6)
CAPS = (None, 0.0005, 0.002, 0.01)


def save(rank: int, world_size: int, folder: str, job: Job, goes_on: bool = False) -> tuple[Seen, list[float], Seen]:
    """Train a leg and save; with ``goes_on``, train the rest, too."""
    model, opt = make_zoo(job, seed=rank)
    train_zoo(model, opt, LEG, rank, world_size)
    assert checkpoint.save(folder, model, opt, extra={"leg": (1, 2)}) == Path(folder) / "step-3"
    seen = look(model, opt)
    losses = train_zoo(model, opt, REST, rank, world_size) if goes_on else []
    return seen, losses, look(model, opt)


def load(rank: int, world_size: int, folder: str, job: Job, goes_on: bool = False) -> tuple[Seen, list[float], Seen]:
    model, opt = make_zoo(job, seed=50 + rank)
    loaded = checkpoint.load(folder, model, opt)
    assert (loaded.folder, loaded.step, loaded.extra) == (Path(folder) / "step-3", 3, {"leg": (1, 2)})
    seen = look(model, opt)
    losses = train_zoo(model, opt, REST, rank, world_size) if goes_on else []
    return seen, losses, look(model, opt)


# Of sixteen pairs of stages, eight in which each stage saves twice and loads twice.
@pytest.mark.parametrize("seed", slow_where(lambda seed: (seed // 4 - seed % 4) % 4 not in (1, 2), range(16)))
def test_drawn_jobs(tmp_path: Path, seed: int) -> None:
    draw = drawn(seed)
    ranks, ranks_then = draw.randint(1, 4), draw.randint(1, 4)
    # Every pair of stages comes up.
    job = Job(stage=seed % 4, dtype=draw.choice(DTYPES), cap=draw.choice(CAPS), split=draw.randint(1, 5))
    then = Job(stage=seed // 4, dtype=draw.choice(DTYPES), cap=draw.choice(CAPS), split=job.split)
    saved, *_ = run_ranks(ranks, save, str(tmp_path), job)[0]
    for seen, *_ in run_ranks(ranks_then, load, str(tmp_path), then):
        assert_loaded(saved, seen, then.dtype)


@pytest.mark.parametrize(
    ("ranks", "stage"),
    slow_after(4, [(2, 0), (3, 1), (2, 2), (3, 3), (1, 1), (1, 3), (3, 0), (3, 2)]),
)
def test_at_the_same_scale_training_goes_on_bit_for_bit(tmp_path: Path, stage: int, ranks: int) -> None:
    job = Job(stage=stage, dtype=torch.bfloat16, cap=0.002)
    whole = run_ranks(ranks, save, str(tmp_path), job, True)
    again = run_ranks(ranks, load, str(tmp_path), job, True)
    for (_, losses, end), (_, losses_then, end_then) in zip(whole, again, strict=True):
        assert losses == losses_then
        for name in end.state:
            assert_bits(end.state[name], end_then.state[name])
            assert torch.equal(end.values[name], end_then.values[name]), name


@pytest.mark.parametrize(
    ("stage", "over"), slow_after(2, [(3, "shard"), (3, "all"), (1, "all"), (2, "shard"), (1, "shard"), (2, "all")])
)
def test_on_a_grid_training_goes_on_bit_for_bit(tmp_path: Path, stage: int, over: str) -> None:
    """And what was saved there loads where all ranks shard, and the other way round."""
    flat = Job(stage=stage, dtype=torch.bfloat16, cap=0.002)
    grid = replace(flat, replicas=2, state_over=over)
    whole = run_ranks(4, save, str(tmp_path / "grid"), grid, True)
    again = run_ranks(4, load, str(tmp_path / "grid"), grid, True)
    for (_, losses, end), (_, losses_then, end_then) in zip(whole, again, strict=True):
        assert losses == losses_then
        for name in end.state:
            assert_bits(end.state[name], end_then.state[name])
    for ranks in (1, 3):
        assert_loaded(whole[0][0], run_ranks(ranks, load, str(tmp_path / "grid"), flat)[0][0], torch.bfloat16)
    saved, *_ = run_ranks(3, save, str(tmp_path / "flat"), flat)[0]
    assert_loaded(saved, run_ranks(4, load, str(tmp_path / "flat"), grid)[0][0], torch.bfloat16)
    sizes = list(read_contents(tmp_path / "grid" / "step-3")["files"].values())
    assert max(sizes) - min(sizes) < 20_000, "replicas share the writing"


def load_whole(rank: int, world_size: int, folder: str, job: Job) -> list[float]:
    """The same by the format alone: every rank reads all, before anything is sharded."""
    tensors, contents = read_tensors(Path(folder) / "step-3"), read_contents(Path(folder) / "step-3")
    model = Zoo()
    own = {name: value for (kind, name), value in tensors.items() if kind in ("parameter", "buffer")}
    model.load_state_dict(own | {"head.weight": own["embedding.weight"]})
    model, opt = make_zoo(job, seed=rank, model=model)
    (saved,) = contents["optimizers"]
    names = [name for group in saved["groups"] for name in group["params"]]
    state = {
        index: {"step": saved["steps"][name], **{kind: tensors[kind, name] for kind in ("exp_avg", "exp_avg_sq")}}
        for index, name in enumerate(names)
        if name in saved["steps"]
    }
    groups = opt.state_dict()["param_groups"]
    zero_optim.load_full_state_dict(opt, {"state": state, "param_groups": groups})
    return train_zoo(model, opt, REST, rank, world_size)


@pytest.mark.parametrize(
    ("ranks", "ranks_then", "stage"),
    slow_after(2, [(1, 3, 3), (4, 2, 2), (2, 1, 1), (2, 4, 3)]),
)
def test_at_another_scale_training_goes_on(tmp_path: Path, ranks: int, ranks_then: int, stage: int) -> None:
    """With the losses of a job that was loaded there from whole states, by ``load_full_state_dict``."""
    job = Job(stage=stage)
    run_ranks(ranks, save, str(tmp_path), job)
    _, losses, end = run_ranks(ranks_then, load, str(tmp_path), job, True)[0]
    of_whole = run_ranks(ranks_then, load_whole, str(tmp_path), job)[0]
    assert losses == pytest.approx(of_whole, rel=1e-4) and len(losses) == len(REST)
    assert {int(entry["step"]) for entry in end.state.values()} == {6}


# -- what is in it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (3, 0), (3, 1), (2, 2), (4, 3)])
def test_it_holds_ordinary_tensors_under_ordinary_names(tmp_path: Path, ranks: int, stage: int) -> None:
    """By the documented format alone. Replicated tensors are shared out by bytes."""
    seen, *_ = run_ranks(ranks, save, str(tmp_path), Job(stage=stage, dtype=torch.bfloat16))[0]
    folder = tmp_path / "step-3"
    tensors, contents = read_tensors(folder), read_contents(folder)
    expected = {("parameter", name): value for name, value in seen.values.items()}
    buffers = ("table", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    expected |= {("buffer", name): expected.pop(("parameter", name)) for name in buffers}
    assert contents["aliases"] == {"head.weight": "embedding.weight"}
    expected |= {
        (kind, name): entry[kind] for name, entry in seen.state.items() for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    never = {key for key in tensors.keys() - expected.keys() if key[1] in ("unused", "frozen")}  # never updated
    assert tensors.keys() - never == expected.keys()
    for key, value in expected.items():
        assert torch.equal(tensors[key], value) and tensors[key].dtype == value.dtype, key
    sizes = list(contents["files"].values())
    assert len(sizes) == ranks and max(sizes) - min(sizes) < 20_000  # rank 0 has buffers too; headers differ
    assert len(list(folder.iterdir())) == ranks + 1


def test_a_plain_model_and_adamw_read_it_and_write_one(tmp_path: Path) -> None:
    saved, *_ = run_ranks(3, save, str(tmp_path / "sharded"), Job(stage=3, dtype=torch.bfloat16))[0]
    model = Zoo().float()
    checkpoint.load(tmp_path / "sharded", model)
    assert model.head.weight is model.embedding.weight
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name == "hidden":
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
    (seen, *_), _ = run_ranks(2, load_other, str(tmp_path / "plain"), Job(stage=3))
    for name, parameter in named:
        if name in seen.state:
            assert torch.equal(seen.values[name], parameter.detach()), name
            assert torch.equal(seen.state[name]["exp_avg"], opt.state[parameter]["exp_avg"]), name


def load_other(rank: int, world_size: int, folder: str, job: Job) -> tuple[Seen]:
    model, opt = make_zoo(job, seed=50 + rank)
    assert checkpoint.load(folder, model, opt, strict=False).step == 4
    return (look(model, opt),)


class Position:
    """A loader that knows where it is."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


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
    checkpoint.save(folder, model, opt, step=7, scaler=scaler, scheduler=scheduler, data=Position(10 + rank))
    scheduler.step()
    return [scaler.get_scale(), *scheduler.get_last_lr(), float(torch.rand(()))]


def load_all(rank: int, world_size: int, folder: str) -> tuple[list[float], int, tuple[str, ...]]:
    model, opt = make_zoo(Job(dtype=torch.float16), seed=rank)
    scaler, data = GradScaler(), Position(0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[1e-3, 1e-3], total_steps=5)
    loaded = checkpoint.load(folder, model, opt, scaler=scaler, scheduler=scheduler, data=data)
    assert loaded.step == 7 and scaler.get_growth_factor() == 2.0
    scheduler.step()
    return [scaler.get_scale(), *scheduler.get_last_lr(), float(torch.rand(()))], data.at, loaded.notes


def test_scaler_schedule_random_states_and_position_come_back(tmp_path: Path) -> None:
    before = run_ranks(2, save_all, str(tmp_path))
    assert before[0][0] > 8 and before[0][-1] != before[1][-1]
    for rank, (now, at, notes) in enumerate(run_ranks(2, load_all, str(tmp_path))):
        assert now == before[rank] and at == 10 + rank and notes == ()
    for now, at, notes in run_ranks(3, load_all, str(tmp_path)):
        assert now[:3] == before[0][:3] and at == 0
        assert notes == ("random states and positions in data were saved by 2 ranks, and are not loaded by 3",)
