"""Saved and loaded at the same world size, through ``torch.load(weights_only=True)``: training goes on bit for bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from harness import run_ranks
from oracle import Hyper, MasterAdamW, averages
from torch import Tensor, nn
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    assert_bitwise,
    copies,
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
        import zero_optim

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
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


def test_plain_state_equals_the_oracle():
    hypers = [Hyper(lr=1e-2, weight_decay=0.1)] * 3 + [Hyper(lr=5e-3, betas=(0.8, 0.99))] * 5
    oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), hypers)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), T_max=STEPS
    )
    for step in range(3):
        factor = rate.get_last_lr()[0]
        oracle.hypers = [Hyper(h.lr * factor, h.betas, h.eps, h.weight_decay) for h in hypers]
        grads = averages([make_gradients(oracle.params, 0, step)])
        oracle.step([None if i == 1 and step % 2 else g for i, g in enumerate(grads)])
        rate.optimizer.step()
        rate.step()
    ((saved, _),) = run_ranks(1, _saved, 2, False)
    for kind, expected in (("master", oracle.master), ("exp_avg", oracle.exp_avg), ("exp_avg_sq", oracle.exp_avg_sq)):
        actual = [saved["plain"][i][kind] for i in range(len(SHAPES))]
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-9)  # the scheduler's lr differs in its last bit


def _mismatched(rank: int, world_size: int, stage: int) -> dict[str, tuple[str, str]]:
    """What loading states that do not fit raises; the optimizer must be as before."""
    import zero_optim

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
        try:
            run.opt.load_state_dict(state)
        except zero_optim.ZeroOptimError as error:
            found[case] = (type(error).__name__, str(error))
        except Exception as error:
            found[case] = (type(error).__name__, str(error))
        else:
            found[case] = ("", "")
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


def _another_world(rank: int, world_size: int, saved: list[bytes]) -> str:
    import zero_optim

    run = _Run(rank, 2, torch.bfloat16, True)
    state = torch.load(io.BytesIO(saved[rank]), weights_only=True)
    try:
        run.opt.load_state_dict(state)
    except zero_optim.StateMismatchError as error:
        return str(error)
    finally:
        run.opt.close()
    return ""


def _saved_bytes(rank: int, world_size: int) -> bytes:
    run = _Run(rank, 2, torch.bfloat16, True)
    run.step(0)
    buffer = io.BytesIO()
    torch.save(run.opt.state_dict(), buffer)
    run.opt.close()
    return buffer.getvalue()


def test_another_world_size_is_refused_in_words():
    saved = run_ranks(3, _saved_bytes)
    assert all("rank" in text for text in run_ranks(2, _another_world, saved))
