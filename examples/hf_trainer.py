"""``transformers.Trainer`` with a sharded optimizer: decay groups, schedule, clipping, checkpoints and resume.

python examples/hf_trainer.py [--output DIR] [--resume]
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py

One rank needs nothing special: Trainer(model, args, optimizers=(optimizer, None)). ``ShardedTrainer`` is for more.
"""

import argparse
import os
import tempfile

import torch
import zero_optim
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from zero_optim import checkpoint


class ShardedTrainer(Trainer):
    """A Trainer that leaves reducing gradients to its optimizer, a ShardedAdamW. On one rank it is a plain Trainer."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model
        # Evaluation mode: mixed precision and torch.compile as ever, but no DDP, which would reduce a second time.
        self.accelerator.prepare_model = lambda model, **_: prepare(model, device_placement=False, evaluation_mode=True)
        self.accelerator.device_placement = False  # model and state are in place, and the optimizer's hooks know where
        if self.accelerator.scaler is not None:  # fp16=True
            self.accelerator.scaler = zero_optim.GradScaler()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if next(model.parameters()).device.type != device.type:  # .to("cpu:0") would copy the parameters
            super()._move_model_to_device(model, device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        self.accelerator.unscale_gradients()
        return self.optimizer.optimizer.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        return grad_norm  # None with max_grad_norm=0, where Trainer would read the gradients

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Every rank writes its part, and any number of ranks can read it. Trainer would write rank 0's shards."""
        folder, optimizer = os.path.join(output_dir, "sharded"), self.optimizer.optimizer
        checkpoint.save(folder, self.model, optimizer, scheduler=self.lr_scheduler, step=self.state.global_step)

    def _load_optimizer_and_scheduler(self, output_dir: str | None) -> None:
        if output_dir is not None:
            folder, optimizer = os.path.join(output_dir, "sharded"), self.optimizer.optimizer
            checkpoint.load(folder, self.model, optimizer, scheduler=self.lr_scheduler)


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay; biases and norms do not. Names make messages and checkpoints readable."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


def main(argv: list[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=os.path.join(tempfile.gettempdir(), "hf_trainer"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    arguments = parser.parse_args(argv)

    options = TrainingArguments(  # starts torch.distributed under torchrun: make the optimizer after it
        output_dir=arguments.output,
        max_steps=arguments.steps,
        save_steps=10,
        logging_steps=10,
        per_device_train_batch_size=4,
        max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, **sizes)).to(options.device.type)
    optimizer = zero_optim.ShardedAdamW(decay_groups(model), lr=1e-3, stage=arguments.stage)

    counting = [(torch.arange(32) + start) % 128 for start in range(128)]
    data = [{"input_ids": tokens, "labels": tokens} for tokens in counting]
    trainer = ShardedTrainer(model, options, train_dataset=data, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=arguments.resume)
    optimizer.close()
    return trainer


if __name__ == "__main__":
    main()
