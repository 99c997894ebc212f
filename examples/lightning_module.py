"""Lightning with a sharded optimizer from ``configure_optimizers``: schedule, clipping, checkpoints and resume.

python examples/lightning_module.py [--output DIR] [--resume]
torchrun --standalone --nproc-per-node 2 examples/lightning_module.py

One rank needs no strategy of its own. ``ShardedStrategy`` is for several, and what it saves goes on with any number.
"""

import argparse
import os
import shutil
import tempfile
from typing import Any

import lightning
import torch
import zero_optim
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from zero_optim import checkpoint


class ShardedStrategy(DDPStrategy):
    """Lightning's processes, samplers and barriers, without the DDP module: the optimizer reduces gradients itself."""

    def configure_ddp(self) -> None:
        pass

    # Rank 0 writes Lightning's file. The optimizer's state goes into a folder beside: every rank writes its part.

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, content: dict[str, Any], filepath: str, storage_options: Any = None) -> None:
        super().save_checkpoint(content, filepath, storage_options)
        step = content["global_step"]
        checkpoint.save(f"{filepath}.sharded", self.lightning_module, self.optimizers, step=step, keep_last=1)

    def load_checkpoint(self, checkpoint_path: str, *options: Any, **more: Any) -> dict[str, Any]:
        self._resumed_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *options, **more)

    def load_optimizer_state_dict(self, content: Any) -> None:
        checkpoint.load(f"{self._resumed_from}.sharded", self.lightning_module, self.optimizers)

    def remove_checkpoint(self, filepath: str) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}.sharded", ignore_errors=True)


class Classifier(lightning.LightningModule):
    def __init__(self, stage: int = 2) -> None:
        super().__init__()
        self.stage = stage
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = zero_optim.ShardedAdamW(self.named_parameters(), lr=1e-2, stage=self.stage)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None, **_: Any
    ) -> None:
        if gradient_clip_val:
            optimizer.clip_grad_norm_(gradient_clip_val)  # Lightning's own would read gradients, which are sharded


def main(argv: list[str] | None = None) -> lightning.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=os.path.join(tempfile.gettempdir(), "lightning_module"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stage", type=int, default=2)
    arguments = parser.parse_args(argv)

    lightning.seed_everything(0, verbose=False)
    x = torch.randn(80, 16)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)
    ranks, by_torchrun = int(os.environ.get("WORLD_SIZE", "1")), "RANK" in os.environ
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy=ShardedStrategy() if by_torchrun else "auto",
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(arguments.output, save_last=True)],
        default_root_dir=arguments.output,
        logger=False,
    )
    last = os.path.join(arguments.output, "last.ckpt")
    trainer.fit(Classifier(arguments.stage), data, ckpt_path=last if arguments.resume else None)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}  world_size={trainer.world_size}")
    for optimizer in trainer.optimizers:
        optimizer.close()  # a second fit of the same module makes optimizers of its own
    return trainer


if __name__ == "__main__":
    main()
