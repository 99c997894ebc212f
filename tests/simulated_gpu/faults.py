"""Seeded faults: the waits of ``zero_optim``, each left out or misplaced once, and programs in which that shows.

A simulation that finds nothing in the package says little by itself. This table says what it would have found: for each
place that orders work today there is a fault, and ``fault_check`` looks whether a simulation reports it. A fault names
the function that waits, and the wait: whoever changes neither need not look here.
"""

from __future__ import annotations

from .fault import AT_ONCE, NOWHERE, PACKAGE, Edit, Fault, fault, one, side, two, within
from .store_faults import STORES

__all__ = ["FAULTS", "PACKAGE", "Edit", "Fault"]

# Waits that hide others, left out in several faults.
_FOLLOW_WAIT = Edit("grads.bucket.Bucket.follow_edits: arrivals.wait()")
_DEALLOCATE_WAIT = Edit("comm.buffers.CommBuffers.deallocate: user.wait()")
_ABANDON_KEEPS = Edit("grads.bucket.Bucket.abandon: self._allocate_gradients()")
_LAUNCH_KEPT = Edit("grads.bucket.Bucket.launch: _use_new_memory_if_kept()")
_GATHERED_FIRST = "[shard.bucket.unshard() for shard in self.states.shards[::-1]] and self.states.update(by)"
_KEPT = "A collective under way counts as a user who keeps the memory, so that gradients go elsewhere."
_TABLES = "The tables of a new layout are copied from the host, which waits for that."
_EXCHANGE = "The exchange of the step goes over the same group, after the {}, and is waited for. Under gloo nothing "
_EXCHANGE += "else orders them."

FAULTS: tuple[Fault, ...] = (
    *within(
        "comm.streams",
        fault("GradStreams.note: _adding.add(...)", two("no_sync", 3)),
        fault("GradStreams.join: wait_stream(stream)", two("no_sync", 3)),
        fault("GradStreams.keep: keep_for_current_stream(...)", two("used twice", 0)),
        fault("keep_for_current_stream: record_stream(...)", two("relaid", 1)),
    ),
    fault("comm.storage.deallocate: keep_for_current_stream(tensor)", one("kept, on two streams", 3)),
    *within(
        "comm.buffers",
        fault(
            "CommBuffers.give_back: keep_for_current_stream(buffer)",
            two("two optimizers", 2, 1, 3),
            two("two optimizers, zeroed", 2),
        ),
        fault("CommBuffers.take: _borrowers[0].wait()", one("plain", 2, 1)),
        fault("CommBuffers.deallocate: user.wait()", one("zeroed in place", 3), one("plain", 3)),
    ),
    *within(
        "comm.collectives",
        fault("Pending.wait: self._hold()", one("plain", 2)),
        fault(
            "Pending.wait: self._hold()",
            one("micro-batches", 2, 0),
            new='(self._on_arrival and self._on_arrival(), setattr(self, "_on_arrival", None), self._hold())',
        ),
        fault(
            "Comm.exchange: self._pending(...).wait()",
            one("plain", 2),
            one("clipped", 2),
            new="self._pending(issued, kind, vector)",
        ),
        fault(
            "Comm.all_to_all: self._pending(...).wait()",
            one("muon, clipped", 3),
            new='self._pending(issued, "all_to_all", sent)',
        ),
    ),
    *within(
        "comm.sharding.Sharding",
        fault(
            "reduce: self.data_parallel.all_reduce(full, on_arrival=lambda: store(full))",
            one("micro-batches", 0),
            new="[self.data_parallel.all_reduce(full), store(full)][0]",
        ),
        fault("whole_of: gather.wait()", one("relaid", 1, 2)),
        fault(
            "whole_of: self.own_part(full).copy_(shard)",
            one("relaid", 1, 2),
            behind="all_gather(...)",
            simulation="held",
        ),
    ),
    *within(
        "comm.host_copy.HostCopy",
        fault("read: _event.synchronize()", one("plain", 2, 1)),
        fault("send: _event.record(...)", one("plain", 2, 1)),
    ),
    *within(
        "comm.arrivals.Arrivals",
        fault("wait: first.wait()", one("plain", 2)),
        fault("then: _queue.append(action)", one("zeroed in place", 2, 1), new=AT_ONCE),
        fault("then: _queue.append(action)", one("zeroed in place", 2, 1), new="self._queue.appendleft(action)"),
        fault(
            "expect: _queue.append(awaited)",
            one("two optimizers, zeroed", 2),
            one("two optimizers, in place", 2),
            one("zeroed in place", 2),
            new="self._queue.appendleft(awaited)",
        ),
        fault(
            "zero: then(part.zero_)",
            one("raised, zeroed in place", 2),
            one("zeroed locally", 2),
            one("raised, zeroed in place", 1),
            new=AT_ONCE,
        ),
    ),
    *within(
        "params.flat_params",
        fault("FlatParams.__init__: keep_for_current_stream(...)", side("plain", 2, 0)),
        fault("FlatParams._unshard_from_host: lane.set(...)", two("offloaded, edited", 3)),
        fault("FlatParams._unshard_from_host: _allocated.set()", one("offloaded", 3)),
        fault("FlatParams._unshard_from_host: lane.after(...)", one("offloaded", 3)),
        fault("FlatParams._unshard_from_host: lane.as_current()", one("offloaded", 3), new=NOWHERE),
        fault("FlatParams.order_after_copy: _copied.order_current()", one("offloaded", 3), ranks=1),
        fault("FlatParams.wait_until_copied: _copied.wait()", two("offloaded, edited", 3)),
        fault(
            "FlatParams.write_back: wait_until_copied()",
            two("offloaded, edited", 3),
            unseen="gather_parameters has copied the shard to the device before, and the host waits for that.",
        ),
        fault(
            "FlatParams.unshard: self._sharding.own_part(self.full).copy_(self.shard)",
            one("plain", 3),
            behind="_sharding.all_gather(...)",
        ),
        fault(
            "FlatParams.unshard: node.own_part(self.full).copy_(self._node_part)",
            one("nodes", 3),
            behind="node.all_gather(...)",
            ranks=4,
        ),
        fault("FlatParams.gathered: gather.wait()", one("plain", 3), one("edited", 3)),
        fault(
            "FlatParams.gathered: self._sharding.own_part(whole).copy_(self.shard)",
            one("plain", 3),
            one("edited", 3),
            behind="_sharding.all_gather(...)",
        ),
    ),
    fault("params.flat_shard.FlatShard.local: arrivals.wait()", one("read", 2, 1)),
    fault("params.param_shard.ParamShard._copy: wait_until_copied()", two("offloaded, edited", 3)),
    fault(
        "stores.state_store.DeviceStore.release: keep_for_current_stream(...)",
        two("thawed", 1, 2),
        new="self._pages.pop(number)",
        unseen=_TABLES,
    ),
    fault("units.unit.Unit.wait: self._await(gather)", one("plain", 3)),
    fault("units.hooks._BeforeLoad.__call__: schedule.reshard_all()", one("kept", 3)),
    *within(
        "grads.bucket",
        fault("Bucket.launch: streams.join()", two("no_sync", 3)),
        fault("Bucket.launch: streams.keep(...)", two("used twice", 0)),
        fault("Bucket.collect: streams.join()", two("half thawed, no_sync", 1, 0)),
        fault("Bucket.collect: streams.keep(...)", two("half thawed, no_sync", 1, 0)),
        fault("Bucket.let_go: keep_for_current_stream(...)", two("relaid", 1, 2)),
        fault("_keep_where: keep_for_current_stream(keep)", two("zeroed locally", 2)),
        fault("Flight.wait: pending.wait()", one("plain", 2), behind="self._then", debug="poison"),
        fault(
            "Bucket.launch: arrivals.wait()",
            one("zeroed at once", 1, 2),
            and_=(Edit("grads.bucket.Bucket.launch: arrivals.under_way", "False"), _LAUNCH_KEPT),
            hidden_by=f"Where a rank may not wait, it adds behind the old sum. {_KEPT}",
        ),
        # A second reduction overwrites one that nobody wants.
        fault(
            "Bucket.launch: arrivals.under_way",
            one("two optimizers, zeroed", 1, 2),
            new="False",
            and_=(_LAUNCH_KEPT,),
            hidden_by=_KEPT,
        ),
        # Local gradients are collected over a reduction under way.
        fault(
            "Bucket.can_collect: arrivals.under_way",
            one("zeroed, then no_sync", 1),
            new="False",
            and_=(Edit("grads.bucket.Bucket.collect: _use_new_memory_if_kept()"),),
            hidden_by=_KEPT,
        ),
        fault("Bucket.leave_memory: arrivals.wait()", one("zeroed at once", 3)),
        fault("Bucket.zero: arrivals.then(...)", one("zeroed in place", 2, 1), new=AT_ONCE),
        fault("Bucket.drop_all: arrivals.then(...)", one("raised, zeroed in place", 2, 1, 3), new=AT_ONCE),
        fault("Bucket.keep_where: arrivals.then(...)", one("raised, zeroed in place", 3, 2, 1), new=AT_ONCE),
        fault("Bucket._drop_zeroed: arrivals.then(...)", one("zeroed locally", 2, 1), new=AT_ONCE),
        fault(
            "Bucket._drop_stale: arrivals.then(partial(_zero, self.grad_shard))",
            one("dropped", 2, 1),
            new=AT_ONCE,
            and_=(_FOLLOW_WAIT,),
            hidden_by="It is done when a step has begun, and follow_edits waits there before it.",
        ),
        fault(
            "Bucket._drop_stale: arrivals.then(partial(_zero, *(...)))",
            one("two optimizers, some zeroed", 3, 2, 1),
            new=AT_ONCE,
        ),
        fault("Bucket.wait_for_parameters: unsharding.wait()", one("plain", 2)),
    ),
    *within(
        "grads.reducer",
        fault("Reducer._use_layout: buffers.deallocate()", two("relaid", 1), two("thawed", 2), unseen=_TABLES),
        fault(
            "Reducer.finish: bucket.wait()",
            one("plain", 2, 1),
            and_=(_FOLLOW_WAIT,),
            hidden_by="Before finish waits for all buckets, follow_edits has waited for each that has reduced.",
        ),
        fault("Reducer._wait_for_averages: bucket.wait()", one("read", 0)),
        fault("Reducer.complete_all_raised: _wait_for_averages()", one("raised, then read", 0)),
        fault(
            "Reducer._deallocate_idle_buffers: rounds.open",
            one("plain", 3),
            new="False",
            and_=(_DEALLOCATE_WAIT,),
            hidden_by="Buffers wait for who has them before they free memory, which would hold up the backward.",
        ),
        # Close leaves reductions under way.
        fault(
            "Reducer.close: bucket.arrives_within(...)",
            one("remade", 3, 2, 1, 0),
            new="False",
            and_=(_ABANDON_KEEPS,),
            hidden_by="An optimizer that is dropped leaves a reduction under way the memory that it writes into.",
        ),
        fault("Reducer.close: wait_for_parameters()", one("closed", 2, 1)),
    ),
    *within(
        "grads.buckets.Buckets",
        fault(
            "lay_out: bucket.wait()",
            one("relaid", 1, 2),
            and_=(_FOLLOW_WAIT,),
            hidden_by="In the first step follow_edits has waited; a layout that is restored has nobody else who waits.",
            unseen=_EXCHANGE.format("reductions"),
        ),
        fault(
            "lay_out: bucket.wait()",
            one("relaid, saved at first", 1),
            one("remade", 1),
            unseen="Loading settles the engine first; and the exchange of a step has waited.",
        ),
        fault(
            "lay_out: bucket.wait_for_parameters()",
            one("relaid, saved at first", 1, 2),
            and_=(Edit("engine.Engine.settle: param_gather.wait()"),),
            hidden_by="Whoever lays out again while a step's gathers are under way has settled the engine before.",
            unseen=_EXCHANGE.format("gathers"),
        ),
    ),
    fault("step.exchange.Exchange.resize: keep_tensors_of(holder)", two("thawed", 2)),
    fault("step.nonfinite.NonFinite.resize: keep_tensors_of(self)", two("thawed", 2)),
    fault("step.hyper_table.HyperTable.grow: keep_tensors_of(self)", two("thawed", 2)),
    *within(
        "step.param_gather",
        fault("ParamGather.after_step: wait_for_parameters()", one("plain", 2)),
        fault("_OwningModule.__call__: self.wait()", one("overlapped", 2)),
        fault(
            "ParamGather.attach: register_state_dict_pre_hook(owner.wait)",
            one("overlapped, saved and loaded", 2),
            new="module.register_state_dict_pre_hook(lambda *_: None)",
        ),
        fault(
            "ParamGather.attach: register_load_state_dict_pre_hook(owner.wait)",
            one("overlapped, saved and loaded", 2),
            new="module.register_load_state_dict_pre_hook(lambda *_: None)",
        ),
    ),
    *within(
        "engine.Engine",
        # Parameters are gathered before they are updated.
        fault(
            "step: bucket.unshard()",
            one("plain", 2),
            and_=(Edit("engine.Engine.step: states.update(by)", _GATHERED_FIRST),),
            hidden_by="They would be gathered again once they are updated.",
        ),
        fault("step: param_gather.wait()", one("overlapped, stepped twice", 2, 1), unseen=_EXCHANGE.format("gathers")),
        fault("_coefficients: schedule.reshard_all()", one("graph", 3), one("evaluated", 3)),
    ),
    fault("optimizer.ShardedOptimizer.wait_for_parameters: param_gather.wait()", one("overlapped", 2)),
    *STORES,
)
