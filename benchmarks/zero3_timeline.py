"""Draws docs/zero3-timeline.png: a measured timeline of rank 0 of two in one step at stage 3.

python benchmarks/zero3_timeline.py [--out FILE]

Two gloo ranks train a small model. Time stamps are taken around ``unshard`` and ``reshard`` of its units, in hooks of
its modules, at each launch of a reduction, and when a collective completes. The step of median time is drawn.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor, nn
from torch.nn import functional as F
from zero_optim.backward_watch import BackwardWatch
from zero_optim.grads.bucket import Bucket
from zero_optim.units.schedule import UnitSchedule
from zero_optim.units.sharded_model import ShardedModel, sharded_model_of
from zero_optim.units.unit import Unit

BLOCKS, HIDDEN, TOKENS, VOCAB = 5, 512, 768, 1024
WARM_UP, STEPS = 5, 15
LANES = ("compute", "gathers", "reductions")
COLORS = ("#8C8C8C", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00")  # of the root and the blocks
OUT = Path(__file__).resolve().parents[1] / "docs" / "zero3-timeline.png"


@dataclass(frozen=True)
class Span:
    """A piece of work from ``start`` to ``end``, in seconds. ``unit``: 0 is the root, None no unit."""

    lane: str
    name: str
    unit: int | None
    start: float
    end: float


class Trace:
    """The spans of a step, and ``unsharded``: moments, each with the bytes that are unsharded from then on."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.unsharded: list[tuple[float, int]] = []
        self._computing: tuple[str, int | None, float] | None = None

    def compute(self, name: str, unit: int | None) -> None:
        """Begin a span of computing, and end the one before."""
        self.idle()
        self._computing = name, unit, time.perf_counter()

    def idle(self, *_: Any) -> None:
        if self._computing is not None:
            name, unit, start = self._computing
            self.spans.append(Span("compute", name, unit, start, time.perf_counter()))
        self._computing = None

    def until_through(self, lane: str, unit: int, start: float, work: Any) -> None:
        """Add a span from ``start`` until all parts of a collective complete, which callbacks of its thread note."""
        left = list(getattr(work, "_works", [work]))
        for one in list(left):
            one.get_future().add_done_callback(functools.partial(self._through, left, one, lane, unit, start))

    def _through(self, left: list[Any], one: Any, lane: str, unit: int, start: float, _: Any) -> None:
        left.remove(one)
        if not left:
            self.spans.append(Span(lane, "", unit, start, time.perf_counter()))


# -- the model, and what is wrapped --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


@contextmanager
def wrapped(owner: type, name: str, around: Callable[..., None]) -> Iterator[None]:
    """Replace ``owner.name`` by ``around(original, self, *args)`` in this block."""
    original = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **options: around(original, self, *args, **options))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def traced(sharded: ShardedModel, trace: Trace) -> Iterator[None]:
    """Record the units' work into ``trace`` in this block."""
    number = {unit: index for index, unit in enumerate(sharded.units)}
    of_flat = {flat: number[unit] for unit in sharded.units for flat in unit.flats}

    def note_memory() -> None:
        trace.unsharded.append((time.perf_counter(), sum(flat.nbytes() for flat in of_flat)))

    def unshard(original: Any, unit: Unit) -> None:
        before, start = unit.state, time.perf_counter()
        original(unit)
        if unit.state is not before:
            note_memory()
            for pending in unit._pending:
                trace.until_through("gathers", number[unit], start, pending._work)

    def reshard(original: Any, unit: Unit, **options: Any) -> None:
        original(unit, **options)
        note_memory()

    def launch(original: Any, bucket: Bucket, *arguments: Any, **options: Any) -> None:
        start = time.perf_counter()
        original(bucket, *arguments, **options)
        flight = bucket.arrivals._queue[-1]
        trace.until_through("reductions", of_flat[bucket.flat], start, flight.pending._work)

    def before_backward(original: Any, schedule: UnitSchedule, unit: Unit) -> None:
        trace.idle()
        original(schedule, unit)
        trace.compute("backward", number[unit])

    def task_ended(original: Any, watch: BackwardWatch, task: int) -> None:
        trace.idle()
        original(watch, task)

    around = [(Unit, unshard), (Unit, reshard), (Bucket, launch)]
    around += [(UnitSchedule, before_backward), (BackwardWatch, task_ended)]
    with ExitStack() as stack:
        for owner, function in around:
            stack.enter_context(wrapped(owner, function.__name__, function))
        stack.callback(lambda handles: [handle.remove() for handle in handles], forward_hooks(sharded, trace))
        yield


def forward_hooks(sharded: ShardedModel, trace: Trace) -> list[Any]:
    """Register hooks that begin and end computing. They run after the units' own, whose waits are not computing."""
    model = sharded.model
    computes = {unit.module: index for index, unit in enumerate(sharded.units) if index}
    computes |= {model.embedding: 0, model.head: 0}

    def embedding_is_next(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: trace.compute("backward", 0))

    handles = [model.embedding.register_forward_hook(embedding_is_next)]
    for module, index in computes.items():
        begin = functools.partial(lambda index, *_: trace.compute("forward", index), index)
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(trace.idle)]
    return handles


# -- a rank ----------------------------------------------------------------------------------------------------------


def train(rank: int, out: Path, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = zero_optim.shard_module(Model(), units=(Block,))
    optimizer = zero_optim.ShardedAdamW(model.parameters(), lr=1e-3)
    (sharded,) = sharded_model_of(model.parameters())
    traces = [one_step(sharded, optimizer) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    if rank == 0:
        traces.sort(key=lambda trace: max(span.end for span in trace.spans) - min(span.start for span in trace.spans))
        draw(traces[len(traces) // 2], sum(parameter.nbytes for parameter in model.parameters()), out)
    optimizer.close()
    dist.destroy_process_group()


def one_step(sharded: ShardedModel, optimizer: zero_optim.ShardedAdamW) -> Trace:
    trace = Trace()
    tokens = torch.randint(VOCAB, (1, TOKENS + 1))
    dist.barrier()
    with traced(sharded, trace):
        logits = sharded.model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        trace.compute("step", None)
        optimizer.step()
        trace.idle()
    optimizer.zero_grad()
    return trace


# -- the picture -----------------------------------------------------------------------------------------------------


def draw(trace: Trace, parameter_bytes: int, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["font.size"] = 8
    from matplotlib import pyplot

    zero = min(span.start for span in trace.spans)
    shape = {"figsize": (11, 4.4), "sharex": True, "height_ratios": (3, 1.3), "layout": "constrained"}
    figure, (lanes, memory) = pyplot.subplots(2, 1, **shape)
    draw_phases(lanes, [span for span in trace.spans if span.lane == "compute"], zero)
    shortest = 0.012 * (max(span.end for span in trace.spans) - zero)
    for span in trace.spans:
        draw_span(lanes, span, zero, labelled=span.end - span.start > shortest)
    lanes.set_yticks(range(len(LANES)), LANES)
    lanes.set(ylim=(len(LANES) - 0.5, -0.9), title="A step at stage 3, rank 0 of two (gloo, one core each, prefetch=1)")
    times, sizes = zip(*trace.unsharded, strict=True)
    milliseconds, mebibytes = [1000 * (moment - zero) for moment in times], [size / 2**20 for size in sizes]
    memory.step(milliseconds, mebibytes, where="post", color="black", lw=1)
    memory.fill_between(milliseconds, mebibytes, step="post", color="#DDDDDD")
    memory.axhline(parameter_bytes / 2**20, color="#D55E00", ls="--", lw=1)
    memory.text(0, parameter_bytes / 2**20, "all parameters", va="bottom", color="#D55E00")
    memory.set(xlabel="milliseconds", ylabel="unsharded, MiB", ylim=(0, parameter_bytes / 2**20 * 1.25))
    figure.savefig(out, dpi=100)


def draw_phases(axes: Any, spans: Sequence[Span], zero: float) -> None:
    for name in dict.fromkeys(span.name for span in spans):
        start = min(span.start for span in spans if span.name == name)
        end = max(span.end for span in spans if span.name == name)
        axes.axvspan(1000 * (start - zero), 1000 * (end - zero), color="#F3F3F3")
        axes.text(500 * (start + end - 2 * zero), -0.68, name, ha="center", va="center")


def draw_span(axes: Any, span: Span, zero: float, *, labelled: bool) -> None:
    """Draw a span. Collectives alternate between two lines, since one begins before the other completes."""
    start, length = 1000 * (span.start - zero), 1000 * (span.end - span.start)
    row, height = float(LANES.index(span.lane)), 0.8
    if row:
        row, height = row + (0.2 if (span.unit or 0) % 2 else -0.2), 0.38
    color = "#F0E442" if span.unit is None else COLORS[span.unit]
    axes.barh(row, length, left=start, height=height, color=color, edgecolor="white", lw=0.5)
    if labelled and span.unit is not None:
        axes.text(start + length / 2, row, str(span.unit or "root"), ha="center", va="center")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args(arguments).out
    torch.multiprocessing.spawn(train, (out, 29_500 + os.getpid() % 1000), nprocs=2)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
