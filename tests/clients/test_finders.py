"""Finders of batch sizes and rates, which train, fail and begin again; SAM, which moves weights between backwards."""

from __future__ import annotations

from typing import Any

import client_cases as cases
import pytest
import torch
import zero_optim
from harness import run_ranks
from test_sharded_trainer import at_stage, make_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training_cases import assert_bitwise

LR, STEPS = 1e-3, 4


def linear() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))


def running_out() -> nn.Module:
    """GPT-2, out of memory in the second backward of a batch of 8."""
    model, sizes = cases.load_example("transformers_loop").build_model("gpt2"), []

    def after(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        sizes.append(len(grad_output[0]))
        if sizes == [8, 8]:
            raise RuntimeError("CUDA out of memory. Tried to allocate 8 TiB")

    model.transformer.h[1].register_full_backward_hook(after)
    return model


def _batch_sizes(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with cases.as_torchrun(rank, world_size):
        from transformers import Trainer
        from zero_optim.integrations.transformers import ShardedTrainer

        found = {}
        options = {"save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False, "max_steps": STEPS}
        options |= {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "gradient_checkpointing": False}
        for stage in (None, 0, 2, 3):
            kind, how = (Trainer, None) if stage is None else (ShardedTrainer, at_stage(stage))
            trainer = make_trainer(kind, folder, running_out(), how=how, gradient_accumulation_steps=1, **options)
            trainer.train()
            assert trainer._train_batch_size == 7
            found[f"stage {stage}"] = cases.weights(trainer.model)
            cases.close(getattr(trainer.optimizer, "optimizer", None))
        return found


@cases.needs("transformers", "accelerate")
def test_batch_sizes_are_found(tmp_path: Any) -> None:
    found = cases.assert_ranks_alike(cases.run_client_ranks(2, _batch_sizes, str(tmp_path), timeout=180))
    for stage in (0, 2, 3):
        cases.assert_like_adamw(found[f"stage {stage}"], found["stage None"], LR, STEPS + 1)


def _tuned(rank: int, world_size: int, folder: str, stage: int | None) -> tuple[list[Tensor], float, int]:
    """The weights after Lightning has tuned and trained, and what it has found. Batches of 32 do not fit."""
    with cases.as_torchrun(rank, world_size), cases.silent():
        import lightning
        from lightning.pytorch.tuner import Tuner
        from zero_optim.integrations.lightning import ShardedStrategy

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layers, self.lr, self.batch_size = linear(), LR, 4

            def training_step(self, batch: list[Tensor], index: int) -> Tensor:
                if len(batch[0]) == 32:
                    raise RuntimeError("CUDA out of memory. Tried to allocate 8 TiB")
                return F.cross_entropy(self.layers(batch[0]), batch[1])

            def train_dataloader(self) -> DataLoader:
                return DataLoader(TensorDataset(*cases.load_example("sam").draw(0, 0, 400)), batch_size=self.batch_size)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                kind = torch.optim.AdamW if stage is None else zero_optim.ShardedAdamW
                return kind(self.parameters(), lr=self.lr, eps=cases.EPS)

        units = {"units": (nn.Linear,)} if stage == 3 else {}
        strategy = "ddp" if stage is None else ShardedStrategy(process_group_backend="gloo", **units)
        options = {"accelerator": "cpu", "devices": world_size, "max_steps": 6, "default_root_dir": folder}
        options |= {"enable_checkpointing": False, **cases.QUIET}
        trainer, module = lightning.Trainer(strategy=strategy if world_size > 1 else "auto", **options), Module()
        if world_size > 1:
            Tuner(trainer).lr_find(module, min_lr=1e-4, num_training=25)
        else:  # Lightning scales batch sizes without a strategy alone
            Tuner(trainer).scale_batch_size(module)
            cases.close(trainer.optimizers[0])
        trainer.fit(module)
        cases.close(trainer.optimizers[0])
        return cases.weights(module), module.lr, module.batch_size


@cases.needs("lightning")
@pytest.mark.parametrize(("ranks", "stages"), [(1, (2,)), (2, (2, 3))])
def test_lightning_finds_batch_sizes_and_rates(ranks: int, stages: tuple[int, ...], tmp_path: Any) -> None:
    (expected, *found), *_ = cases.run_client_ranks(ranks, _tuned, str(tmp_path), None)
    assert (found[0] > LR) == (ranks == 2) and found[1] == (16 if ranks == 1 else 4)
    for stage in stages:
        for ours, *found_here in cases.run_client_ranks(ranks, _tuned, str(tmp_path), stage):
            assert found_here == found
            cases.assert_like_adamw(ours, expected, found[0], 6)


def _sam(rank: int, world_size: int, stage: int, dtype: torch.dtype, rho: float | None) -> list[Tensor]:
    """The weights after steps of the example; ``rho`` None: of plain ones."""
    sam, model = cases.load_example("sam"), linear().to(dtype)
    opt = zero_optim.ShardedAdamW(model, lr=LR, eps=cases.EPS, stage=stage)
    for step in range(STEPS):
        x, classes = sam.draw(step, rank)
        if rho is not None:
            sam.train_step(model, opt, x.to(dtype), classes, rho)
        else:
            F.cross_entropy(model(x.to(dtype)), classes).backward()
            opt.step()
            opt.zero_grad()
    return cases.weights(model)


def test_sam_climbs_and_comes_back() -> None:
    sam, model = cases.load_example("sam"), linear()
    assert sam.main(["--stage", "1"]) < 0.5  # four classes: 1.386 at first
    opt = torch.optim.AdamW(model.parameters(), lr=LR, eps=cases.EPS)
    for step in range(STEPS):
        grads = []
        for x, classes in (sam.draw(step, rank) for rank in (0, 1)):
            F.cross_entropy(model(x), classes).backward()
            before = sam.climb(model, 0.05)
            grads.append(torch.autograd.grad(F.cross_entropy(model(x), classes), [*model.parameters()]))
            for parameter, value in before:
                parameter.data.copy_(value)
        for parameter, *own in zip(model.parameters(), *grads, strict=True):
            parameter.grad = sum(own) / 2
        opt.step()
        opt.zero_grad()
    for stage in (0, 1, 2):
        for ours in run_ranks(2, _sam, stage, torch.float32, 0.05):
            cases.assert_like_adamw(ours, cases.weights(model), LR, STEPS)
        for still, plain in zip(*(run_ranks(2, _sam, stage, torch.bfloat16, rho) for rho in (0.0, None)), strict=True):
            assert_bitwise(still, plain, "masters keep their low bits")
