"""Lightning with a sharded optimizer from ``configure_optimizers``: schedule, clipping, checkpoints and resume.

python examples/lightning_module.py [--output DIR] [--resume]
torchrun --standalone --nproc-per-node 2 examples/lightning_module.py

One rank needs no strategy of its own; ``ShardedStrategy`` is for more.
"""

import argparse
import os
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


class ShardedStrategy(DDPStrategy):
    """Lightning's processes, samplers and barriers, without the DDP module: the optimizer reduces gradients itself."""

    def configure_ddp(self) -> None:
        pass

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Called on every rank for a checkpoint that rank 0 writes. Any number of ranks can load it."""
        return zero_optim.full_state_dict(optimizer)


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
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy=ShardedStrategy() if ranks > 1 else "auto",
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
