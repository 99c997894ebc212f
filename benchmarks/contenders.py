"""Ways to train one GPT on ranks, as data: ``WAYS`` has each by name. ``bench_training.py`` lets them train in turns.

All start from equal weights, see the same windows, keep fp32 masters of a bf16 model (unless their name or the README
says otherwise), sum gradients over the ranks in the model's dtype, clip to the same global 2-norm and update by the
same AdamW. Use it as:

    task = Task(model_config(numel, device), torch.bfloat16, batch=4, device=device)
    training = WAYS["stage3"].make(task)    # on a rank of an initialized process group
    losses = train(training, steps=3)
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from zero_optim import ShardedAdamW, ShardedMuon, shard_module
from zero_optim.bench.cases import HYPER, MAX_NORM, PEERS, Masters, Peer
from zero_optim.rules import AdamW
from zero_optim.rules.muon import scale_of
from zero_optim.rules.newton_schulz import QUINTIC, orthogonalized
from zero_optim.train.model import GPT, VOCAB, Block, ModelConfig, next_byte_loss

TRAINING: Mapping[str, Any] = {**HYPER, "lr": 1e-4}
MUON_TRAINING: Mapping[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
FUSED = functools.partial(torch.optim.AdamW, fused=True)


# -- the task ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """The training that all run. Each rank has ``batch`` windows of its own, the same at every step.

    ``replicas``: of the sharded state.
    """

    config: ModelConfig
    dtype: torch.dtype
    batch: int
    device: torch.device = torch.device("cpu")
    replicas: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a step."""
        return self.batch * self.config.seq

    def model(self) -> GPT:
        torch.manual_seed(0)
        with self.device:
            return GPT(self.config, self.dtype)

    def mesh(self) -> DeviceMesh | None:
        """Collective. Make the mesh to average over and to shard over; None: shard over all ranks."""
        if self.replicas == 1:
            return None
        shape = self.replicas, dist.get_world_size() // self.replicas
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def windows(self) -> Tensor:
        """Draw this rank's windows, [batch, seq + 1] int64."""
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        return torch.randint(VOCAB, (self.batch, self.config.seq + 1), generator=generator).to(self.device)


@dataclass(frozen=True)
class Training:
    """One training under way. ``laps``: the parts of a step, in order. The lap ``clip``, if any, returns the norm.

    ``last_loss``: this rank's loss in the last step.
    """

    laps: Mapping[str, Callable[[], object]]
    last_loss: Callable[[], float]

    def step(self) -> None:
        for lap in self.laps.values():
            lap()


def train(training: Training, steps: int) -> list[float]:
    """Train so many steps. Returns this rank's loss in each."""
    losses = []
    for _ in range(steps):
        training.step()
        losses.append(training.last_loss())
    return losses


class Passes:
    """Forward and backward of ``model`` on this rank's windows, as two laps."""

    def __init__(
        self, model: nn.Module, task: Task, backward: Callable[[Tensor], object] = torch.Tensor.backward
    ) -> None:
        self._model, self._windows, self._backward = model, task.windows(), backward
        self._loss = torch.zeros(())

    def forward(self) -> None:
        self._loss = next_byte_loss(self._model, self._windows)

    def backward(self) -> None:
        self._backward(self._loss)
        self._loss = self._loss.detach()

    def then(self, **laps: Callable[[], object]) -> Training:
        return Training({"forward": self.forward, "backward": self.backward, **laps}, lambda: self._loss.item())


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(task: Task, stage: int, reshard: bool = True, **form: Any) -> Training:
    """Train by ``ShardedAdamW``. ``reshard``: stage 3 frees a block's parameters after its forward.

    ``form``: options of the state.
    """
    model, mesh = task.model(), task.mesh()
    if stage == 3:
        shard_module(model, (Block,), reshard_after_forward=reshard, mesh=mesh)
    opt = ShardedAdamW(model, stage=stage, mesh=mesh, **TRAINING, **form)
    clip = functools.partial(opt.clip_grad_norm_, MAX_NORM)
    return Passes(model, task).then(clip=clip, update=opt.step, zero_grad=opt.zero_grad)


def muon(task: Task, stage: int) -> Training:
    """Update hidden matrices by Muon, all else by AdamW, in one optimizer. Nothing is clipped."""
    model = task.model()
    if stage == 3:
        shard_module(model, (Block,))
    matrices, others = ShardedMuon.split(model)
    groups = [{"params": matrices}, {"params": others, "rule": AdamW(**TRAINING)}]
    opt = ShardedMuon(groups, stage=stage, **MUON_TRAINING)
    return Passes(model, task).then(update=opt.step, zero_grad=opt.zero_grad)


# -- torch's -----------------------------------------------------------------------------------------------------------


def ddp(task: Task, optimizer: Callable[..., torch.optim.Optimizer] = FUSED) -> Training:
    """Train in DDP. Every rank has all masters."""
    model = task.model()
    masters = Masters(model.parameters())
    opt = optimizer(masters.masters, **TRAINING)
    replica = replicate(model)

    def clip() -> Tensor:
        masters.take_gradients()
        return nn.utils.clip_grad_norm_(masters.masters, MAX_NORM, foreach=True)

    def update() -> None:
        opt.step()
        masters.give_back()

    return Passes(replica, task).then(clip=clip, update=update, zero_grad=model.zero_grad)


def zero_redundancy(masters: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    """Shard the moments. Every rank has all masters, and the updated ones are broadcast in fp32."""
    return ZeroRedundancyOptimizer(masters, torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **options)


def replicate(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    """Wrap in DDP, without a second copy of the gradients and without a broadcast of buffers in every forward."""
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def fsdp2(task: Task, *, reshard: bool) -> Training:
    """Train in FSDP2 with fp32 shards, a unit a block. ``reshard``: parameters are freed after forward and gathered
    again in backward; those of the root are not, which is fully_shard's default."""
    model, mesh = _widened(task.model()), task.mesh()
    _fully_shard(task, model, mesh, reshard=reshard)
    return _plain_end(Passes(model, task), model, FUSED(model.parameters(), **TRAINING))


def _fully_shard(task: Task, model: GPT, mesh: DeviceMesh | None, *, reshard: bool) -> None:
    policy = MixedPrecisionPolicy(task.dtype, task.dtype, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard and module is not model)


def _plain_end(passes: Passes, model: nn.Module, opt: torch.optim.Optimizer) -> Training:
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


def ddp_muon(task: Task) -> Training:
    """Do what ``muon`` does with torch's optimizers: every rank has all masters and orthogonalizes every matrix."""
    model = task.model()
    masters = Masters(model.parameters())
    hidden = {id(parameter) for _, parameter in ShardedMuon.split(model)[0]}
    pairs = list(zip(masters.params, masters.masters, strict=True))
    matrices = [master for parameter, master in pairs if id(parameter) in hidden]
    others = [master for parameter, master in pairs if id(parameter) not in hidden]
    opts = torch.optim.Muon(matrices, **MUON_TRAINING), FUSED(others, **TRAINING)
    replica = replicate(model)

    def update() -> None:
        masters.take_gradients()
        for opt in opts:
            opt.step()
        masters.give_back()

    return Passes(replica, task).then(update=update, zero_grad=model.zero_grad)


# -- other packages' ---------------------------------------------------------------------------------------------------


def fsdp2_dion(task: Task) -> Training:
    """Train in FSDP2 with Dion's Muon, which makes a matrix whole on one rank by an all-to-all, and AdamW for the rest.

    By default Dion has its own rates by shape and its own coefficients; here both are torch's.
    """
    model = _widened(task.model())
    hidden = {name for name, _ in ShardedMuon.split(model)[0]}
    mesh = init_device_mesh(task.device.type, (dist.get_world_size(),))
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


def deepspeed(task: Task, stage: int, **zero: Any) -> Training:
    """Train in DeepSpeed's ZeRO around the same AdamW. Its collectives go through shared memory; its step clips.

    ``zero``: where its state lies; with it the AdamW is its own for the CPU.
    """
    os.environ.setdefault("DS_ACCELERATOR", task.device.type)
    package = importlib.import_module("deepspeed")
    model = task.model()
    config = {
        "train_micro_batch_size_per_gpu": task.batch,
        "bf16": {"enabled": task.dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage, **zero},
        "gradient_clipping": MAX_NORM,
        "zero_allow_untested_optimizer": True,
    }
    opt = FUSED(model.parameters(), **TRAINING)
    if zero:
        opt = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(model.parameters(), **TRAINING)
    engine, *_ = package.initialize(model=model, optimizer=opt, config=config, dist_init_required=False)
    return Passes(engine, task, backward=engine.backward).then(update=engine.step)


def by_peer(task: Task, peer: Peer) -> Training:
    """Train by a package's AdamW: in DDP around masters, or on the model's parameters."""
    if peer.name == "FusedAdam" and task.device.type == "cpu":  # where only DeepSpeed has one
        peer = peer._replace(name="DeepSpeedCPUAdam")
    if peer.has_masters:
        return ddp(task, peer.make)
    model = task.model()
    return _plain_end(Passes(model, task), model, peer.make(model.parameters(), **TRAINING))


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How to build a training, and what is known of it.

    Attributes:
        ours: it may not fail.
        gathers_twice: it frees a block's parameters after its forward, and gathers them again in backward.
        package: what it needs besides torch.
        bf16_only: why it cannot train in fp32; "": it can.
        has_masters: False: it loses small updates of a bf16 model, so its losses are others.
    """

    make: Callable[[Task], Training]
    ours: bool = False
    gathers_twice: bool = False
    package: str | None = None
    bf16_only: str = ""
    has_masters: bool = True


FORMS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "_fp32": {"master": "fp32"},
    "_bf16": {"state_dtype": "bf16"},
    "_int8": {"state_dtype": "int8"},
    "_split8": {"master": "split8"},
    "_smallest": {"master": "split8", "state_dtype": "int8"},
}
"""Options of the form of state by the end of a contender's name. A bf16 model has split masters, but for "_fp32"."""

STORES: Mapping[str, Mapping[str, Any]] = {
    "_paged": {"state_offload": "paged", "device_budget": 0},
    "_cpu": {"state_offload": "cpu"},
    "_nvme": {"state_offload": f"nvme:{tempfile.gettempdir()}"},
}
"""Options that move the state off the device, likewise."""


def _at(stage: int, reshard: bool = True, **options: Any) -> Way:
    why = "8 bits of a master are for bf16 parameters" if options.get("master") == "split8" else ""
    make = functools.partial(ours, stage=stage, reshard=reshard, **options)
    return Way(make, ours=True, gathers_twice=stage == 3 and reshard, bf16_only=why)


def _of_peer(peer: Peer) -> Way:
    make, package = functools.partial(by_peer, peer=peer), peer.module.split(".")[0]
    return Way(make, package=package, has_masters=peer.has_masters)


WAYS: Mapping[str, Way] = {
    "stage0": _at(0),
    "stage1": _at(1),
    **{f"stage2{end}": _at(2, **options) for end, options in {**FORMS, **STORES}.items()},
    **{f"stage3{end}": _at(3, **options) for end, options in FORMS.items()},
    **{f"stage3_keep{end}": _at(3, reshard=False, **options) for end, options in FORMS.items()},
    "muon": Way(functools.partial(muon, stage=2), ours=True),
    "muon_stage3": Way(functools.partial(muon, stage=3), ours=True),
    "ddp_muon": Way(ddp_muon),
    "fsdp2_dion": Way(fsdp2_dion, package="dion"),
    "ddp": Way(ddp),
    "zero_redundancy": Way(functools.partial(ddp, optimizer=zero_redundancy)),
    "fsdp2": Way(functools.partial(fsdp2, reshard=True), gathers_twice=True),
    "fsdp2_zero2": Way(functools.partial(fsdp2, reshard=False)),
    "deepspeed1": Way(functools.partial(deepspeed, stage=1), package="deepspeed"),
    "deepspeed2": Way(functools.partial(deepspeed, stage=2), package="deepspeed"),
    "deepspeed2_cpu": Way(
        functools.partial(deepspeed, stage=2, offload_optimizer={"device": "cpu"}), package="deepspeed"
    ),
    **{name: _of_peer(peer) for name, peer in PEERS.items()},
}
