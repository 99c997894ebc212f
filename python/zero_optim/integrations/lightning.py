"""Lightning with sharded optimizers: ``Trainer(strategy=ShardedStrategy())``."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.swa_utils import AveragedModel

from .. import checkpoint
from ..errors import ZeroOptimError
from ..optimizer import ShardedOptimizer
from ..params.tensor_slice import is_distributed, shown_as, slice_of
from ..shard_module import gather_parameters, register_forward_method, shard_module
from ..sync_buffers import sync_buffers
from ..units.sharded_model import sharded_model_of
from .clients import (
    attach,
    check_optimizer,
    entered,
    in_place,
    is_in_parts,
    is_sharded,
    plain_optimizer,
    require,
    sharded_among,
    sharded_scaler,
    showing_averages,
    whole_state_dict,
)

require("zero_optim.integrations.lightning", "lightning")

from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, Strategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

_EVALUATION = ("validation_step", "test_step", "predict_step")
_READ, _WRITE = False, True
# These callbacks keep a whole copy of the model on every rank. The methods access the parameters of modules among their
# arguments, outside of any forward, where a model of stage 3 has only shards.
_METHODS = {
    "WeightAveraging": {"setup": _READ, "_swap_models": _WRITE, "_copy_average_to_current": _WRITE},
    "StochasticWeightAveraging": {"setup": _READ, "update_parameters": _READ, "transfer_weights": _WRITE},
}


class EvaluateAverages(callbacks.Callback):
    """Validate with averages in place of the parameters: the first one of each optimizer made with ``ema_decay``.

    Checkpoints are of the parameters; the averages are among the optimizer's state.
    """

    def __init__(self) -> None:
        self._shown = ExitStack()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._shown.enter_context(showing_averages(trainer.optimizers))

    def on_validation_end(self, *_: Any) -> None:
        self._shown.close()

    on_exception = on_validation_end


class ShardedStrategy(DDPStrategy):
    """Lightning's processes, samplers and barriers, without the DDP module: the optimizers reduce gradients themselves.

    ``configure_optimizers`` returns a ``ShardedOptimizer``, or several. Beside Lightning's ``NAME.ckpt``, which holds
    whole weights, the folder ``NAME.ckpt.sharded`` has the optimizers' state, for any number of ranks and any stage.
    Callbacks that average weights (``WeightAveraging``, ``StochasticWeightAveraging``) keep a whole copy on every rank,
    as in DDP. ``gradient_clip_val`` clips by norm, an fp16 scaler is replaced by ``zero_optim.GradScaler``, and a
    second ``fit`` closes the optimizers of the first.

    Args:
        units: stage 3: the classes, or their names, of the modules to gather one at a time. The LightningModule is
            given to ``zero_optim.shard_module`` once it is in its place, before ``configure_optimizers``.
        tensor_parallel_size: ranks over which ``configure_model`` cuts the model. As in ``ModelParallelStrategy``,
            ``self.device_mesh`` has the dimensions "data_parallel" and "tensor_parallel" there, and ranks along the
            second have the same batches. The optimizer is given ``mesh=self.device_mesh["data_parallel"]``.
        sync_each_batch: reduce every micro-batch of ``accumulate_grad_batches``, instead of once a step: that
            communicates more, and keeps no whole gradients meanwhile.
        sync_buffers: "broadcast" or "mean": give all ranks the same buffers, by ``zero_optim.sync_buffers``, before
            they evaluate and save. None: each rank keeps its own, and those of rank 0 are saved.
        options: those of ``DDPStrategy``.

    Raises TypeError, on several ranks, for an optimizer that is not a ``ShardedOptimizer``, and ValueError for one
    whose parameters are cut over another number of ranks than ``tensor_parallel_size``, or if that does not divide the
    ranks.
    """

    model: Any
    _lightning_module: Any

    def __init__(
        self,
        *,
        units: Sequence[type[nn.Module] | str] | None = None,
        tensor_parallel_size: int = 1,
        sync_each_batch: bool = False,
        sync_buffers: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._units, self._sync_each_batch, self._sync_buffers = units, sync_each_batch, sync_buffers
        self._tensor_parallel_size = tensor_parallel_size
        self._mesh: DeviceMesh | None = None  # of two dimensions, where the model is cut
        self._resumed_from = ""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._mesh is None:
            return super().distributed_sampler_kwargs
        data_parallel = self._mesh["data_parallel"]
        return {"num_replicas": data_parallel.size(), "rank": data_parallel.get_local_rank()}

    # -- setting up ----------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        for callback in self.lightning_module.trainer.callbacks:  # before their own setup, which copies the model
            for name, methods in _METHODS.items():
                kind = getattr(callbacks, name, None)  # an older release lacks one
                for method, writes in methods.items() if kind is not None and isinstance(callback, kind) else ():
                    _gather_in(callback, method, writes=writes)
            if isinstance(callback, callbacks.BaseFinetuning) and "finetune_function" not in vars(callback):
                callback.finetune_function = _by_identity(callback.finetune_function)
        size = self._tensor_parallel_size
        if size > 1:
            if self.world_size % size:
                raise ValueError(f"tensor_parallel_size={size} does not divide {self.world_size} ranks")
            names = ("data_parallel", "tensor_parallel")
            self._mesh = init_device_mesh(self.root_device.type, (self.world_size // size, size), mesh_dim_names=names)
            self.lightning_module._device_mesh = self._mesh  # its ``device_mesh``, in ``configure_model``

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        if trainer.state.fn != TrainerFn.FITTING and self._units is None and not is_in_parts(module):
            return super().setup(trainer)  # outside of ``fit`` it wraps nothing, and gives all ranks rank 0's weights
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        Strategy.setup(self, trainer)  # not DDPStrategy's, which wraps the model

    def model_to_device(self) -> None:
        if not in_place(self.model, self.root_device):
            super().model_to_device()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self._units is not None and not sharded_model_of(model.parameters()):
            shard_module(model, self._units, mesh=None if self._mesh is None else self._mesh["data_parallel"])
        # Lightning calls these methods, not the module. In manual optimization training_step has the backward, too.
        for name in (*_EVALUATION, "training_step") if model.automatic_optimization else _EVALUATION:
            if name not in vars(model):  # an earlier fit may have registered it
                register_forward_method(model, name)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, callbacks.ModelPruning):
                if is_sharded(self.lightning_module):
                    raise ZeroOptimError(
                        "the callback ModelPruning ranks the values of whole weights, and at stage 3 the model has "
                        "shards: make the optimizer with stage=2, and leave out units"
                    )
                if callback._use_lottery_ticket_hypothesis:
                    raise ZeroOptimError(
                        "the callback ModelPruning would give parameters new data after each epoch, which the "
                        "optimizer does not follow: give it use_lottery_ticket_hypothesis=False"
                    )
        for optimizer in sharded_among(self.optimizers):
            optimizer.close()  # these are of an earlier fit
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_optimizer(plain_optimizer(optimizer), self.world_size, "ShardedStrategy")
        for optimizer in sharded_among(self.optimizers):  # it must be for the ranks by which samplers give batches
            columns, size = optimizer.engine.sharding.topology.columns, self._tensor_parallel_size
            if len(columns or [0]) != size:
                cut = f"parameters are cut over {len(columns)}" if columns else "no parameter of the optimizer is cut"
                raise ValueError(
                    f"ShardedStrategy has tensor_parallel_size={size}, and {cut}: give the number of ranks over which "
                    "configure_model cuts it, by parallelize_module(model, self.device_mesh['tensor_parallel'], plan)"
                )
        attach([self.lightning_module])

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            plugin.scaler = sharded_scaler(plugin.scaler)
        by_torch = type(plugin).clip_grad_by_norm

        def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
            plain = plain_optimizer(optimizer)
            if isinstance(plain, ShardedOptimizer):
                plain.clip_grad_norm_(clip_val)
            else:
                by_torch(plugin, optimizer, clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm

    def teardown(self) -> None:
        module = self._lightning_module
        if module is not None and is_in_parts(module):
            self._lightning_module = None  # Lightning would move it to the CPU, which neither shards nor slices can be
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    # -- a step --------------------------------------------------------------------------------------------------

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Reduce no gradients in this block, which has all micro-batches of a step but the last."""
        return entered(opt.no_sync() for opt in sharded_among(self.optimizers) if not self._sync_each_batch)

    # -- saving and loading --------------------------------------------------------------------------------------

    def _agree_on_buffers(self) -> None:
        if self._sync_buffers is not None:
            sync_buffers(self.lightning_module, self._sync_buffers)

    on_validation_start = on_test_start = on_predict_start = _agree_on_buffers  # Lightning's names

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._agree_on_buffers()
        return whole_state_dict(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state = dict(checkpoint["state_dict"])
        for name, value in self.lightning_module.state_dict(keep_vars=True).items():
            if name in state and is_distributed(value):  # a whole tensor is cut as the model's is, by each rank alone
                own = slice_of(value)
                if own is not None and not is_distributed(state[name]):
                    state[name] = shown_as(value, own.of(state[name]))
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {} if isinstance(plain_optimizer(optimizer), ShardedOptimizer) else super().optimizer_state(optimizer)

    def save_checkpoint(self, content: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(content, filepath, storage_options)
        if "optimizer_states" in content and sharded_among(self.optimizers):  # absent where only weights are saved
            step = content["global_step"]
            checkpoint.save(
                f"{filepath}.sharded", self.lightning_module, sharded_among(self.optimizers), step=step, keep_last=1
            )

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        beside = f"{checkpoint_path}.sharded"
        # last.ckpt may be a link, and then has no folder of its own
        self._resumed_from = beside if os.path.isdir(beside) else f"{os.path.realpath(checkpoint_path)}.sharded"
        return super().load_checkpoint(checkpoint_path, *args, **options)

    def load_optimizer_state_dict(self, content: Mapping[str, Any]) -> None:
        for optimizer in sharded_among(self.optimizers):
            # ``BaseFinetuning``, when it resumes, has assigned groups to ``param_groups``. They may be frozen again by
            # then. They need state all the same, as it was saved with that of the others.
            assigned, own = optimizer.param_groups, optimizer.engine.parameters.groups
            optimizer.param_groups = own
            for group in assigned[len(own) :] if assigned is not own else ():
                frozen = [parameter for parameter in group["params"] if not parameter.requires_grad]
                for parameter in frozen:
                    parameter.requires_grad_(True)
                optimizer.add_param_group(group)
                for parameter in frozen:
                    parameter.requires_grad_(False)
        if any(content["optimizer_states"]) and not os.path.isdir(self._resumed_from):
            super().load_optimizer_state_dict(content)  # saved with AdamW, in DDP or on one rank
        else:
            checkpoint.load(self._resumed_from, self.lightning_module, sharded_among(self.optimizers))

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}.sharded", ignore_errors=True)


# -- callbacks that read or write parameters outside of any forward ----------------------------------------------------


def _gather_in(owner: Any, method: str, *, writes: bool) -> None:
    """Wrap a method of this one object, once, so that the modules among its arguments are gathered."""
    if method in vars(owner) or not hasattr(owner, method):
        return
    plain: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(plain)
    def gathered(*args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            for given in (*args, *options.values()):
                if isinstance(given, nn.Module):
                    stack.enter_context(gather_parameters(given, writeback=writes))
            result = plain(*args, **options)
        average = getattr(owner, "_average_model", None)
        if isinstance(average, AveragedModel):
            _gather_in(average, "update_parameters", writes=False)
        return result

    setattr(owner, method, gathered)


def _by_identity(finetune: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finetune_function``. Lightning compares values: shards have none, and two biases of zeros are equal."""
    kind = callbacks.BaseFinetuning

    def not_in(optimizer: Any, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in params if id(parameter) not in held]

    @functools.wraps(finetune)
    def finetune_by_identity(*args: Any, **options: Any) -> None:
        by_value, kind.filter_on_optimizer = kind.filter_on_optimizer, staticmethod(not_in)
        try:
            finetune(*args, **options)
        finally:
            kind.filter_on_optimizer = staticmethod(by_value)

    return finetune_by_identity
