"""Ways to train one GPT on several ranks: ours by stage, and those of other packages. All start from equal weights.

Each keeps fp32 masters of a bf16 model, sums gradients over the ranks in the model's dtype, clips to the same global
2-norm and updates by the same AdamW.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..drop_ins import ShardedAdamW, ShardedMuon
from ..rules.adamw import AdamW
from ..rules.muon import scale_of
from ..rules.newton_schulz import QUINTIC, orthogonalized
from ..shard_module import shard_module
from ..train.model import GPT, VOCAB, Block, ModelConfig, next_byte_loss
from .fused_adams import HYPER
from .masters import Masters
from .timing import Job

MAX_NORM = 1.0
NEVER = 1e6  # a norm that no gradient has: the norm is computed, and nothing is clipped
TRAINING = {**HYPER, "lr": 1e-4}
STAGE3, STAGE3_SPLIT, STAGE3_SMALL = "stage3", "stage3_split", "stage3_small"
STAGE3_KEEP, STAGE3_KEEP_SPLIT = "stage3_keep", "stage3_keep_split"
OURS = ("stage0", "stage1", "stage2", STAGE3, STAGE3_KEEP)
SMALL: Mapping[str, Any] = {"master": "split", "state_dtype": "int8"}
SMALLEST: Mapping[str, Any] = {"master": "split8", "state_dtype": "int8"}
STAGE2_SMALL, STAGE2_SMALLEST, STAGE3_SMALLEST = "stage2_small", "stage2_smallest", "stage3_smallest"
FORMS: Mapping[str, Mapping[str, Any]] = {
    STAGE3_SPLIT: {"master": "split"},
    STAGE3_KEEP_SPLIT: {"master": "split"},
    STAGE2_SMALL: SMALL,
    STAGE3_SMALL: SMALL,
    STAGE2_SMALLEST: SMALLEST,
    STAGE3_SMALLEST: SMALLEST,
}
"""Options of our contenders with smaller state, which only bf16 parameters can have."""
STAGE_OF = {
    **{f"stage{n}": n for n in range(4)},
    **dict.fromkeys((STAGE3_KEEP, STAGE3_SPLIT, STAGE3_KEEP_SPLIT, STAGE3_SMALL, STAGE3_SMALLEST), 3),
    **dict.fromkeys((STAGE2_SMALL, STAGE2_SMALLEST), 2),
}
"""Stage of each of our contenders that updates by AdamW alone."""
MUON, MUON_STAGE3, DDP_MUON, FSDP2_DION = "muon", "muon_stage3", "ddp_muon", "fsdp2_dion"
MUON_TRAINING: Mapping[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
DDP, DDP_AUTOCAST = "ddp", "ddp_autocast"
FSDP2, FSDP2_ZERO2 = "fsdp2", "fsdp2_zero2"
GATHERING_TWICE = (STAGE3, STAGE3_SPLIT, STAGE3_SMALL, STAGE3_SMALLEST, FSDP2)
"""Contenders that free a block's parameters after its forward, and gather them again in backward."""

Laps = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Task:
    """The training that all contenders run. Each rank has ``batch`` windows of its own, the same at every step."""

    config: ModelConfig
    dtype: torch.dtype
    batch: int
    device: torch.device = torch.device("cpu")

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a step."""
        return self.batch * self.config.seq

    def model(self) -> GPT:
        torch.manual_seed(0)
        with self.device:
            return GPT(self.config, self.dtype)

    @property
    def slices(self) -> int:
        """Number of neighbouring ranks that have the same windows, each with another slice of the model."""
        return 1

    def spread(self, model: GPT) -> tuple[GPT, dist.DeviceMesh | None]:
        """Collective. Give this rank's part of ``model``, and the mesh to average over; None: all ranks, all share."""
        return model, None

    def windows(self) -> Tensor:
        """Draw this rank's windows, [batch, seq + 1] int64."""
        generator = torch.Generator().manual_seed(1 + dist.get_rank() // self.slices)
        return torch.randint(VOCAB, (self.batch, self.config.seq + 1), generator=generator).to(self.device)


def model_config(numel: int, device: torch.device) -> ModelConfig:
    """Choose a model of about ``numel`` parameters: blocks of 12 hidden² each, a hundred times wider than their number.

    Windows are of a realistic length on a GPU, and as short as can be on a CPU.
    """
    hidden = max(64, 64 * round((100 * numel / 12) ** (1 / 3) / 64))
    layers = max(1, round(numel / (12 * hidden**2)))
    return ModelConfig(layers, hidden, hidden // 64, 1024 if device.type == "cuda" else 16)


@dataclass(frozen=True)
class Contender:
    """One way to train. ``laps``: the parts of a step, in order. The lap ``clip``, if there is one, returns the norm.

    ``last_loss``: this rank's loss in the last step.
    """

    laps: Laps
    last_loss: Callable[[], float]

    @property
    def job(self) -> Job:
        return list(self.laps.values())


class Passes:
    """Forward and backward of ``model`` on this rank's windows, as two laps."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        backward: Callable[[Tensor], object] = torch.Tensor.backward,
    ) -> None:
        self._model, self._windows = model, task.windows()
        self._autocast, self._backward = autocast, backward
        self._loss = torch.zeros(())

    def forward(self) -> None:
        with self._autocast():
            self._loss = next_byte_loss(self._model, self._windows)

    def backward(self) -> None:
        self._backward(self._loss)
        self._loss = self._loss.detach()

    def last_loss(self) -> float:
        return self._loss.item()

    def then(self, **laps: Callable[[], object]) -> Contender:
        return Contender({"forward": self.forward, "backward": self.backward, **laps}, self.last_loss)


def ours(task: Task, stage: int, *, reshard: bool = True, form: Mapping[str, Any] | None = None) -> Contender:
    """Train by ``ShardedAdamW``. ``reshard``: at stage 3 a block's parameters are freed after forward and gathered
    again. ``form``: options of the optimizer for smaller state; None: fp32."""
    model, mesh = task.spread(task.model())
    if stage == 3:
        shard_module(model, (Block,), reshard_after_forward=reshard, mesh=mesh)
    opt = ShardedAdamW(model.named_parameters(), stage=stage, mesh=mesh, **TRAINING, **(form or {}))
    clip = functools.partial(opt.clip_grad_norm_, MAX_NORM)
    return Passes(model, task).then(clip=clip, update=opt.step, zero_grad=opt.zero_grad)


def muon(task: Task, stage: int) -> Contender:
    """Update hidden matrices by Muon, all else by AdamW, in one optimizer. Nothing is clipped."""
    model = task.model()
    if stage == 3:
        shard_module(model, (Block,))
    matrices, others = ShardedMuon.split(model)
    groups = [{"params": matrices}, {"params": others, "rule": AdamW(**TRAINING)}]
    opt = ShardedMuon(groups, stage=stage, **MUON_TRAINING)
    return Passes(model, task).then(update=opt.step, zero_grad=opt.zero_grad)


def ddp_muon(task: Task) -> Contender:
    """Do the same with torch's optimizers: every rank has all masters, and makes every matrix orthogonal."""
    model = task.model()
    masters = Masters(model.parameters())
    hidden = {id(parameter) for _, parameter in ShardedMuon.split(model)[0]}
    pairs = list(zip(masters.params, masters.masters, strict=True))
    opts = (
        torch.optim.Muon([master for parameter, master in pairs if id(parameter) in hidden], **MUON_TRAINING),
        torch.optim.AdamW(
            [master for parameter, master in pairs if id(parameter) not in hidden], fused=True, **TRAINING
        ),
    )
    replica = _replicate(model)

    def update() -> None:
        masters.take_gradients()
        for opt in opts:
            opt.step()
        masters.give_back()

    return Passes(replica, task).then(update=update, zero_grad=model.zero_grad)


def ddp(task: Task) -> Contender:
    """Train in DDP. Every rank has all masters."""
    model = task.model()
    masters = Masters(model.parameters())
    return _beside_ddp(task, model, masters, torch.optim.AdamW(masters.masters, fused=True, **TRAINING))


def zero_redundancy(task: Task) -> Contender:
    """Shard the moments. Every rank has all masters, and the updated ones are broadcast in fp32."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = task.model()
    masters = Masters(model.parameters())
    opt = ZeroRedundancyOptimizer(
        masters.masters,
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        fused=True,
        **TRAINING,
    )
    return _beside_ddp(task, model, masters, opt)


def _beside_ddp(task: Task, model: GPT, masters: Masters, opt: torch.optim.Optimizer) -> Contender:
    replica = _replicate(model)

    def clip() -> Tensor:
        masters.take_gradients()
        return nn.utils.clip_grad_norm_(masters.masters, MAX_NORM, foreach=True)

    def update() -> None:
        opt.step()
        masters.give_back()

    return Passes(replica, task).then(clip=clip, update=update, zero_grad=model.zero_grad)


def _replicate(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    """Wrap in DDP, without a second copy of the gradients and without a broadcast of buffers in every forward."""
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def ddp_autocast(task: Task) -> Contender:
    """Train an fp32 model, which is its own masters, under autocast; gradients are cast to bf16 only for the sum."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = _widened(task.model())
    replica = _replicate(model)
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # in fp32 there is nothing to cast
    if task.dtype != torch.float32:
        # Under its own name torch refuses the hook on gloo, where it works.
        replica.register_comm_hook(dist.group.WORLD, lambda group, bucket: bf16_compress_hook(group, bucket))
        autocast = functools.partial(torch.autocast, task.device.type, task.dtype)
    opt = torch.optim.AdamW(model.parameters(), fused=True, **TRAINING)
    return _plain_end(Passes(replica, task, autocast), model, opt)


def fsdp2(task: Task, *, reshard: bool) -> Contender:
    """Train in FSDP2 with fp32 shards, a unit a block. ``reshard``: parameters are freed after forward and gathered
    again in backward; those of the root are not, which is fully_shard's default."""
    model, mesh = task.spread(_widened(task.model()))
    _fully_shard(task, model, mesh, reshard=reshard)
    opt = torch.optim.AdamW(model.parameters(), fused=True, **TRAINING)
    return _plain_end(Passes(model, task), model, opt)


def _fully_shard(task: Task, model: GPT, mesh: dist.DeviceMesh | None, *, reshard: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(task.dtype, task.dtype, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard and module is not model)


def fsdp2_dion(task: Task) -> Contender:
    """Train in FSDP2 with Dion's Muon, which makes a matrix whole on one rank by an all-to-all, and AdamW for the rest.

    By default Dion has its own rates by shape and its own coefficients; here both are torch's.
    """
    model = _widened(task.model())
    hidden = {name for name, _ in ShardedMuon.split(model)[0]}
    mesh = dist.device_mesh.init_device_mesh(task.device.type, (dist.get_world_size(),))
    _fully_shard(task, model, mesh, reshard=True)
    beta1, beta2 = TRAINING["betas"]
    adamw = {"algorithm": "adamw", "beta1": beta1, "beta2": beta2, "epsilon": TRAINING["eps"]}
    others: dict[str, Any] = {"params": [], **_rate_and_decay(TRAINING), **adamw}
    by_scale: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        of_scale = by_scale.setdefault(scale_of(parameter.shape, None), []) if name in hidden else others["params"]
        of_scale.append(parameter)
    matrices = [{"params": params, **_rate_and_decay(MUON_TRAINING, scale)} for scale, params in by_scale.items()]
    opt = importlib.import_module("dion").Muon(
        [*matrices, others],
        distributed_mesh=mesh,
        nesterov=True,
        adjust_lr=None,
        newton_schulz_func=torch.compile(_iterate_as_torch, dynamic=False, fullgraph=True),
    )
    return Passes(model, task).then(update=opt.step, zero_grad=opt.zero_grad)


def _rate_and_decay(training: Mapping[str, Any], scale: float = 1.0) -> dict[str, float]:
    """Scale the rate alone: Dion multiplies the decay by the scaled rate, so the decay is divided by ``scale``."""
    return {"lr": training["lr"] * scale, "weight_decay": training["weight_decay"] / scale}


def _iterate_as_torch(matrices: Tensor, epsilon: float) -> Tensor:
    """Run torch.optim.Muon's iteration on a batch [..., rows, columns]."""
    return orthogonalized(matrices, QUINTIC, 5, epsilon)


def _plain_end(passes: Passes, model: nn.Module, opt: torch.optim.Optimizer) -> Contender:
    """End a step as with any optimizer of torch's: clip, step, zero."""
    params = list(model.parameters())

    def clip() -> Tensor:
        return nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)

    return passes.then(clip=clip, update=opt.step, zero_grad=opt.zero_grad)


def _widened(model: GPT) -> GPT:
    """Widen parameters to fp32, with the values that they have in the model's dtype. Buffers stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def deepspeed(task: Task, stage: int, *, offload: bool = False) -> Contender:
    """Train in DeepSpeed's ZeRO around the same AdamW. Its collectives go through shared memory; its step clips.

    ``offload``: the state is in host memory, and is updated there by DeepSpeed's Adam. Nothing is clipped.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    package = importlib.import_module("deepspeed")

    model = task.model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.batch,
        "bf16": {"enabled": task.dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": MAX_NORM,
        "zero_allow_untested_optimizer": True,
    }
    opt: torch.optim.Optimizer
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["gradient_clipping"] = NEVER
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        opt = adam(model.parameters(), adamw_mode=True, **TRAINING)
    else:
        opt = torch.optim.AdamW(model.parameters(), fused=True, **TRAINING)
    engine, *_ = package.initialize(model=model, optimizer=opt, config=config, dist_init_required=False)
    return Passes(engine, task, backward=engine.backward).then(update=engine.step)


MAKERS: Mapping[str, Callable[[Task], Contender]] = {
    **{
        name: functools.partial(ours, stage=stage, reshard=name in GATHERING_TWICE, form=FORMS.get(name))
        for name, stage in STAGE_OF.items()
    },
    MUON: functools.partial(muon, stage=2),
    MUON_STAGE3: functools.partial(muon, stage=3),
    DDP_MUON: ddp_muon,
    FSDP2_DION: fsdp2_dion,
    DDP: ddp,
    DDP_AUTOCAST: ddp_autocast,
    "zero_redundancy": zero_redundancy,
    FSDP2: functools.partial(fsdp2, reshard=True),
    FSDP2_ZERO2: functools.partial(fsdp2, reshard=False),
    "deepspeed1": functools.partial(deepspeed, stage=1),
    "deepspeed2": functools.partial(deepspeed, stage=2),
}

PACKAGES = {"deepspeed1": "deepspeed", "deepspeed2": "deepspeed", FSDP2_DION: "dion"}  # what some need besides torch


def keeps(name: str, dtype: torch.dtype) -> str | None:
    """Describe the bytes a parameter that a rank of N keeps for training in ``dtype``; None for some contenders."""
    size = dtype.itemsize
    state: int | str = 8 if dtype == torch.float32 else 12  # with fp32 masters
    if name in FORMS:
        low = 1 if FORMS[name]["master"] == "split8" else 2
        state = f"({low + 2} + 1/16)" if "state_dtype" in FORMS[name] else low + 8
    if name in STAGE_OF:
        shown = {"parameters": size, "gradients": size, "state": state}
        sharded = ("state", "gradients", "parameters")[: STAGE_OF[name]]
        return ", ".join(f"{what} {count}{'/N' if what in sharded else ''}" for what, count in shown.items())
    if name in (FSDP2, FSDP2_ZERO2):
        return "parameters 4/N, gradients 4/N until zero_grad, state 8/N"
    return None
