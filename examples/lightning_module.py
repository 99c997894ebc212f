"""Lightning with a sharded optimizer from ``configure_optimizers``: schedule, clipping, checkpoints and resume.

python examples/lightning_module.py [--stage 3] [--output DIR] [--resume]
torchrun --standalone --nproc-per-node 2 examples/lightning_module.py

What one number of ranks saved, any other goes on with.
"""

import argparse
import os
import tempfile
from typing import Any

import lightning
import torch
import zero_optim
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from zero_optim.integrations.lightning import ShardedStrategy


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


def main(argv: list[str] | None = None) -> lightning.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=os.path.join(tempfile.gettempdir(), "lightning_module"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    arguments = parser.parse_args(argv)

    lightning.seed_everything(0, verbose=False)
    x = torch.randn(80, 16)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=ShardedStrategy(units=(nn.Linear,) if arguments.stage == 3 else None),
        max_epochs=arguments.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(arguments.output, save_last=True)],
        default_root_dir=arguments.output,
        logger=False,
    )
    last = os.path.join(arguments.output, "last.ckpt")
    trainer.fit(Classifier(arguments.stage), data, ckpt_path=last if arguments.resume else None)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}  world_size={trainer.world_size}")
    return trainer


if __name__ == "__main__":
    main()
