"""``transformers.Trainer`` with a sharded optimizer: ``ShardedTrainer``. ``sharded`` is for classes derived from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import checkpoint
from ..checkpoint.hugging_face import load_safetensors
from ..drop_ins import ShardedAdamW, ShardedSGD
from ..errors import ParameterError
from ..optimizer import ShardedOptimizer
from ..shard_module import shard_module
from ..sync_buffers import sync_buffers
from ..units.sharded_model import sharded_model_of
from .clients import (
    check_sums,
    in_place,
    is_cut,
    is_in_parts,
    plain_optimizer,
    require,
    showing_averages,
    whole_state_dict,
)

require("zero_optim.integrations.transformers", "transformers", "accelerate")

from transformers import Seq2SeqTrainer, Trainer  # noqa: E402

from .accelerate import FOLDER, adopt, data_parallel_mesh  # noqa: E402

_SHARDED: dict[type, type[ShardedOptimizer]] = {torch.optim.AdamW: ShardedAdamW, torch.optim.SGD: ShardedSGD}


class ShardedTrainer(Trainer):
    """A ``Trainer`` that leaves reducing gradients to a ``ShardedOptimizer``. Its other arguments are Trainer's.

    Without an optimizer it makes one, from ``optim``, the learning rate, betas, epsilon and weight decay of the
    TrainingArguments. Saving is collective, ``save_model`` too: checkpoints hold whole weights, which
    ``from_pretrained`` reads, and in the folder ``sharded`` the state of the optimizer, for any number of ranks and any
    stage.

    Args:
        stage: what is sharded, as in ``ShardedOptimizer``, for the optimizer that is made here. None: 2, or 3 with
            ``units``.
        units: stage 3: the classes, or their names, of the modules to gather one at a time, as ``("GPT2Block",)``.
            The model is given to ``zero_optim.shard_module`` once it is in its place. To choose more than that, move
            the model to ``arguments.device``, and shard it, before the Trainer is made.
        sync_buffers: "broadcast" or "mean": give all ranks the same buffers, by ``zero_optim.sync_buffers``, before
            they evaluate and save. None: each rank keeps its own, and those of rank 0 are saved.
        ema_decay, master, state_dtype: as in ``ShardedOptimizer``, for the optimizer that is made here. With
            an optimizer that keeps averages the model is evaluated with the first of them in place of its parameters.

    Raises:
        ParameterError: ``units`` with an optimizer that was made before: shard the model first. A model that was loaded
            with a ``DistributedConfig`` of more than ``tp_size``.
        TypeError: on several ranks, an optimizer that is not a ``ShardedOptimizer``.
        ValueError: an ``optim`` among the TrainingArguments that is neither AdamW nor SGD.
    """

    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None

    def __init__(
        self,
        *args: Any,
        stage: int | None = None,
        units: Sequence[type[nn.Module] | str] | None = None,
        sync_buffers: str | None = None,
        ema_decay: float | Sequence[float] | None = None,
        master: str | None = None,
        state_dtype: str = "fp32",
        **options: Any,
    ) -> None:
        self._stage, self._units, self._sync_buffers = stage, units, sync_buffers
        self._of_state = {"ema_decay": ema_decay, "master": master, "state_dtype": state_dtype}
        self._whole: dict[str, Any] | None = None  # the weights of a sharded model, while it is saved
        self._made: ShardedOptimizer | None = None  # the optimizer of the last training
        super().__init__(*args, **options)
        self._shard()

    def _shard(self) -> None:
        check_sums(self.model)
        # ``from_pretrained`` may have cut the model in a way that the optimizer cannot take.
        loaded = getattr(getattr(self.model, "config", None), "distributed_config", None)
        if loaded is not None and getattr(self.model, "is_distributed_loading_by_transformers", False):
            for name in ("dp_replicate_size", "fsdp_size", "ep_size", "pp_size"):
                if (size := getattr(loaded, name)) > 1:
                    raise ParameterError(
                        f"the model was loaded with DistributedConfig({name}={size}), and ShardedTrainer takes tp_size "
                        "alone, over all ranks. With fewer tensor-parallel ranks load it whole, give TrainingArguments "
                        "parallelism_config=ParallelismConfig(dp_shard_size=..., tp_size=...), and cut the model by "
                        "torch's parallelize_module over parallelism_config.get_device_mesh(...)['tp']"
                    )
        if self._units is not None and not sharded_model_of(self.model.parameters()):
            shard_module(self.model, self._units, mesh=data_parallel_mesh(self.accelerator))

    def _agree_on_buffers(self) -> None:
        if self._sync_buffers is not None:
            sync_buffers(self.model, self._sync_buffers)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        adopt(self.accelerator)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None and self._made is not None:  # Trainer has dropped it, for another training
            self._made.close()
            self._made = None
        self._shard()  # with model_init, each training has a model of its own
        if self.optimizer is not None:
            return self.optimizer
        given = self.optimizer_cls_and_kwargs
        if not given:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            if kind not in _SHARDED:
                raise ValueError(
                    f"ShardedTrainer makes a ShardedAdamW, or a ShardedSGD, and TrainingArguments ask for "
                    f"optim={self.args.optim.value!r}: leave optim out, or give optimizer_cls_and_kwargs"
                )
            options.pop("fused", None)
            if is_cut(self.model):  # Trainer splits its groups by mesh, for torch's optimizers. These fit any mesh.
                decaying = self.get_decay_parameter_names(self.model)
                trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
                options["params"] = [
                    {"params": [p for name, p in trained if (name in decaying) == decays], "weight_decay": decay}
                    for decays, decay in ((True, self.args.weight_decay), (False, 0.0))
                ]
            mesh = None if sharded_model_of(self.model.parameters()) else data_parallel_mesh(self.accelerator)
            options |= {"stage": self._stage, "mesh": mesh, **self._of_state}
            self.optimizer_cls_and_kwargs = _SHARDED[kind], options
        try:
            optimizer = super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given  # the next training may have other TrainingArguments
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.attach(self.model)  # Trainer's groups have no names
            self._made = optimizer
        return optimizer

    def _update_auto_batch_size(self, batch_size: int) -> None:
        super()._update_auto_batch_size(batch_size)
        for _ in range(2 if self.optimizer is not None else 0):  # the second compares where the ranks ran out of memory
            plain_optimizer(self.optimizer).zero_grad()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not in_place(model, device):
            super()._move_model_to_device(model, device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Do nothing: the optimizer has broadcast parameters, and averages gradients. Trainer would average again."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        return grad_norm  # None with max_grad_norm=0, where Trainer would ask for a norm to log

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        self._agree_on_buffers()
        with showing_averages([] if self.optimizer is None else [self.optimizer]):
            return super().evaluation_loop(*args, **options)

    # -- saving and loading --------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Collective. Gather before Trainer's own method: some of its releases call ``_save`` only on writing ranks."""
        self._agree_on_buffers()
        if is_in_parts(self.model):
            self._whole = whole_state_dict(self.model, on_all=self.args.save_on_each_node)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if is_cut(self.model):  # torch does not load whole tensors into slices
            load_safetensors(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if is_cut(self.model) and self.state.best_model_checkpoint is not None:
            load_safetensors(self.model, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write every rank's part, where Trainer would write rank 0's shards alone."""
        optimizer, step = plain_optimizer(self.optimizer), self.state.global_step
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._save_optimizer_and_scheduler(output_dir)
        folder = os.path.join(output_dir, FOLDER)
        checkpoint.save(folder, self.model, optimizer, scheduler=self.lr_scheduler, step=step, keep_last=1)

    def _load_optimizer_and_scheduler(self, output_dir: str | None) -> None:
        folder = None if output_dir is None else os.path.join(output_dir, FOLDER)
        if folder is None or not os.path.isdir(folder):  # saved by a plain Trainer with AdamW
            return super()._load_optimizer_and_scheduler(output_dir)
        checkpoint.load(folder, self.model, plain_optimizer(self.optimizer), scheduler=self.lr_scheduler)


def sharded(kind: type[Trainer]) -> type[ShardedTrainer]:
    """Make a ``ShardedTrainer`` of a class derived from Trainer: ``ShardedSFTTrainer = sharded(trl.SFTTrainer)``.

    It takes the arguments of both. A method that ``ShardedTrainer`` overrides calls that of ``kind``.

    Raises TypeError for what is not derived from Trainer.
    """
    if not (isinstance(kind, type) and issubclass(kind, Trainer)):
        raise TypeError(f"sharded(kind): {kind!r} is not a class derived from transformers.Trainer")
    if kind is Trainer or issubclass(kind, ShardedTrainer):
        return ShardedTrainer if kind is Trainer else kind
    return type(f"Sharded{kind.__name__}", (ShardedTrainer, kind), {"__doc__": f"A ``{kind.__name__}``, sharded."})


# At stage 3 all ranks generate for as long as any has to.
ShardedSeq2SeqTrainer = sharded(Seq2SeqTrainer)
