"""``ShardedAdamW``: ``torch.optim.AdamW`` for data-parallel training, its state sharded over the ranks."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

# torch.optim.Optimizer's constructor imports it. First imported after init_process_group, it holds the group for ever
# in default arguments, and gloo's threads outlive destroy_process_group (seen: 1 rank in 40 aborts at exit).
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from . import validate
from .checkpoint.state_dict import load_groups, make_state_dict, match_state, saved_order, step_counts
from .comm.collectives import make_comm
from .comm.sharding import Sharding
from .errors import ClosedError, GradientError, ZeroOptimError
from .grads.bucket_plan import buckets_by_size, buckets_of_units
from .grads.reducer import Reducer
from .grads.slots import GradState
from .params.parameter_set import ParameterSet, listed
from .stats import memory_by_kind
from .step.clip import Clip
from .step.exchange import Exchange
from .step.hyper_table import HyperTable
from .step.param_gather import ParamGather
from .step.shard_state import OptimizerState
from .units.hooks import tensors_in
from .units.sharded_model import sharded_model_of


class Watcher(Protocol):
    """What looks on while ``step`` updates the shards."""

    def before_update(self, grad_scale: Tensor | None, found_inf: Tensor) -> None: ...
    def after_update(self, found_inf: Tensor) -> None: ...


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW with fp32 master weights, its state (and gradients) sharded over data-parallel ranks.

    Use it where ``torch.optim.AdamW`` stood; the model is not wrapped. Parameters are fp16, bf16 or fp32, on
    one device. At construction rank 0's parameters are broadcast and become views of flat buckets; hooks
    reduce gradients while backward runs. Without ``torch.distributed`` it is a plain fused optimizer.

    Args:
        params: parameters, ``model.named_parameters()``, or groups, as ``torch.optim.AdamW`` takes them.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``; a group's own values win; read at
            every step.
        stage: what the ranks share: 0 nothing, 1 optimizer state, 2 optimizer state and gradients; 3, parameters too,
            where ``zero_optim.shard_module`` was given the model before. None: 2, or 3 then.
        process_group: the ranks; None: those of the sharded model, else the default group where ``torch.distributed``
            is initialised, else one rank.
        mesh: a 1-D DeviceMesh, instead of ``process_group``.
        bucket_cap_mb: MiB of gradients that one collective carries, at most; never over 1/4 of the parameters
            of one dtype. At stage 3 it carries a unit's.
        grad_reduce_dtype: dtype in which gradients are summed over ranks and accumulated in shards; None:
            their own.
        max_grad_norm: clip every step to this 2-norm, unless ``clip_grad_norm_`` was called for it.
        skip_nonfinite: a step with an inf or NaN gradient on any rank changes nothing on any; False: it goes
            through.
        overlap_grad_reduce: reduce while backward runs, instead of after it.
        overlap_param_gather: gather updated parameters while the next forward runs: after ``opt.attach(model)``, a
            module waits for its own as it is called. Else read them only after ``opt.wait_for_parameters()``. At
            stage 3 nothing is gathered by ``step``.
        decoupled_weight_decay: False makes it ``torch.optim.Adam``, with L2 in the gradient.
        fused, foreach, capturable: accepted for torch's sake; it is always all of them.

    Raises:
        ParameterError: a parameter that it cannot hold, or that another live ``ShardedAdamW`` holds.
        ValueError: an argument out of range.
        RankMismatchError: on every rank, when ranks disagree or one of them failed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        stage: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: dist.DeviceMesh | None = None,
        bucket_cap_mb: float = 25.0,
        grad_reduce_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = True,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        decoupled_weight_decay: bool = True,
    ) -> None:
        self._closed = True  # until the constructor is through
        params = listed(params)
        sharded = sharded_model_of(tensors_in(params))
        group = process_group if process_group is not None or mesh is None else mesh.get_group(mesh.ndim - 1)
        comm = make_comm(sharded[0].process_group() if group is None and sharded else group)
        stage = (3 if sharded else 2) if stage is None else stage
        options = {
            "stage": stage,
            "bucket_cap_mb": bucket_cap_mb,
            "grad_reduce_dtype": grad_reduce_dtype,
            "max_grad_norm": max_grad_norm,
            "skip_nonfinite": skip_nonfinite,
            "overlap_grad_reduce": overlap_grad_reduce,
            "overlap_param_gather": overlap_param_gather,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        meaningless = {"fused": fused, "foreach": foreach, "capturable": capturable}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"maximize": maximize, "amsgrad": amsgrad, "differentiable": differentiable}
        with comm.raising_together("the constructor"):
            validate.check_arguments(process_group, mesh, stage, bucket_cap_mb, grad_reduce_dtype, max_grad_norm)
            validate.warn_of_meaningless(meaningless)
            super().__init__(params, defaults)
            self._parameters = ParameterSet(self.param_groups)
            indices = self._parameters.read_groups()
            validate.check_groups(self.param_groups)
            self._sharded = sharded[0] if sharded else None
            validate.check_sharded(self._parameters, indices, stage, comm)
            validate.check_parameters(self._parameters, indices)
        validate.check_agreement(comm, self._parameters, 0, options)
        comm.separate()

        self.stage, self.max_grad_norm, self.skip_nonfinite = stage, max_grad_norm, skip_nonfinite
        self.device = self._parameters.all[0].device
        self._sharding = Sharding(comm, stage, grad_reduce_dtype, self.device)
        trained = self._parameters.trained
        make_buckets = partial(buckets_by_size, trained, self._parameters.labels, self._sharding, bucket_cap_mb)
        schedule = None
        if self._sharded is not None:
            self._parameters.take_names(self._sharded.model)
            make_buckets = partial(buckets_of_units, self._sharded, trained, self._parameters.labels, self._sharding)
            schedule = self._sharded.schedule
            comm.traffic = self._sharded.sharding.everyone.traffic
        self._reducer = Reducer(
            trained, self._parameters.labels, self._sharding, make_buckets, overlap_grad_reduce, schedule
        )
        self._states = OptimizerState(trained, self._sharding)
        self._exchange = Exchange(self._sharding, self._parameters.labels, trained, by_units=schedule is not None)
        self._clip = Clip(self._sharding, self._parameters.labels)
        self._hyper = HyperTable([], 0, self.device, decoupled=decoupled_weight_decay)
        self._gather = ParamGather(overlap_param_gather and stage < 3)
        self._reducer.on_layout = [self._states.lay_out, self._gather.use]
        # Not a method of ours: parameters hold the reducer by its hooks, and would keep the optimizer alive.
        self._reducer.on_change = [self._clip.discard, self._exchange.outdate]
        self._steps = 0
        self.watchers: list[Watcher] = []  # told of every update; ``zero_optim.verify`` adds one
        self._closed = False
        try:
            self._take_in(indices, self._to_train(indices))
        except BaseException:
            self._close(collective=False)
            raise

    # -- a step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. The host reads nothing from the device; a skipped step is skipped there.

        Raises:
            GradientError: a gradient that cannot be used, or one that came after its bucket had been reduced.
            ClosedError: after ``close()``.
        """
        self._check_usable()
        self._sharding.everyone.check_alone()
        self._parameters.check_groups_unedited()
        self._hyper.check(self.param_groups)
        if self._sharded is not None:
            self._sharded.schedule.check_not_gathered()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._update()
        return result

    @torch.compiler.disable  # traced together with step, it counted no steps (seen)
    def _update(self) -> None:
        self._gather.wait()
        self._adopt_torch_scale()
        self._keep_edits()
        self._states.refresh_edited()
        self._finish_and_exchange(2.0 if self.max_grad_norm is not None else None)
        grad_scale, found_inf = self._coefficients()
        self._apply(grad_scale, found_inf)

    # Phases 1 and 2: complete the reductions; agree on norm, overflow and used parameters.

    def _finish_and_exchange(self, norm_type: float | None) -> None:
        if self._exchange.current:
            self._follow_edits()
        if self._exchange.current and self._exchange.with_stats >= self._wants_stats:
            return
        while True:
            thawed = self._parameters.thawed()
            validate.check_kinds(self._parameters, thawed)
            used = self._reducer.finish()
            self._run_exchange(used, norm_type, thawed)
            if not thawed and not self._reducer.leftover:
                return
            # On all ranks, as the exchange has shown. These gradients come in a round of their own; then once more.
            self._reducer.reduce_leftover()
            if thawed:
                self._take_in(thawed, thawed)

    @property
    def _wants_stats(self) -> bool:
        return self.skip_nonfinite or self._clip.scaled

    def _run_exchange(self, used: bytearray, norm_type: float | None, thawed: Sequence[int]) -> None:
        reducer = self._reducer
        refused = reducer.refused
        about = {"late": reducer.late, "refused": {*refused}, "thawed": {*thawed}, "leftover": {*reducer.leftover}}
        try:
            self._exchange.run(
                reducer.buckets,
                used,
                norm_type,
                stats=self._wants_stats,
                about=about,
                order_code=0 if self._sharded is None else self._sharded.schedule.order_code,
                own=[*refused.values()],
                flags=(reducer.nonfinite, reducer.slot_params),
            )
        except ZeroOptimError:
            self._clip.unclip()
            raise

    def _follow_edits(self) -> None:
        """Gradients dropped or assigned since the exchange count as they are; what was clipped stays so."""
        assigned, dropped = self._reducer.recheck()
        if assigned and self._sharding.reduces:
            raise GradientError(
                "a gradient was assigned after clip_grad_norm_ had reduced them: assign it before, on every rank"
            )
        self._exchange.current = not (assigned or dropped)

    # Phase 3: one device scalar that unscales and clips, and one that says whether to skip.

    def _coefficients(self) -> tuple[Tensor | None, Tensor]:
        if self.max_grad_norm is not None and not self._clip.clipped:
            self._clip.clip_to(self.max_grad_norm, 2.0, self._exchange, self._reducer.buckets)
        self._exchange.decide(self._wants_stats)
        return self._clip.grad_scale(), self._exchange.found_inf

    # Phase 4: update every shard and send it out, in the order in which the next forward wants the parameters.

    def _apply(self, grad_scale: Tensor | None, found_inf: Tensor) -> None:
        self._hyper.advance(self.param_groups, self._exchange.used & (found_inf == 0), self._clip.factor)
        if self._sharded is not None:
            self._sharded.schedule.settle()
        for watcher in self.watchers:
            watcher.before_update(grad_scale, found_inf)
        for shard in reversed(self._states.shards):
            shard.update(self._hyper.table, grad_scale, found_inf, self._exchange.nonfinite.marks)
            shard.bucket.unshard()
        self._gather.after_step()
        for watcher in self.watchers:
            watcher.after_update(found_inf)
        self._states.mark_updated()
        self._exchange.skipped += found_inf.reshape(())
        self._steps += 1
        self._reducer.end_step()
        if self._sharded is not None:
            self._sharded.schedule.end_step()
        self._forget_coefficients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient; ``set_to_none=False`` makes it zero instead, which counts as a gradient in ``step``."""
        self._check_usable()
        self._reducer.clear(set_to_none)
        for parameter in self._parameters.untrained():
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.detach().zero_()
        self._forget_coefficients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within it add up on each rank, communicating nothing; the next outside, or ``step``, reduces."""
        self._check_usable()
        with self._reducer.no_sync():
            yield

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Tensor | Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip the gradients of the next step to ``max_norm``. No pass over memory: ``step`` multiplies as it loads.

        Returns the norm of the averaged gradients before clipping, a device tensor [] fp32, the same on every rank;
        still times the loss scale unless ``scaler.unscale_(opt)`` was called, as in torch. What was clipped before, by
        another call for this step, counts as clipped. A backward after it, or a
        ``no_sync`` block, discards it, with a warning.

        Args:
            norm_type: any p > 0, or inf.
            parameters: clip these alone, by their own norm; the same on every rank. None: all.

        Raises:
            ParameterError: one of ``parameters`` is not this optimizer's.
        """
        self._check_usable()
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
        subset = None if parameters is None else self._parameters.indices_of(parameters)
        self._finish_and_exchange(float(norm_type) if subset is None else None)
        return self._clip.clip_to(max_norm, float(norm_type), self._exchange, self._reducer.buckets, subset)

    # -- loss scaling --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def unscale_gradients(self, inverse_scale: Tensor) -> None:
        """For ``GradScaler.unscale_``: divide gradients where ``.grad`` shows them, a dtype at a time; else note it."""
        self._check_usable()
        self._clip.scaled = True
        if self._parameters.thawed():
            self._finish_and_exchange(None)  # takes them in
        if not self._reducer.make_readable():
            self._clip.inverse_scale = inverse_scale
            return
        self._exchange.current = False
        present = [bucket.grad_buffer for bucket in self._reducer.buckets if bucket.state is not GradState.EMPTY]
        for dtype in {buffer.dtype for buffer in present}:
            torch._amp_foreach_non_finite_check_and_unscale_(
                [buffer for buffer in present if buffer.dtype == dtype], self._exchange.found_inf, inverse_scale
            )

    def step_scaled(self, inverse_scale: Tensor | None) -> Any:
        """For ``GradScaler.step``: step on gradients times ``inverse_scale`` [1]; None: they were unscaled before."""
        self._clip.scaled = True
        if inverse_scale is not None:
            self._clip.inverse_scale = inverse_scale
        return self.step()

    @torch.no_grad()
    def found_inf_without_step(self) -> Tensor:
        """For ``GradScaler.update`` after ``unscale_`` alone: [1] fp32, not 0 where a gradient is not finite."""
        self._finish_and_exchange(None)
        return self._exchange.overflowed()

    def found_inf_of_step(self) -> Tensor:
        """For ``GradScaler.update``: [1] fp32, not 0 where the last step was skipped."""
        return self._exchange.found_inf.clone()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``torch.amp.GradScaler`` asks this, and then sets ``grad_scale`` and ``found_inf`` around ``step``.

        Lightning asks too, to leave out ``unscale_``: told no, it clips gradients that are unscaled.
        """
        if sys._getframe(1).f_globals.get("__name__") != TorchGradScaler.__module__:
            return False
        if self._sharding.reduces:
            raise ZeroOptimError(
                "torch.amp.GradScaler does not share overflows over ranks: use zero_optim.GradScaler(), same interface"
            )
        return True

    def _adopt_torch_scale(self) -> None:
        if getattr(self, "found_inf", None) is not None:
            self._clip.scaled = True
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            self._clip.inverse_scale = scale.double().reciprocal().float().reshape(1)

    def _forget_coefficients(self) -> None:
        self._clip.reset()
        self._exchange.current = False

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Empty: ``state_dict()`` has what there is. An empty dict assigned to it begins anew, as in torch."""
        return self._empty_state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        if value:
            raise ZeroOptimError("state cannot be assigned: load_state_dict() takes one over; an empty dict restarts")
        self._empty_state = value
        if hasattr(self, "_states"):  # else torch's constructor assigns it
            self._states.restart(set(self._parameters.trained))
            self._hyper.steps.zero_()

    # -- the user's edits and names ------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Take over parameters edited in a way that version counters cannot show, such as through ``p.data``."""
        self._check_usable()
        self._gather.wait()
        self._keep_edits(unseen=True)
        self._states.refresh_masters(set(self._parameters.trained))

    def _keep_edits(self, *, unseen: bool = False) -> None:
        """At stage 3, before masters are made from shards: what was written into parameters that are whole now."""
        for unit in self._sharded.units if self._sharded is not None else ():
            unit.keep_edits(unseen=unseen)

    def wait_for_parameters(self) -> None:
        """Order what follows after the updates of the last ``step``. Needed with ``overlap_param_gather=True`` alone,
        before parameters are read or written in another way than by calling their modules."""
        self._check_usable()
        self._gather.wait()

    def attach(self, model: nn.Module) -> None:
        """Make the model known: names in messages and state dicts are those of ``model.named_parameters()``, and with
        ``overlap_param_gather=True`` its modules wait for their parameters as they are called.

        Raises ParameterError where the model lacks a parameter of this optimizer.
        """
        self._check_usable()
        self._parameters.take_names(model)
        for bucket in self._reducer.buckets:
            bucket.relabel()
        if self._gather.overlap:
            self._gather.attach(model, {id(parameter): i for i, parameter in enumerate(self._parameters.all)})

    def observe(self) -> None:
        """Count anew, in the next backward, how often each gradient becomes ready; call it on every rank."""
        self._check_usable()
        self._reducer.observe()
        if self._sharded is not None:
            self._sharded.schedule.record()

    # -- the parameters ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as ``torch.optim.Optimizer.add_param_group`` does. Collective; rank 0's values are broadcast.

        Raises what the constructor raises; then nothing was added.
        """
        if not hasattr(self, "_parameters"):  # called by the constructor
            super().add_param_group(param_group)
            return
        self._check_usable()
        self.settle()
        before, comm = len(self.param_groups), self._sharding.everyone
        try:
            with comm.raising_together("add_param_group"):
                super().add_param_group(self._parameters.with_names(param_group))
                indices = self._parameters.read_groups()
                validate.check_groups(self.param_groups[before:], before)
                validate.check_sharded(self._parameters, indices, self.stage, comm)
                validate.check_parameters(self._parameters, indices)
            validate.check_agreement(comm, self._parameters, before, {})
        except BaseException:
            del self.param_groups[before:]
            self._parameters.read_groups()
            raise
        self._take_in(indices, self._to_train(indices))

    def settle(self) -> None:
        """What a backward or ``step`` has left under way is over afterwards. What communicates outside of both begins
        with it: another rank may wait for what a backward that raised here owes it. Nothing where this was closed."""
        if self._closed:
            return
        self._reducer.settle_rounds()
        self._gather.wait()
        if self._sharded is not None:
            self._sharded.schedule.settle()
        self._exchange.check_alarms()

    def _to_train(self, indices: Sequence[int]) -> list[int]:
        """Those that require a gradient, and those whose bucket has others that do."""
        wanted = self._parameters.requiring_grad(indices)
        if self._sharded is None:
            return wanted
        beside = {id(p) for flat in self._sharded.trained_flats() for p in flat.params}
        return [index for index in indices if index in wanted or id(self._parameters.all[index]) in beside]

    def _take_in(self, indices: Sequence[int], trained: Sequence[int]) -> None:
        """Collective. Give these parameters what they lack: rank 0's values, and those that are ``trained`` a place."""
        for index in indices if self._sharded is None else ():
            self._sharding.everyone.broadcast(self._parameters.all[index].data)
        self._parameters.claim(indices)
        self._parameters.train(trained)
        self._exchange.resize()
        self._clip.resize()
        self._hyper.grow(self._parameters.group_of, len(self.param_groups))
        if trained:
            self._states.grow(self._reducer.grow(trained))
            self._gather.use(self._reducer.buckets)

    # -- state and statistics ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {name or index: {master, exp_avg, exp_avg_sq, step}}, "param_groups": [...]}``.

        Tensors are views of the live state in the parameter's shape: plain where this rank holds all of it,
        else ``FlatShard``. fp32 parameters have no master. Keys stand in the order of the buckets, which
        loading restores. Hooks are called as torch calls them.
        """
        self._check_usable()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._keep_edits()
        state = make_state_dict(self.param_groups, self._states.export(), self._hyper.steps.float())
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave on the same rank of as many ranks; or full tensors, on every rank, such as
        ``torch.optim.AdamW`` saves. Parameters stay. Hooks are called as torch calls them.

        Parameters that it does not hold start afresh. Masters that it does not hold come from the parameters, and so do
        those that do not round to them at the next step. Gradients may be dropped. Raises StateMismatchError before any
        state is changed, naming what does not fit; on every rank.
        """
        self._check_usable()
        self.settle()
        comm = self._sharding.everyone
        saved: dict[int, Mapping[str, Any]] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        with comm.raising_together("load_state_dict"):
            state_dict = self._prepare_load(state_dict)
            saved = match_state(state_dict, self._parameters, decoupled=self._hyper.decoupled)
        self._reducer.restore_order(comm.gather_objects(saved_order(saved), "load_state_dict")[0])
        with comm.raising_together("load_state_dict"):
            copies = self._states.plan_load(saved, self._parameters.labels)
        self._states.load(copies)
        self._states.restart(set(self._parameters.trained) - set(saved))
        self._hyper.steps.copy_(step_counts(saved, len(self._hyper.steps)))
        load_groups(self.param_groups, state_dict["param_groups"])
        self._exchange.current = False  # gradients may have been dropped
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _prepare_load(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the hooks make of a shallow copy."""
        state: Any = copy.copy(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def stats(self) -> dict[str, Any]:
        """Counts since construction and bytes now, on this rank. It reads device values: not for the inside of a step.

        Keys: ``stage, world_size, buckets, steps`` (calls of ``step``), ``skipped_steps``, ``collectives`` ({kind:
        {calls, bytes, wait_seconds}}), ``memory`` ({kind: bytes}), ``non_finite`` (None, or {parameter, rank, step} of
        the first non-finite gradient in the latest run of steps that had one, ``step`` counted from 1; parameter and
        rank are None until the next step where the overflow arose in the sum, in another rank's shard).
        """
        self._check_usable()
        return {
            "stage": self.stage,
            "world_size": self._sharding.everyone.world_size,
            "buckets": len(self._reducer.buckets),
            "steps": self._steps,
            "skipped_steps": int(self._exchange.skipped),
            "collectives": self._sharding.everyone.stats(),
            "memory": memory_by_kind(self._states.shards, self._reducer.buffers, self._sharded),
            "non_finite": self.first_non_finite(),
        }

    def first_non_finite(self) -> dict[str, Any] | None:
        """``stats()["non_finite"]``, by itself."""
        first = self._exchange.nonfinite.first()
        if first is None:
            return None
        index, rank, step = first
        return {"parameter": None if index is None else self._parameters.name(index), "rank": rank, "step": step}

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the hooks and drop the gradients. Parameters keep their values.

        What a backward that raised has begun to reduce is completed, for the ranks on which it did not.
        """
        self._close(collective=True)

    def _close(self, *, collective: bool) -> None:
        # Its own, not getattr: a wrapper that passes reads on, as Lightning's, dies before the optimizer (seen: its
        # __del__ removed the hooks, and gradients stayed whole until step).
        if not self.__dict__.get("_closed", True):
            self._closed = True
            self._gather.close()
            self._reducer.close(collective=collective)
            self._parameters.release()
            self._sharding.everyone.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # half of what it would use is gone; the process takes the rest along
            self._close(collective=False)

    def __getstate__(self) -> dict[str, Any]:
        raise ZeroOptimError(
            "a ShardedAdamW cannot be copied or pickled: its parameters have hooks and buckets. Copy its state_dict(), "
            "or zero_optim.full_state_dict(opt), and load it into a new one"
        )

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this optimizer was closed: make a new one")
