"""Averages over tokens in clients: two ranks with sequences of different lengths train as one process in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zero_optim
from client_cases import QUIET, as_torchrun, forget_accelerator, needs, run_client_ranks, silent
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LR, EPS, MICRO, STEPS, RANKS = 17, 1e-2, 1e-4, 2, 3, 2
LENGTHS = (3, 9, 5, 2, 12, 4, 7, 3, 8, 2, 6, 11)  # of the sequences, in the order in which both ranks take them


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (length + 1,), generator=generator) for length in LENGTHS]


def summed(model: nn.Module, row: Tensor) -> Tensor:
    return F.cross_entropy(model(row[:-1]), row[1:], reduction="sum")


def alone() -> list[Tensor]:
    model = make_model()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    of_step = RANKS * MICRO
    for step in range(STEPS):
        window = rows()[of_step * step :][:of_step]
        (sum(summed(model, row) for row in window) / sum(len(row) - 1 for row in window)).backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def own(rank: int, number: int) -> Tensor:
    """The micro-batch of that number, over all steps."""
    return rows()[RANKS * number + rank]


def by_accelerate(rank: int, folder: str) -> nn.Module:
    from accelerate import Accelerator
    from zero_optim.integrations.accelerate import prepare

    forget_accelerator()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO, rng_types=[])
    model = make_model()
    model, opt = prepare(accelerator, model, zero_optim.ShardedAdamW(model, lr=LR, eps=EPS))
    for number in range(MICRO * STEPS):
        with accelerator.accumulate(model):
            row = own(rank, number)
            accelerator.backward(summed(model, row) * accelerator.gradient_accumulation_steps)
            opt.optimizer.count(len(row) - 1)
            opt.step()
            opt.zero_grad()
    return model


def by_lightning(rank: int, folder: str) -> nn.Module:
    import lightning
    from zero_optim.integrations.lightning import ShardedStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, number: Tensor) -> Tensor:
            row = own(rank, int(number))
            self.tokens = len(row) - 1
            return summed(self.model, row) * self.trainer.accumulate_grad_batches

        def on_after_backward(self) -> None:  # Lightning calls zero_grad between training_step and backward
            self.optimizers().count(self.tokens)

        def configure_optimizers(self) -> Any:
            return zero_optim.ShardedAdamW(self.model, lr=LR, eps=EPS)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(MICRO * STEPS), batch_size=None)

    module, options = Module(), {"accelerator": "cpu", "devices": RANKS, "max_epochs": 1, **QUIET}
    options |= {"accumulate_grad_batches": MICRO, "use_distributed_sampler": False, "enable_checkpointing": False}
    strategy = ShardedStrategy(process_group_backend="gloo")
    lightning.Trainer(strategy=strategy, default_root_dir=folder, **options).fit(module)
    return module.model


class Causal(nn.Module):
    """As the models of transformers: it takes ``num_items_in_batch``, and gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        scores, labels = self.model(input_ids).flatten(0, 1), labels.flatten()
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(scores, labels)}
        return {"loss": F.cross_entropy(scores, labels, reduction="sum") / num_items_in_batch}


def by_trainer(rank: int, folder: str) -> nn.Module:
    from transformers import TrainingArguments
    from zero_optim.integrations.transformers import ShardedTrainer

    longest = max(LENGTHS)
    padded = [F.pad(row[1:], (0, longest - len(row) + 1), value=-100) for row in rows()]
    data = [
        {"input_ids": F.pad(row[:-1], (0, longest - len(row) + 1)), "labels": labels}
        for row, labels in zip(rows(), padded, strict=True)
    ]
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=MICRO,
        max_steps=STEPS,
        learning_rate=LR,
        adam_epsilon=EPS,
        weight_decay=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    model = Causal()
    opt = zero_optim.ShardedAdamW(model, lr=LR, eps=EPS)
    ShardedTrainer(model, arguments, train_dataset=data, optimizers=(opt, None)).train()
    return model.model


def _trained(rank: int, world_size: int, client: str, folder: str) -> list[Tensor]:
    with as_torchrun(rank, world_size), silent():
        model = {"accelerate": by_accelerate, "lightning": by_lightning, "transformers": by_trainer}[client](
            rank, folder
        )
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "client",
    [
        pytest.param("accelerate", marks=needs("accelerate")),
        pytest.param("lightning", marks=needs("lightning")),
        pytest.param("transformers", marks=needs("transformers", "accelerate")),
    ],
)
def test_clients_average_over_tokens(client: str, tmp_path: Any) -> None:
    for found in run_client_ranks(RANKS, _trained, client, str(tmp_path), timeout=120):
        for value, expected in zip(found, alone(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=2e-6)
