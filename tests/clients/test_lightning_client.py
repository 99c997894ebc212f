"""Lightning: ``configure_optimizers``, its closures, clipping, precision plugin and checkpoints; one rank and two."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import zero_optim
from client_cases import EPS, as_torchrun, assert_like_adamw, assert_ranks_alike, close, load_example, needs, weights
from harness import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import assert_bitwise

pytestmark = needs("lightning")

LR, STEPS = 1e-2, 10


@contextlib.contextmanager
def silent() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silent():
        yield


def train(make_optimizer: Any, *, own_clipping: bool = True, scaler: Any = None, **options: Any) -> nn.Module:
    """The example's module after STEPS steps. ``own_clipping``: by the example's hook, else by Lightning."""
    import lightning
    from lightning.pytorch.plugins.precision import MixedPrecision

    example = load_example("lightning_module")

    class Module(example.Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.parameters(), lr=LR, eps=EPS)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=100, div_factor=1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        if not own_clipping:
            configure_gradient_clipping = lightning.LightningModule.configure_gradient_clipping

    lightning.seed_everything(0, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    x = torch.randn(4 * STEPS * ranks, 16)
    module = Module()
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if scaler else []
    quiet = {"logger": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, max_epochs=1, plugins=plugins, enable_progress_bar=False, **quiet, **options
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4))
    for optimizer in trainer.optimizers:
        close(optimizer)
    return module


@pytest.mark.parametrize("clip", [None, 0.1])
def test_it_trains_as_with_adamw(clip: float | None) -> None:
    options = {"own_clipping": False, "gradient_clip_val": clip, "accumulate_grad_batches": 2}
    ours, expected = train(zero_optim.ShardedAdamW, **options), train(torch.optim.AdamW, **options)
    assert_like_adamw(weights(ours), weights(expected), LR, STEPS)


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, zero_optim.GradScaler], ids=["torch", "zero_optim"])
def test_either_scaler_scales(scaler: Any) -> None:
    """And what is clipped was unscaled before."""
    ours = train(zero_optim.ShardedAdamW, scaler=scaler("cpu"), gradient_clip_val=0.1)
    expected = train(torch.optim.AdamW, scaler=torch.amp.GradScaler("cpu"), gradient_clip_val=0.1, own_clipping=False)
    assert_like_adamw(weights(ours), weights(expected), LR, STEPS)


def test_lightnings_wrapper_takes_no_hooks_along() -> None:
    """It passes reads on to the optimizer whose class it takes on, ``_closed`` too, and dies while training begins."""
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = nn.Linear(4, 4)
    optimizer = zero_optim.ShardedAdamW(model.parameters())
    wrapper = LightningOptimizer(optimizer)
    assert isinstance(wrapper, zero_optim.ShardedAdamW)
    del wrapper
    gc.collect()
    model.weight.data = torch.zeros(4, 4)
    with pytest.raises(zero_optim.ParameterError, match="moved"):  # from a hook
        model(torch.ones(1, 4)).sum().backward()
    optimizer.close()


def test_a_scaler_may_be_given_lightnings_wrapper() -> None:
    """It takes what is written to it for itself."""
    from lightning.pytorch.core.optimizer import LightningOptimizer

    found = []
    for wrap in (lambda optimizer: optimizer, LightningOptimizer):
        model, scaler = nn.Linear(4, 1), zero_optim.GradScaler()
        nn.init.ones_(model.weight)
        optimizer = zero_optim.ShardedAdamW(model.parameters(), lr=LR, eps=1.0)
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(wrap(optimizer))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        found.append(model.weight.detach().clone())
    assert_bitwise(found[1:], found[:1], "unscaled through the wrapper")


def run_example(folder: str) -> dict[str, Any]:
    main = load_example("lightning_module").main
    straight = main(["--epochs", "2", "--output", os.path.join(folder, "straight")])
    main(["--epochs", "1", "--output", os.path.join(folder, "halves")])
    resumed = main(["--epochs", "2", "--output", os.path.join(folder, "halves"), "--resume"])
    return {"straight": weights(straight.lightning_module), "resumed": weights(resumed.lightning_module)}


def test_the_example(tmp_path: Any) -> None:
    found = run_example(str(tmp_path))
    assert_bitwise(found["resumed"], found["straight"], "resumed")


def _on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), silent():
        strategy_of = partial(load_example("lightning_module").ShardedStrategy, process_group_backend="gloo")
        found = run_example(folder)
        for name, ours, torchs in (("", None, None), ("scaled ", zero_optim.GradScaler(), torch.amp.GradScaler("cpu"))):
            options = {"gradient_clip_val": 0.1}
            found[f"{name}ours"] = weights(train(_SeenSharded, strategy=strategy_of(), scaler=ours, **options))
            options |= {"strategy": "ddp", "own_clipping": False}
            found[f"{name}expected"] = weights(train(torch.optim.AdamW, scaler=torchs, **options))
        return found


class _SeenSharded(zero_optim.ShardedAdamW):
    """Fails unless backward itself left the gradients sharded."""

    def clip_grad_norm_(self, *args: Any, **options: Any) -> Any:
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        assert all(isinstance(gradient, zero_optim.FlatShard) for gradient in gradients)
        return super().clip_grad_norm_(*args, **options)


def test_two_ranks(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_ranks(2, _on_two_ranks, str(tmp_path)))
    assert_like_adamw(found["ours"], found["expected"], LR, STEPS)
    for ours, expected in zip(found["scaled ours"], found["scaled expected"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)  # fp16 rounds what the last bits decide
    assert_bitwise(found["resumed"], found["straight"], "resumed")


def _resume_elsewhere(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), silent():
        arguments = ["--epochs", "3", "--output", os.path.join(folder, "halves"), "--resume"]
        return {"resumed": weights(load_example("lightning_module").main(arguments).lightning_module)}


def test_two_ranks_checkpoint_goes_on_on_one_and_on_three(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_ranks(2, _on_two_ranks, str(tmp_path)))
    for ranks in (1, 3):
        folder = tmp_path / f"on {ranks}"
        shutil.copytree(tmp_path / "halves", folder / "halves")
        elsewhere = assert_ranks_alike(run_ranks(ranks, _resume_elsewhere, str(folder)))["resumed"]
        for after, before in zip(elsewhere, found["resumed"], strict=True):  # an epoch later, by Adam's steps
            assert 0 < (after - before).abs().max() < 30 * LR
