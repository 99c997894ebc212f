"""AdamWs of torch and of other packages, which ``bench adam_step`` and ``benchmarks/bench_training.py`` measure."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch


class Peer(NamedTuple):
    """An AdamW. ``has_masters``: of fp32 masters, so that gradients are widened for it and parameters cast after it."""

    module: str
    name: str = "AdamW8bit"
    has_masters: bool = False
    options: Mapping[str, Any] = {}

    def make(self, params: Iterable[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
        return pkgutil.resolve_name(f"{self.module}:{self.name}")(params, **self.options, **options)


FUSED = Peer("torch.optim", "AdamW", has_masters=True, options={"fused": True})
TORCHS = {"torch_fused": FUSED._replace(has_masters=False), "torch_foreach": FUSED._replace(options={"foreach": True})}
PEERS = {
    "deepspeed_adam": Peer("deepspeed.ops.adam", "FusedAdam", has_masters=True),
    "apex": Peer("apex.optimizers", "FusedAdam", has_masters=True),
    "te": Peer("transformer_engine.pytorch.optimizers", "FusedAdam", has_masters=True),
    "bitsandbytes": Peer("bitsandbytes.optim"),
    "torchao": Peer("torchao.optim"),
    "flashoptim": Peer("flashoptim", "FlashAdamW"),  # with 24 bits of a master
}


def state_bytes(value: object) -> int:
    """Count the bytes of tensors in a parameter's state, and in the objects that torchao and FlashOptim put there."""
    inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return sum(map(state_bytes, inner.values())) or getattr(value, "nbytes", 0)
