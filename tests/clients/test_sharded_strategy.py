"""``ShardedStrategy``: stages 0 to 3 on one rank and on two, as AdamW with Lightning's DDP; what it saves and loads."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import Any

import pytest
import torch
import zero_optim
from client_cases import (
    ALONE_SLOW,
    EPS,
    QUIET,
    as_torchrun,
    assert_like_adamw,
    assert_ranks_alike,
    close,
    gathers_in_flight,
    load_example,
    needs,
    reductions_a_step,
    run_client_ranks,
    silent,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training_cases import assert_bitwise

pytestmark = needs("lightning")

LR, STEPS = 1e-2, 10


def module_class(base: Any) -> type[Any]:
    """A module whose steps read a parameter that no unit holds, and call its own forward."""

    class Module(base):
        def __init__(self, make_optimizer: Any = None, dropout: float = 0.1) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 4))
            self.scale = nn.Parameter(torch.ones(4))
            self.make_optimizer = make_optimizer
            self.register_buffer("seen", torch.zeros(()))  # the sum of this rank's inputs
            self.validated: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            self.seen += batch[0].sum()
            return F.cross_entropy(self(batch[0]) * self.scale, batch[1])

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.validated.append(self.seen.item())
            self.log("validation", F.cross_entropy(self(batch[0]) * self.scale, batch[1]), sync_dist=True)

        def on_train_batch_end(self, *_: Any) -> None:
            self.in_flight = gathers_in_flight(self.trainer.optimizers[0])

        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer(self.parameters(), lr=LR, eps=EPS)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=100, div_factor=1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module


def data() -> DataLoader:
    x = torch.randn(80, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)


def fit(
    strategy: Any, make_optimizer: Any, folder: str, resume: str | None = None, dropout: float = 0.1, **options: Any
) -> Any:
    """The Trainer after ``fit``: two micro-batches a step, clipped, a validation and a checkpoint after each epoch."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    lightning.seed_everything(0, verbose=False)
    ranks = int(os.environ["WORLD_SIZE"])
    settings = {"accelerator": "cpu", "devices": ranks, "max_epochs": ranks, "accumulate_grad_batches": 2}
    settings |= {"gradient_clip_val": 0.1, "callbacks": [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]}
    trainer = lightning.Trainer(strategy=strategy, default_root_dir=folder, **{**settings, **QUIET, **options})
    module = module_class(lightning.LightningModule)(make_optimizer, dropout)
    trainer.fit(module, data(), data(), ckpt_path=resume)
    return trainer


def sharded(stage: int, **options: Any) -> dict[str, Any]:
    from zero_optim.integrations.lightning import ShardedStrategy

    units = (nn.Linear,) if stage == 3 else None
    strategy = ShardedStrategy(units=units, process_group_backend="gloo", **options)
    return {"strategy": strategy, "make_optimizer": partial(zero_optim.ShardedAdamW, stage=stage)}


def closed(trainer: Any) -> list[Tensor]:
    """The weights of a run that is over."""
    for optimizer in trainer.optimizers:
        close(optimizer)
    return weights(trainer.lightning_module)


def from_file(path: str) -> list[Tensor]:
    """As a process without sharding reads it."""
    import lightning

    return weights(module_class(lightning.LightningModule).load_from_checkpoint(path))


def _all_stages(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), silent():
        adamw = fit("ddp", torch.optim.AdamW, f"{folder}/adamw")
        found, last = {"expected": weights(adamw.lightning_module)}, f"epoch={world_size - 1}.ckpt"
        for stage in range(4):
            place = f"{folder}/{stage}"
            trainer = fit(**sharded(stage), folder=place)
            optimizer = trainer.optimizers[0]
            assert optimizer.stage == stage and optimizer.stats()["steps"] == STEPS
            assert world_size == 1 or reductions_a_step(optimizer) == 1
            assert trainer.lightning_module.in_flight == (world_size > 1 and stage in (1, 2))
            there = trainer.callback_metrics["validation"]
            again = trainer.validate(dataloaders=data(), ckpt_path=f"{place}/{last}", verbose=False)
            assert again[0]["validation"] == there.item()
            found[f"stage {stage}"] = closed(trainer)
            assert_bitwise(from_file(f"{place}/{last}"), found[f"stage {stage}"], f"saved at stage {stage}")
            if world_size > 1:
                resumed = closed(fit(**sharded(stage), folder=place, resume=f"{place}/epoch=0.ckpt"))
                assert_bitwise(resumed, found[f"stage {stage}"], f"resumed at stage {stage}")
        return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ALONE_SLOW)
def test_every_stage_trains_saves_and_resumes(ranks: int, tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(ranks, _all_stages, str(tmp_path), timeout=180))
    for stage in range(4):
        assert_like_adamw(found[f"stage {stage}"], found["expected"], LR, STEPS)


# -- precision, accumulation, and what else a strategy is asked for ------------------------------------------------


def _precisions(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from lightning.pytorch.plugins.precision import MixedPrecision

    with as_torchrun(rank, world_size), silent():
        found = {}
        for name, options in (("", {}), ("bf16-mixed ", {"precision": "bf16-mixed"})):
            found[f"{name}expected"] = weights(fit("ddp", torch.optim.AdamW, folder, **options).lightning_module)
        scaled = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]
        found["16-mixed expected"] = weights(fit("ddp", torch.optim.AdamW, folder, plugins=scaled).lightning_module)
        for stage in (2, 3):
            scaled = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))]
            trainer = fit(**sharded(stage), folder=folder, plugins=scaled)
            assert isinstance(trainer.precision_plugin.scaler, zero_optim.GradScaler)
            found[f"16-mixed {stage}"] = closed(trainer)
            found[f"bf16-mixed {stage}"] = closed(fit(**sharded(stage), folder=folder, precision="bf16-mixed"))
            trainer = fit(**sharded(stage), folder=folder, precision="bf16-true")
            whole = zero_optim.iter_full_parameters(trainer.lightning_module, trainer.optimizers[0], torch.float32)
            masters = {name: tensor.clone() for name, tensor in whole}
            found[f"bf16-true {stage}"] = [masters[name] for name, _ in trainer.lightning_module.named_parameters()]
            closed(trainer)
        return found


@pytest.mark.slow
def test_every_precision(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _precisions, str(tmp_path), timeout=180))
    for stage in (2, 3):
        for name, expected in (("16-mixed", "16-mixed "), ("bf16-mixed", "bf16-mixed "), ("bf16-true", "")):
            for ours, torchs in zip(found[f"{name} {stage}"], found[f"{expected}expected"], strict=True):
                assert (ours - torchs).abs().mean() < LR / 4  # they have moved by about STEPS * LR / 2


def by_hand(strategy: Any, make_optimizer: Any) -> list[Tensor]:
    """Weights after manual optimisation: a step whose backward is in ``training_step``."""
    import lightning

    class ByHand(module_class(lightning.LightningModule)):
        automatic_optimization = False

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) * self.scale

        def training_step(self, batch: list[Tensor], index: int) -> None:
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            self.optimizers().step()
            self.optimizers().zero_grad()

    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, enable_checkpointing=False, **QUIET
    )
    trainer.fit(ByHand(make_optimizer), data())
    return closed(trainer)


def _further(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelPruning

    with as_torchrun(rank, world_size), silent():
        plain: dict[str, Any] = {"dropout": 0.0}  # Lightning's own checkpoint has no random states
        straight = fit("ddp", torch.optim.AdamW, f"{folder}/adamw", **plain)
        found = {"straight": weights(straight.lightning_module)}
        for stage in (2, 3):
            resume = f"{folder}/adamw/epoch=0.ckpt"
            found[f"from ddp {stage}"] = closed(
                fit(**sharded(stage), folder=f"{folder}/{stage}", resume=resume, **plain)
            )
        each = fit(**sharded(2, sync_each_batch=True, sync_buffers="mean"), folder=folder)
        found["validated with"] = [torch.tensor(each.lightning_module.validated)]
        found["buffer"] = [each.lightning_module.seen]
        assert reductions_a_step(each.optimizers[0]) == 2
        first = each.optimizers[0]
        each.fit_loop.max_epochs += 1
        each.fit(each.lightning_module, data())  # closes the first optimizer
        with pytest.raises(zero_optim.ClosedError):
            first.step()
        closed(each)
        found["by hand 0"] = by_hand("ddp", torch.optim.AdamW)
        for stage in (2, 3):
            found[f"by hand {stage}"] = by_hand(**sharded(stage))
        with pytest.raises(TypeError, match=r"make a zero_optim\.ShardedAdamW"):
            fit(sharded(2)["strategy"], torch.optim.AdamW, folder)
        with pytest.raises(zero_optim.ShardAccessError, match="clip_grad_norm_"):
            fit(**sharded(2), folder=folder, gradient_clip_algorithm="value")
        for stage, remedy in ((2, "use_lottery_ticket_hypothesis=False"), (3, "stage=2")):
            with pytest.raises(zero_optim.ZeroOptimError, match=f"ModelPruning.*{remedy}"):
                fit(**sharded(stage), folder=folder, callbacks=[ModelPruning("l1_unstructured", amount=0.1)])
        return found


def test_runs_of_ddp_go_on_and_misuse_says_what_to_do(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _further, str(tmp_path), timeout=180))
    for stage in (2, 3):
        assert_like_adamw(found[f"from ddp {stage}"], found["straight"], LR, STEPS)
        assert_like_adamw(found[f"by hand {stage}"], found["by hand 0"], LR, STEPS)


# -- the example ---------------------------------------------------------------------------------------------------


def _example(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), silent():
        main, found = load_example("lightning_module").main, {}
        for stage in ("2", "3"):
            place, options = os.path.join(folder, stage), ["--stage", stage, "--output"]
            found[f"straight {stage}"] = closed(main(["--epochs", "2", *options, f"{place}/straight"]))
            closed(main(["--epochs", "1", *options, f"{place}/halves"]))
            shutil.copytree(f"{place}/halves", f"{place}/{rank} of {world_size}")  # for other numbers of ranks
            found[f"resumed {stage}"] = closed(main(["--epochs", "2", *options, f"{place}/halves", "--resume"]))
        return found


def _example_goes_on(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), silent():
        trainer = load_example("lightning_module").main(["--epochs", "2", "--output", folder, "--resume"])
        return {"weights": closed(trainer)}


@pytest.mark.slow
def test_the_example(tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _example, str(tmp_path), timeout=180))
    for stage in (2, 3):
        assert_bitwise(found[f"resumed {stage}"], found[f"straight {stage}"], f"resumed at stage {stage}")
    for ranks in (1, 3):  # at stage 2, from what stage 3 saved
        folder = shutil.copytree(tmp_path / "3" / "0 of 2", tmp_path / f"on {ranks}")
        elsewhere = assert_ranks_alike(run_client_ranks(ranks, _example_goes_on, str(folder)))["weights"]
        for after, before in zip(elsewhere, found["straight 3"], strict=True):  # other batches, by Adam's steps
            assert 0 < (after - before).abs().max() < 40 * LR


# -- callbacks that average weights --------------------------------------------------------------------------------


def averaging(kind: str, folder: str) -> list[Any]:
    from lightning.pytorch import callbacks

    average = (
        callbacks.EMAWeightAveraging(decay=0.5)
        if kind == "ema"
        else callbacks.StochasticWeightAveraging(LR, swa_epoch_start=1)
    )
    return [average, callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]


def _averages(rank: int, world_size: int, folder: str, kind: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), silent():
        adamw = fit("ddp", torch.optim.AdamW, f"{folder}/adamw", callbacks=averaging(kind, f"{folder}/adamw"))
        found = {"expected": weights(adamw.lightning_module)}
        trainer = fit(**sharded(3), folder=f"{folder}/3", callbacks=averaging(kind, f"{folder}/3"))
        found["3"] = weights(trainer.lightning_module)
        trainer.validate(trainer.lightning_module, data(), verbose=False)  # SWA copies the model once more
        assert_bitwise(closed(trainer), found["3"], "after another validation")
        if kind == "ema":  # of the file the weights are the average; the state beside it is that of the model itself
            again = fit(
                **sharded(3),
                folder=f"{folder}/3",
                callbacks=averaging(kind, f"{folder}/3"),
                resume=f"{folder}/3/epoch=0.ckpt",
            )
            assert_bitwise(closed(again), found["3"], "resumed")
        return found


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_callbacks_that_average_weights_at_stage_3(kind: str, tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(2, _averages, str(tmp_path), kind, timeout=180))
    assert_like_adamw(found["3"], found["expected"], LR, STEPS)


# -- finetuning, and links to checkpoints --------------------------------------------------------------------------


def finetuned(stage: int, folder: str, epochs: int, resume: str | None = None) -> list[Tensor]:
    """Weights after epochs of one step each over the same rows. From the second on the backbone is trained, too."""
    import lightning
    from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint

    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch >= 1:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = backbone_and_head()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

        def configure_optimizers(self) -> Any:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return sharded(stage)["make_optimizer"](trained, lr=LR, eps=EPS)

    ranks = int(os.environ["WORLD_SIZE"])
    callbacks = [Unfreeze(), ModelCheckpoint(folder, save_last="link", save_top_k=-1)]
    options = {"strategy": sharded(stage)["strategy"], "callbacks": callbacks, **QUIET}
    trainer = lightning.Trainer(accelerator="cpu", devices=ranks, max_epochs=epochs, **options)
    trainer.fit(Net(), DataLoader(data().dataset, batch_size=80 // ranks), ckpt_path=resume)
    return closed(trainer)


def backbone_and_head() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), nn.Linear(16, 4)


def finetuned_by_torch(epochs: int) -> list[Tensor]:
    """The same with all rows on one rank. What is unfrozen has a tenth of the learning rate."""
    backbone, head = backbone_and_head()
    optimizer = torch.optim.AdamW(head.parameters(), lr=LR, eps=EPS)
    x, y = data().dataset.tensors
    for epoch in range(epochs):
        if epoch == 1:
            optimizer.add_param_group({"params": [*backbone.parameters()], "lr": LR / 10})
        optimizer.zero_grad()
        backbone.zero_grad()
        F.cross_entropy(head(backbone(x)), y).backward()
        optimizer.step()
    return weights(nn.ModuleList([backbone, head]))


def _finetunes(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), silent():
        found = {}
        for stage in (0, 2, 3):
            place = f"{folder}/{stage}"
            found[f"straight {stage}"] = finetuned(stage, f"{place}/straight", 4)
            finetuned(stage, f"{place}/halves", 2)
            assert os.path.islink(f"{place}/halves/last.ckpt")
            resumed = finetuned(stage, f"{place}/halves", 4, f"{place}/halves/last.ckpt")
            assert_bitwise(resumed, found[f"straight {stage}"], f"resumed at stage {stage}")
        return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ALONE_SLOW)
def test_finetuning_goes_on_from_a_link(ranks: int, tmp_path: Any) -> None:
    found = assert_ranks_alike(run_client_ranks(ranks, _finetunes, str(tmp_path), timeout=180))
    for stage in (0, 2, 3):
        assert_like_adamw(found[f"straight {stage}"], finetuned_by_torch(4), LR, 4)
