"""Seeded faults in the stores of state: copies between host memory and the device."""

from __future__ import annotations

from .fault import NOWHERE, Fault, fault, one, two, within

_HERE = "tests/stores/test_on_a_simulated_gpu.py shows it"
_NORM = "The host has waited for the stream that computes, which the norm and the overflow come from."
_NO_PAGES = f"Where a program drops frames, the host has waited for every page. {_HERE}."
_READ = f"The host has all of a page that it reads before it reads the next. {_HERE}."
_ASLEEP = "No program sleeps. tests/step/test_sleep.py shows it on a simulated GPU."
_LEAVES_FIRST = "[begun[0].end_update(), self._rule.update(updates)]"

_OF_LANES = within(
    "stores.lanes",
    fault("_CudaMark.set: event.record(...)", one("paged", 2)),
    fault("_CudaMark.order_current: event.wait(...)", one("paged", 2)),
    fault("_CudaMark.wait: event.synchronize()", one("updated on the host", 2)),
    fault("_CudaLane.after: event.wait(self.stream)", one("paged", 2)),
    fault("_CudaLane.set: event.record(self.stream)", one("paged", 2)),
    fault("_CudaLane.as_current: torch.cuda.stream(...)", one("updated on the host", 2), new=NOWHERE),
    fault("CudaLanes.keep: record_stream(...)", one("paged, as there is room", 2), unseen=_NO_PAGES),
)

_OF_RESTS = within(
    "stores.rests",
    *(
        fault(place, one("paged", 2), unseen=unseen)
        for place, unseen in (
            ("HostRest._copy: lane.after(now)", _ASLEEP),
            ("HostRest._copy: over.wait()", _ASLEEP),
            ("DiskRest.save: lane.after(now)", "The tests read the state before, and wait for that."),
            ("DiskRest.save: copied.wait", _ASLEEP),
            ("DiskRest.load: lane.after(now)", _ASLEEP),
            ("DiskRest.load: free[ahead % len(free)].wait()", "Reads of a file are no operations of torch's."),
            ("DiskRest.load: mark.wait()", _ASLEEP),
        )
    ),
)

_OF_PAGES = within(
    "stores.paged_store.PagedStore",
    fault(
        "allocate: left.set()",
        one("paged", 2),
        unseen="The copy of a new page into host memory is one that the host waits for.",
    ),
    fault(
        "release: arrived.wait()",
        one("paged, thawed", 2),
        unseen=f"No program reads state and gives it up before the host has all of it. {_HERE}.",
    ),
    fault(
        "release: left.wait()",
        one("paged, thawed", 2),
        unseen=f"The memory of a program's pages is used anew, or goes, after its end. {_HERE}.",
    ),
    fault(
        "release: keep_for_current_stream(...)",
        two("paged, some stay, thawed", 2),
        unseen="The tables of a new layout are copied from the host, which waits for that.",
    ),
    fault("fetch: arrived.order_current()", one("paged", 2), one("parameters on the host", 3)),
    fault("commit: used.set()", one("paged", 2)),
    fault("commit: lane.after(page.used)", one("paged", 2), one("parameters on the host", 3)),
    fault("commit: lane.set(page.left)", one("paged", 2)),
    fault("commit: leave_frame(page.left)", one("paged", 2), new="page.leave_frame(page.used)"),
    fault("discard: used.set()", one("paged, saved and loaded", 2), unseen=_READ),
    fault(
        "discard: leave_frame(page.used)",
        one("paged, saved and loaded", 2),
        new="page.leave_frame(page.arrived)",
        unseen=_READ,
    ),
    fault(
        "end_step: wait_for_visitors(number)", one("parameters on the host", 3), one("parameters on the host, paged", 3)
    ),
    fault("wait_for_visitors: left.wait()", one("parameters on the host", 3)),
    fault(
        "wait_for_visitors: arrived.wait()",
        one("parameters on the host, saved and loaded", 3),
        unseen="What came in with a page goes out again, and the host waits for that; where a page was only read, it "
        "has waited for the values.",
    ),
    fault("_bring: lane.after(frame.free)", one("paged", 2)),
    fault("_bring: lane.after(page.left)", one("paged, some stay, clipped", 3)),
    fault("_bring: lane.set(page.arrived)", one("paged", 2)),
    fault(
        "_send_back: arrived.wait()", one("paged", 2), unseen="No program wants the frame of a page that is on its way."
    ),
    fault("drop_frames: _lanes.keep(...)", one("paged, as there is room", 2), unseen=_NO_PAGES),
    fault("drop_frames: keep_for_current_stream(...)", two("paged, as there is room", 2), unseen=_NO_PAGES),
    fault(
        "_fit_frames: free.set()",
        one("paged", 2),
        unseen=f"New pages are copied into host memory, and the host waits for that. {_HERE}.",
    ),
    fault("_let_stay: left.wait()", one("paged, as there is room", 2)),
)

_OF_STATE = within(
    "step",
    fault("shard_state.ShardState.opened: wait_for_visitors(...)", one("parameters on the host, saved and loaded", 3)),
    # A page leaves before it is updated; parameters are sent before they are.
    fault("batches.ShardBatch.update: _rule.update(updates)", one("paged", 2), new=_LEAVES_FIRST),
    fault("batches.ShardBatch.update: _rule.update(updates)", one("updated on the host", 2), new=_LEAVES_FIRST),
)

_ON_HOST = within(
    "step.workplace.OnHost",
    fault("reduction_launched: to_host.as_current()", one("updated on the host", 2), new=NOWHERE),
    fault(
        "reduction_launched: pending.order_current()",
        one("updated on the host", 2),
        one("updated on the host, micro-batches", 2),
        new="True",
    ),
    fault("after_taking: _taken.order_current()", one("updated on the host, zeroed in place", 2, 1)),
    fault("_take_from_current: _now.set()", one("updated on the host, micro-batches", 2, 0)),
    fault("_take_from_current: to_host.after(self._now)", one("updated on the host, micro-batches", 2, 0)),
    fault("_take: lane.set(self._taken)", one("updated on the host, zeroed in place", 2)),
    fault(
        "gradient: _taken.wait()",
        one("updated on the host", 0),
        unseen="Updates of fp32 wait for the parameters, which come to the host after the gradient. "
        "tests/stores/test_deferred.py shows it.",
    ),
    # What the host has of a gradient is never outdated.
    fault(
        "reduction_begins: None",
        one("updated on the host, micro-batches", 2),
        new="self._has",
        unseen="Every reduction is taken anew as it arrives.",
    ),
    fault(
        "_bring_parameters: _sent.wait()",
        one("updated on the host", 2),
        unseen="The stream that computes comes after what was sent, and the lane after that stream.",
    ),
    fault("_bring_parameters: _now.set()", one("updated on the host", 2), unseen=_NORM),
    fault("_bring_parameters: lane.after(self._now)", one("updated on the host", 2), unseen=_NORM),
    fault("_bring_parameters: lane.set(self._brought)", one("updated on the host", 2)),
    fault("parameters: _brought.wait()", one("updated on the host", 2)),
    fault(
        "parameters: _sent.wait()",
        one("updated on the host", 2),
        unseen=f"{_NORM} That stream comes after what was sent.",
    ),
    fault(
        "parameters: wait_until_copied()",
        one("parameters on the host, updated there", 3),
        one("parameters on the host, updated there, edited", 3),
        unseen=_NORM,
    ),
    fault("updated: _now.set()", one("updated on the host", 2), unseen=_NORM),
    fault("updated: to_device.after(self._now)", one("updated on the host", 2), unseen=_NORM),
    fault("updated: to_device.set(self._sent)", one("updated on the host", 2)),
    fault("updated: _sent.order_current()", one("updated on the host", 2)),
    fault(
        "release: mark.wait()",
        one("updated on the host, remade", 2),
        unseen="A new layout takes its memory before the old one gives any back, and what an optimizer that is closed "
        "had goes later.",
    ),
)

STORES: tuple[Fault, ...] = (*_OF_LANES, *_OF_RESTS, *_OF_PAGES, *_OF_STATE, *_ON_HOST)
