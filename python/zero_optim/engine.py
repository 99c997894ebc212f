"""The engine behind the face: the parts of an optimizer, and the step that goes through them.

A step has four phases, each a method of ``Engine``::

    finish         complete the reductions that are owed                      grads/
    exchange       one small all-reduce: norm, overflow, use, alarms          step/exchange, step/alarms
    coefficients   one device scalar that unscales and clips, one that skips  step/clip, step/hyper_table
    update         update every shard, and send the parameters out            step/optimizer_state, step/param_gather
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_kernels import is_capturing

from . import validate
from .asleep import Asleep
from .comm.collectives import Comm
from .comm.sharding import Sharding, broadcast_together, connect_for_buckets
from .comm.spans import LOGGER, span
from .errors import GradientError, ZeroOptimError
from .grads.bucket import Bucket
from .grads.buckets import buckets_by_size, buckets_of_units
from .grads.reducer import Reducer
from .grads.rounds import Rounds
from .grads.slots import GradState
from .mode import CurrentMode, Mode
from .params.param_shard import plain_parameter
from .params.parameter_set import ParameterSet, Shardings
from .params.tensor_slice import is_cut, local_of
from .recovery import all_of
from .rules.codec import Begins
from .rules.group_rules import GroupRules
from .settings import Settings
from .step import replicas
from .step.clip import Clip, TokenCount, unscale_in_place
from .step.exchange import Exchange, ToExchange
from .step.hyper_table import HyperTable, was_updated
from .step.optimizer_state import OptimizerState
from .step.param_gather import ParamGather
from .step.pipeline import Pipeline
from .step.saved_state import SavedState
from .step.telemetry import Measured
from .step.workplace import Coefficients
from .stores.offload import Tier
from .stores.state_store import StateStore
from .units.sharded_model import ShardedModel, sharded_model_of

Groups = Sequence[Mapping[str, Any]]


class Engine:
    """The parts of one optimizer, and the calls that join them. The parts know each other only through the constructor.

    ``sharded_model``: the model at stage 3, else None. ``pipeline``: the other stages of a model that is cut into them.
    """

    def __init__(
        self,
        parameters: ParameterSet,
        shardings: Shardings,
        rules: GroupRules,
        sharded_model: ShardedModel | None,
        settings: Settings,
        store: StateStore,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.parameters, self.shardings, self.rules, self.sharded_model = parameters, shardings, rules, sharded_model
        self.settings, self.offload, self.store, self.pipeline = settings, settings.offload, store, pipeline
        self.sharding = sharding = shardings.main  # of the parameters that are no experts
        # Users may set both between steps.
        self.max_grad_norm, self.skip_nonfinite = settings.max_grad_norm, settings.skip_nonfinite
        self.steps = 0  # calls of ``step`` so far
        self.mode = CurrentMode()  # decides what may be called now
        trained, labels = parameters.trained, parameters.labels
        make_buckets = partial(buckets_by_size, trained, labels, shardings, rules, settings.bucket_cap_mb)
        if sharded_model is not None:
            make_buckets = partial(buckets_of_units, sharded_model, trained, labels, shardings, rules)
        schedule = None if sharded_model is None else sharded_model.schedule
        early = settings.overlap_grad_reduce
        self.reducer = Reducer(trained, labels, sharding, make_buckets, early, schedule, self.mode)
        disk = None if sharded_model is None else sharded_model.disk
        self.states = OptimizerState(trained, sharding, rules, store, group=parameters.group, disk=disk)
        self.measured: Measured | None = None  # the telemetry of the last update that was measured
        if settings.telemetry_every is not None:
            self.measured = Measured(self.states, parameters, shardings, settings.telemetry_every)
        self.hyper = HyperTable([], rules.by_group, sharding.device, hashes=sharding.agrees)
        of_parameters = sharding if sharded_model is None else sharded_model.sharding
        any_equal = of_parameters.equals(cut=False)[0] > 1 or shardings.of_groups  # else no rank holds what another has
        self.compared_every = settings.check_replicas_every if any_equal else None
        name_unequal = partial(replicas.check, parameters, shardings, sharded_model)
        self.exchange = Exchange(
            sharding,
            labels,
            trained,
            by_units=schedule is not None,
            at_once=store.may_lose,
            pipeline=pipeline,
            places=shardings.places_of_use,
            hyper=self.hyper,
            name_unequal=None if self.compared_every is None else name_unequal,
        )
        self.clip = Clip(sharding, labels, pipeline)
        self.tokens = TokenCount(sharding)
        self.param_gather = ParamGather(settings.overlap_param_gather and sharding.stage < 3, sharding.device)
        self._ahead = schedule if settings.overlap_param_gather and self.sharding.stage == 3 else None
        # Bound methods of the parts, not of the engine: hooks make the parameters hold the reducer. Through a method of
        # the engine they would hold the engine, and the optimizer would never be collected and closed.
        self.reducer.on_layout = [self.states.lay_out, self.param_gather.use]
        self.reducer.on_change = [self.clip.discard, self.exchange.outdate]
        self.reducer.on_clear = [self.clip.reset, self.tokens.reset]
        self.asleep = Asleep(self.mode, parameters, sharding, self.reducer, store, sharded_model, self.measured)
        self.reducer.rounds.engine = weakref.ref(self)
        self.optimizer: Callable[[], object] = lambda: None  # a weak reference to its owner, set by that

    # -- a step --------------------------------------------------------------------------------------------------

    def check_step(self, groups: Groups) -> None:
        """Raise the errors that can be found before anything is communicated."""
        if self.offload.tier is not Tier.DEVICE and is_capturing(self.sharding.device):
            raise ValueError(
                f"state_offload={self.offload.tier.value!r}: such a step cannot be captured in a CUDA graph, since the "
                "host takes part in it. Leave state_offload out, or capture forward and backward alone"
            )
        self.sharding.world.check_alone()
        self.reducer.check_laid_out()
        self.parameters.check_groups_unedited(groups)
        self.mode.check("step")
        self.hyper.check(groups)
        if self.sharded_model is not None:
            self.sharded_model.schedule.check_not_gathered()

    @torch.compiler.disable  # traced together with the optimizer's step, it counted no steps (seen)
    def step(self, groups: Groups) -> None:
        """Update the parameters. The host reads nothing from the device, except where this rank raises an alarm, and
        while the layout is still learned."""
        with self.failing_with_stages():
            self.param_gather.wait()
            self.keep_edits()  # first into the shards: masters are refreshed from them
            self.states.refresh_edited()
            if not self.states.started:  # weights may have been initialised since
                self.states.restart(set(self.parameters.trained), self.rules.averages)
            if not self.sharding.agrees:  # else all ranks raise together, in the exchange
                self.states.lost.check()
                if message := self.tokens.uncounted(self.reducer.backwards):
                    raise GradientError(message)
        self.finish_and_exchange(2.0 if self.max_grad_norm is not None else None)
        with span("step.coefficients"):
            by = self._coefficients(groups)
        stale = {shard.bucket.flat for shard in self.states.shards}
        for batch, here in self.states.to_update(by):
            batch.update(here)
            for shard in batch.shards:
                if not shard.bucket.flat.offloaded:
                    shard.bucket.unsharding.start()  # the all-gather is in flight while the next batch is updated
                # Else a gather ahead would hold the next updates until its unit's shards come together.
                if shard.bucket.unsharding.pending is None:
                    stale.remove(shard.bucket.flat)
            if self._ahead is not None:
                self._ahead.gather_ahead(stale)
        for shard in self.states.shards:
            if shard.bucket.flat.offloaded:  # only now its parameters are back where they rest
                shard.bucket.unsharding.start()
        # The next forward may be this rank's alone: whatever it waits for, the others have issued.
        self.sharding.gather_legs.issue()
        if self._ahead is None:
            self.param_gather.after_step()
        else:  # units wait for their own shards
            self._ahead.gather_ahead(())
        if self.measured is not None and by.measures:
            self.measured.updated = self.exchange.used & (by.found_inf == 0)
        self.states.mark_updated()
        self.exchange.skipped += by.found_inf.reshape(())
        self.steps += 1
        # On CUDA the host would wait to know: ``stats()`` counts skipped steps there.
        if by.found_inf.device.type == "cpu" and LOGGER.isEnabledFor(logging.INFO) and bool(by.found_inf):
            empty = self.tokens.empty is not None and bool(self.tokens.empty)
            reason = (
                "the tokens of all ranks are no positive number" if empty else f"not finite: {self.first_non_finite()}"
            )
            LOGGER.info("step %d was skipped, %s", self.steps, reason)
        self.reducer.end_step()
        if self.sharded_model is not None:
            self.sharded_model.schedule.due.reset()
        self.forget_coefficients()

    def finish_and_exchange(self, norm_type: float | None) -> None:
        """Phases 1 and 2: complete the reductions; agree on norm, overflow and used parameters.

        In a pipeline every call, on every stage, ends in one all-reduce over the stages, whatever this stage did.
        """
        if self.pipeline is None:
            if self._finish_and_exchange(norm_type) and self.tokens.counting:
                self.tokens.average(self.exchange.tokens)
                self.clip.token_scale = self.tokens.scale
            return
        with self.failing_with_stages():
            self.pipeline.check()
            fresh = self._finish_and_exchange(norm_type)
        scale, counting = self.clip.inverse_loss_scale, self.tokens.counting
        self.exchange.combine_stages(
            norm_type, fresh=fresh, stats=self._wants_stats, inverse_scale=scale, counting=counting
        )
        self.tokens.average(self.pipeline.tokens, self.pipeline.counting)
        self.clip.token_scale = self.tokens.scale
        try:
            self.pipeline.check_now(wait=self.store.may_lose)
        except ZeroOptimError:
            self.forget_coefficients()
            raise

    @contextmanager
    def failing_with_stages(self) -> Iterator[None]:
        """Where this stage of a pipeline raises, let the other stages skip the step and raise: they wait in it."""
        try:
            yield
        except Exception as error:
            if self.pipeline is not None:
                self.exchange.outdate()
                with suppress(ZeroOptimError):  # the first error is the one to raise
                    self.pipeline.fail(error)
            raise

    def _finish_and_exchange(self, norm_type: float | None) -> bool:
        """Phases 1 and 2 on this stage. Returns whether totals were exchanged; False: those of before still hold.

        Two kinds of gradient need a second pass: those of thawed parameters, and those assigned after the last round.
        The first exchange shows that every rank has them, or raises. The second pass reduces them.
        """
        if self.exchange.knows(stats=False):
            self._follow_edits()
        if self.exchange.knows(stats=self._wants_stats):
            return False
        while True:
            thawed = self.parameters.thawed()
            validate.check_kinds(self.parameters, thawed)
            with span("step.finish"):
                used = self.reducer.finish()
            self.parameters.warn_of_replaced(used)
            with span("step.exchange"):
                self._run_exchange(used, norm_type, thawed)
            if self.exchange.failed or not (thawed or self.reducer.leftover):
                return True
            if thawed:
                self.grow(thawed, thawed)  # it ends with a round owed, which takes leftovers along
            else:
                self.reducer.rounds.local()

    @property
    def _wants_stats(self) -> bool:
        return self.skip_nonfinite or self.clip.scaled

    def _run_exchange(self, used: bytearray, norm_type: float | None, thawed: Sequence[int]) -> None:
        reducer = self.reducer
        every, device, terms = self.compared_every, self.sharding.device, None
        if every is not None:
            self.param_gather.wait()  # parameters are read here, or to name what differed in the last step
            if (self.steps + 1) % every == 0 and not is_capturing(device):  # no host would raise for a captured step
                terms = replicas.terms_of([shard.bucket for shard in self.states.shards], device)
        self.states.lost.look()
        refused = reducer.layout.refused
        about = {
            "offload": self.states.lost.parameters,
            "late": reducer.late,
            "refused": {*refused},
            "thawed": {*thawed},
            "leftover": reducer.leftover,
        }
        reasons = {"refused": [*refused.values()], "offload": self.states.lost.reasons}
        if uncounted := self.tokens.uncounted(reducer.backwards):
            reasons["uncounted"] = [uncounted]
        numbers = {"counting": int(self.tokens.counting), "uncounted": int(uncounted is not None)}
        if self.sharded_model is not None:
            numbers["parted"] = self.sharded_model.schedule.cycle.code
        own = ToExchange(
            reducer.buckets,
            used,
            norm_type,
            self._wants_stats,
            about,
            numbers,
            reasons,
            flags=(reducer.layout.nonfinite, reducer.layout.slot_params),
            tokens=self.tokens.own if self.tokens.counting else None,
            terms=terms,
        )
        try:
            self.exchange.run(own)
        except ZeroOptimError as error:
            LOGGER.error("step %d raises on every rank: %s", self.steps + 1, error)
            self.clip.unclip()  # the step failed: its clip must not multiply the gradients of the next
            raise

    def _follow_edits(self) -> None:
        """Take in what the user has dropped or written since the exchange. The clip coefficient stays.

        On several ranks this sends nothing: ranks without edits would not take part.
        """
        edits = self.reducer.follow_edits()
        if self.sharding.world.world_size == 1:  # other stages of a pipeline take no part in its exchange
            if edits.assigned or edits.dropped or edits.written:
                self.exchange.outdate()
            return
        # After an exchange that failed the assignment is known already, and the next exchange brings it to all ranks.
        if edits.assigned and not self.exchange.failed:
            raise GradientError(
                "a gradient was assigned after clip_grad_norm_ had reduced them: assign it before, on every rank"
            )
        self.exchange.follow_edits(edits.dropped, edits.written)

    def _coefficients(self, groups: Groups) -> Coefficients:
        """Phase 3: the scalar that unscales and clips, the one that skips, the rule's coefficients; on the device."""
        if self.max_grad_norm is not None and not self.clip.clipped:
            self.clip.clip_to(self.max_grad_norm, 2.0, self.exchange, self.reducer.buckets)
        self.exchange.decide(self._wants_stats)
        grad_scale, found_inf = self.clip.grad_scale(), self.exchange.found_inf
        if self.tokens.empty is not None:  # the scaler's is left alone: the loss scale is not at fault
            found_inf = torch.where(self.tokens.empty, 1.0, found_inf)
        if self.sharded_model is not None:
            self.sharded_model.schedule.reshard_all()  # it may raise: before anything is counted
        norm: Any = self.max_grad_norm
        if norm is not None:  # a tensor's value would be a host sync; 1 and 1.0 are equal
            norm = "a tensor" if isinstance(norm, Tensor) else float(norm)
        self.hyper.beside = (f"max_grad_norm={norm}", f"skip_nonfinite={bool(self.skip_nonfinite)}")
        self.hyper.advance(groups, self.exchange.used & (found_inf == 0), self.clip.factor)
        return Coefficients(
            self.hyper.tables,
            grad_scale,
            found_inf,
            self.exchange.nonfinite.marks,
            self.exchange.used,
            rates=self.hyper.rates,
            measures=self.measured is not None and self.measured.wants(self.steps + 1),
        )

    # -- gradients -----------------------------------------------------------------------------------------------

    def count(self, tokens: float | Tensor) -> None:
        """See ``ShardedOptimizer.count``."""
        with self.failing_with_stages():
            if self.exchange.knows(stats=False):
                raise GradientError(
                    "opt.count() came after clip_grad_norm_ or unscale_, which have exchanged tokens: call it before"
                )
            self.tokens.add(tokens)

    def unscale(self, inverse_scale: Tensor) -> None:
        """Divide gradients that are readable through ``.grad``, a dtype at a time; else leave it to ``step``."""
        self.clip.scaled, self.clip.inverse_loss_scale = True, inverse_scale
        # Thawed parameters need slots first. In a pipeline one stage alone may have some, so every stage exchanges.
        if self.pipeline is not None or self.parameters.thawed():
            self.finish_and_exchange(None)
            if self.pipeline is None and self.exchange.failed:  # other ranks have not exchanged here, and can't now
                self.exchange.check_alarms()
        if not self.reducer.make_readable():
            self.clip.inverse_scale = inverse_scale
            return
        self.exchange.outdate()
        present = [bucket.grad_buffer for bucket in self.reducer.buckets if bucket.state is not GradState.EMPTY]
        # torch's op wants somewhere to write what it finds: ``decide`` overwrites it in ``step``.
        unscale_in_place(present, inverse_scale, self.exchange.found_inf)

    def forget_coefficients(self) -> None:
        """Reset clipping and unscaling, and outdate the exchange: the gradients were applied or dropped."""
        self.clip.reset()
        self.tokens.reset()
        self.exchange.outdate()
        if self.pipeline is not None:
            self.pipeline.end_step()

    # -- parameters and state ------------------------------------------------------------------------------------

    def to_train(self, indices: Sequence[int]) -> list[int]:
        """List the parameters that need a slot and state: those that require a gradient. At stage 3 frozen ones in a
        trained flat tensor do, too, as a bucket is a whole flat tensor."""
        wanted = [index for index in indices if self.parameters.all[index].requires_grad]
        if self.sharded_model is None:
            return wanted
        trained = [flat for unit in self.sharded_model.units for flat in unit.flats if flat.trained]
        beside = {id(p) for flat in trained for p in flat.params}
        return [index for index in indices if index in wanted or id(self.parameters.all[index]) in beside]

    @torch.inference_mode(False)  # hooks need autograd's nodes, and what is made here is written in every step
    def grow(self, indices: Sequence[int], trained: Sequence[int]) -> None:
        """Collective. Broadcast rank 0's values of these new parameters; give the ``trained`` ones a slot and state."""
        whole = self.sharded_model is None  # else ``shard_module`` has broadcast them
        kinds: dict[tuple[Sharding, bool], list[Tensor]] = {}
        for index in sorted(set(indices).difference(trained)) if whole else ():
            parameter = self.parameters.all[index]
            kinds.setdefault((self.shardings.of(index), is_cut(parameter)), []).append(local_of(parameter).data)
        for (sharding, cut), alike in kinds.items():  # in no bucket; trained ones follow, a bucket at a time
            broadcast_together(sharding.alike(cut=cut), alike)
        self.parameters.claim(indices, trained)
        self.exchange.resize()
        self.clip.resize()
        self.hyper.grow(self.parameters.group_of, self.rules.by_group)
        if trained:
            buckets: list[Bucket] = []
            world, device = self.sharding.world, self.sharding.device
            with world.raising_together("making the buckets", device):  # where one rank runs out of memory
                buckets = self.reducer.grow(trained)
            for sharding in dict.fromkeys(bucket.sharding for bucket in buckets):
                flats = [(bucket.layout.numel, bucket.dtype) for bucket in buckets if bucket.sharding == sharding]
                memory = self.reducer.rounds.buffers.storages[0]  # new with the layout, so not lent yet
                connect_for_buckets(sharding, flats, memory, gathered=whole)  # the model's group gathers units
            for bucket in buckets if whole else ():
                bucket.sharding.alike(cut=bucket.flat.cut).broadcast(bucket.flat.full)
            with world.raising_together("making the state", device):
                self.states.grow(buckets)  # only now: masters are made of rank 0's values
            self.param_gather.use(self.reducer.buckets)

    def keep_edits(self, *, unseen: bool = False) -> None:
        """Copy, at stage 3, edits of unsharded parameters into the shards. ``unseen``: also those without a version."""
        if self.sharded_model is not None:
            for unit in self.sharded_model.units:
                unit.keep_edits(unseen=unseen)

    def begin_load(self, saved: SavedState) -> None:
        """Restart the state that ``saved`` lacks. Warn of state that was saved in more bits than are kept here."""
        if saved.rounded and self.sharding.world.rank == 0:
            names = ", ".join(sorted(saved.rounded))
            warnings.warn(f"{names}: saved in more bits than are kept here, and rounded (docs/state.md)", stacklevel=2)
        self.states.restart(set(self.parameters.trained) - set(saved.tensors))
        for rule in self.rules.all:
            own = {index: names for index, names in saved.tensors.items() if self.rules.of(index) is rule}
            for name in (tensor.name for tensor in rule.tensors if tensor.begins is not Begins.ZERO):
                self.states.restart({index for index, names in own.items() if name not in names}, [name])

    def end_load(self, saved: SavedState) -> None:
        """Go on from the loaded state, once its tensors are there."""
        self.hyper.take_over(saved)
        self.states.mark_masters_stale()
        self.exchange.outdate()  # gradients may have been dropped

    def reset_state(self, *, keep_master: bool, keep_ema: bool) -> None:
        """Set moments and step counts to zero; set what is not kept to the parameters' present values."""
        if not (keep_master and keep_ema):  # else leave masters: the model may be loaded after them
            self.param_gather.wait()
            self.keep_edits(unseen=not keep_master)
            self.states.refresh_edited()
        kept = {Begins.PARAMETER: keep_master, Begins.AVERAGE: keep_ema}
        for rule in self.rules.all:
            own = {index for index in self.parameters.trained if self.rules.of(index) is rule}
            self.states.restart(own, [tensor.name for tensor in rule.tensors if not kept.get(tensor.begins)])
        self.hyper.steps.copy_(torch.where(was_updated(self.hyper.steps), -0.0, 0.0))  # in place, for CUDA graphs

    def settle(self) -> None:
        """Complete raised backwards, wait for parameters, reshard units, raise alarms: nothing is in flight then."""
        self.reducer.rounds.complete_all_raised()
        self.param_gather.wait()
        if self.sharded_model is not None:
            self.sharded_model.schedule.reshard_all()
        self.exchange.check_alarms()
        self.states.raise_lost_together()  # a rank that lost state must not raise alone later, within a collective

    def first_non_finite(self) -> dict[str, Any] | None:
        if (first := self.exchange.nonfinite.first()) is None:
            return None
        index, rank, step = first
        number = None if rank is None else self.sharding.world.ranks[rank]
        return {"parameter": None if index is None else self.parameters.name(index), "rank": number, "step": step}

    def begin_averages(self) -> None:
        """Set averages that begin with the next update to the parameters' present values, such as loaded ones."""
        self.states.refresh_edited()
        for number, name in enumerate(self.rules.averages):
            self.states.restart({*self.hyper.begins[:, number].nonzero().flatten().tolist()}, [name])

    # -- the end -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def close(self, *, collective: bool) -> None:
        """Remove the hooks and free what the parts hold. ``collective``: complete a raised backward, for the ranks on
        which it did not raise."""
        if self.mode.now is Mode.AVERAGE:
            self.states.put_back(collective=collective and not self.reducer.rounds.out_of_step)
            self.param_gather.wait()
            self.mode.now = Mode.OWN
        self.param_gather.close()
        try:  # an error of the last step: there is no later step to raise it
            if not self.reducer.rounds.out_of_step:
                self.exchange.check_alarms(together=False)
        except ZeroOptimError as error:
            warnings.warn(f"the last step was skipped: {error}", stacklevel=2)
        except RuntimeError:  # the device has failed, which an earlier call has raised
            pass
        try:
            self.reducer.close(collective=collective)
            self.states.close(wait=not self.reducer.rounds.out_of_step)
        finally:  # even where a disk fails, the parameters are free for another optimizer
            self.parameters.release()
            self.sharding.world.close()
            self.asleep.close()


def open_engines() -> list[Engine]:
    """List the engines of this process's open optimizers, in the order in which they were made."""
    return [engine for rounds in all_of(Rounds) if isinstance(engine := rounds.engine(), Engine)]


def check_whole(where: str, parameters: Iterable[Tensor]) -> None:
    """Raise ParameterError where one of these parameters cannot be made whole for ``where``: see
    ``Shardings.check_whole``. Raise ZeroOptimError where one of them is asleep."""
    plain = [*map(plain_parameter, parameters)]
    ids = {*map(id, plain)}
    for model in sharded_model_of(plain):
        model.check_whole(where, ids)
    for engine in open_engines():
        engine.shardings.check_whole(where, ids)
        if any(id(parameter) in ids for flat in engine.asleep.flats for parameter in flat.params):
            engine.mode.check_awake(where)


def savers_of(ids: Container[int]) -> Comm | None:
    """Find the ranks that save these parameters, by ``id``, together, where some are plain slices; else None."""
    for engine in open_engines():
        if engine.sharding.of_plain_slices and any(id(parameter) in ids for parameter in engine.parameters.all):
            return engine.sharding.savers
    return None
