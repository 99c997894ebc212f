"""Fine-tuning by trl's ``SFTTrainer`` with a sharded optimizer: prompts and completions, checkpoints and resume.

python examples/trl_sft.py [--stage 3] [--output DIR] [--resume]
torchrun --standalone --nproc-per-node 2 examples/trl_sft.py

``sharded`` makes a sharded class of trl's other trainers, too: ``sharded(trl.DPOTrainer)``.
"""

import argparse
import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from zero_optim.integrations.transformers import ShardedTrainer, sharded

ShardedSFTTrainer = sharded(SFTTrainer)


def build_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=34, n_positions=32, **sizes))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Its words are the numbers below 32. Nothing is downloaded."""
    words = ["<pad>", "<end>", *map(str, range(32))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def build_data() -> Dataset:
    """Numbers that are counted on from a prompt. The loss is of the completion alone."""

    def count(start: int, numbers: int) -> str:
        return " ".join(str((start + step) % 32) for step in range(numbers))

    rows = [(start, 2 + start % 3) for start in range(128)]
    return Dataset.from_list([{"prompt": count(s, n), "completion": f" {count(s + n, 12)}"} for s, n in rows])


def main(argv: list[str] | None = None) -> ShardedTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=os.path.join(tempfile.gettempdir(), "trl_sft"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    arguments = parser.parse_args(argv)

    on_gpu = torch.cuda.is_available()
    options = SFTConfig(  # starts torch.distributed under torchrun
        output_dir=arguments.output,
        max_steps=arguments.steps,
        save_steps=10,
        logging_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to=[],
    )
    trainer = ShardedSFTTrainer(
        build_model(),
        options,
        train_dataset=build_data(),
        processing_class=build_tokenizer(),
        stage=arguments.stage,
        units=("GPT2Block",) if arguments.stage == 3 else None,  # what is gathered at a time
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    return trainer


if __name__ == "__main__":
    main()
