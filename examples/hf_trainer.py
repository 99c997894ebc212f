"""``transformers.Trainer`` with a sharded optimizer: decay groups, schedule, clipping, checkpoints and resume.

python examples/hf_trainer.py [--stage 3] [--output DIR] [--resume]
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py

The folders checkpoint-N are what ``from_pretrained`` reads. What one number of ranks saved, any other goes on with.
"""

import argparse
import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from zero_optim.integrations.transformers import ShardedTrainer


def main(argv: list[str] | None = None) -> ShardedTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=os.path.join(tempfile.gettempdir(), "hf_trainer"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    arguments = parser.parse_args(argv)

    options = TrainingArguments(  # starts torch.distributed under torchrun
        output_dir=arguments.output,
        max_steps=arguments.steps,
        save_steps=10,
        logging_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        weight_decay=0.1,  # of matrices: Trainer leaves biases and norms out
        max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, **sizes))
    counting = [(torch.arange(32) + start) % 128 for start in range(128)]
    data = [{"input_ids": tokens, "labels": tokens} for tokens in counting]
    units = ("GPT2Block",) if arguments.stage == 3 else None  # what is gathered at a time
    trainer = ShardedTrainer(model, options, train_dataset=data, stage=arguments.stage, units=units)
    trainer.train(resume_from_checkpoint=arguments.resume)
    return trainer


if __name__ == "__main__":
    main()
