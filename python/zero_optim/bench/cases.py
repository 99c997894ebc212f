"""The ops: contenders that do the same work on the same tensors, and the copy that bounds them."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero_kernels
from zero_kernels import ROW
from zero_kernels.codecs import FORMS

from ..errors import UsageError
from ..rules.codec import DTYPES
from ..train.model import ModelConfig
from .timing import Job, Spread

TORCH, COPY, STREAM = "torch_pipeline", "copy", "stream"
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MAX_NORM = 1.0
Row = dict[str, Any]


# -- AdamWs of torch and of other packages, which ``adam_step`` and ``benchmarks/bench_training.py`` measure -----------


class Peer(NamedTuple):
    """An AdamW. ``has_masters``: of fp32 masters, so that gradients are widened for it and parameters cast after it."""

    module: str
    name: str = "AdamW8bit"
    has_masters: bool = False
    options: Mapping[str, Any] = {}

    def make(self, params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
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


class Masters:
    """fp32 copies, for an optimizer to step, of a model's parameters and gradients. fp32 parameters are their own."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params: list[Tensor] = list(params)
        self.separate = any(parameter.dtype != torch.float32 for parameter in self.params)
        self.masters: list[Tensor] = self.params
        if self.separate:
            self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.params]
            for master in self.masters:
                master.grad = torch.empty_like(master)

    def take_gradients(self) -> None:
        if self.separate:
            grads = [master.grad for master in self.masters if master.grad is not None]
            torch._foreach_copy_(grads, [p.grad for p in self.params if p.grad is not None])

    @torch.no_grad()
    def give_back(self) -> None:
        if self.separate:
            torch._foreach_copy_(self.params, self.masters)


def model_config(numel: int, device: torch.device) -> ModelConfig:
    """Choose a model of about ``numel`` parameters: blocks of 12 hidden² each, a hundred times wider than their number.

    Windows are of a realistic length on a GPU, and as short as can be on a CPU.
    """
    hidden = max(64, 64 * round((100 * numel / 12) ** (1 / 3) / 64))
    layers = max(1, round(numel / (12 * hidden**2)))
    return ModelConfig(layers, hidden, hidden // 64, 1024 if device.type == "cuda" else 16)


# -- a case ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What one case is measured with. ``backends``: those of ``zero_kernels``. ``peers``: beside ``adam_step``."""

    device: torch.device
    dtype: str
    numel: int
    backends: tuple[str, ...]
    peers: Mapping[str, Peer] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal values: memory and arithmetic may be faster on zeros than on the values of a training."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.torch_dtype)


@dataclass(frozen=True)
class Case:
    """One op on one dtype and size."""

    op: str
    setting: Setting
    bytes: float  # the fewest bytes an element that the op must read plus write
    jobs: Mapping[str, Job]  # the contenders by name, TORCH among them
    yardstick: str = COPY  # the job that moves as many bytes and computes nothing
    own_bytes: Mapping[str, float] = field(default_factory=dict)  # ``bytes`` of jobs that have another state
    left_out: Mapping[str, str] = field(default_factory=dict)  # why there is no job of a peer

    def rows(self, times: Mapping[str, Sequence[float]]) -> list[Row]:
        """Make a row for each job. ``times``: its milliseconds in each round."""
        spreads = {name: Spread.of(values) for name, values in times.items()}
        moved = {name: self.own_bytes.get(name, self.bytes) for name in times}
        gbps = {name: moved[name] * self.setting.numel / spread.ms / 1e6 for name, spread in spreads.items()}
        return [
            {
                "op": self.op,
                "backend": name,
                "dtype": self.setting.dtype,
                "numel": self.setting.numel,
                **vars(spread),
                "bytes": moved[name],
                "gbps": round(gbps[name], 3),
                "yardstick": self.yardstick,
                "copy_gbps": round(gbps[self.yardstick], 3),
                "fraction": round(gbps[name] / gbps[self.yardstick], 4),
                "vs_torch": round(spreads[TORCH].ms / spread.ms, 4),
            }
            for name, spread in spreads.items()
        ]


def choose_backends(device: torch.device, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Choose the backends: those asked for, else the device's fast ones. Raises UsageError.

    The reference is plain torch, and Triton runs in an interpreter on a CPU: both are slow.
    """
    usable = zero_kernels.available_backends(device)
    for name in asked or ():
        if name not in usable:
            raise UsageError(f"--backends {name}: usable on {device.type} are {', '.join(usable)}")
    slow = {"reference", "triton"} if device.type == "cpu" else {"reference"}
    return tuple(asked or [name for name in usable if name not in slow] or ["reference"])


def on_each_backend(setting: Setting, work: Callable[[], object], ending: str = "") -> dict[str, Job]:
    """Make a job for each backend, on which the ops of ``work`` run. ``ending``: of the jobs' names."""

    def run(name: str) -> object:
        with zero_kernels.use_backend(name):
            return work()

    return {f"{name}{ending}": [functools.partial(run, name)] for name in setting.backends}


def copy_job(setting: Setting, bytes_per_element: int) -> Job:
    """Make a job ``dst.copy_(src)`` that reads and writes, together, as many bytes as the op."""
    nbytes = bytes_per_element * setting.numel // 2
    source, target = (torch.empty(-(-nbytes // 8), dtype=torch.int64, device=setting.device) for _ in range(2))
    source.random_()
    source, target = source.view(torch.uint8)[:nbytes], target.view(torch.uint8)[:nbytes]
    return [lambda: target.copy_(source)]


# -- adam_step ---------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """Dtypes of state other than fp32. ``low``: of a split master's lower half; None: the master is fp32."""

    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    low: torch.dtype | None = None

    @property
    def bytes(self) -> float:
        """Bytes an element, read and written: gradient, parameter, master, moments, and the scales of their rows."""
        param_and_master = 2 * (2 + self.low.itemsize) if self.low else 2 + 2 * 4
        return 2 + param_and_master + 2 * sum(dtype.itemsize + 4 / ROW * FORMS[dtype].scaled for dtype in self[:2])


FP32, INT8 = (torch.float32, torch.float32), (torch.int8, torch.uint8)
STATE_FORMS = {
    ", bf16": Form(torch.bfloat16, torch.bfloat16),
    ", int8": Form(*INT8),
    ", split": Form(*FP32, low=torch.int16),
    ", split, int8": Form(*INT8, low=torch.int16),
    ", split8": Form(*FP32, low=torch.int8),
    ", split8, int8": Form(*INT8, low=torch.int8),
}
"""By suffix of a backend's name: the state that ``master`` and ``state_dtype`` of the optimizer give."""


@dataclass(frozen=True)
class Shard:
    """The tensors of one update, each [numel]: gradient and parameter 16-bit, the others fp32."""

    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    param: Tensor

    @property
    def row_slot(self) -> Tensor:
        return torch.zeros(-(-self.grad.numel() // ROW), dtype=torch.int32, device=self.grad.device)


def make_shard(setting: Setting) -> Shard:
    master, exp_avg, exp_avg_sq = (setting.random(setting.numel, dtype=torch.float32) for _ in range(3))
    return Shard(setting.random(setting.numel), master, exp_avg, exp_avg_sq.square_(), master.to(setting.torch_dtype))


def adam_step(setting: Setting) -> Case:
    """Unscale, update the fp32 master, cast: 28 bytes an element, of them 2 gradient, 2 parameter, 24 state."""
    shard = make_shard(setting)
    # as in unused rows of an embedding: a root of zero is slow on GPUs
    zeros = {name: torch.zeros_like(getattr(shard, name)) for name in ("grad", "exp_avg", "exp_avg_sq")}
    forms = {way: form for way, form in STATE_FORMS.items() if setting.dtype == "bf16" or not form.low}
    works = {"": update(shard), ", zeros": update(replace(shard, **zeros))}
    works |= {way: update_in_form(shard, form) for way, form in forms.items()}
    jobs = {name: job for way, work in works.items() for name, job in on_each_backend(setting, work, way).items()}
    wide_grad = torch.empty_like(shard.master)
    jobs |= {TORCH: update_by_peer(shard, wide_grad, FUSED)[0], COPY: copy_job(setting, 28)}
    yardstick = COPY
    if setting.device.type == "cpu" and "cpu" in zero_kernels.available_backends("cpu"):
        # The op's own loop without arithmetic. A processor also reads each line that ``copy`` is about to overwrite.
        state, yardstick = (shard.master, shard.exp_avg, shard.exp_avg_sq), STREAM
        jobs[STREAM] = [lambda: torch.ops.zero_kernels_C.stream(shard.grad, *state, shard.param)]
    own_bytes, left_out = {f"{name}{way}": form.bytes for way, form in forms.items() for name in setting.backends}, {}
    for name, peer in setting.peers.items():
        try:
            jobs[name], own_bytes[name] = update_by_peer(shard, wide_grad, peer)
        except Exception as error:
            left_out[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return Case("adam_step", setting, 28, jobs, yardstick, own_bytes, left_out)


def update(shard: Shard) -> Callable[[], object]:
    tensors = (shard.grad, shard.master, shard.exp_avg, shard.exp_avg_sq, shard.param, shard.row_slot)
    return functools.partial(zero_kernels.adam_step, *tensors, **_scalars(shard))


def update_in_form(shard: Shard, form: Form) -> Callable[[], object]:
    """Update the shard with its state stored in ``form``."""
    states, scales = [], []
    for values, dtype in ((shard.exp_avg, form.exp_avg), (shard.exp_avg_sq, form.exp_avg_sq)):
        stored, *scale = FORMS[dtype].encode(torch.nn.functional.pad(values, (0, -len(values) % ROW)).view(-1, ROW))
        states.append(values if dtype == torch.float32 else stored.view(-1)[: len(values)])
        scales += [each.view(-1) for each in scale]
    master = torch.zeros_like(shard.param, dtype=form.low) if form.low else shard.master
    lists = ([shard.grad], [master], states, [shard.param], [shard.row_slot])
    step = functools.partial(zero_kernels.foreach_step, "adamw", *lists, **_scalars(shard))
    return functools.partial(step, scales=scales or None, row_keys=[shard.row_slot])


def _scalars(shard: Shard) -> dict[str, Any]:
    device = shard.grad.device
    return {
        "hyper": zero_kernels.hyper_table(**HYPER, step=2, device=device),  # of peers, the first made the state
        "grad_scale": torch.full((1,), 0.5, device=device),
        "found_inf": torch.zeros(1, device=device),
    }


def update_by_peer(shard: Shard, wide_grad: Tensor, peer: Peer) -> tuple[Job, float]:
    """Make the peer's update, in passes around its masters, and run it once. Returns it, and its bytes an element."""
    values, grad = (shard.master, wide_grad) if peer.has_masters else (shard.param.clone(), shard.grad)
    parameter = torch.nn.Parameter(values)
    parameter.grad = grad
    optimizer = peer.make([parameter], **HYPER)
    scale = torch.full((1,), 0.5, device=grad.device)

    def in_passes() -> None:
        if grad.is_cuda:
            torch.mul(shard.grad, scale, out=grad)
        else:  # two passes are torch's fastest way there: 33 ms of 64 Mi, a mixed mul takes 86
            grad.copy_(shard.grad).mul_(scale)
        optimizer.step()
        shard.param.copy_(values)

    work = in_passes if peer.has_masters else optimizer.step
    work()
    state = optimizer.state[parameter]
    nbytes = shard.grad.nbytes + shard.param.nbytes * peer.has_masters + 2 * (values.nbytes + state_bytes(state))
    if peer.has_masters:  # one pair of moments for all of them: a pair each takes 8 GiB at 2^30
        state |= {"exp_avg": shard.exp_avg, "exp_avg_sq": shard.exp_avg_sq}
    return [work], round(nbytes / shard.grad.numel(), 3)


# -- pack and grad_stats -----------------------------------------------------------------------------------------------


def pack(setting: Setting) -> Case:
    """Gather gradients of transformer blocks into one bucket and scale them: 2 bytes read, 2 written an element."""
    grads = [setting.random(numel) for numel in gradient_numels(setting.numel)]
    bucket = torch.empty(setting.numel, device=setting.device, dtype=setting.torch_dtype)
    numels = [grad.numel() for grad in grads]
    offsets, views = [0, *accumulate(numels)][: len(numels)], list(bucket.split(numels))

    def in_two_passes() -> None:
        torch._foreach_copy_(views, grads)
        bucket.mul_(0.5)

    jobs = on_each_backend(setting, lambda: zero_kernels.pack(grads, offsets, bucket, 0.5))
    jobs |= {TORCH: [in_two_passes], COPY: copy_job(setting, 4)}
    return Case("pack", setting, 4, jobs)


def gradient_numels(numel: int) -> list[int]:
    """Give the sizes of gradients of transformer blocks, ``numel`` in all: four matrices and two vectors a block.

    The width is the largest power of two up to 2048 with which there is at least one block.
    """
    width = next((2**k for k in range(11, 3, -1) if 12 * 4**k + 2 * 2**k <= numel), 0)
    if not width:
        return [numel]
    block = [width, 3 * width**2, width**2, width, 4 * width**2, 4 * width**2]
    blocks, rest = divmod(numel, sum(block))
    return block * blocks + [rest] * (rest > 0)


def grad_stats(setting: Setting) -> Case:
    """Sum of squares and count of non-finite values: 2 bytes read an element."""
    shard = setting.random(setting.numel)
    one, found_inf = torch.ones(1, device=shard.device), torch.zeros(1, device=shard.device)

    def norm() -> Tensor:
        return torch.linalg.vector_norm(shard, dtype=torch.float32)

    def check_then_norm() -> object:  # GradScaler.unscale_ with a scale of 1, so that gradients stay
        torch._amp_foreach_non_finite_check_and_unscale_([shard], found_inf.zero_(), one)
        return norm(), found_inf

    no_check = shard.is_cuda and shard.dtype == torch.bfloat16  # torch's check does not take bf16 on CUDA
    jobs = on_each_backend(setting, lambda: zero_kernels.grad_stats(shard))
    jobs[TORCH] = [lambda: (norm(), shard.isfinite().all())] if no_check else [check_then_norm]
    jobs[COPY] = copy_job(setting, 2)
    return Case("grad_stats", setting, 2, jobs)
