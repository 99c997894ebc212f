"""Numbers on the simulated device are those of the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simulated_gpu.worker import Call


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 12)
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 29), nn.Linear(29, 17, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(self.embedding(tokens)))))


def trained(device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        tokens = torch.randint(17, (3, 9), generator=torch.Generator().manual_seed(step)).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().cpu() for tensor in (*losses, *model.parameters())]


def training_agrees(dtype: torch.dtype) -> bool:
    return all(map(torch.equal, trained("cpu", dtype), trained("cuda", dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_gives_the_bits_of_the_cpu(call: Call, dtype: torch.dtype) -> None:
    assert call(training_agrees, dtype) == (True, [])


OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "matmul": lambda x, y: x @ y,
    "addmm, out": lambda x, y: torch.addmm(x, x, y, out=torch.empty(6, 6, device=x.device)),
    "out of no elements": lambda x, y: torch.mul(x, y, out=torch.empty(0, device=x.device)),
    "out that is too small, and grows": lambda x, y: torch.cat([x, y], out=torch.empty(0, 6, device=x.device)),
    "layer_norm": lambda x, y: F.layer_norm(x, (6,), y[0], y[1]),
    "softmax": lambda x, y: x.softmax(-1),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None]).isfinite(),
    "convolution": lambda x, y: F.conv2d(x[None, None], y[None, None, :3, :3]),
    "cat, stack": lambda x, y: (torch.cat([x, y]), torch.stack([x, y])),
    "split, chunk": lambda x, y: (x.split(4), y.chunk(3, 1)),
    "foreach, in place": lambda x, y: (torch._foreach_mul_([x, y], 2.0), x, y)[1:],
    "foreach": lambda x, y: torch._foreach_add([x, y], [y, x]),
    "foreach_norm": lambda x, y: torch._foreach_norm([x, y[:0]]),
    "foreach_copy_": lambda x, y: (torch._foreach_copy_([x[0], x[2]], [y[0], y[2]]), x)[1],
    "in place on a view": lambda x, y: (x[1:3].t().mul_(3), x)[1],
    "in place, of itself": lambda x, y: x.add_(x),
    "strided copy": lambda x, y: (x[:, ::2].copy_(y[:, 1::2]), x)[1],
    "view of another dtype": lambda x, y: x.view(torch.int32).bitwise_and(0xFFFF).view(torch.int16),
    "unfold, a view": lambda x, y: (x.unfold(0, 3, 1).fill_(4), x)[1],
    "complex": lambda x, y: torch.complex(x, y).conj().mul(2).real,
    "index": lambda x, y: x[torch.tensor([4, 0], device=x.device)],
    "index of the host": lambda x, y: x[torch.tensor([4, 0])],
    "index, some absent": lambda x, y: x[:, torch.tensor([4, 0], device=x.device)],
    "index_put_": lambda x, y: x.index_put_((torch.tensor([1, 1], device=x.device),), y[:2], accumulate=True),
    "mask": lambda x, y: x[x > 0],
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, -1),
    "nonzero, unique": lambda x, y: ((x > 0).nonzero(), (x > 0).int().unique()),
    "sort, topk": lambda x, y: (*x.sort(0), *y.topk(2)),
    "empty": lambda x, y: (x[:0] @ y, x[:0].sum(), torch.cat([x[:0], y]), x[:0].clone()),
    "a number of the host": lambda x, y: x * torch.tensor(2.5) + 1,
    "zero-dim": lambda x, y: x.sum() / y.sum(),
    "factories": lambda x, y: (torch.arange(4, device=x.device), torch.full_like(x, 3), torch.eye(3, device=x.device)),
    "where, clamp": lambda x, y: torch.where(x > y, x, y).clamp(min=0.5),
    "resize_": lambda x, y: x.resize_(2, 3),
    "set_": lambda x, y: x.set_(y.untyped_storage(), 2, (2, 2), (6, 1)),
    "dtypes": lambda x, y: (x.bfloat16() + y, x.half().float(), x.double(), x.to(torch.int64)),
    "to and fro": lambda x, y: x.cpu().to(y.device, non_blocking=True),
    "inf and nan": lambda x, y: ((x / 0).isinf().all(), torch.linalg.vector_norm(y, float("inf"))),
}


def op_agrees(name: str) -> bool:
    def results(device: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        x, y = (torch.randn(6, 6, generator=generator).to(device) for _ in range(2))
        given = OPS[name](x, y)
        return [value.cpu() for value in flat(given)]

    pairs = list(zip(results("cpu"), results("cuda"), strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs) and bool(pairs)


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in flat(item)]


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_the_bits_of_the_cpu(call: Call, name: str) -> None:
    assert call(op_agrees, name) == (True, [])
