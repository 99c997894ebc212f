"""Whether work for a device is being recorded into a CUDA graph, to be replayed without Python."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
