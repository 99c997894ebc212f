"""A ResNet of Hugging Face in channels_last: it stays so, and trains as under ``torch.optim.AdamW``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zero_optim
from client_cases import EPS, assert_like_adamw, assert_ranks_alike, close, needs, replicate, weights
from harness import run_ranks
from memory_formats import same_layout, strides
from torch import Tensor, nn

pytestmark = needs("transformers")

LR, STEPS = 1e-3, 4


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}
    model = ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic", num_labels=4))
    return model.train().to(memory_format=torch.channels_last)


def _train(rank: int, world_size: int, stage: int | None) -> dict[str, list[Tensor]]:
    """``stage`` None: ``torch.optim.AdamW``, in DDP on several ranks."""
    model = _resnet()
    before = strides(model)
    assert before["resnet.embedder.embedder.convolution.weight"] == (147, 1, 21, 3)
    module = replicate(model) if stage is None else model
    if stage == 3:
        zero_optim.shard_module(model, ["ResNetBasicLayer"])
    make: Any = torch.optim.AdamW if stage is None else zero_optim.ShardedAdamW
    opt = make(model.parameters(), lr=LR, eps=EPS, **({} if stage in (None, 3) else {"stage": stage}))
    for step in range(STEPS):
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        logits = module(images.to(memory_format=torch.channels_last)).logits
        nn.functional.cross_entropy(logits, torch.arange(4)).backward()
        assert all(same_layout(p.grad, p) for p in model.parameters())
        opt.step()
        opt.zero_grad()
        assert strides(model) == before
    trained = weights(model)
    close(opt)
    return {"parameters": trained}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 2), (2, 3)])
def test_it_trains_as_under_adamw(world_size: int, stage: int) -> None:
    ours, theirs = (assert_ranks_alike(run_ranks(world_size, _train, one)) for one in (stage, None))
    assert_like_adamw(ours["parameters"], theirs["parameters"], LR, STEPS)
