"""A training step as rank 0 of N over an emulated link: the communication that each schedule leaves exposed.

    python benchmarks/bench_link.py --gigabytes 50 --microseconds 30

A collective takes so many microseconds, and its bytes at that rate, one after another. On a GPU it is copies and a
timed sleep on a stream; on a CPU, who waits too early sleeps. Other ranks are copies of this one. Exposed is the time
above that over a link that takes none; both run in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contenders import WAYS, Task
from lab import parser_of, progress, run_script, show
from torch import Tensor
from zero_optim.bench.cases import DTYPES, model_config
from zero_optim.bench.record import Result
from zero_optim.bench.run import find_device
from zero_optim.bench.timing import Clock, Job, Spread, interleaved

CONTENDERS = ("fsdp2", "fsdp2_zero2", "stage1", "stage2", "stage3", "stage3_keep")
NUMEL, TOKENS = {"cpu": 2**24, "cuda": 1.5e9}, {"cpu": 256, "cuda": 4096}
STEPS = 4  # timed together: what one leaves in flight, the next hides
GIGABYTES, MICROSECONDS = {"cpu": 1.0, "cuda": 378.0}, 30.0  # NVSwitch of eight H100: gpu time of NCCL 2.29


class Arrival(dist.Work):
    """The end of a collective: a time of the host, or an event of the link's stream."""

    def __init__(self, end: float | torch.cuda.Event) -> None:
        super().__init__()
        self._end = end

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if isinstance(self._end, torch.cuda.Event):
            torch.cuda.current_stream().wait_event(self._end)
        else:
            time.sleep(max(0.0, self._end - time.perf_counter()))
        return True


class Link(dist.ProcessGroup):
    """A group of rank 0; all have one link. ``speed``: seconds a collective, seconds a byte."""

    speed, collectives, bytes = (0.0, 0.0), 0, 0
    _free, _stream = 0.0, None

    def _issue(self, tensor: Tensor, fill: Callable[[], object]) -> Arrival:
        seconds = Link.speed[0] + tensor.nbytes * Link.speed[1]
        Link.collectives, Link.bytes = Link.collectives + 1, Link.bytes + tensor.nbytes
        if tensor.is_cuda:
            Link._stream = Link._stream or torch.cuda.Stream(priority=-1)
            Link._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(Link._stream):
                fill()
                rate = torch.cuda.get_device_properties(tensor.device).clock_rate * 1e3
                torch.cuda._sleep(int(seconds * rate))
                return Arrival(Link._stream.record_event())
        fill()
        Link._free = max(Link._free, time.perf_counter()) + seconds
        return Arrival(Link._free)

    def _allgather_base(self, output: Tensor, sent: Tensor, opts: Any = None) -> Arrival:
        return self._issue(output, lambda: output.view(self.size(), -1).copy_(sent.clone().view(1, -1)))

    def _reduce_scatter_base(self, output: Tensor, sent: Tensor, opts: Any = None) -> Arrival:
        return self._issue(sent, lambda: output.view(-1).copy_(sent.view(self.size(), -1)[0]))

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names in torch 2.13

    def allgather(self, outputs: Any, sent: Any, opts: Any = None) -> Arrival:
        return self._issue(sent[0], lambda: [of_rank.copy_(sent[0]) for of_rank in outputs[0]])

    def allreduce(self, tensors: Any, opts: Any = None) -> Arrival:
        return self._issue(tensors[0], lambda: None)

    broadcast = allreduce

    def barrier(self, opts: Any = None) -> Arrival:
        return Arrival(0.0)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda" if torch.cuda.is_available() else "cpu")]

    def _get_backend(self, device: torch.device) -> Link:
        return self

    def getBackendName(self) -> str:
        return "link"


def drained(device: torch.device) -> float:
    """Read the clock once device and link have done their work: a gather of the last step counts."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    Arrival(Link._free).wait()
    return time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> int:
    about = "A training step as rank 0 of N, over an emulated link."
    parser = parser_of(__file__, about, device=None, dtype="bf16", numel=None, contenders=CONTENDERS, ranks=8, rounds=7)
    for name, default in {"tokens": "256, on a GPU 4096", "gigabytes": "1, on a GPU 378", "microseconds": 30}.items():
        parser.add_argument(f"--{name}", type=float, help=f"({default})")
    return run_script(parser, work, arguments)


def work(parsed: argparse.Namespace) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = find_device(parsed.device)
    kind = device.type
    rate, wait = (parsed.gigabytes or GIGABYTES[kind]) * 1e9, parsed.microseconds or MICROSECONDS
    dist.Backend.register_backend("link", lambda store, rank, size, timeout: Link(rank, size), devices=[kind])
    dist.init_process_group("link", rank=0, world_size=parsed.ranks, store=FakeStore())
    numel, tokens = int(parsed.numel or NUMEL[kind]), int(parsed.tokens or TOKENS[kind])
    task = Task(config := model_config(numel, device), DTYPES[parsed.dtype], tokens // config.seq or 1, device=device)
    result = Result(device, parsed.out, parsed.write, "link", gigabytes=rate / 1e9, microseconds=wait)
    of_step, free, link = {}, (0.0, 0.0), (wait / 1e6, 1 / rate)
    jobs: dict[str, Job] = {}
    for name in parsed.contenders:
        progress(f"link: {name}")
        step = WAYS[name].make(task).step
        train(step, free)  # the first step lays buckets out, and gathers in another order
        calls, nbytes = Link.collectives, Link.bytes
        train(step, free)
        of_step[name] = (Link.collectives - calls) // STEPS, (Link.bytes - nbytes) // STEPS
        jobs |= {f"{name} {of}": [partial(train, step, of)] for of in (free, link)}
    times = interleaved(jobs, Clock(partial(drained, device)), parsed.rounds)
    for name, (calls, nbytes) in of_step.items():
        alone, linked = (Spread.of([lap / STEPS for (lap,) in times[f"{name} {of}"]]) for of in (free, link))
        row = {"op": "link", "backend": name, "dtype": parsed.dtype, "numel": numel, "ranks": parsed.ranks}
        row |= {**vars(linked), "exposed_ms": linked.ms - alone.ms, "collectives": calls, "communicated": nbytes}
        result.add([row])
    show(result)


def train(step: Callable[[], None], speed: tuple[float, float]) -> None:
    Link.speed = speed
    for _ in range(STEPS):
        step()


if __name__ == "__main__":
    sys.exit(main())
