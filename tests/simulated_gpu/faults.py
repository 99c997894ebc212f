"""Seeded faults: the waits of ``zero_optim``, each left out or misplaced once, and programs in which that shows.

A simulation that finds nothing in the package says little by itself. This table says what it would have found: for each
place that orders work today there is a fault, and ``fault_check`` looks whether a simulation reports it.
"""

from __future__ import annotations

from order_programs import SIDE, OrderProgram

from .fault import PACKAGE, Edit, Fault
from .fault import fault as _fault
from .fault import one as _one
from .fault import two as _two
from .store_faults import STORES

__all__ = ["FAULTS", "PACKAGE", "Edit", "Fault"]

# Waits that hide others, left out in several faults.
_FOLLOW_WAIT = Edit(
    "grads/bucket.py",
    "            self.arrivals.wait()\n            self._drop_zeroed(found.zeroed)\n",
    "            self._drop_zeroed(found.zeroed)\n",
)
_DEALLOCATE_WAIT = Edit(
    "comm/buffers.py",
    "            if user is not None:\n                user.wait()\n",
    "            pass\n",
)
_LAUNCH_KEPT = Edit(
    "grads/bucket.py",
    "            accumulate = True\n        else:\n            self._use_new_memory_if_kept()\n",
    "            accumulate = True\n",
)

# ---- streams and memory ----------------------------------------------------------------------------------------------

_MEMORY = (
    _fault(
        "GradStreams.note forgets the stream",
        "comm/streams.py",
        "            self._adding.add(torch._C._accelerator_getStream(self._index))",
        "            pass",
        _two(3, "no_sync"),
    ),
    _fault(
        "GradStreams.join waits for no stream",
        "comm/streams.py",
        "                current.wait_stream(stream)",
        "                pass",
        _two(3, "no_sync"),
    ),
    _fault(
        "launch packs without join",
        "grads/bucket.py",
        "        streams.join()\n        if may_wait:",
        "        if may_wait:",
        _two(3, "no_sync"),
    ),
    _fault(
        "collect packs without join",
        "grads/bucket.py",
        "        streams.join()\n        found = self.slots.scan",
        "        found = self.slots.scan",
        _two(1, "half thawed, no_sync"),
        _two(0, "half thawed, no_sync"),
    ),
    _fault(
        "GradStreams.keep keeps nothing",
        "comm/streams.py",
        "            keep_for_current_stream(*gradients)",
        "            pass",
        _two(0, "used twice"),
    ),
    _fault(
        "launch drops gradients without keep",
        "grads/bucket.py",
        "        streams.keep(grad for _, grad in sources)\n        del",
        "        del",
        _two(0, "used twice"),
    ),
    _fault(
        "collect drops gradients without keep",
        "grads/bucket.py",
        "        streams.keep(grad for _, grad in sources)\n        self.slots.collect",
        "        self.slots.collect",
        _two(1, "half thawed, no_sync"),
        _two(0, "half thawed, no_sync"),
    ),
    _fault(
        "keep_for_current_stream keeps nothing",
        "comm/streams.py",
        "            tensor.record_stream(torch.cuda.current_stream(tensor.device))",
        "            pass",
        _two(1, "relaid"),
    ),
    _fault(
        "deallocate frees what another stream uses",
        "comm/storage.py",
        "    keep_for_current_stream(tensor)\n",
        "",
        _one(3, "kept, on two streams"),
    ),
    _fault(
        "flat parameters drop what they have copied",
        "params/flat_params.py",
        "            keep_for_current_stream(parameter.data)\n",
        "",
        OrderProgram(2, "plain", SIDE, SIDE),
        OrderProgram(0, "plain", SIDE, SIDE),
    ),
    _fault(
        "a bucket that lets go drops its memory",
        "grads/bucket.py",
        "        keep_for_current_stream(self.flat.full, self.grad_buffer)\n",
        "",
        _two(1, "relaid"),
        _two(2, "relaid"),
    ),
    _fault(
        "state that was moved is dropped",
        "stores/state_store.py",
        "        keep_for_current_stream(*self._pages.pop(number).values())",
        "        self._pages.pop(number)",
        _two(1, "thawed"),
        _two(2, "thawed"),
        unseen="The tables of a new layout are copied from the host, which waits for that.",
    ),
    _fault(
        "the exchange grows, and drops what it had",
        "step/exchange.py",
        "            keep_tensors_of(holder)\n",
        "            pass\n",
        _two(2, "thawed"),
    ),
    _fault(
        "the record of non-finite gradients grows, and drops what it had",
        "step/nonfinite.py",
        "        keep_tensors_of(self)\n",
        "",
        _two(2, "thawed"),
    ),
    _fault(
        "the table of coefficients grows, and drops what it had",
        "step/hyper_table.py",
        "        keep_tensors_of(self)\n",
        "",
        _two(2, "thawed"),
    ),
    _fault(
        "what decides whether a gradient stays is dropped",
        "grads/bucket.py",
        "    keep_for_current_stream(keep)  # it may be of the stream on which it was decided\n",
        "",
        _two(2, "zeroed locally"),
    ),
    _fault(
        "memory lent beside the buffers is dropped",
        "comm/buffers.py",
        "            keep_for_current_stream(buffer)  # which has waited for the reduction\n",
        "",
        _two(2, "two optimizers"),
        _two(1, "two optimizers"),
        _two(3, "two optimizers"),
        _two(2, "two optimizers, zeroed"),
    ),
    _fault(
        "buffers of an old layout are dropped",
        "grads/reducer.py",
        "        self.buffers.deallocate()\n        buckets",
        "        buckets",
        _two(1, "relaid"),
        _two(2, "thawed"),
        unseen="The tables of a new layout are copied from the host, which waits for that.",
    ),
)

# ---- collectives -----------------------------------------------------------------------------------------------------

_COLLECTIVES = (
    _fault(
        "Pending.wait waits for nothing",
        "comm/collectives.py",
        "            self._work.wait()\n            return\n",
        "            return\n",
        _one(2),
    ),
    _fault(
        "on_arrival is called before the wait",
        "comm/collectives.py",
        "        start = time.perf_counter()\n        try:\n            self._hold()",
        "        start = time.perf_counter()\n        if self._on_arrival is not None:\n"
        "            self._on_arrival()\n            self._on_arrival = None\n        try:\n            self._hold()",
        _one(2, "micro-batches"),
        _one(0, "micro-batches"),
    ),
    _fault(
        "a reduction adds before it has arrived",
        "comm/sharding.py",
        "        return self.everyone.all_reduce(full, on_arrival=lambda: store(full))",
        "        pending = self.everyone.all_reduce(full)\n        store(full)\n        return pending",
        _one(0, "micro-batches"),
    ),
    _fault(
        "the exchange is read before it has arrived",
        "comm/collectives.py",
        "self._pending(issued, kind, vector).wait()",
        "self._pending(issued, kind, vector)",
        _one(2),
        _one(2, "clipped"),
    ),
    _fault(
        "whole_of does not wait",
        "comm/sharding.py",
        "            gather.wait()\n",
        "            pass\n",
        _one(1, "relaid"),
        _one(2, "relaid"),
    ),
    _fault(
        "whole_of copies its own part after the gather began",
        "comm/sharding.py",
        "        self.own_part(full).copy_(shard)\n        if (gather := self.all_gather(full, kind)) is not None:\n",
        "        gather = self.all_gather(full, kind)\n        self.own_part(full).copy_(shard)\n"
        "        if gather is not None:\n",
        _one(1, "relaid"),
        _one(2, "relaid"),
        simulation="held",
    ),
    _fault(
        "the host reads a copy before it has come",
        "comm/host_copy.py",
        "            self._event.synchronize()\n",
        "            pass\n",
        _one(2),
        _one(1),
    ),
    _fault(
        "the event of a host copy is not recorded",
        "comm/host_copy.py",
        "            self._event.record(torch.cuda.current_stream(self.source.device))\n",
        "",
        _one(2),
        _one(1),
    ),
)

# ---- gradients -------------------------------------------------------------------------------------------------------

_GRADIENTS = (
    _fault(
        "Arrivals.wait waits for no reduction",
        "comm/arrivals.py",
        "            first() if callable(first) else first.wait()\n",
        "            if callable(first):\n                first()\n",
        _one(2),
    ),
    _fault(
        "Arrivals.then acts at once",
        "comm/arrivals.py",
        "        if self._queue:\n            self._queue.append(action)\n        else:\n            action()",
        "        action()",
        _one(2, "zeroed in place"),
        _one(1, "zeroed in place"),
    ),
    _fault(
        "Arrivals.wait does what comes then before the reductions",
        "comm/arrivals.py",
        "        while self._queue:\n            first",
        "        self._queue = deque(sorted(self._queue, key=lambda of: not callable(of)))\n"
        "        while self._queue:\n            first",
        _one(2, "zeroed in place"),
        _one(1, "zeroed in place"),
    ),
    _fault(
        "Arrivals.expect puts a reduction before those under way",
        "comm/arrivals.py",
        "        self._queue.append(awaited)",
        "        self._queue.appendleft(awaited)",
        _one(2, "two optimizers, zeroed"),
        _one(2, "two optimizers, in place"),
        _one(2, "zeroed in place"),
    ),
    _fault(
        "a gradient's zero_ does not wait",
        "comm/arrivals.py",
        "        self.then(part.zero_)",
        "        part.zero_()",
        _one(2, "raised, zeroed in place"),
        _one(2, "zeroed locally"),
        _one(1, "raised, zeroed in place"),
    ),
    _fault(
        "FlatShard.local does not wait",
        "params/flat_shard.py",
        "            self.arrivals.wait()\n",
        "            pass\n",
        _one(2, "read"),
        _one(1, "read"),
    ),
    _fault(
        "a reduction gives its memory back before it has arrived",
        "grads/bucket.py",
        "        self.pending.wait()\n        for buffer in self._lent:\n"
        "            self._buffers.give_back(buffer)\n        self._lent = ()\n",
        "        for buffer in self._lent:\n            self._buffers.give_back(buffer)\n        self._lent = ()\n"
        "        self.pending.wait()\n",
        _one(2),
        debug="poison",
    ),
    _fault(
        "a buffer is taken from who still has it",
        "comm/buffers.py",
        "        if self._borrowers[0] is not None:\n            self._borrowers[0].wait()\n",
        "",
        _one(2),
        _one(1),
    ),
    _fault(
        "launch does not wait for the last reduction, nor act behind it",
        "grads/bucket.py",
        "        if may_wait:\n            self.arrivals.wait()\n",
        "",
        _one(1, "zeroed at once"),
        _one(2, "zeroed at once"),
        and_=(
            Edit(
                "grads/bucket.py", "        elif self.arrivals.under_way:  # nothing", "        elif False:  # nothing"
            ),
            _LAUNCH_KEPT,
        ),
        hidden_by="Where a rank may not wait, it adds behind the old sum; and a collective under way counts as a user "
        "who keeps the memory.",
    ),
    _fault(
        "a second reduction overwrites one that nobody wants",
        "grads/bucket.py",
        "        elif self.arrivals.under_way:  # nothing",
        "        elif False:  # nothing",
        _one(2, "two optimizers, zeroed"),
        _one(1, "two optimizers, zeroed"),
        and_=(_LAUNCH_KEPT,),
        hidden_by="A collective under way counts as a user who keeps the memory, so that gradients go elsewhere.",
    ),
    _fault(
        "local gradients are collected over a reduction under way",
        "grads/bucket.py",
        "self.state is not GradState.REDUCED and not self.arrivals.under_way",
        "self.state is not GradState.REDUCED",
        _one(1, "zeroed, then no_sync"),
        and_=(
            Edit(
                "grads/bucket.py",
                "            return False\n        self._use_new_memory_if_kept()\n",
                "            return False\n",
            ),
        ),
        hidden_by="A collective under way counts as a user who keeps the memory, so that gradients go elsewhere.",
    ),
    _fault(
        "clear frees memory of a reduction under way",
        "grads/bucket.py",
        "            self.arrivals.wait()\n            self._use_new_memory_if_kept()\n            deallocate",
        "            self._use_new_memory_if_kept()\n            deallocate",
        _one(3, "zeroed at once"),
    ),
    _fault(
        "zero writes under a reduction",
        "grads/bucket.py",
        "            self.arrivals.then(partial(_zero, buffer))",
        "            _zero(buffer)",
        _one(2, "zeroed in place"),
        _one(1, "zeroed in place"),
    ),
    _fault(
        "what was zeroed after a raise is zeroed under way",
        "grads/bucket.py",
        "        else:\n            self.arrivals.then(partial(_zero, self.grad_shard))\n\n    def keep_where",
        "        else:\n            _zero(self.grad_shard)\n\n    def keep_where",
        _one(2, "raised, zeroed in place"),
        _one(1, "raised, zeroed in place"),
        _one(3, "raised, zeroed in place"),
    ),
    _fault(
        "what may have been zeroed after a raise is zeroed under way",
        "grads/bucket.py",
        "        self.arrivals.then(partial(_keep_where, self.grad_shard, keep))",
        "        _keep_where(self.grad_shard, keep)",
        _one(2, "raised, zeroed in place"),
        _one(1, "raised, zeroed in place"),
        _one(3, "raised, zeroed in place"),
    ),
    _fault(
        "an average is zeroed under way",
        "grads/bucket.py",
        "            self.arrivals.then(partial(_keep_where, self._part_of(index), grad.detach().ne(0).any()))",
        "            _keep_where(self._part_of(index), grad.detach().ne(0).any())",
        _one(2, "zeroed locally"),
        _one(1, "zeroed locally"),
    ),
    _fault(
        "all of a bucket that was dropped is zeroed under way",
        "grads/bucket.py",
        "        if len(stale) == len(self.params):\n            self.arrivals.then(partial(_zero, self.grad_shard))",
        "        if len(stale) == len(self.params):\n            _zero(self.grad_shard)",
        _one(2, "dropped"),
        _one(1, "dropped"),
        and_=(_FOLLOW_WAIT,),
        hidden_by="It is done when a step has begun, and follow_edits waits there before it.",
    ),
    _fault(
        "some of a bucket that were dropped are zeroed under way",
        "grads/bucket.py",
        "            self.arrivals.then(partial(_zero, *(self._part_of(index) for index in stale)))",
        "            _zero(*(self._part_of(index) for index in stale))",
        _one(2, "two optimizers, some zeroed"),
        _one(3, "two optimizers, some zeroed"),
        _one(1, "two optimizers, some zeroed"),
    ),
    _fault(
        "finish does not wait for the reductions",
        "grads/reducer.py",
        "            bucket.wait()\n            bucket.note_writes()",
        "            bucket.note_writes()",
        _one(2),
        _one(1),
        and_=(_FOLLOW_WAIT,),
        hidden_by="Before finish waits for all buckets, follow_edits has waited for each that has reduced.",
    ),
    _fault(
        "an average is not there when backward ends",
        "grads/reducer.py",
        "            prefetch_rest_of_backwards(self.thread)\n            for bucket in self.buckets:\n"
        "                bucket.wait()\n",
        "            prefetch_rest_of_backwards(self.thread)\n",
        _one(0, "read"),
    ),
    _fault(
        "an average is not there when a raise is settled",
        "grads/reducer.py",
        "            reducer._wait_for_averages()\n",
        "            pass\n",
        _one(0, "raised, then read"),
    ),
    _fault(
        "buckets are laid out again under reductions",
        "grads/buckets.py",
        "            bucket.wait()\n            bucket.wait_for_parameters()\n        moving",
        "            bucket.wait_for_parameters()\n        moving",
        _one(1, "relaid"),
        _one(2, "relaid"),
        and_=(_FOLLOW_WAIT,),
        hidden_by="In the first step follow_edits has waited; a layout that is restored has nobody else who waits.",
        unseen="The exchange of the step goes over the same group, after the reductions, and is waited for. Under "
        "gloo nothing else orders them.",
    ),
    _fault(
        "a restored layout takes memory of reductions",
        "grads/buckets.py",
        "            bucket.wait()\n            bucket.wait_for_parameters()\n        moving",
        "            bucket.wait_for_parameters()\n        moving",
        _one(1, "relaid, saved at first"),
        _one(1, "remade"),
        unseen="Loading settles the engine first; and the exchange of a step has waited.",
    ),
    _fault(
        "buffers are freed under reductions",
        _DEALLOCATE_WAIT.file,
        _DEALLOCATE_WAIT.old,
        _DEALLOCATE_WAIT.new,
        _one(3, "zeroed in place"),
        _one(3),
    ),
    _fault(
        "idle buffers are freed while a round is open",
        "grads/reducer.py",
        "        waits_for_nothing = self.sharding.host_waits or not self.rounds.open",
        "        waits_for_nothing = True",
        _one(3),
        and_=(_DEALLOCATE_WAIT,),
        hidden_by="Buffers wait for who has them before they free memory, which would hold up the backward.",
    ),
    _fault(
        "close leaves reductions under way",
        "grads/reducer.py",
        "                if bucket.arrives_within(PATIENCE_SECONDS):\n                    bucket.wait()\n",
        "                pass\n",
        _one(2, "remade"),
        _one(1, "remade"),
        _one(0, "remade"),
        _one(3, "remade"),
    ),
)

# ---- parameters ------------------------------------------------------------------------------------------------------

_PARAMETERS = (
    _fault(
        "wait_for_parameters does not wait",
        "grads/bucket.py",
        "            self.unsharding.wait()\n",
        "",
        _one(2),
    ),
    _fault(
        "parameters are gathered before they are updated",
        "engine.py",
        "        for shard in self.states.update(by):\n            shard.bucket.unshard()\n",
        "        for shard in self.states.shards[::-1]:\n            shard.bucket.unshard()\n"
        "        for _ in self.states.update(by):\n            pass\n",
        _one(2),
    ),
    _fault(
        "a step does not wait for what no module waits for",
        "step/param_gather.py",
        "            if bucket not in self._under_way:\n                bucket.wait_for_parameters()\n",
        "            pass\n",
        _one(2),
    ),
    _fault(
        "modules do not wait for their parameters",
        "step/param_gather.py",
        "        self.called = True\n        self.wait()\n",
        "        self.called = True\n",
        _one(2, "overlapped"),
    ),
    _fault(
        "a model's state dict does not wait",
        "step/param_gather.py",
        "                    module.register_state_dict_pre_hook(owner.wait),\n",
        "",
        _one(2, "overlapped, saved and loaded"),
    ),
    _fault(
        "loading into a model does not wait",
        "step/param_gather.py",
        "                    module.register_load_state_dict_pre_hook(owner.wait),\n",
        "",
        _one(2, "overlapped, saved and loaded"),
    ),
    _fault(
        "wait_for_parameters of the optimizer does not wait",
        "optimizer.py",
        "        self.check_usable()\n        self.engine.param_gather.wait()\n",
        "        self.check_usable()\n",
        _one(2, "overlapped"),
    ),
    _fault(
        "a step updates what the last one gathers",
        "engine.py",
        "        self.param_gather.wait()\n        self.keep_edits()\n        self.states",
        "        self.keep_edits()\n        self.states",
        _one(2, "overlapped, stepped twice"),
        _one(1, "overlapped, stepped twice"),
        unseen="The exchange of the step goes over the same group, after the gathers, and is waited for. Under gloo "
        "nothing else orders them.",
    ),
    _fault(
        "parameters move to another layout while they are gathered",
        "grads/buckets.py",
        "            bucket.wait()\n            bucket.wait_for_parameters()\n        moving",
        "            bucket.wait()\n        moving",
        _one(1, "relaid, saved at first"),
        _one(2, "relaid, saved at first"),
        and_=(
            Edit(
                "engine.py",
                "        self.reducer.complete_all_raised()\n        self.param_gather.wait()\n",
                "        self.reducer.complete_all_raised()\n",
            ),
        ),
        hidden_by="Whoever lays out again while a step's gathers are under way has settled the engine before.",
        unseen="The exchange of the step goes over the same group, after the gathers, and is waited for. Under gloo "
        "nothing else orders them.",
    ),
    _fault(
        "close leaves gathers under way",
        "grads/reducer.py",
        "                bucket.wait_for_parameters()\n                if bucket.arrives",
        "                if bucket.arrives",
        _one(2, "closed"),
        _one(1, "closed"),
    ),
    _fault(
        "a unit is shown before it has arrived",
        "units/unit.py",
        "                self._await(gather)\n",
        "                pass\n",
        _one(3),
    ),
    _fault(
        "the event of a unit's copy is not recorded",
        "params/flat_params.py",
        "        lane.set(self._copied)\n",
        "",
        _two(3, "offloaded, edited"),
    ),
    _fault(
        "no mark says that a unit has memory",
        "params/flat_params.py",
        "        self._allocated.set()  # its memory may be what the stream that computes has used before\n",
        "",
        _one(3, "offloaded"),
    ),
    _fault(
        "a unit is copied into memory that is still used",
        "params/flat_params.py",
        "        lane.after(self._allocated)\n",
        "",
        _one(3, "offloaded"),
    ),
    _fault(
        "ranks gather a unit before their parts of it were copied",
        "params/flat_params.py",
        "        with lane.as_current():\n            return self._sharding.all_gather(self.full)\n",
        "        return self._sharding.all_gather(self.full)\n",
        _one(3, "offloaded"),
    ),
    _fault(
        "a unit of one rank is used before it was copied",
        "params/flat_params.py",
        "        if self._lanes is not None:\n            self._copied.order_current()\n",
        "",
        _one(3, "offloaded"),
        ranks=1,
    ),
    _fault(
        "the host does not wait until the device has read a shard",
        "params/flat_params.py",
        "            self._copied.wait()",
        "            pass",
        _two(3, "offloaded, edited"),
    ),
    _fault(
        "a load writes into a shard that the device reads",
        "params/param_shard.py",
        "            if self.flat is not None:\n                self.flat.wait_until_copied()\n",
        "",
        _two(3, "offloaded, edited"),
    ),
    _fault(
        "write_back writes into a shard that the device reads",
        "params/flat_params.py",
        "        self.wait_until_copied()\n        self.shard.copy_(new)",
        "        self.shard.copy_(new)",
        _two(3, "offloaded, edited"),
        unseen="gather_parameters has copied the shard to the device before, and the host waits for that.",
    ),
    _fault(
        "a unit's own part is copied after the gather began",
        "params/flat_params.py",
        "        self._sharding.own_part(self.full).copy_(self.shard)\n"
        "        return self._sharding.all_gather(self.full)",
        "        gather = self._sharding.all_gather(self.full)\n"
        "        self._sharding.own_part(self.full).copy_(self.shard)\n"
        "        return gather",
        _one(3),
    ),
    _fault(
        "a node's own part is copied after the gather began",
        "params/flat_params.py",
        "            node.own_part(self.full).copy_(self._node_part)\n"
        '            return node.all_gather(self.full, "node_all_gather")\n',
        '            gather = node.all_gather(self.full, "node_all_gather")\n'
        "            node.own_part(self.full).copy_(self._node_part)\n"
        "            return gather\n",
        _one(3, "nodes"),
        ranks=4,
    ),
    _fault(
        "gather_parameters shows what has not arrived",
        "params/flat_params.py",
        "            gather.wait()\n",
        "            pass\n",
        _one(3),
        _one(3, "edited"),
    ),
    _fault(
        "gather_parameters copies its own part after the gather began",
        "params/flat_params.py",
        "        self._sharding.own_part(whole).copy_(self.shard)\n"
        '        if (gather := self._sharding.all_gather(whole, "gather_parameters")) is not None:\n',
        '        gather = self._sharding.all_gather(whole, "gather_parameters")\n'
        "        self._sharding.own_part(whole).copy_(self.shard)\n"
        "        if gather is not None:\n",
        _one(3),
        _one(3, "edited"),
    ),
    _fault(
        "a load leaves units as they were gathered",
        "units/hooks.py",
        "        self.schedule.reshard_all()  # what",
        "        pass  # what",
        _one(3, "kept"),
    ),
    _fault(
        "a step leaves units as they were gathered",
        "engine.py",
        "            self.sharded_model.schedule.reshard_all()  # it may raise",
        "            pass  # it may raise",
        _one(3, "graph"),
        _one(3, "evaluated"),
    ),
)

FAULTS: tuple[Fault, ...] = (*_MEMORY, *_COLLECTIVES, *_GRADIENTS, *_PARAMETERS, *STORES)
