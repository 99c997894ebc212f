"""The contenders of ``offload``: ours by store, and other packages that keep state in host memory."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..drop_ins import ShardedAdamW
from ..stores.paged_store import PagedStore
from . import contenders
from .contenders import NEVER, SMALL, TRAINING, Contender, Passes, Task
from .fused_adams import PACKAGES, why_unusable
from .timing import Job

NONE, PAGED, HALF, CPU, WAITING, NVME = "None", "paged 0", "paged half", "cpu", "cpu no speculation", "nvme"
OURS = (NONE, PAGED, HALF, CPU, WAITING, NVME)
SMALL_PAGED, SMALL_NVME = "paged 0 small", "nvme small"
SMALLER = (SMALL_PAGED, SMALL_NVME)
"""Ours with a split master and 8-bit moments, which only bf16 parameters can have. Their moments are rounded."""
DEEPSPEED, TORCHAO = "deepspeed", "torchao"
NAMES = (*OURS, *SMALLER, DEEPSPEED, TORCHAO)
PAGES = 32
MOVED, HELD = ("to_device", "to_host", "read", "written"), ("device", "host", "disk")


@dataclass(frozen=True)
class Update:
    """The update alone, on one rank: ``numel`` parameters with gradients, in four tensors a page."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    folder: Path  # of the disk

    def tensors(self, seed: int) -> list[Tensor]:
        generator = torch.Generator(self.device).manual_seed(seed)
        sizes = [self.numel // (4 * PAGES)] * (4 * PAGES)
        return [torch.randn(n, generator=generator, device=self.device).to(self.dtype) for n in sizes]

    def parameters(self) -> list[nn.Parameter]:
        return [nn.Parameter(values) for values in self.tensors(0)]

    def gradients(self) -> list[Tensor]:
        return self.tensors(1)


@dataclass(frozen=True)
class Training:
    """Whole steps of a GPT at stage 2."""

    task: Task
    folder: Path  # of the disk
    numel: int

    @property
    def device(self) -> torch.device:
        return self.task.device

    @property
    def dtype(self) -> torch.dtype:
        return self.task.dtype


Workload = Update | Training


@dataclass(frozen=True)
class Made:
    """A contender that is ready: each run of ``job`` is a step, after which all pages are back in their store.

    Attributes:
        result: a figure that after as many steps is the same for all that compute the same.
        account: for ours ``opt.stats()["state_offload"]``, else empty.
    """

    job: Job
    result: Callable[[], float]
    account: Callable[[], Mapping[str, Any]] = dict


# -- ours ----------------------------------------------------------------------------------------------------------


def choice(name: str, numel: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Choose the arguments of ``ShardedAdamW``. All have buckets of the same size, and so pages."""
    buckets = {"bucket_cap_mb": numel * 2 / 2**20 / PAGES}
    stores: dict[str, dict[str, Any]] = {
        NONE: {},
        PAGED: {"state_offload": "paged", "device_budget": 0},
        HALF: {"state_offload": "paged", "device_budget": 12 * numel // ranks // 2},
        CPU: {"state_offload": "cpu"},
        WAITING: {"state_offload": "cpu", "speculate": False},
        NVME: {"state_offload": f"nvme:{folder}"},
    }
    stores[SMALL_PAGED], stores[SMALL_NVME] = ({**stores[name], **SMALL} for name in (PAGED, NVME))
    return buckets | stores[name]


def update_ours(work: Update, name: str) -> Made:
    """Update by ours. One backward of the parameters alone sets gradients, which every step uses again."""
    parameters = work.parameters()
    opt = ShardedAdamW(parameters, skip_nonfinite=False, **TRAINING, **choice(name, work.numel, 1, work.folder))
    torch.autograd.backward(parameters, work.gradients())
    return Made([functools.partial(_step, opt)], lambda: _checksum(parameters), lambda: _account(opt))


def train_ours(work: Training, name: str, ranks: int) -> Made:
    model = work.task.model()
    opt = ShardedAdamW(model.named_parameters(), stage=2, **TRAINING, **choice(name, work.numel, ranks, work.folder))
    made = Passes(model, work.task).then(
        clip=functools.partial(opt.clip_grad_norm_, NEVER), update=opt.step, zero_grad=opt.zero_grad
    )
    return Made([*made.job, functools.partial(_rest, opt)], made.last_loss, lambda: _account(opt))


def _step(opt: ShardedAdamW) -> None:
    opt.step()
    _rest(opt)


def _rest(opt: ShardedAdamW) -> None:
    """Wait for the pages that a step has left under way: they must not slow down the next contender."""
    store = opt.engine.store
    if isinstance(store, PagedStore):
        store.wait()


def _account(opt: ShardedAdamW) -> Mapping[str, Any]:
    return dict(opt.stats()["state_offload"])


def _checksum(parameters: list[nn.Parameter]) -> float:
    return float(sum(parameter.detach().double().sum() for parameter in parameters))


# -- others --------------------------------------------------------------------------------------------------------


def update_deepspeed(work: Update) -> Made:
    """Update by ZeRO-Offload's recipe with DeepSpeed's CPU Adam: widen the gradient on the host, update, cast back."""
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # it has an OpenMP of its own
    pinned = work.device.type == "cuda"

    def host(values: Tensor) -> Tensor:
        wide = values.to("cpu", torch.float32)
        return wide.pin_memory() if pinned else wide

    parameters, gradients = torch.cat(work.tensors(0)), torch.cat(work.gradients())
    master = nn.Parameter(host(parameters))
    grad = master.grad = host(gradients)
    opt = PACKAGES[DEEPSPEED].load("cpu")([master])
    opt.param_groups[0].update(TRAINING)

    def step() -> None:
        grad.copy_(gradients)
        opt.step()
        parameters.copy_(master.detach())

    return Made([step], lambda: float(parameters.double().sum()))


def update_torchao(work: Update) -> Made:
    """Update by torchao, with fp32 parameters and gradients: its host copies have the parameters' dtype, as masters."""
    made = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    parameters = [nn.Parameter(values.float()) for values in work.tensors(0)]
    for parameter, gradient in zip(parameters, work.gradients(), strict=True):
        parameter.grad = gradient.float()
    opt = made(parameters, torch.optim.AdamW, fused=True, **TRAINING)
    return Made([opt.step], lambda: _checksum(parameters))


def train_deepspeed(work: Training) -> Made:
    made: Contender = contenders.deepspeed(work.task, 2, offload=True)
    return Made(made.job, made.last_loss)


def make(work: Workload, name: str, ranks: int) -> Made:
    """Make the contender, ready for its first step."""
    if isinstance(work, Update):
        others = {DEEPSPEED: update_deepspeed, TORCHAO: update_torchao}
        return others[name](work) if name in others else update_ours(work, name)
    return train_deepspeed(work) if name == DEEPSPEED else train_ours(work, name, ranks)


def field(work: Workload, names: tuple[str, ...], ranks: int) -> Iterator[str]:
    """Choose the contenders of ``names`` that can do the work; ``None`` always.

    One that waits instead of speculating differs only in a training on several ranks."""
    for name in NAMES:
        guesses = isinstance(work, Training) and ranks > 1
        if (
            name == NONE
            or name in names
            and (name != WAITING or guesses)
            and (name != TORCHAO or isinstance(work, Update))
        ):
            yield name


def why_missing(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why a contender cannot be measured here; None where it can."""
    if name in SMALLER and dtype != torch.bfloat16:
        return "a split master is of bf16 parameters"
    if name == DEEPSPEED:
        return why_unusable(DEEPSPEED, "cpu")
    if name == TORCHAO and device.type != "cuda":
        return "not run here: needs CUDA"
    if name == TORCHAO and importlib.util.find_spec("torchao") is None:
        return "not installed"
    return None


def versions(names: list[str]) -> dict[str, str]:
    return {name: version(name) for name in names if name not in (*OURS, *SMALLER)}
