"""``integrations.accelerate.prepare``: stages 0 to 3 on one rank and on two, as AdamW in DDP; what is saved, loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zero_optim
from client_cases import (
    ALONE_SLOW,
    EPS,
    as_torchrun,
    assert_like_adamw,
    assert_ranks_alike,
    forget_accelerator,
    gathers_in_flight,
    load_example,
    needs,
    reductions_a_step,
    run_client_ranks,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from training_cases import assert_bitwise

pytestmark = needs("accelerate")

LR, STEPS = 1e-2, 4


class Net(nn.Module):
    """With a parameter that no unit holds, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = load_example("accelerate_loop").build_model()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.layers(x) * self.scale


class Run:
    """A model, its optimizer and its schedule, prepared by accelerate: by its own prepare for AdamW, else by ours."""

    def __init__(self, stage: int | None, *, precision: str = "no", scaler: Any = None, **plugin: Any) -> None:
        from accelerate import Accelerator
        from accelerate.utils import GradientAccumulationPlugin
        from zero_optim.integrations.accelerate import prepare

        forget_accelerator()
        accumulation = GradientAccumulationPlugin(num_steps=2, **plugin)
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_plugin=accumulation, rng_types=[]
        )
        self.accelerator.scaler = scaler
        torch.manual_seed(0)
        self.plain = model = Net().to(self.accelerator.device)
        if stage == 3:
            zero_optim.shard_module(model, units=(nn.Linear,))
        options = {} if stage is None else {"stage": stage}
        kind = torch.optim.AdamW if stage is None else zero_optim.ShardedAdamW
        self.inner = kind(model.parameters(), lr=LR, eps=EPS, **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(self.inner, LR, total_steps=100, div_factor=1)
        objects = (model, self.inner, schedule)
        prepared = self.accelerator.prepare(*objects) if stage is None else prepare(self.accelerator, *objects)
        self.model, self.optimizer, self.schedule = prepared

    def train(self, steps: int = STEPS) -> list[Tensor]:
        """The weights after so many steps; from where it is."""
        draw, accelerator = load_example("accelerate_loop").draw, self.accelerator
        for step in range(accelerator.step, accelerator.step + 2 * steps):
            x, y = draw(step, accelerator.process_index)
            with accelerator.accumulate(self.model):
                accelerator.backward(F.cross_entropy(self.model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.in_flight = gathers_in_flight(self.inner)
                self.schedule.step()
                self.optimizer.zero_grad()
        return weights(self.plain)


def from_file(path: str) -> dict[str, Tensor]:
    """As a process without sharding reads it."""
    from safetensors.torch import load_file

    Net().load_state_dict(state := load_file(path))
    return state


def _all_stages(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        found = {"expected": Run(None).train()}
        for stage in range(4):
            place, run = f"{folder}/{stage}", Run(stage)
            run.train(2)
            run.accelerator.save_state(place)
            found[f"stage {stage}"] = run.train(2)
            assert run.inner.stage == stage and (world_size == 1 or reductions_a_step(run.inner) == 1)
            assert run.in_flight == (world_size > 1 and stage in (1, 2))
            run.accelerator.save_model(run.model, f"{place}/model")
            state = run.accelerator.get_state_dict(run.model)
            assert bool(state) is (rank == 0 or stage < 3)
            run.accelerator.load_state(place)  # back, in the same run
            assert_bitwise(run.train(2), found[f"stage {stage}"], f"gone back at stage {stage}")
            run.inner.close()
            saved = from_file(f"{place}/model/model.safetensors")
            named = [saved[name] for name, _ in run.plain.named_parameters()]
            assert_bitwise(named, found[f"stage {stage}"], f"saved at stage {stage}")
            halfway = [from_file(f"{place}/model.safetensors")[name] for name, _ in run.plain.named_parameters()]
            resumed = Run(stage)
            resumed.accelerator.load_state(place)
            assert resumed.plain.calls == 4 == resumed.accelerator.step
            assert_bitwise(weights(resumed.plain), halfway, f"save_state's weights at stage {stage}")
            assert_bitwise(resumed.train(2), found[f"stage {stage}"], f"resumed at stage {stage}")
            resumed.inner.close()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ALONE_SLOW)
def test_every_stage_trains_saves_and_resumes(ranks: int, tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(ranks, _all_stages, str(tmp_path), timeout=180))
    for stage in range(4):
        assert_like_adamw(found[f"stage {stage}"], found["expected"], LR, STEPS)


def _leaves(rank: int, world_size: int, folder: str) -> None:
    with as_torchrun(rank, world_size):
        run = Run(3)
        trained = run.train(2)
        run.accelerator.save_state(folder)
        state = zero_optim.full_state_dict(run.inner, None)["state"]
        run.inner.close()
        plain = Run(None)
        assert type(plain.inner) is torch.optim.AdamW
        zero_optim.checkpoint.load(f"{folder}/sharded", plain.plain, plain.inner)
        assert_bitwise(weights(plain.plain), trained, "weights")
        found = plain.inner.state_dict()["state"]
        assert found.keys() == state.keys() and len(found) == len(trained)
        for index, of in state.items():
            for name in ("step", "exp_avg", "exp_avg_sq"):
                assert_bitwise([found[index][name]], [of[name]], f"{name} of {index}")
        plain.train(1)


def test_plain_accelerate_goes_on_with_adamw(tmp_path: Any) -> None:
    run_client_ranks(2, _leaves, str(tmp_path), timeout=120)


def _further(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from accelerate import Accelerator, DistributedType
    from zero_optim.integrations.accelerate import prepare

    with as_torchrun(rank, world_size):
        found = {"expected": Run(None).train(), "expected bf16": Run(None, precision="bf16").train()}
        for stage in (2, 3):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)  # as accelerate makes one for a GPU
            run = Run(stage, scaler=scaler)
            assert isinstance(run.accelerator.scaler, zero_optim.GradScaler)
            found[f"scaled {stage}"] = run.train()
            found[f"bf16 {stage}"] = Run(stage, precision="bf16").train()
        each = Run(2, sync_each_batch=True)
        each.train()
        assert reductions_a_step(each.inner) == 2
        with pytest.raises(zero_optim.CheckpointError, match=r"load_full_state_dict"):
            each.accelerator.load_state(folder)
        with pytest.raises(TypeError, match=r"make a zero_optim\.ShardedAdamW"):
            prepare(each.accelerator, nn.Linear(1, 1), torch.optim.AdamW(nn.Linear(1, 1).parameters()))
        each.accelerator.backward(each.model(torch.ones(1, 16)).sum())
        with pytest.raises(zero_optim.ShardAccessError, match=r"clip_grad_norm_"):
            each.accelerator.clip_grad_value_(each.model.parameters(), 0.1)
        other = zero_optim.ShardedAdamW(nn.Linear(2, 2).parameters())
        each.accelerator.prepare(other)
        everything = [*each.model.parameters(), *other.param_groups[0]["params"]]
        with pytest.raises(zero_optim.ParameterError, match="parameters of 2 optimizers"):
            each.accelerator.clip_grad_norm_(everything, 0.1)
        accelerator = Accelerator(cpu=True)
        accelerator.state.distributed_type = DistributedType.FSDP
        with pytest.raises(zero_optim.ZeroOptimError, match="FSDP, which shards by itself"):
            prepare(accelerator, nn.Linear(1, 1))
        return found


def test_precisions_and_what_misuse_says(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _further, str(tmp_path), timeout=180))
    for stage in (2, 3):
        assert_like_adamw(found[f"scaled {stage}"], found["expected"], LR, STEPS)
        for ours, torchs in zip(found[f"bf16 {stage}"], found["expected bf16"], strict=True):
            assert (ours - torchs).abs().mean() < LR / 4  # they have moved by about STEPS * LR / 2


# -- the example ---------------------------------------------------------------------------------------------------


def _example(rank: int, world_size: int, folder: str, stages: tuple[str, ...]) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        main, found = load_example("accelerate_loop").main, {}
        for stage in stages:
            found[f"straight {stage}"] = weights(main(["--steps", "4", "--stage", stage]))
            options = ["--stage", stage, "--checkpoint", f"{folder}/{stage}"]
            main(["--steps", "2", *options])
            found[f"resumed {stage}"] = weights(main(["--steps", "4", *options]))
        return found


def _example_goes_on(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        main = load_example("accelerate_loop").main
        there = weights(main(["--steps", "4", "--checkpoint", folder]))  # the steps are done: nothing is trained
        return {"there": there, "on": weights(main(["--steps", "5", "--checkpoint", folder]))}


def test_the_example(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _example, str(tmp_path), ("2", "3")))
    for stage in (2, 3):
        assert_bitwise(found[f"resumed {stage}"], found[f"straight {stage}"], f"resumed at stage {stage}")
    for ranks in (1, 3):  # at stage 2, from what two ranks saved at stage 3
        elsewhere = assert_ranks_alike(run_client_ranks(ranks, _example_goes_on, str(tmp_path / str(5 - ranks))))
        assert not any(map(torch.equal, elsewhere["on"], elsewhere["there"]))
