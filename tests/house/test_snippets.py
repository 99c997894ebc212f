"""The snippets of README and docs run, on two ranks or four: each with the names that its page takes for granted."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before ``torch.compile`` is patched
import torch.distributed as dist
from harness import run_ranks

ROOT = Path(__file__).parents[2]
SNIPPETS = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Of the CPU and four ranks, in place of a page's GPUs.
REPLACED = {
    '"cuda"': '"cpu"',
    ".cuda()": "",
    "torch.cuda.set_device(local_rank)": "pass",
    "/shared/": "",
    "nvme:/local/scratch": "nvme:.",
    "1_000_000": "1_000",
    ', state_offload="paged", device_budget="8GB"': ', state_offload="cpu"',  # pages are for a GPU
    "(2, 8), mesh": "(2, 2), mesh",
    "(4, 2), mesh": "(2, 2), mesh",
    "(4, 8), mesh": "(2, 2), mesh",
    "(2, 4), mesh": "(2, 2), mesh",
    '"grad_divisor": 8': '"grad_divisor": 4',
    'get_local_rank("pp"), 4, device': 'get_local_rank("pp"), 2, device',
}

NAMES = """
import torch, zero_optim, torch.distributed as dist
from torch import nn
from zero_optim import rules

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(8)
    def forward(self, x):
        return self.norm(self.blocks(x))

def loss_fn(output, y): return (output.float() - y.float()).square().mean()
def batch_of(): return torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(2, 8, dtype=torch.bfloat16)
def train_step(*_):
    loss_fn(model(batch_of()[0]), batch_of()[1]).backward()
    opt.step()
    opt.zero_grad()
train = train_step
model, data, steps, rank = MyModel().to(torch.bfloat16), [batch_of(), batch_of()], 2, dist.get_rank()
"""
OPT = "opt = zero_optim.ShardedAdamW(model.named_parameters())\n"
MESH = "from torch.distributed.device_mesh import init_device_mesh\n"
PLAN = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
kinds = {"up": ColwiseParallel, "down": RowwiseParallel}
plan = {f"blocks.{number}.{name}": kind() for number in (0, 1) for name, kind in kinds.items()}
"""

SCALED = f"""{OPT}
scaler, scheduler = zero_optim.GradScaler("cpu"), torch.optim.lr_scheduler.ConstantLR(opt)
"""

# What else a snippet takes for granted, by page and number.
GIVEN: dict[tuple[str, int], str] = {
    ("averaging", 0): f"""{OPT}
def loss_fn(output): return output.float().square().mean(-1)
window = [batch_of()[0] for _ in range(1 + rank)]
for micro_batch in window:
    micro_batch.tokens = len(micro_batch)
""",
    ("checkpoint", 0): SCALED,
    ("checkpoint", 1): f"{SCALED}from zero_optim import checkpoint",
    ("checkpoint", 2): f"{OPT}train_step()",
    ("memory", 1): f"{OPT}engine = type('Engine', (), dict(generate=lambda self, batch: None))()",
    ("memory", 3): OPT,
    ("muon", 0): "def loss(model, batch): return loss_fn(model(batch[0]), batch[1])",
    ("muon", 1): """
qkv, queries, outputs, others = ([nn.Parameter(torch.ones(*n))] for n in ((6144, 8), (64, 8), (8, 64), (8, 8)))""",
    ("muon", 2): "adamw = opt = zero_optim.ShardedAdamW(model.named_parameters())\ntrain_step()",
    ("parallelism", 1): PLAN,
    ("parallelism", 2): f"""{MESH}
for weight in model.parameters():
    weight.tensor_model_parallel = weight.ndim == 2
groups = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
class parallel_state:
    get_data_parallel_group = lambda **_: groups.get_group("dp")
    get_tensor_model_parallel_group = lambda: groups.get_group("tp")
""",
    ("parallelism", 3): MESH,
    ("parallelism", 4): f"{MESH}dense, experts = [*model.norm.parameters()], [*model.blocks.parameters()]",
    ("parallelism", 5): f"""{MESH}
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
module, device = Block(), torch.device("cpu")
data = [(torch.randn(8, 8), torch.randn(8, 8))] * 2
""",
    ("profiling", 0): OPT,
    ("profiling", 1): "step = 1\nclass wandb: log = lambda *_, **__: None",
    ("rules", 1): "def evaluate(model): model(batch_of()[0])",
    ("step", 1): OPT,
    ("step", 2): f"{OPT}max_norm = 1.0",
}
IN_ORDER = ("zero3",)  # pages whose snippets go on from each other, and need nothing else
ELSEWHERE = {
    ("integrations", None): "tests/clients",
    ("ops", 1): "tests/kernels/test_prepared.py",
    ("parallelism", 6): "tests/face/test_bits_of_topologies.py has tied weights of a pipeline",
    ("step", 3): "a CUDA graph: tests/gpu",
}


def run_page(rank: int, world_size: int, page: Path, folder: str) -> tuple[str, dict[str, int]]:
    """Runs a page's snippets. Returns what they print, and the collectives of the last one's ``optimizer``."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setenv("LOCAL_RANK", str(rank))
        for name in ("init_process_group", "destroy_process_group"):  # the harness has one
            patch.setattr(dist, name, lambda *_, **__: None)
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # in seconds less
        names: dict[str, Any] = {"__name__": "page"}
        for number, snippet in enumerate(SNIPPETS.findall(page.read_text())):
            if (page.stem, number) in ELSEWHERE:
                continue
            torch.manual_seed(rank)
            if page.stem not in IN_ORDER:
                names.clear()
                names = {"__name__": "page"}
                exec(NAMES + GIVEN.get((page.stem, number), ""), names)
            for given, here in REPLACED.items():
                snippet = snippet.replace(given, here)
            first, opt, rest = snippet.partition("opt = zero_optim.")  # a second one is there in place of the first
            snippet = first + opt + rest.replace("\nopt = zero_optim.", "\nopt.close()\nopt = zero_optim.")
            exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), names)
        traffic = names["optimizer"].stats()["collectives"] if page.stem in IN_ORDER else {}
    names.clear()
    gc.collect()  # no optimizer stays behind on ranks that measure memory next
    return printed.getvalue(), {kind: of_kind["calls"] for kind, of_kind in traffic.items()}


EVERY = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in EVERY if SNIPPETS.search(page.read_text()) and (page.stem, None) not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_snippets_run(page: Path, tmp_path: Path) -> None:
    ranks = 2 if page.stem in IN_ORDER else 4
    (printed, calls), *others = run_ranks(ranks, run_page, page, str(tmp_path), timeout=180)
    if page.stem == "zero3":
        assert re.search(r"^norm of the head \d+\.\d{3}$", printed, re.MULTILINE)
        assert [text for text, _ in others] == [printed]  # rank 0's values, whole on both
        # Three steps, and a forward and backward by parts; two gathers for the next forward, which saving has dropped.
        assert calls["all_gather"] == 4 * (1 + 2 * 4) + 2 and calls["reduce_scatter"] == 4 * (1 + 4)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0"]  # no step is given there
