"""The simulated device itself: each of its rules with a program that keeps it and one that does not.

A body runs in a process of its own (see worker.py). It ends with ``torch.cuda.synchronize()``, so that what is freed
when it returns is not in use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from simulated_gpu import Race, host_access, ops, races, set_arrival
from simulated_gpu.worker import Call


def texts(found: list[Race]) -> list[str]:
    return [race.text for race in found]


def written_on(stream: torch.cuda.Stream, numel: int = 4) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.empty(numel, device="cuda").fill_(1)


def read_on(stream: torch.cuda.Stream, tensor: Tensor) -> None:
    with torch.cuda.stream(stream):
        tensor.sum()


# Reads and writes


def read_elsewhere(wait: str) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()  # streams 1 and 2
    early = a.record_event()
    x = written_on(a)
    waits: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "wait_stream": lambda: b.wait_stream(a),
        "wait_event": lambda: b.wait_event(a.record_event()),
        "event.wait": lambda: a.record_event().wait(b),
        "through a third stream": lambda: (
            torch.cuda.current_stream().wait_stream(a),
            b.wait_stream(torch.cuda.current_stream()),
        ),
        "event.synchronize": lambda: a.record_event().synchronize(),
        "stream.synchronize": lambda: a.synchronize(),
        "synchronize": lambda: torch.cuda.synchronize(),
        "item": lambda: read_with_item(a, x),
        "blocking copy": lambda: copied_to_host(a, x, non_blocking=False),
        "asynchronous copy": lambda: copied_to_host(a, x, non_blocking=True),
        "an event of before": lambda: b.wait_event(early),
        "the other way round": lambda: a.wait_stream(b),
        "another stream": lambda: b.wait_stream(torch.cuda.current_stream()),
    }
    waits[wait]()
    read_on(b, x)
    torch.cuda.synchronize()


def read_with_item(stream: torch.cuda.Stream, x: Tensor) -> None:
    with torch.cuda.stream(stream):
        x[0].item()


def copied_to_host(stream: torch.cuda.Stream, x: Tensor, non_blocking: bool) -> None:
    with torch.cuda.stream(stream):
        torch.empty(4, pin_memory=True).copy_(x, non_blocking=non_blocking)


ORDERS = (
    "wait_stream",
    "wait_event",
    "event.wait",
    "through a third stream",
    "event.synchronize",
    "stream.synchronize",
    "synchronize",
    "item",
    "blocking copy",
)
DOES_NOT_ORDER = ("nothing", "an event of before", "the other way round", "another stream", "asynchronous copy")


@pytest.mark.parametrize("wait", ORDERS)
def test_a_read_that_waits_for_the_write_is_no_race(call: Call, wait: str) -> None:
    assert call(read_elsewhere, wait)[1] == []


@pytest.mark.parametrize("wait", DOES_NOT_ORDER)
def test_a_read_that_does_not_wait_for_the_write_is_one_race(call: Call, wait: str) -> None:
    _, (race,) = call(read_elsewhere, wait)
    assert race.text == "aten::sum on stream 2 reads what aten::fill_ on stream 1 wrote"
    assert race.count == 1
    assert race.stack[-1].endswith(" in read_on") and race.stack[-2].endswith(" in read_elsewhere")


def write_after_read(waits: bool) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    x = written_on(a)
    b.wait_stream(a)
    read_on(b, x)
    if waits:
        a.wait_stream(b)
    with torch.cuda.stream(a):
        x.zero_()
    torch.cuda.synchronize()


def test_a_write_waits_for_the_read_before_it(call: Call) -> None:
    assert call(write_after_read, True)[1] == []
    assert texts(call(write_after_read, False)[1]) == ["aten::zero_ on stream 1 writes what aten::sum on stream 2 read"]


def halves(overlapping: bool) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.empty(8, device="cuda")
    a.wait_stream(torch.cuda.current_stream())
    b.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(a):
        x[:4].fill_(1)
    with torch.cuda.stream(b):
        x[4 - overlapping :].fill_(2)
    torch.cuda.synchronize()


def test_parts_of_a_tensor_race_where_they_overlap(call: Call) -> None:
    assert call(halves, False)[1] == []
    assert texts(call(halves, True)[1]) == ["aten::fill_ on stream 2 writes what aten::fill_ on stream 1 wrote"]


def two_reads() -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    for stream in (a, b):
        stream.wait_stream(torch.cuda.current_stream())
        read_on(stream, x)
    torch.cuda.synchronize()


def test_two_reads_do_not_race(call: Call) -> None:
    assert call(two_reads)[1] == []


def read_between(last_writes: bool) -> None:
    a, b, c = (torch.cuda.Stream() for _ in range(3))
    x = written_on(a)
    b.wait_stream(a)
    read_on(b, x)
    with torch.cuda.stream(c):
        x.zero_() if last_writes else x.sum()
    torch.cuda.synchronize()


def test_a_read_that_waits_does_not_hide_the_write_from_another(call: Call) -> None:
    assert texts(call(read_between, False)[1]) == ["aten::sum on stream 3 reads what aten::fill_ on stream 1 wrote"]
    assert texts(call(read_between, True)[1]) == [
        "aten::zero_ on stream 3 writes what aten::fill_ on stream 1 wrote",
        "aten::zero_ on stream 3 writes what aten::sum on stream 2 read",
    ]


def the_same_race_again() -> None:
    x, y = written_on(torch.cuda.Stream()), written_on(torch.cuda.Stream())
    for _ in range(3):
        x.sum()
    y.sum()
    torch.cuda.synchronize()


def test_a_race_is_kept_once_with_its_count(call: Call) -> None:
    _, found = call(the_same_race_again)
    assert [(race.text, race.count) for race in found] == [
        ("aten::sum on the default stream reads what aten::fill_ on stream 1 wrote", 3),
        ("aten::sum on the default stream reads what aten::fill_ on stream 2 wrote", 1),
    ]


# Memory


def free_in_use(how: str, excuse: str) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    x = written_on(a)
    b.wait_stream(a)
    read_on(b, x)
    if excuse == "record_stream":
        x[1:].record_stream(b)
    elif excuse == "record_stream of another":
        x.record_stream(torch.cuda.current_stream())
    elif excuse == "record_stream of one that waits":
        torch.cuda.current_stream().wait_stream(b)
        x.record_stream(torch.cuda.current_stream())
    elif excuse == "wait":
        a.wait_stream(b)
    elif excuse == "synchronize":
        b.synchronize()
    if how == "del":
        del x
    else:
        x.untyped_storage().resize_(0)
    torch.cuda.synchronize()


@pytest.mark.parametrize("how", ["del", "resize_"])
@pytest.mark.parametrize(
    "excuse",
    ["nothing", "record_stream", "record_stream of another", "record_stream of one that waits", "wait", "synchronize"],
)
def test_memory_is_freed_when_no_other_stream_uses_it(call: Call, how: str, excuse: str) -> None:
    text = "memory allocated on stream 1 is freed, and may be used again there, while aten::sum on stream 2 reads it"
    expected = [text] if excuse in ("nothing", "record_stream of another") else []
    assert texts(call(free_in_use, how, excuse)[1]) == expected


def first_used_elsewhere(waits: bool) -> None:
    torch.ones(4, device="cuda")  # freed, and given to the next
    x = torch.empty(4, device="cuda")
    b = torch.cuda.Stream()
    if waits:
        b.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(b):
        x.fill_(1)
    torch.cuda.synchronize()


def test_new_memory_is_used_after_what_its_stream_did_before(call: Call) -> None:
    assert call(first_used_elsewhere, True)[1] == []
    assert texts(call(first_used_elsewhere, False)[1]) == [
        "aten::fill_ on stream 1 writes memory allocated on the default stream, whose earlier work may still use it"
    ]


def fresh_memory() -> dict[str, list[float]]:
    new = torch.empty(3, device="cuda")
    resized = torch.ones(3, device="cuda")
    view = resized[1:]
    resized.untyped_storage().resize_(0)
    resized.untyped_storage().resize_(12)
    grown = torch.ones(2, device="cuda")
    grown.untyped_storage().resize_(12)
    whole = torch.empty(0, device="cuda").set_(grown.untyped_storage())
    pinned = torch.empty(3, pin_memory=True)
    tensors = {"new": new, "resized": resized, "view": view, "grown": whole, "pinned": pinned}
    return {name: tensor.nan_to_num(nan=-7).tolist() for name, tensor in tensors.items()}


def test_new_memory_is_nan(call: Call) -> None:
    values, found = call(fresh_memory)
    assert found == []
    nans = [-7.0] * 3
    assert values == {"new": nans, "resized": nans, "view": nans[1:], "grown": [1, 1, -7], "pinned": nans}


def use_without_memory() -> None:
    x = torch.ones(3, device="cuda")
    x.untyped_storage().resize_(0)
    x.add_(1)


def test_a_kernel_refuses_a_tensor_without_memory(call: Call) -> None:
    with pytest.raises(RuntimeError, match="a kernel is given a tensor whose memory is gone"):
        call(use_without_memory)


def bytes_of_tensors() -> list[int]:
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    x = torch.ones(100, device="cuda")
    with_one = torch.cuda.memory_allocated()
    y = x + x
    del x, y
    return [with_one - start, torch.cuda.memory_allocated() - start, torch.cuda.max_memory_allocated() - start]


def test_bytes_of_tensors_are_counted(call: Call) -> None:
    assert call(bytes_of_tensors)[0] == [400, 0, 800]


# Pinned memory


def overwritten(wait: str, write: bool) -> None:
    host, device = torch.ones(4).pin_memory(), torch.empty(4, device="cuda")
    device.copy_(host, non_blocking=wait != "blocking")
    event = torch.cuda.current_stream().record_event()
    if wait == "event":
        event.synchronize()
    elif wait == "device":  # orders streams, and not the host
        torch.cuda.Stream().wait_event(event)
    host_access(host, write)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("wait", "write"), [("nothing", True), ("device", True)])
def test_the_host_does_not_overwrite_what_is_being_copied(call: Call, wait: str, write: bool) -> None:
    assert texts(call(overwritten, wait, write)[1]) == [
        "the host (host_access) writes what aten::copy_ on the default stream read"
    ]


@pytest.mark.parametrize(("wait", "write"), [("nothing", False), ("event", True), ("blocking", True)])
def test_the_host_may_read_it_and_may_write_it_after_a_wait(call: Call, wait: str, write: bool) -> None:
    assert call(overwritten, wait, write)[1] == []


def read_by_the_host(wait: bool) -> None:
    host = torch.empty(4, pin_memory=True)
    host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    if wait:
        torch.cuda.current_stream().synchronize()
    host_access(host, False, "print")
    torch.cuda.synchronize()


def test_the_host_waits_before_it_reads_a_copy(call: Call) -> None:
    assert call(read_by_the_host, True)[1] == []
    assert texts(call(read_by_the_host, False)[1]) == [
        "the host (print) reads what aten::copy_ on the default stream wrote"
    ]


def registered(wait: bool) -> tuple[list[bool], list[int]]:
    runtime, memory = torch.cuda.cudart(), torch.ones(8)
    address = memory.data_ptr()
    statuses, pinned = [runtime.cudaHostRegister(address, memory.nbytes, 0)], [memory[3:].is_pinned()]
    memory[4:].copy_(torch.ones(4, device="cuda"), non_blocking=True)
    host_access(memory[:4], True, "another part")
    if wait:
        torch.cuda.current_stream().synchronize()
    host_access(memory[7:], False, "print")
    statuses.append(runtime.cudaHostUnregister(address))
    host_access(memory[7:], False, "pageable")
    torch.cuda.synchronize()
    return [*pinned, memory.is_pinned()], [*statuses, runtime.cudaHostUnregister(address)]


def test_registered_memory_is_pinned_until_it_is_taken_back(call: Call) -> None:
    told, found = call(registered, True)
    assert (told, texts(found)) == (([True, False], [0, 0, 713]), [])
    assert texts(call(registered, False)[1]) == [
        "the host (print) reads what aten::copy_ on the default stream wrote",
        "memory of the host is unregistered while aten::copy_ on the default stream uses it",
    ]


# Queries


def queried(when: str, seed: int) -> tuple[list[bool], list[str]]:
    set_arrival(when, seed)
    a = torch.cuda.Stream()
    x = written_on(a)
    answers = []
    for _ in range(32):
        with torch.cuda.stream(a):
            x.add_(1)
        answers.append(a.record_event().query())
    if not a.query():
        torch.cuda.synchronize()
    assert a.query() and a.record_event().query(), "the host has waited"
    return answers, texts(races())


def test_queries_answer_as_chosen(call: Call) -> None:
    assert call(queried, "never", 0)[0] == ([False] * 32, [])
    assert call(queried, "always", 0)[0] == ([True] * 32, [])
    first, again, other = (call(queried, "random", seed)[0][0] for seed in (1, 1, 2))
    assert first == again != other
    assert {True, False} == set(first)


def used_after_query(when: str) -> bool:
    set_arrival(when)
    a = torch.cuda.Stream()
    x = written_on(a)
    answer = a.record_event().query()
    x.sum()
    torch.cuda.synchronize()
    return answer


def test_a_host_that_is_told_that_it_is_over_has_waited(call: Call) -> None:
    assert call(used_after_query, "always") == (True, [])
    answer, found = call(used_after_query, "never")
    assert not answer and len(found) == 1


def unknown_arrival() -> None:
    set_arrival("soon")


def test_an_unknown_answer_is_refused(call: Call) -> None:
    with pytest.raises(RuntimeError, match="arrival is never, random or always, not soon"):
        call(unknown_arrival)


# Collectives


def collective(waits_before: bool, waits_after: bool) -> list[float]:
    own = ops.new_stream()
    x, out = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
    if waits_before:
        ops.block(ops.record(torch.cuda.current_stream()), own)
    ops.launch(own)
    ops.touch(x, False, own, "all_reduce")
    ops.touch(out, True, own, "all_reduce")
    ops.alias(out).copy_(ops.alias(x) * 2)
    done = ops.record(own)
    if waits_after:
        ops.block(done, torch.cuda.current_stream())
    values = out.tolist()
    torch.cuda.synchronize()
    return values


def test_a_collective_is_made_of_ops(call: Call) -> None:
    assert call(collective, True, True) == ([2.0] * 4, [])
    assert "all_reduce on stream 129 reads what aten::fill_ on the default stream wrote" in texts(
        call(collective, False, True)[1]
    )
    assert texts(call(collective, True, False)[1]) == [
        "aten::copy_ on the default stream reads what all_reduce on stream 129 wrote"
    ]


# Autograd


def two_layers(keep_nodes: bool, read_in_hook: bool) -> bool:
    """Two rounds of backward on a side stream, of weights made on the default one. Returns whether numbers are right.

    ``keep_nodes``: as who keeps hooks on parameters does. AccumulateGrad then stays on the default stream.
    """
    weights = [nn.Parameter(torch.ones(3, 3, device="cuda")) for _ in range(2)]
    nodes = [torch.autograd.graph.get_gradient_edge(weight).node for weight in weights] if keep_nodes else []
    torch.cuda.synchronize()
    sums: list[Tensor] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            hidden = torch.ones(2, 3, device="cuda") @ weights[0]
            if read_in_hook:  # the other weight's gradient is there already
                hidden.register_hook(lambda _: sums.append(weights[1].grad.sum()))
            (hidden @ weights[1]).sum().backward()
        right = all(torch.equal(weight.grad, torch.full_like(weight, 12.0)) for weight in weights)
    torch.cuda.synchronize()
    del nodes
    return right


@pytest.mark.parametrize("keep_nodes", [False, True])
def test_gradients_are_ordered_after_backward(call: Call, keep_nodes: bool) -> None:
    assert call(two_layers, keep_nodes, False) == (True, [])


def test_a_hook_on_another_stream_than_the_accumulation_is_a_race(call: Call) -> None:
    assert call(two_layers, False, True) == (True, [])
    right, found = call(two_layers, True, True)
    (race,) = found
    assert right, "kernels run in the order of the program"
    assert race.text == (
        "aten::sum of MmBackward0 on stream 1 reads what aten::add_ of torch::autograd::AccumulateGrad on the default "
        "stream wrote"
    )
    assert race.stack[-1].endswith("in <lambda>")


WARNING = "The AccumulateGrad node's stream does not match the stream"


def accumulation(node_made_on: str, first_backward: bool) -> tuple[str, list[str], list[str]]:
    """Where torch accumulates a gradient, made on stream 1, of a parameter made on the default one.

    Returns the stream of the hook after accumulation, those that the gradient is recorded for, and what torch warns of.
    """
    weight = nn.Parameter(torch.ones(3, 3, device="cuda"))
    default, side, other = torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    streams = {"default": default, "other": other}
    node = None
    if node_made_on in streams:
        with torch.cuda.stream(streams[node_made_on]):
            node = torch.autograd.graph.get_gradient_edge(weight).node
    torch.cuda.synchronize()
    seen: list[str] = []
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(repr(torch.cuda.current_stream().stream_id)))
    if not first_backward:
        weight.grad = torch.ones(3, 3, device="cuda")
        torch.cuda.synchronize()
    with torch.cuda.stream(side), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        (torch.ones(2, 3, device="cuda") @ weight).sum().backward()
        torch.set_warn_always(False)
    recorded = [str(stream) for stream in ops.recorded_streams(weight.grad)]
    torch.cuda.synchronize()
    del node
    return seen[0], recorded, [str(item.message).split(" of ")[0] for item in warned]


@pytest.mark.parametrize("node_made_on", ["default", "other", "backward"])
@pytest.mark.parametrize("first_backward", [True, False])
def test_where_torch_accumulates(call: Call, node_made_on: str, first_backward: bool) -> None:
    """On the stream that was current when the AccumulateGrad node was made: what we rely on, and what we look for.

    A node lives as long as a graph or its own holder. Where the gradient comes from another stream, torch warns, the
    node's stream waits, and record_stream keeps the incoming gradient; a first gradient becomes ``.grad`` as it is.
    """
    (stream, recorded, warned), found = call(accumulation, node_made_on, first_backward)
    expected = {"default": "0", "other": "2", "backward": "1"}[node_made_on]
    moves = node_made_on != "backward"
    assert (stream, found) == (expected, [])
    assert recorded == ([expected] if moves and first_backward else [])
    assert warned == ([WARNING] if moves else [])
