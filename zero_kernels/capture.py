"""Whether work for a device is being recorded into a CUDA graph, to be replayed without Python."""

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is being captured.

    A copy from the host must not be recorded then: every replay would read its source again, which is gone by then.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
