"""Memory and streams: storages behind tensors, memory that several CUDA streams use, and copies to the host.

The caching allocator knows one stream of a tensor: that on which it was allocated. A freed block goes back to later
work of that stream, whatever other streams still do with it::

    stream A   allocate x                                  y takes the memory of x, and is written
    stream B                wait for A    read x ........................ reads y?
    host                                          del x

As a rule there is one stream, and nothing to do. There are two where an optimizer was made on one stream and trains on
another; and autograd has streams of its own choice, see ``GradStreams``.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zero_kernels import is_capturing

references_in_cpp: Callable[[Tensor], int] = operator.methodcaller("_use_count")
"""Count the references to a tensor in C++; all its references in Python share one of them."""


def on_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Within it ``device`` is the current one, where it is a GPU: for calls to which torch passes no device.

    A program need not call ``torch.cuda.set_device``, and a thread has a current GPU of its own, number 0. A wait for
    an event, or memory that is pinned, would make a context there, a few hundred megabytes, from every rank of the
    machine; ``"cuda"`` would be the same GPU for all of them.
    """
    return nullcontext() if device is None or device.type != "cuda" else torch.cuda.device(device)


def keep_for_current_stream(*tensors: Tensor) -> None:
    """Call it before dropping ``tensors``: their memory is not reused before the current stream is done with it.

    Where they were allocated on the current stream, torch notes nothing. A tensor over a part of another's storage, as
    ``as_own_storage`` makes, is not noted either: torch knows whole blocks alone.
    """
    for tensor in tensors:
        if tensor.is_cuda and tensor.layout is torch.strided:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def keep_tensors_of(holder: object) -> None:
    """Do the same for every tensor among the attributes of ``holder``, before these are replaced."""
    keep_for_current_stream(*(value for value in vars(holder).values() if isinstance(value, Tensor)))


class GradStreams:
    """The streams on which autograd adds to gradients that are not packed yet.

    Autograd adds up a gradient on the stream that was current when its accumulation node was made: with our hooks, in
    the optimizer's constructor. The stream that called backward waits for that stream only at the end of the backward,
    or never, where the backward raises. So readers after such an error must wait themselves, and so must a bucket that
    leaves within the backward, from a hook on another node::

        default stream   the optimizer is made            .grad += ...
        side stream                            backward                 pack: must wait for the line above

    Attributes:
        several: whether there can be more than one.
    """

    def __init__(self, device: torch.device) -> None:
        self.several = device.type == "cuda"
        self._device = device
        self._index = (
            None if not self.several else torch.cuda.current_device() if device.index is None else device.index
        )
        self._adding: set[torch.Stream] = set()  # in a backward that has not ended
        self._added: set[torch.Stream] = set()  # since ``forget``
        self._called_on: torch.Stream | None = None  # where the program has stepped or zeroed; None: nowhere yet

    def note(self) -> None:
        """Note that a gradient was added to on the current stream. Called for every gradient: it must be quick."""
        if self._index is not None:
            self._adding.add(torch._C._accelerator_getStream(self._index))

    def join(self) -> None:
        """Order what follows on the current stream after all that was noted."""
        if self._index is not None and self._adding:
            current = torch._C._accelerator_getStream(self._index)
            for stream in self._adding - {current}:
                current.wait_stream(stream)

    def backward_ended(self) -> None:
        """Note that a backward ended: autograd has ordered the current stream after all of them."""
        self._added |= self._adding
        self._adding.clear()

    def keep(self, gradients: Iterable[Tensor]) -> None:
        """Call it before dropping ``gradients`` that the current stream has read. Where this stream added them up,
        autograd has informed the allocator; but not of gradients that the program made, on the stream that it uses."""
        if self._index is None:
            return
        current = torch._C._accelerator_getStream(self._index)
        # A capture has a stream of its own. All gradients are made in it then, and memory recorded on two streams
        # would stay taken until it ends.
        called_here = self._called_on is not None and self._called_on == current  # None and a stream: no ==
        programs = not called_here and not is_capturing(self._device)
        if programs or (self._added | self._adding) - {current}:
            keep_for_current_stream(*gradients)

    def forget(self) -> None:
        """Forget the streams, as nothing is left to be packed. The program is stepping or zeroing."""
        self._adding.clear()
        self._added.clear()
        self._called_on = None if self._index is None else torch._C._accelerator_getStream(self._index)


def allocate(tensor: Tensor, nbytes: int | None = None) -> Tensor:
    """Give memory back to a tensor, and to its views, after ``deallocate``. Contents: undefined. Returns the tensor.
    ``nbytes``: of its beginning, where no more will be used; None: all."""
    storage = tensor.untyped_storage()
    needed = tensor.nbytes if nbytes is None else nbytes
    if storage.nbytes() < needed:
        deallocate(tensor)  # else what is there would be copied
        storage.resize_(needed)
    return tensor


def deallocate(tensor: Tensor) -> None:
    """Free the memory of a tensor that has a storage of its own. Its views stay."""
    storage = tensor.untyped_storage()
    if storage.resizable():  # else NumPy has seen it, by ``tensor.numpy()``, and an array may still show it
        keep_for_current_stream(tensor)
        storage.resize_(0)


def bytes_of(tensor: Tensor) -> Tensor:
    """[bytes] uint8, all of the storage that a tensor views."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def is_there(tensor: Tensor) -> bool:
    """Whether there is memory behind the tensor."""
    return tensor.untyped_storage().nbytes() > 0


def as_own_storage(view: Tensor) -> Tensor:
    """View the same memory as a storage of its own."""
    # Of tensors that share a storage safetensors keeps one and drops the others, with a warning (seen: a checkpoint
    # without most parameters), and torch.save of a single one writes them all.
    return next(own_storages(view, [view]))


def own_storages(full: Tensor, views: Sequence[Tensor]) -> Iterator[Tensor]:
    """Do the same for many ``views`` of ``full``, faster."""
    storage, itemsize = full.untyped_storage(), full.itemsize
    for view in views:
        start = view.storage_offset() * itemsize
        part = storage[start : start + view.numel() * itemsize]
        yield full.new_empty(0).set_(part, 0, view.shape, view.stride())


class HostCopy:
    """A small fp32 tensor as the host sees it: a CPU's at once, a GPU's as of the last ``send`` that has arrived.

    Attributes:
        immediate: whether what is sent can be read at once.
        unread: whether values were sent that nobody has read.
    """

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self._host = source
        if source.is_cuda:
            self._host = torch.zeros(source.numel(), dtype=torch.float32, device="cpu", pin_memory=True)
        # Read past torch: no operator runs, so nothing that forbids reading device values mistakes it for one.
        self._memory = (ctypes.c_float * source.numel()).from_address(self._host.data_ptr())
        self._event = torch.cuda.Event() if source.is_cuda else None
        self.immediate = self._event is None
        self.unread = False

    def send(self) -> None:
        """Start to copy the values to the host. Does nothing while the last copy was not read."""
        if self._event is not None and not self.unread:
            self._host.copy_(self.source.reshape(-1), non_blocking=True)
            self._event.record(torch.cuda.current_stream(self.source.device))
        self.unread = True

    def read(self, *, wait: bool) -> list[float] | None:
        """Return the sent values, once. None where nothing was sent, or where it has not arrived, without ``wait``."""
        if not self.unread:
            return None
        if self._event is not None:
            with on_device(self.source.device):
                if not wait and not self._event.query():
                    return None
                self._event.synchronize()  # without ``wait`` it has passed: the host does not wait
        self.unread = False
        return list(self._memory)
