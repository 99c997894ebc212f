"""Saved and loaded at the same world size, through ``torch.load(weights_only=True)``: training goes on bit for bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from cells import pairs
from harness import run_ranks
from sharded_cases import Given, GivenNet
from torch import Tensor, nn
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    error_of,
    linear_backward,
    make_gradients,
    make_parameters,
    named,
    through_a_file,
)

STEPS, SAVED = 6, 3


class _Run:
    """A model, its optimizer and a scheduler over two groups."""

    def __init__(
        self, rank: int, stage: int, dtype: torch.dtype, with_names: bool, seed: int = 0, shuffled: bool = False
    ) -> None:
        self.rank, self.shuffled = rank, shuffled
        self.params = make_parameters(SHAPES, dtype, seed)
        entries = named(self.params) if with_names else self.params
        groups = [
            {"params": entries[:3], "weight_decay": 0.1},
            {"params": entries[3:], "lr": 5e-3, "betas": (0.8, 0.99)},
        ]
        self.opt = zero_optim.ShardedAdamW(groups, lr=1e-2, stage=stage, bucket_cap_mb=TINY_CAP_MB)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=STEPS)

    def step(self, step: int) -> None:
        grads: list[Tensor | None] = list(make_gradients(self.params, self.rank, step))
        if step % 2:
            grads[1] = None  # a step count of its own
        order = [3, 0, 6, 1, 7, 5, 2, 4] if self.shuffled else range(len(grads))
        linear_backward([self.params[i] for i in order], [grads[i] for i in order])
        self.opt.step()
        self.opt.zero_grad()
        self.scheduler.step()

    def checkpoint(self) -> dict[str, Any]:
        return {
            "model": nn.ParameterList(self.params).state_dict(),
            "opt": self.opt.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        nn.ParameterList(self.params).load_state_dict(checkpoint["model"])
        self.opt.load_state_dict(checkpoint["opt"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])


def _resumed(
    rank: int, world_size: int, stage: int, dtype: torch.dtype, with_names: bool, shuffled: bool
) -> list[list[Tensor]]:
    """Parameters of a straight run, of one restored into fresh objects, and of one restored into objects in use."""
    straight = _Run(rank, stage, dtype, with_names, shuffled=shuffled)
    for step in range(STEPS):
        if step == SAVED:
            checkpoint = through_a_file(straight.checkpoint())
        straight.step(step)

    fresh = _Run(rank, stage, dtype, with_names, seed=9, shuffled=shuffled)
    fresh.restore(checkpoint)
    used = _Run(rank, stage, dtype, with_names, seed=9)  # its buckets took another order
    for step in range(2):
        used.step(20 + step)
    used.restore(checkpoint)
    for step in range(SAVED, STEPS):
        fresh.step(step)
        used.step(step)
    runs = (straight, fresh, used)
    assert len({tuple(group["lr"] for group in run.opt.param_groups) for run in runs}) == 1
    for run in runs:
        run.opt.close()
    return [copies(run.params) for run in runs]


@pytest.mark.parametrize(("stage", "world_size", "dtype"), pairs((0, 1, 2), (1, 2, 3), (torch.float32, torch.bfloat16)))
def test_training_continues_bit_for_bit(stage, world_size, dtype):
    with_names = world_size != 3
    for straight, fresh, used in run_ranks(world_size, _resumed, stage, dtype, with_names, True):
        assert_bitwise(fresh, straight, "restored into fresh objects")
        assert_bitwise(used, straight, "restored into objects in use")


def _saved(rank: int, world_size: int, stage: int, with_names: bool) -> tuple[dict[str, Any], list[str]]:
    run = _Run(rank, stage, torch.bfloat16, with_names)
    for step in range(3):
        run.step(step)
    state = run.opt.state_dict()
    kinds = sorted({type(value).__name__ for entry in state["state"].values() for value in entry.values()})
    shapes = {
        key: {name: tuple(value.shape) for name, value in entry.items() if name != "step"}
        for key, entry in state["state"].items()
    }
    steps = {key: float(entry["step"]) for key, entry in state["state"].items()}
    groups = state["param_groups"]
    plain = state["state"] if world_size == 1 else None
    run.opt.close()
    return {"shapes": shapes, "steps": steps, "groups": groups, "plain": plain, "keys": sorted(state)}, kinds


@pytest.mark.parametrize("with_names", [True, False])
def test_what_a_state_dict_holds(with_names):
    names = [name for name, _ in named(make_parameters(SHAPES))] if with_names else list(range(len(SHAPES)))
    for world_size in (1, 2):
        for stage in (1, 2):
            for saved, kinds in run_ranks(world_size, _saved, stage, with_names):
                assert saved["keys"] == ["param_groups", "state"]
                assert set(saved["shapes"]) == set(names)
                for name, shape in zip(names, SHAPES, strict=True):
                    assert saved["shapes"][name] == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), shape)
                    assert saved["steps"][name] == (2 if name == names[1] else 3)
                assert ("FlatShard" in kinds) == (world_size == 2)
                assert [len(group["params"]) for group in saved["groups"]] == [3, 5]
                assert [group["weight_decay"] for group in saved["groups"]] == [0.1, 1e-2]
                assert saved["groups"][1]["betas"] == (0.8, 0.99)


def _mismatched(rank: int, world_size: int, stage: int) -> dict[str, tuple[str, str]]:
    """What loading states that do not fit raises; the optimizer must be as before."""
    run = _Run(rank, stage, torch.bfloat16, True)
    run.step(0)
    good = run.opt.state_dict()

    def changed(**entries: Any) -> dict[str, Any]:
        return {**good, **entries}

    names = sorted(good["state"])
    renamed = {("other.weight" if name == names[0] else name): entry for name, entry in good["state"].items()}
    swapped = dict(good["state"])
    swapped[names[0]], swapped[names[1]] = swapped[names[1]], swapped[names[0]]
    without_moment = {
        name: {k: v for k, v in e.items() if (name, k) != (names[0], "exp_avg")} for name, e in good["state"].items()
    }
    cases = {
        "renamed": changed(state=renamed),
        "swapped shapes": changed(state=swapped),
        "a missing moment": changed(state=without_moment),
        "one group less": changed(param_groups=good["param_groups"][:1]),
        "no groups": {"state": good["state"]},
        "nothing": {},
    }
    before = copies(run.params)
    found = {}
    for case, state in cases.items():
        found[case] = error_of(lambda state=state: run.opt.load_state_dict(state))
    assert all(torch.equal(a, b) for a, b in zip(before, run.params, strict=True))
    run.opt.load_state_dict(good)
    run.step(1)
    run.opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_that_does_not_fit_is_refused_by_name(world_size):
    for found in run_ranks(world_size, _mismatched, 2):
        for case, (kind, text) in found.items():
            assert kind == "StateMismatchError", f"{case}: {kind or 'nothing raised'} {text}"
        assert "layer0.weight" in found["renamed"][1] or "other.weight" in found["renamed"][1]
        assert "layer0.weight" in found["a missing moment"][1]
        assert "layer" in found["swapped shapes"][1]


def _another_world(rank: int, world_size: int, saved: list[bytes]) -> tuple[str, str]:
    run = _Run(rank, 2, torch.bfloat16, True)
    state = torch.load(io.BytesIO(saved[rank]), weights_only=True)
    found = error_of(lambda: run.opt.load_state_dict(state))
    run.opt.close()
    return found


def _saved_bytes(rank: int, world_size: int) -> bytes:
    run = _Run(rank, 2, torch.bfloat16, True)
    run.step(0)
    buffer = io.BytesIO()
    torch.save(run.opt.state_dict(), buffer)
    run.opt.close()
    return buffer.getvalue()


def test_another_world_size_is_refused_in_words():
    saved = run_ranks(3, _saved_bytes)
    for kind, text in run_ranks(2, _another_world, saved):
        assert kind == "StateMismatchError" and "rank" in text


# -- what rank 0 alone has saved ---------------------------------------------------------------------------------------

RUNS = (((24, 40), (300,)), ((5,), (2, 12, 20)), ((36, 30), (1,)))


class _Sharded:
    """A model of units. ``muon``: its matrices are Muon's, and the rest AdamW's."""

    def __init__(self, rank: int, stage: int, muon: bool) -> None:
        self.rank, self.model = rank, GivenNet(RUNS, torch.bfloat16)
        if stage == 3:
            zero_optim.shard_module(self.model, (Given,))
        every = [*self.model.named_parameters()]
        matrices = [entry for entry in every if entry[1].dim() > 1]
        others = {"params": [entry for entry in every if entry[1].dim() < 2]}
        if muon:
            others["rule"] = zero_optim.rules.AdamW(lr=1e-2)
        make = zero_optim.ShardedMuon if muon else zero_optim.ShardedAdamW
        options = {"lr": 1e-2, "max_grad_norm": 0.5, "bucket_cap_mb": 0.004}
        self.opt = make([{"params": matrices}, others], stage=stage, **options)

    def step(self, step: int) -> None:
        shapes = [shape for run in RUNS for shape in run]
        self.model(make_gradients([torch.empty(shape).bfloat16() for shape in shapes], self.rank, step)).backward()
        self.opt.step()
        self.opt.zero_grad()

    def seen(self) -> list[Tensor]:
        """Collective. State and parameters, whole."""
        state = zero_optim.full_state_dict(self.opt, rank=None)["state"]
        tensors = [value for index in sorted(state) for value in state[index].values()]
        return copies([*tensors, *zero_optim.full_model_state_dict(self.model, rank=None).values()])


def _saved_by_rank_0(rank: int, world_size: int, stage: int, muon: bool, fresh: bool) -> tuple[str, str]:
    """What loading it raises on this rank; the optimizer must be as before. ``fresh``: it has not stepped."""
    buffer, straight = io.BytesIO(), _Sharded(rank, stage, muon)
    straight.step(0)
    if rank == 0:
        torch.save(straight.opt.state_dict(), buffer)
    sent = [buffer.getvalue()]
    dist.broadcast_object_list(sent)
    straight.opt.close()
    ends = []
    for disturbed in (True, False):
        run = _Sharded(rank, stage, muon)
        if not fresh:
            run.step(1)
        if disturbed:
            before = run.seen()
            state = torch.load(io.BytesIO(sent[0]), weights_only=True)
            told = error_of(lambda run=run, state=state: run.opt.load_state_dict(state))
            assert_bitwise(run.seen(), before, "after a load that was refused")
        run.step(2)
        run.step(3)
        ends.append(run.seen())
        run.opt.close()
    assert_bitwise(*ends, "a training with a load that was refused")
    return told


@pytest.mark.parametrize(
    ("world_size", "stage", "muon", "fresh"),
    [(2, 1, True, True), (2, 2, False, True), (3, 2, True, False), (3, 3, True, True), (2, 3, False, False)],
)
def test_what_rank_0_alone_has_saved_is_refused_on_every_rank(world_size, stage, muon, fresh):
    """As a script for DDP saves it: the file has the shards of one rank. The error says what to save."""
    first, *others = run_ranks(world_size, _saved_by_rank_0, stage, muon, fresh)
    assert first[0] == "RankMismatchError" and "rank 1 failed with StateMismatchError" in first[1]
    assert {kind for kind, _ in others} == {"StateMismatchError"}
    for _, text in (first, *others):
        assert "was saved as FlatShard" in text and "or save zero_optim.full_state_dict(opt)" in text


def _whole_at_stage_0(rank: int, world_size: int) -> None:
    straight = _Sharded(rank, 0, muon=True)
    straight.step(0)
    sent = [straight.opt.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(sent)
    again = _Sharded(rank, 0, muon=True)
    again.model.load_state_dict(straight.model.state_dict())
    again.opt.load_state_dict(sent[0])
    assert_bitwise(again.seen(), straight.seen(), "loaded")
    for step in (1, 2):
        straight.step(step)
        again.step(step)
    assert_bitwise(again.seen(), straight.seen(), "resumed")


def test_at_stage_0_rank_0_has_all_of_it():
    run_ranks(2, _whole_at_stage_0)
