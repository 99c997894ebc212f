"""``accelerate`` with sharded optimizers: ``prepare``, in place of ``accelerator.prepare``.

::

    accelerator = Accelerator(gradient_accumulation_steps=4)
    optimizer = zero_optim.ShardedAdamW(model.to(accelerator.device).named_parameters(), lr=1e-3)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

From then on the accelerator's own calls handle sharded parameters and gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import checkpoint
from ..comm.topology import read_rows
from ..errors import CheckpointError, ParameterError, ZeroOptimError
from ..optimizer import ShardedOptimizer, optimizers_of
from ..params.param_shard import plain_parameter
from .clients import (
    attach,
    check_optimizer,
    check_sums,
    entered,
    in_place,
    is_in_parts,
    is_sharded,
    plain_optimizer,
    require,
    same_place,
    sharded_among,
    sharded_scaler,
    whole_state_dict,
)

require("zero_optim.integrations.accelerate", "accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402

FOLDER = "sharded"  # beside what accelerate saves: model and optimizer, by zero_optim.checkpoint
_OTHER_ENGINES = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


def data_parallel_mesh(accelerator: Accelerator) -> DeviceMesh | None:
    """Collective. Make the ``mesh`` for ``ShardedOptimizer`` and ``shard_module`` from the ``ParallelismConfig``.

    None without such a configuration: then all ranks shard. The mesh has two dimensions with ``dp_replicate_size`` and
    ``dp_shard_size``, else one. Where all ranks are tensor-parallel ones, each rank is alone in it.

    Raises ZeroOptimError for ``cp_size`` and ``sp_size``, which accelerate has only with FSDP and DeepSpeed.
    """
    chosen, mesh = accelerator.parallelism_config, accelerator.torch_device_mesh
    _check_sequences(chosen)
    if mesh is None:
        return None
    names = tuple(chosen.dp_dim_names)
    if not names:
        return init_device_mesh(mesh.device_type, (1, mesh.size()), mesh_dim_names=("dp_shard", "tp"))["dp_shard"]
    return mesh[names]


def prepare(accelerator: Accelerator, *objects: Any, device_placement: list[bool] | None = None) -> Any:
    """Prepare as ``accelerator.prepare`` does models, optimizers, loaders and schedulers; nothing is wrapped in DDP.

    The accelerator is changed into a ``ShardedAccelerator``, whose ``accumulate``, ``no_sync``, ``unscale_gradients``,
    ``clip_grad_norm_``, ``get_state_dict``, ``save_model``, ``save_state`` and ``load_state`` handle shards. The
    last four are then collective. An fp16 scaler is replaced by ``zero_optim.GradScaler``.

    Move the model to ``accelerator.device`` before its optimizer is made; for stage 3, then give it to
    ``zero_optim.shard_module``.

    Raises:
        ParameterError: an optimizer whose parameters are on another device than the accelerator's.
        TypeError: on several ranks, an optimizer that is not a ``ShardedOptimizer``.
        ValueError: an optimizer over other ranks than the accelerator's ``ParallelismConfig`` has.
        ZeroOptimError: an accelerator with a sharding of its own, such as FSDP or DeepSpeed, or with ``cp_size`` or
            ``sp_size``.
    """
    return adopt(accelerator).prepare(*objects, device_placement=device_placement)


def adopt(accelerator: Accelerator) -> ShardedAccelerator:
    """Change an accelerator into a ``ShardedAccelerator``, in place. Raises ZeroOptimError as ``prepare`` does."""
    if not isinstance(accelerator, ShardedAccelerator):
        _check_sequences(accelerator.parallelism_config)
        if (engine := accelerator.distributed_type) in _OTHER_ENGINES:
            raise ZeroOptimError(f"the accelerator is set up for {engine}, which shards by itself: launch without it")
        kind = type(accelerator)
        bases = (ShardedAccelerator,) if kind is Accelerator else (ShardedAccelerator, kind)
        accelerator.__class__ = type(f"Sharded{kind.__name__}", bases, {})
        if accelerator.scaler is not None:
            accelerator.scaler = sharded_scaler(accelerator.scaler)
    return accelerator


class ShardedAccelerator(Accelerator):
    """An ``Accelerator`` that leaves reducing gradients to its optimizers, each a ``ShardedOptimizer``."""

    scaler: Any
    _optimizers: list[Any]

    def _prepare_tp(self, *objects: Any) -> tuple[Any, ...]:
        """Do nothing: accelerate would identify parameters by address, and all shards have the same address."""
        return objects

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        prepared = super().prepare(*objects, device_placement=device_placement)
        attach(self._models)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as accelerate does for evaluation: with autocast and torch.compile, and without DDP."""
        check_sums(model)
        if device_placement is not False:
            device_placement = self.device_placement and not in_place(model, self.device)
        if device_placement and (is_sharded(model) or optimizers_of(model)):
            name = next(name for name, p in model.named_parameters() if not same_place(p.device, self.device))
            raise ParameterError(
                f"{name!r} is not on {self.device}, where the accelerator would move it: call "
                "model.to(accelerator.device) before zero_optim.shard_module and before the optimizer is made"
            )
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        plain = plain_optimizer(optimizer)
        check_optimizer(plain, self.num_processes, "zero_optim.integrations.accelerate")
        if not isinstance(plain, ShardedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if not same_place(plain.device, self.device):
            raise ParameterError(
                f"the optimizer's parameters are on {plain.device}, and the accelerator is for {self.device}: "
                "call model.to(accelerator.device) before the optimizer is made"
            )
        # The optimizer must be for the ranks by which loaders give batches.
        sharding, mesh, chosen = plain.engine.sharding, self.torch_device_mesh, self.parallelism_config
        topology = sharding.topology
        if mesh is None and topology.columns is not None:
            raise ValueError(
                f"parameters are cut over {len(topology.columns)} ranks, to which the accelerator would give different "
                "batches: make it with parallelism_config=ParallelismConfig(dp_shard_size=..., "
                f"tp_size={len(topology.columns)})"
            )
        if mesh is not None:
            if chosen.tp_enabled and topology.columns is None:
                raise ValueError(
                    f"parallelism_config has tp_size={chosen.tp_size}, and no parameter of the optimizer is cut: call "
                    "parallelize_module(model, accelerator.torch_device_mesh['tp'], plan) before it is made"
                )
            columns = topology.columns or (tuple(sharding.world.ranks),)
            wanted = tuple(zip(*mesh.mesh.reshape(-1, chosen.tp_size).tolist(), strict=True))  # "tp" is the last one
            grid = mesh[tuple(chosen.dp_dim_names)] if len(chosen.dp_dim_names) == 2 else None
            rows = read_rows(grid, shards=plain.stage != 0)
            if columns != wanted or topology.rows != rows:
                raise ValueError(
                    f"the optimizer is for ranks {topology.rows or columns}, and parallelism_config for "
                    f"{rows or wanted}: give ShardedAdamW, or shard_module, mesh=data_parallel_mesh(accelerator)"
                )
        return super().prepare_optimizer(optimizer, device_placement=False)  # its state lies with its parameters

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Reduce no gradients in this block. ``accumulate`` enters it between steps."""
        return entered(optimizer.no_sync() for optimizer in optimizers_of(model))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients of one optimizer, of a list, or (None) of all, where there is a scaler; on a CPU too."""
        if self.scaler is not None:
            chosen = self._optimizers if optimizer is None else optimizer
            for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
                self.scaler.unscale_(plain_optimizer(one))

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Unscale now, and clip at the next step. Returns the norm before, as ``ShardedAdamW.clip_grad_norm_`` does.

        Raises ParameterError for parameters of several optimizers: clip each optimizer's in a call of its own.
        """
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(plain_parameter(parameter)) for parameter in listed}
        own = {one: one.engine.parameters.all for one in sharded_among(self._optimizers)}
        holders = [one for one, held in own.items() if any(id(parameter) in ids for parameter in held)]
        if not holders:
            return super().clip_grad_norm_(listed, max_norm, norm_type)
        if len(holders) > 1:
            raise ParameterError(
                f"clip_grad_norm_ was given parameters of {len(holders)} optimizers: call it for those of each"
            )
        self.unscale_gradients()
        some = [parameter for parameter in own[holders[0]] if id(parameter) in ids]
        return holders[0].clip_grad_norm_(max_norm, norm_type, None if len(some) == len(own[holders[0]]) else some)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Collective. Give the whole state dict of a sharded model on rank 0, and ``{}`` on the other ranks."""
        if not is_in_parts(model):
            return super().get_state_dict(model, unwrap)
        everywhere = self.project_configuration.save_on_each_node
        return whole_state_dict(self.unwrap_model(model) if unwrap else model, on_all=everywhere)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Collective. Save as accelerate does, with models and optimizers for any number of ranks in ``sharded``.

        The file of weights that accelerate writes holds whole weights: ``safetensors.torch.load_file`` reads it.
        """
        with self._apart() as sharded:
            folder = super().save_state(output_dir, safe_serialization, **options)
        if sharded:
            done = {"micro_batches": self.step}  # accelerate writes it beside the random states of each rank it has
            checkpoint.save(Path(folder) / FOLDER, _together(self._models), sharded, extra=done, keep_last=1)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Load what ``save_state`` wrote, on any number of ranks.

        Raises CheckpointError, before anything is loaded, for a folder that plain accelerate wrote.
        """
        folders: list[Path] = []

        def leave_models(models: list[nn.Module], folder: str) -> None:
            if checkpoint.latest(Path(folder) / FOLDER) is None:
                raise CheckpointError(
                    f"{folder} holds no {FOLDER!r}: it was not saved by zero_optim.integrations.accelerate. Load its "
                    "model, then its optimizer.bin by zero_optim.load_full_state_dict(opt, torch.load(...))"
                )
            folders.append(Path(folder) / FOLDER)
            models.clear()  # so that accelerate does not load them

        with self._apart() as sharded, ExitStack() as hooks:
            if sharded:
                hooks.callback(self.register_load_state_pre_hook(leave_models).remove)
            super().load_state(input_dir, load_kwargs, **options)
        for folder in folders:
            self.step = checkpoint.load(folder, _together(self._models), sharded).extra["micro_batches"]

    # -- the optimizers ------------------------------------------------------------------------------------------

    @contextmanager
    def _apart(self) -> Iterator[list[ShardedOptimizer]]:
        """Hide the sharded optimizers from accelerate, which would save one rank's shards, and yield them."""
        every = self._optimizers
        self._optimizers = [one for one in every if not isinstance(plain_optimizer(one), ShardedOptimizer)]
        try:
            yield sharded_among(every)
        finally:
            self._optimizers = every


def _check_sequences(chosen: Any) -> None:
    """Raise ZeroOptimError where a ``ParallelismConfig`` gives ranks parts of a sequence."""
    for name in ("cp_size", "sp_size"):
        if getattr(chosen, name, 1) > 1:
            raise ZeroOptimError(
                f"accelerate has {name} with FSDP and DeepSpeed alone, which shard by themselves: leave it out, cut "
                "sequences in a loop of your own, and give ShardedAdamW mesh=mesh['dp', 'cp']._flatten('dp_cp')"
            )


def _together(models: list[nn.Module]) -> nn.Module:
    """Combine models into one module, which is what ``checkpoint.save`` takes."""
    plain = [getattr(model, "_orig_mod", model) for model in models]
    return plain[0] if len(plain) == 1 else nn.ModuleDict({str(number): model for number, model in enumerate(plain)})
