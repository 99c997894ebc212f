"""``ShardedOptimizer``: any update rule for data-parallel training, its state sharded over the ranks."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

# torch.optim.Optimizer's constructor imports it. First imported after init_process_group, it holds the group for ever
# in default arguments, and gloo's threads outlive destroy_process_group (seen: 1 rank in 40 aborts at exit).
import torch._dynamo
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from . import validate
from .admission import Admission, Experts, check_order
from .callers import DCP_STATE_DICT, called_from, called_within, local_of_caller
from .checkpoint import rank_state
from .comm.collectives import Comm, make_comm
from .comm.sharding import make_expert_shardings, make_sharding
from .comm.topology import RowRanks, Topology, group_of, read_row, read_rows, read_topology, split_off
from .engine import Engine, open_engines
from .errors import ClosedError, ZeroOptimError
from .memory.live import explaining_out_of_memory
from .params.param_shard import plain_parameter
from .params.parameter_set import (
    ParameterSet,
    Shardings,
    check_listed,
    gc_paused,
    is_model,
    listed,
    model_behind,
    tensors_of,
)
from .params.tensor_slice import mesh_of
from .rules.group_rules import RULE, GroupRules
from .rules.options import EMA_DECAY
from .rules.update_rule import UpdateRule, exported_for
from .settings import Settings, ShardingOptions, check_keywords, shows_options
from .stats import stats_of
from .step.clip import EXCHANGED_NORMS
from .step.pipeline import comm_of_pipeline, make_pipeline
from .step.saved_state import call_load_hooks
from .step.telemetry import Telemetry
from .stores.host_threads import own_cores, threads_of, warn_of_one_thread
from .stores.offload import Tier
from .stores.paged_store import make_store
from .units.sharded_model import ShardedModel, sharded_model_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _of_engine(name: str, about: str) -> Any:
    """Make a property that the engine has by the same name: users may set it between steps."""
    return property(
        lambda opt: getattr(opt.engine, name), lambda opt, value: setattr(opt.engine, name, value), doc=about
    )


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer with fp32 master weights, its state (and gradients) sharded over data-parallel ranks.

    Use it where one of torch's stood; the model is not wrapped. Parameters are fp16, bf16 or fp32, on one device. At
    construction rank 0's parameters are broadcast and become views of flat buckets; hooks reduce gradients while
    backward runs. Without ``torch.distributed`` it is a plain fused optimizer. ``ShardedAdamW``, ``ShardedAdam``,
    ``ShardedLion``, ``ShardedSGD`` and ``ShardedMuon`` are this with a rule and its arguments.

    Args:
        params: the model, which is then attached (see ``attach``); or parameters, ``model.named_parameters()``, or
            groups, as torch's optimizers take them. A group may bring its own rule, as ``{"params": others, "rule":
            rules.AdamW(lr=3e-4)}``, and then has that rule's options. A group of experts names the ranks that hold the
            same experts by ``mesh`` or ``process_group``, which at stage 3 the model has, and what the sum of their
            gradients is divided by as ``grad_divisor``, an int or a group.
        rule: the update rule with its default options, such as ``rules.Lion(lr=1e-4)``, for all groups that bring none.
            A group's own options win; they are read at every step.
        stage: what is sharded: 0 nothing, 1 optimizer state, 2 optimizer state and gradients; 3, parameters too,
            where ``zero_optim.shard_module`` was given the model before. None: 2, or 3 then.
        process_group: the ranks; None: those of the sharded model, else the default group where ``torch.distributed``
            is initialised, else one rank.
        mesh: a DeviceMesh, instead of ``process_group``. With two dimensions, ("replicate", "shard"), ranks replicate
            along the first and shard along the second. Of tensor-parallel ``DTensor``s give the mesh of the
            data-parallel ranks alone, as ``mesh["dp"]``.
        state_over: "all": with a mesh of two dimensions, shard state, and from stage 2 on gradients, over all of its
            ranks (HFSDP). "shard": along the second alone. At stage 3 give it to ``shard_module``, whose model has it.
        tensor_parallel: for a model of plain slices, as Megatron's: the ranks that hold the other slices, as
            ``world_mesh["tp"]``, or a process group. A parameter's ``tensor_model_parallel`` and ``sequence_parallel``
            mark what it is. With a group of one rank nothing is cut. DTensors need no such group.
        pipeline: for a model that is cut into stages: the ranks that hold them, as ``world_mesh["pp"]``, or a process
            group. The gradient norm is then that of all stages, and a non-finite gradient on one stage skips the step
            of all. Their optimizers make the same calls, with the same ``max_grad_norm`` and ``skip_nonfinite``.
        bucket_cap_mb: MiB of gradients in one collective; it may have 5/4 of this, or one larger parameter. At most
            1/4 of the parameters of one dtype. None: 100 on a GPU, 25 on a CPU, or 16,384 elements a rank where that is
            more. At stage 3 a collective carries a unit's gradients.
        grad_reduce_dtype: dtype in which gradients are summed over ranks and accumulated in shards; None: their own.
        grad_accumulation_dtype: torch.float32: accumulate gradients in fp32, in ``.grad`` and in shards, whatever dtype
            is sent. None: in ``.grad`` in the parameter's dtype, in shards in the dtype that is sent.
        max_grad_norm: clip every step to this 2-norm, unless ``clip_grad_norm_`` was called for it.
        skip_nonfinite: a step with an inf or NaN gradient on any rank changes nothing on any; False: it goes through.
        overlap_grad_reduce: reduce while backward runs, instead of after it.
        overlap_param_gather: gather updated parameters while the next forward runs, below stage 3, if the model is
            attached: each module waits for its own. At stage 3 ``step`` starts to gather the root and the first unit.
            False: ``step`` waits for all, and starts none.
        state_offload: where the state lives. None: on the device. "paged": in host memory, copied to the device around
            its update. "cpu": in host memory, and updated there. "nvme:DIR": in a file in that folder, read and written
            around the update. All give the same bits.
        device_budget: with "paged", how much of the state stays on the device, in bytes or as a size such as "8GB".
            "auto" or None: as much as is free after the second step.
        ema_decay: keep an exponential average of the fp32 master: this fraction of it stays in each update, as 0.999.
            The average is one more state tensor, and begins with the result of the first update. A sequence: one
            average for each. A group's own values win. See ``ema_state_dict`` and ``swap_to_ema``. None: no average.
        master: "fp32": 16-bit parameters have an fp32 master beside them. "split": a bf16 parameter is the upper half
            of its master, and the other 16 bits are stored beside it. "split8": 8 bits, for a master of 24. None:
            "split", or "fp32" where a parameter is fp16. See ``docs/state.md``.
        state_dtype: "fp32", "bf16", rounded stochastically, or "int8": for state other than masters and averages.
        telemetry_every: measure every k-th step for ``telemetry()``. None: no step.
        check_replicas_every: compare trained parameters, bit for bit, over ranks that should hold the same, in every
            k-th step: where they differ it updates nothing, and all raise RankMismatchError. None: in no step.

    Raises:
        ParameterError: a parameter that it cannot hold, or that another live optimizer of ``zero_optim`` holds.
        ValueError: an argument out of range.
        RankMismatchError: on every rank, when ranks disagree or one of them failed.
        OutOfMemoryError: the memory is not there; here, or in the first ``step``.
        OffloadError: host memory, the folder or its disk do not hold the state.
    """

    @shows_options
    @torch.inference_mode(False)  # tensors made here are written in every step
    @gc_paused()
    def __init__(self, params: nn.Module | Iterable[Any], rule: UpdateRule, **options: Unpack[ShardingOptions]) -> None:
        self._closed = True  # until the constructor is through
        check_keywords(type(self), ShardedOptimizer, options)
        named_by = model_behind(params)
        given, expert_groups = split_off(listed(params))
        model = next(iter(sharded_model_of(tensors_of(given))), None)
        settings = Settings.of(options, default_stage=2 if model is None else 3)
        ranks = _find_ranks(given, expert_groups, model, options)
        where = "the constructor"
        with ranks.stages.raising_together(where), ranks.world.raising_together(where):
            # What is wrong on this rank alone, for all ranks to raise.
            mesh, topology = options.get("mesh"), ranks.topology
            validate.check_rule(rule)
            validate.check_group(options.get("process_group"), mesh)
            settings.check()
            check_listed(given)
            over_all = settings.state_over == "all"
            if model is None:
                topology = replace(topology, over_all=over_all)
            elif over_all and not topology.over_all:
                raise ValueError('state_over="all": give it to shard_module, whose model the optimizer takes it from')
            if model is None or mesh is not None:  # else the topology of the sharded model has its rows
                rows = read_rows(mesh, shards=settings.stage != 0, over_all=over_all and model is None)
                topology = replace(topology, rows=rows)
            self._rule = rule
            self._shared_defaults = {} if settings.ema_decay is None else {EMA_DECAY: settings.ema_decay}
            self._rules_of_groups: list[UpdateRule] = []  # ``add_param_group`` adds them, which torch calls
            super().__init__(given, {**rule.defaults, **self._shared_defaults})
            parameters = ParameterSet(self.param_groups, named_by)
            indices = parameters.read_groups()
            plain_slices = len(topology.slices) if topology.plain else 1
            rules = GroupRules(parameters, partial(settings.applied_to, plain_slices=plain_slices))
            rules.take(self._rules_of_groups)
            stages = ranks.stages.world_size
            admission = Admission(ranks.world, topology, settings.stage, stages, rules, where, settings.state_offload)
            experts = admission.check(parameters, expert_groups, ranks.tp_row)
        experts = admission.agree(parameters, experts, settings.described())
        self.engine = _make_engine(settings, parameters, model, admission, experts, ranks.stages)
        self._closed = False
        self.engine.optimizer = weakref.ref(self)
        try:
            if model is None:  # else shard_module has compared the names
                check_order(parameters, self.engine.shardings, indices, where)
            with explaining_out_of_memory(self, "as the optimizer was made"):
                self.engine.grow(indices, self.engine.to_train(indices))
            if is_model(params):
                self.attach(params)
        except BaseException:
            _close(self, collective=False)
            raise

    @property
    def stage(self) -> int:
        """The stage, as given: what is sharded."""
        return self.engine.sharding.stage

    @property
    def device(self) -> torch.device:
        """The device of parameters and gradients, and of state unless it is offloaded."""
        return self.engine.sharding.device

    max_grad_norm: float | None = _of_engine("max_grad_norm", "The norm to clip to, as given; read at every step.")
    skip_nonfinite: bool = _of_engine("skip_nonfinite", "True if non-finite gradients skip a step; read at every step.")

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. The host reads nothing from the device, unless state or parameters are off it: a step
        is skipped on the device, too.

        Raises:
            GradientError: a gradient that cannot be used, or one that came after its bucket had been reduced.
            OffloadError: a rank lost state off the device to an I/O error; on every rank, in every step from then on.
            ClosedError: after ``close()``.
        """
        with torch.inference_mode(False), torch.no_grad():  # tensors made here are written in every step
            self.check_usable()
            result = None
            with self.engine.failing_with_stages():
                self.engine.check_step(self.param_groups)
            if closure is not None:  # where it raises, other stages may wait for its activations, not in ``step``
                self.engine.reducer.complete_before_closure()
                with torch.enable_grad():
                    result = closure()
            if getattr(self, "found_inf", None) is not None:  # torch's GradScaler sets both around this call
                self.engine.clip.scaled = True
            scale: Tensor | None = getattr(self, "grad_scale", None)
            if scale is not None:
                self.engine.clip.inverse_scale = scale.double().reciprocal().float().reshape(1)
            with explaining_out_of_memory(self, "in the first step"):
                self.engine.step(self.param_groups)
            return result

    @torch.inference_mode(False)
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient; ``set_to_none=False`` makes it zero instead, which counts as a gradient in ``step``.

        Collective where it is the second call since the last ``step``: a backward may have raised here before its first
        gradient, while others wait for its round. The ranks then compare how many rounds they have launched.
        """
        self.check_usable()
        with torch._C.DisableTorchFunctionSubclass():  # 10 µs less for each parameter whose gather is in flight
            self.engine.reducer.clear(set_to_none)
        for parameter in self.engine.parameters.frozen.values():
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.detach().zero_()
        self.engine.forget_coefficients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in ``.grad``, without communication. The next backward outside of it, or ``step``,
        reduces."""
        self.check_usable()
        with self.engine.reducer.no_sync():
            yield

    @torch.inference_mode(False)
    @torch.no_grad()
    def count(self, tokens: float | Tensor) -> None:
        """Count the tokens of a micro-batch: the next step averages gradients over the tokens of all ranks and
        micro-batches, instead of over ranks. Losses are sums over tokens: ``loss.sum().backward(); opt.count(n)``.

        Counts are summed in the exchange of ``step``, and their total divides in the update, so that norms, clipping
        and telemetry are of that average. Call it for every micro-batch, on every rank: 0 where one has no tokens;
        ranks along ``tensor_parallel`` count the same tokens; of a pipeline the last stage alone counts. Where no
        rank has a token the step is skipped. ``step`` and ``zero_grad`` forget all counts. See docs/averaging.md.

        Args:
            tokens: a number of 0 or more; or a tensor of one element, which the host does not read.

        Raises:
            TypeError, ValueError: ``tokens`` is no such number.
            GradientError: after ``clip_grad_norm_`` or ``unscale_``; in ``step``, a backward was not counted.
            RankMismatchError: in ``step``, a rank has not counted.
        """
        self.check_usable()
        self.engine.count(tokens)

    @torch.inference_mode(False)
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float | str = 2.0, parameters: Tensor | Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip the gradients of the next step to ``max_norm``. No pass over memory: ``step`` multiplies as it loads,
        and the gradients themselves are not written.

        Returns the norm of the averaged gradients before clipping, a device tensor [] fp32, the same on every rank;
        still times the loss scale unless ``scaler.unscale_(opt)`` was called, as in torch. A second call for the same
        step sees gradients as the first has clipped them. A backward or a ``no_sync`` block after it discards the
        clipping, with a warning.

        Args:
            max_norm: not negative.
            norm_type: any p > 0, or "inf".
            parameters: clip these alone, by their own norm; the same on every rank. None: all.

        Raises:
            ParameterError: one of ``parameters`` is not this optimizer's.
            TypeError: ``max_norm`` is no number, as where parameters come first.
            ValueError: ``max_norm`` is negative, or ``norm_type`` is not positive.
        """
        self.check_usable()
        engine = self.engine
        with engine.failing_with_stages():
            norm = validate.read_clip_arguments(max_norm, norm_type)
            subset = None if parameters is None else engine.parameters.indices_of(parameters)
        engine.finish_and_exchange(norm if subset is None and norm in EXCHANGED_NORMS else None)
        return engine.clip.clip_to(max_norm, norm, engine.exchange, engine.reducer.buckets, subset)

    # -- loss scaling --------------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True for ``torch.amp.GradScaler``, which then sets ``grad_scale`` and ``found_inf`` around ``step``."""
        if not called_from(TorchGradScaler.__module__):
            return False  # Lightning would leave out ``unscale_``, and has to clip unscaled gradients
        if self.engine.sharding.agrees:
            raise ZeroOptimError(
                "torch.amp.GradScaler sees overflows of its own rank alone: use zero_optim.GradScaler(), same interface"
            )
        return True

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """An empty dict: ``state_dict()`` has the state. Assigning an empty dict is ``reset_state()``."""
        # DCP reads the names of the state here. Where it finds none, it makes a step of zero gradients.
        if called_from(DCP_STATE_DICT):
            kinds = {
                rule: dict.fromkeys([*(tensor.name for tensor in exported_for(rule, torch.bfloat16)), "step"])
                for rule in self.engine.rules.all
            }
            shown = [parameter for group in self.param_groups for parameter in group["params"]]
            trained = self.engine.parameters.trained
            return defaultdict(dict, {shown[index]: kinds[self.engine.rules.of(index)] for index in trained})
        return self._empty_state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        if value:
            raise ZeroOptimError("state cannot be assigned: load_state_dict() takes one over; an empty dict restarts")
        self._empty_state = value
        if hasattr(self, "engine"):  # else torch's constructor assigns it
            self.reset_state()

    @torch.inference_mode(False)  # pages that are fetched are written later
    @torch.no_grad()
    def reset_state(self, keep: str | None = "master", *, keep_ema: bool = True) -> None:
        """Set moments and step counts to zero; gradients stay. It is local, and not checked: call it on every rank
        after the same step, else ranks update parameters differently. Raises ValueError for another ``keep``.

        ``keep``: "master": masters keep the bits that 16-bit parameters lack. None: they are taken from the parameters.
        ``keep_ema``: averages go on. False: they restart at the masters.
        """
        self.check_usable()
        self.engine.mode.check("reset_state")
        if keep not in ("master", None):
            raise ValueError(f"keep must be 'master' or None, got {keep!r}")
        self.engine.reset_state(keep_master=keep is not None, keep_ema=keep_ema)

    # -- the user's edits and names ------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Set fp32 masters to parameters that were edited through ``p.data``, which version counters do not show. Split
        masters need no such call: the parameter is a part of them."""
        self.check_usable()
        self.engine.mode.check("refresh_master")
        self.engine.param_gather.wait()
        self.engine.keep_edits(unseen=True)
        self.engine.states.refresh_masters(set(self.engine.parameters.trained))

    def wait_for_parameters(self) -> None:
        """Order later work after the updates of the last ``step``. With an attached model needed before parameters are
        read or written in ways that do not wait: see docs/step.md."""
        self.check_usable()
        self.engine.param_gather.wait()

    def attach(self, model: nn.Module) -> None:
        """Make the model known: names in messages and state dicts are those of ``model.named_parameters()``. Unless
        ``overlap_param_gather=False``, ``step`` leaves gathers in flight, and modules wait for their parameters as they
        are called.

        Raises ParameterError where the model lacks a parameter of this optimizer.
        """
        self.check_usable()
        parameters, gather = self.engine.parameters, self.engine.param_gather
        parameters.take_names(model)
        for bucket in self.engine.reducer.buckets:
            bucket.shown.relabel()
        if gather.overlap:
            gather.attach(model, {id(parameter): index for index, parameter in enumerate(parameters.all)})

    def observe(self) -> None:
        """Collective. Record again, in the next backward, how often gradients become ready, and the order of units."""
        self.check_usable()
        self.engine.reducer.observe()
        if self.engine.sharded_model is not None:
            self.engine.sharded_model.schedule.orders.record()

    # -- averages ------------------------------------------------------------------------------------------------

    def ema_state_dict(self, which: int = 0, rank: int | None = 0) -> dict[str | int, Tensor]:
        """Collective. Return the average of every trained parameter by its name: whole, fp32, in host memory.

        Parameters given without names, as by ``parameters()``, are keyed by their number over all groups.

        Args:
            which: the number of the average, where ``ema_decay`` has several.
            rank: the rank, in the optimizer's group, that gets it; the others get an empty dict. None: all. With plain
                slices each tensor-parallel rank has averages of its own, and ``rank`` is a data-parallel rank.

        Raises ValueError where there is no such average, or no such rank; ParameterError for experts that are plain
        tensors.
        """
        self.check_usable()
        rank_state.average_name(self.engine, which)
        self.settle()
        return rank_state.ema_state_dict(self.engine, self.param_groups, which, rank)

    @contextmanager
    def swap_to_ema(self, which: int = 0) -> Iterator[None]:
        """Collective. Put the average in place of the parameters, for evaluation: ``with opt.swap_to_ema():``.

        Afterwards parameters are what they were, bit for bit: edits within the block are lost. ``step`` raises within.
        It takes memory for a copy of this rank's shard of the parameters. Raises ValueError as ``ema_state_dict``.
        """
        self.check_usable()
        rank_state.average_name(self.engine, which)
        self.settle()
        with rank_state.ema_swapped(self.engine, which):
            yield

    # -- sleep -----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # pages that are fetched are written later
    @torch.no_grad()
    def sleep(self, parameters: bool = False) -> None:
        """Collective. Free the device's memory of state, gradients and communication until ``wake()``.

        Every flat buffer is copied once, into pinned host memory that is kept for the next sleep. What
        ``state_offload`` has off the device stays where it is. Gradients have to be applied, and are dropped. Until
        ``wake``, all that trains, reads or saves raises ZeroOptimError; ``stats()`` and ``close()`` go on.

        Args:
            parameters: let the parameters go as well. They read as NaN and refuse writes until ``wake``; a forward
                raises ZeroOptimError. Frozen parameters go at stage 3 alone.

        Raises, on every rank and with all awake as before:
            GradientError: there are gradients that no step has applied.
            OffloadError: host memory does not hold it.
            ParameterError: a parameter was moved since the optimizer was made.
            RankMismatchError: another rank has failed, or was given another argument.
        """
        self.check_usable()
        self.engine.mode.check("sleep")
        self.engine.settle()
        self.engine.asleep.check(parameters=parameters)
        self.zero_grad()
        self.engine.asleep.sleep(parameters=parameters)

    @torch.inference_mode(False)
    @torch.no_grad()
    def wake(self) -> None:
        """Collective. Bring back what ``sleep`` has taken off the device, bit for bit. Awake, it does nothing.

        Parameters are the same objects, in the same flat buffers, which may have new addresses: capture CUDA graphs
        again.

        Raises, on every rank and with all asleep as before:
            OutOfMemoryError: the device has not the memory now.
            RankMismatchError: another rank has failed.
        """
        self.check_usable(asleep=True)
        self.engine.asleep.wake()

    # -- the parameters ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as ``torch.optim.Optimizer.add_param_group`` does. Collective; rank 0's values are broadcast.

        The group may bring a ``rule`` of its own. Raises what the constructor raises; then nothing was added.
        """
        if not hasattr(self, "engine"):  # called by the constructor
            self._rules_of_groups.append(_add_group(self, param_group))
            return
        self.check_usable()
        self.settle()
        before, engine = len(self.param_groups), self.engine
        parameters, sharding, rules = engine.parameters, engine.sharding, engine.rules
        where = "add_param_group"
        stages = 1 if engine.pipeline is None else engine.pipeline.comm.world_size
        admission = Admission(
            sharding.world, sharding.topology, self.stage, stages, rules, where, engine.settings.state_offload, before
        )
        (param_group,), of_group = split_off([param_group])
        expert_groups = dict(zip([before], of_group.values(), strict=False))
        try:
            with sharding.world.raising_together(where):
                check_listed([param_group], before)
                rule = _add_group(self, parameters.with_names(param_group))
                indices = parameters.read_groups()
                rules.take([rule])
                experts = admission.check(parameters, expert_groups)
            experts = admission.agree(parameters, experts, {})
            engine.shardings.of_groups.update(make_expert_shardings(sharding, experts))
            if engine.sharded_model is None:
                check_order(parameters, engine.shardings, indices, where)
        except BaseException:
            engine.shardings.of_groups.pop(before, None)
            del self.param_groups[before:]
            parameters.read_groups()
            rules.forget(before)
            raise
        engine.grow(indices, engine.to_train(indices))

    def settle(self) -> None:
        """Collective. Complete what a backward or ``step`` has left in flight. No effect after ``close``."""
        # Everything else that communicates calls it first: a backward that raised here may still owe another rank a
        # reduction, which that rank waits for.
        if not self._closed:
            self.engine.mode.check("what reads or writes parameters and state on all ranks")
            self.engine.settle()

    # -- state and statistics ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {name or index: {...}}, "param_groups": [...]}``. AdamW has ``master, exp_avg, exp_avg_sq,
        step``.

        Tensors are views of the live state in the parameter's shape: plain where this rank holds all of it,
        else ``FlatShard``; with ``state_offload``, copies in host memory. fp32 parameters have no master. Keys stand in
        the order of the buckets, which loading restores. Hooks are called as torch calls them.
        """
        self.check_usable()
        self.engine.mode.check("state_dict")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        as_torch = called_from(DCP_STATE_DICT)  # it gives parameters their names itself
        info: Any = local_of_caller("info") if as_torch else None
        flattened = getattr(info, "flatten_optimizer_state_dict", False)
        if getattr(info, "full_state_dict", False):
            self.settle()
            state = rank_state.save_whole(self.engine, self.param_groups, on_rank_0=info.cpu_offload)
        elif as_torch and called_within(DCP_STATE_DICT, "_load_optim_state_dict"):
            if flattened:
                raise ZeroOptimError(
                    "set_optimizer_state_dict: torch cannot load a state with full_state_dict and "
                    "flatten_optimizer_state_dict: leave one of the two out, there and where it was saved"
                )
            state = rank_state.to_load_whole(self.engine, self.param_groups)
        else:
            state = rank_state.save(self.engine, self.param_groups, as_torch=as_torch)
        for packed, group in zip(state["param_groups"], self.param_groups, strict=True):
            if flattened and "param_names" in group:  # in a flat dict DCP looks for every option of the live groups
                packed["param_names"] = group["param_names"]
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    @gc_paused()
    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave on the same rank of as many ranks; or, on every rank, full tensors such as
        ``torch.optim.AdamW`` saves. Parameters are left alone. Hooks are called as torch calls them.

        Parameters that are not in the state start afresh. A master that is not in the state, or an fp32 master that
        does not round to its parameter at the next step, is taken from the parameter. Gradients may be dropped. Raises
        StateMismatchError before any state is changed, naming what does not fit; on every rank.
        """
        self.check_usable()
        self.settle()
        with self.engine.sharding.world.raising_together("load_state_dict"):
            state: Any = copy.copy(state_dict)  # shallow, for the hooks to change
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = hook(self, state)
                state = state if changed is None else changed
        rank_state.load(self.engine, self.param_groups, state)
        call_load_hooks(self)

    def stats(self) -> dict[str, Any]:
        """Return counts since construction and bytes now, on this rank. It reads device values: call it between steps.
        Bytes leave out parameters that were frozen from the start, and modules' buffers.

        Keys: ``stage, world_size, buckets, steps`` (calls of ``step``), ``skipped_steps``, ``collectives`` ({kind:
        {calls, bytes, wait_seconds}}), ``process_groups`` ({name: (description, ranks)}, as NCCL's flight recorder
        shows them), ``memory`` ({kind: bytes}), ``non_finite`` (None, or {parameter, rank, step} of
        the first non-finite gradient in the latest run of steps that had one, ``step`` counted from 1; parameter and
        rank are None until the next step where the overflow arose in the sum, in another rank's shard).
        ``state_offload`` has the bytes of state on ``device``, ``host`` and ``disk``, those moved ``to_device``,
        ``to_host``, ``read`` and ``written`` so far. ``sleep`` has the ``mode``, and the bytes of ``host`` memory
        that are kept for sleeping.
        """
        self.check_usable(asleep=True)
        return stats_of(self.engine)

    @torch.no_grad()
    def telemetry(self, over_ranks: bool = False) -> Telemetry:
        """Return numbers of the last measured step by parameter name: see ``ParameterNumbers``. Their ``floats()`` is a
        flat dict for TensorBoard or Weights & Biases.

        The numbers are device tensors, and the host does not wait. If that step was skipped, before the first one and
        after ``wake()`` all numbers are 0, ``updated`` is False, and ``floats()`` is empty.

        Args:
            over_ranks: False: numbers of the elements that this rank updates; parameters without any are left out.
                True: numbers of whole parameters. The call is collective then, and takes one message of 48 bytes for
                each parameter and rank. Experts that are plain tensors keep this rank's numbers.

        Raises ZeroOptimError where the optimizer was made without ``telemetry_every``.
        """
        self.check_usable()
        if self.engine.measured is None:
            raise ZeroOptimError("there is no telemetry: the optimizer was made without telemetry_every")
        if over_ranks:  # a backward that raised here may still owe another rank a reduction, which comes first
            self.engine.reducer.rounds.complete_all_raised()
        return self.engine.measured.read(over_ranks=over_ranks)

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the hooks and drop the gradients. Parameters keep their values.

        If a backward has raised here, its reductions are completed for the ranks on which it did not.
        """
        _close(self, collective=True)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else modules that closing needs may be unloaded already
            _close(self, collective=False)

    def __getstate__(self) -> dict[str, Any]:
        raise ZeroOptimError(
            f"a {type(self).__name__} cannot be copied or pickled: its parameters have hooks and buckets. Copy its "
            "state_dict(), or zero_optim.full_state_dict(opt), and load it into a new one"
        )

    def check_usable(self, *, asleep: bool = False) -> None:
        """Raise ClosedError after ``close()``, ZeroOptimError between ``sleep()`` and ``wake()`` unless ``asleep``."""
        if self._closed:
            raise ClosedError("this optimizer was closed: make a new one")
        if not asleep:
            self.engine.mode.check_awake()


def _add_group(opt: ShardedOptimizer, param_group: Any) -> UpdateRule:
    """Add a group as torch does, with the defaults of its own rule, which is taken out of it. Returns that rule."""
    rule = opt._rule
    if isinstance(param_group, dict) and RULE in param_group:
        param_group = {**param_group}
        rule = param_group.pop(RULE)
        validate.check_rule(rule, f" of parameter group {len(opt.param_groups)}")
    defaults, opt.defaults = opt.defaults, {**rule.defaults, **opt._shared_defaults}
    try:
        torch.optim.Optimizer.add_param_group(opt, param_group)
    finally:
        opt.defaults = defaults
    return rule


def _close(opt: ShardedOptimizer, *, collective: bool) -> None:
    # ``__dict__``, not getattr: a wrapper that passes reads on, as Lightning's, dies before the optimizer (seen:
    # its __del__ removed the hooks, and gradients stayed whole until step).
    if not opt.__dict__.get("_closed", True):
        opt._closed = True
        opt.engine.close(collective=collective)


def optimizers_of(model: nn.Module) -> list[ShardedOptimizer]:
    """List the open optimizers that hold parameters of ``model``, in the order in which they were made."""
    held = {id(plain_parameter(parameter)) for parameter in model.parameters()}
    known = [engine.optimizer() for engine in open_engines()]
    alive = [opt for opt in known if isinstance(opt, ShardedOptimizer) and not opt._closed]
    return [opt for opt in alive if any(id(parameter) in held for parameter in opt.engine.parameters.all)]


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a new optimizer."""

    world: Comm  # the ranks that train one stage of the pipeline together
    stages: Comm  # the same rank of every stage
    topology: Topology  # of ``world``, without the rows of a mesh of two dimensions
    tp_row: RowRanks | None  # the tensor-parallel ranks that ``tensor_parallel`` or a ``DTensor`` names


def _find_ranks(
    params: Any, expert_groups: Container[int], model: ShardedModel | None, options: ShardingOptions
) -> _Ranks:
    """Collective. Find the ranks by the arguments, the tensor-parallel parameters and the sharded model."""
    tensors = dense = tensors_of(params)
    if expert_groups:
        dense = tensors_of([group for number, group in enumerate(params) if number not in expert_groups])
    tensor_parallel = options.get("tensor_parallel")
    tp_row = read_row(tensor_parallel, mesh_of(dense))
    group = group_of(options.get("process_group"), options.get("mesh"))
    if model is None:
        group, topology = read_topology(group, tp_row, explicit_tp=tensor_parallel is not None)
    elif group is None:
        group, topology = model.process_group(), replace(model.sharding.topology, explicit_tp=True)
    else:  # the grid of the sharded model counts even if a group is given
        group, topology = read_topology(group, tp_row, explicit_tp=True)
        topology = replace(topology, rows=model.sharding.topology.rows, over_all=model.sharding.topology.over_all)
    device = next((tensor.device for tensor in tensors), None)
    return _Ranks(make_comm(group, device), comm_of_pipeline(options.get("pipeline"), device), topology, tp_row)


def _make_engine(
    settings: Settings,
    parameters: ParameterSet,
    model: ShardedModel | None,
    admission: Admission,
    experts: Experts,
    stages: Comm,
) -> Engine:
    """Collective. Connect the admitted ranks, and make their engine; its buckets and state come later."""
    comm, device = admission.world, parameters.all[0].device
    comm.separate()
    comm.connect(device)
    if settings.stage == 0:  # its gradients and the exchange of ``step`` are both summed by an all-reduce
        comm.take_channels(["all_reduce"], device, "the constructor")
    if model is not None:
        parameters.take_names(model.model)
        comm.traffic = model.sharding.world.traffic
    sharding = make_sharding(
        comm,
        settings.stage,
        device,
        admission.topology,
        grad_reduce_dtype=settings.grad_reduce_dtype,
        grad_accumulation_dtype=settings.grad_accumulation_dtype,
        pipeline_stages=stages.world_size,
    )
    shardings = Shardings(parameters, sharding, make_expert_shardings(sharding, experts))
    offload, threads = settings.offload, 1
    if offload.tier is Tier.CPU:
        cores = comm.gather_objects(own_cores(), "the constructor")
        threads = threads_of(comm.rank, cores)
        warn_of_one_thread(threads, cores[comm.rank])
    with comm.raising_together("the constructor"):
        params_off_device = model is not None and model.backing is not None
        store = make_store(offload, device, comm.rank, params_off_device=params_off_device, threads=threads)
        store.may_lose |= model is not None and model.disk is not None
    alike = {"max_grad_norm": settings.max_grad_norm, "skip_nonfinite": settings.skip_nonfinite}
    pipeline = make_pipeline(stages, device, alike, dict(zip(parameters.labels, parameters.all, strict=True)))
    return Engine(parameters, shardings, admission.rules, model, settings, store, pipeline)
