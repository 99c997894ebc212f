"""What a simulated collective, or another kernel of one's own, is made of.

A collective of NCCL's runs on a stream of its own, which waits for the caller's; ``work.wait()`` makes the caller's
wait for it. Here::

    stream = new_stream()                        # once for a group

    event = record(torch.cuda.current_stream())  # issue
    block(event, stream)
    launch(stream)
    touch(source, False, stream, "all_gather")
    touch(target, True, stream, "all_gather")
    alias(target).copy_(...)                     # the numbers, from the other ranks, at once
    done = record(stream)

    block(done, torch.cuda.current_stream())     # wait
    done.query()                                 # whether it is over, as set_arrival says

The functions are not ops of the program's: a TorchDispatchMode does not see them, and autograd does not either.
Imported after ``load()``, as it imports torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .device import call
from .torch_cuda import Event, Stream

__all__ = ["alias", "block", "launch", "new_stream", "record", "recorded_streams", "touch"]


def new_stream() -> Stream:
    """A stream that nobody else has, unlike torch's, until ``clear``. Raises RuntimeError when all are taken."""
    return Stream.of(call("new_stream"))


def launch(stream: torch.Stream) -> None:
    """A new piece of work on the stream. ``touch`` then says what it uses."""
    call("launch", stream.stream_id)


def touch(tensor: Tensor, write: bool, stream: torch.Stream, what: str) -> None:
    """The last piece of work of the stream reads or writes the tensor, all bytes from its first to its last element.

    ``what`` names the work in a report. Memory of the host that is not pinned is not looked at.
    """
    call("touch", tensor.detach(), write, stream.stream_id, what)


def record(stream: torch.Stream) -> Event:
    """An event: all work of the stream up to here."""
    event = Event()
    event.record(stream)
    return event


def block(event: torch.Event, stream: torch.Stream) -> None:
    """What the stream does later comes after the event."""
    event.wait(stream)


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor of the same memory. What is done with it is not looked at: ``touch`` tells."""
    return call("alias", tensor.detach())


def recorded_streams(tensor: Tensor) -> list[int]:
    """The numbers of the streams that ``record_stream`` was called with for this memory, by torch or the program."""
    return call("recorded_streams", tensor.detach())
