"""Lightning as it is, on one rank: ``configure_optimizers``, its closures, clipping and precision plugin."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zero_optim
from client_cases import EPS, QUIET, assert_like_adamw, close, load_example, needs, silent, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import assert_bitwise

pytestmark = needs("lightning")

LR, STEPS = 1e-2, 10
ONE_CPU = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **QUIET}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silent():
        yield


def train(make_optimizer: Any, *, scaler: Any = None, **options: Any) -> nn.Module:
    """The example's module after STEPS steps, clipped by Lightning."""
    import lightning
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Module(load_example("lightning_module").Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.parameters(), lr=LR, eps=EPS)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=100, div_factor=1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    lightning.seed_everything(0, verbose=False)
    x = torch.randn(4 * STEPS, 16)
    module = Module()
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if scaler else []
    trainer = lightning.Trainer(max_epochs=1, plugins=plugins, **ONE_CPU, **options)
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4))
    for optimizer in trainer.optimizers:
        close(optimizer)
    return module


@pytest.mark.parametrize("clip", [None, 0.1])
def test_it_trains_as_with_adamw(clip: float | None) -> None:
    options = {"gradient_clip_val": clip, "accumulate_grad_batches": 2}
    ours, expected = train(zero_optim.ShardedAdamW, **options), train(torch.optim.AdamW, **options)
    assert_like_adamw(weights(ours), weights(expected), LR, STEPS)


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, zero_optim.GradScaler], ids=["torch", "zero_optim"])
def test_either_scaler_scales(scaler: Any) -> None:
    """And what is clipped was unscaled before."""
    ours = train(zero_optim.ShardedAdamW, scaler=scaler("cpu"), gradient_clip_val=0.1)
    expected = train(torch.optim.AdamW, scaler=torch.amp.GradScaler("cpu"), gradient_clip_val=0.1)
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
    model.weight.data = torch.zeros(4, 8)[:, ::2]
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


def test_validation_sees_the_averages() -> None:
    """And training and checkpoints the parameters."""
    import lightning
    from zero_optim.integrations.lightning import EvaluateAverages

    seen = []

    class Module(load_example("lightning_module").Classifier):
        def configure_optimizers(self) -> Any:
            return zero_optim.ShardedAdamW(self.named_parameters(), lr=LR, ema_decay=0.9)

        def validation_step(self, batch: Any, index: int) -> None:
            seen.append([p.detach().clone() for p in self.parameters()])

        def on_train_end(self) -> None:
            opt = self.optimizers().optimizer
            own = [p.detach().clone() for p in self.parameters()]
            average = opt.ema_state_dict()
            assert_bitwise(seen[-1], [average[name] for name, _ in self.named_parameters()], "seen in validation")
            assert not torch.equal(seen[-1][0], own[0])

    x = torch.randn(16, 16)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)
    trainer = lightning.Trainer(max_epochs=1, callbacks=[EvaluateAverages()], num_sanity_val_steps=0, **ONE_CPU)
    trainer.fit(Module(), data, data)
    assert len(seen) == 4
    for optimizer in trainer.optimizers:
        close(optimizer)
