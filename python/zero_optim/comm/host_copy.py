"""Device values on the host without waiting for the device."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .streams import on_device


class HostCopy:
    """A small fp32 tensor as the host sees it: a CPU's at once, a GPU's as of the last ``send`` that has arrived."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self._host = source
        if source.is_cuda:
            self._host = torch.zeros(source.numel(), dtype=torch.float32, device="cpu", pin_memory=True)
        # Read past torch: no operator runs, so nothing that forbids reading device values mistakes it for one.
        self._memory = (ctypes.c_float * source.numel()).from_address(self._host.data_ptr())
        self._event = torch.cuda.Event() if source.is_cuda else None
        self._sent = False

    def send(self) -> None:
        """Start to copy the values to the host. Does nothing while the last copy was not read."""
        if self._event is not None and not self._sent:
            self._host.copy_(self.source.reshape(-1), non_blocking=True)
            self._event.record(torch.cuda.current_stream(self.source.device))
        self._sent = True

    def read(self, *, wait: bool) -> list[float] | None:
        """Return the sent values, once. None where nothing was sent, or where it has not arrived, without ``wait``."""
        if not self._sent or not (wait or self._arrived()):
            return None
        if self._event is not None:
            with on_device(self.source.device):
                self._event.synchronize()
        self._sent = False
        return list(self._memory)

    @property
    def unread(self) -> bool:
        """Whether values were sent that nobody has read."""
        return self._sent

    def _arrived(self) -> bool:
        with on_device(self.source.device):
            return self._event is None or self._event.query()

    @property
    def immediate(self) -> bool:
        """Whether what is sent can be read at once."""
        return self._event is None
