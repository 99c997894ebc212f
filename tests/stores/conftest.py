"""The process that has the simulated GPU."""

from simulated_gpu.conftest import call, device

__all__ = ["call", "device"]
