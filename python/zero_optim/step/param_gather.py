"""Decides who waits for updated parameters: ``step``, or, with ``overlap_param_gather``, the modules that use them.

A module's pre-forward hook waits for the buckets of its own parameters. That covers a parameter only if each module
that owns it is called; some are not (``nn.MultiheadAttention`` reads ``out_proj.weight`` itself). So the forwards
before the first step are observed, and for parameters of modules that were not called in them ``step`` waits.

A graph that ``torch.compile`` traces, or that CUDA captures, replays no hook: once one has recorded a module, ``step``
waits for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_kernels import is_capturing

from ..errors import ZeroOptimError
from ..grads.bucket import Bucket


class _OwningModule:
    """The pre-forward hook of a module that owns parameters. A copy of the module gets one that does nothing."""

    def __init__(self, parameters: Sequence[int] = (), gather: ParamGather | None = None) -> None:
        self.parameters, self._gather = tuple(parameters), gather
        self.buckets: tuple[Bucket, ...] = ()
        self.called = False

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or (self._gather is not None and is_capturing(self._gather.device)):
            self._recorded()
            return
        self.called = True
        # The forward may run on another stream than the step: it waits for the all-gathers of its own parameters.
        self.wait()

    def wait(self, *_: Any) -> None:
        for bucket in self.buckets:
            bucket.unsharding.wait()

    @torch.compiler.assume_constant_result  # so that dynamo calls it at once, and traces nothing of it
    def _recorded(self) -> None:
        if self._gather is not None:
            self._gather.stop_overlapping()

    def __reduce__(self) -> tuple[Any, ...]:
        return _OwningModule, ()


class ParamGather:
    """Knows the modules of the parameters, and which buckets ``step`` may leave in flight."""

    def __init__(self, overlap: bool, device: torch.device) -> None:
        self.overlap, self.device = overlap, device
        self._buckets: Sequence[Bucket] = ()
        self._owners: list[_OwningModule] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._observed = False
        self._in_flight: set[Bucket] = set()  # buckets that only called modules use

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Follow the parameters into ``buckets``, all that there are."""
        self._buckets = buckets
        bucket_of = {slot.param: bucket for bucket in buckets for slot in bucket.layout.slots}
        for owner in self._owners:
            of_owner = [bucket_of[index] for index in owner.parameters if index in bucket_of]
            owner.buckets = tuple(dict.fromkeys(of_owner))
        self._choose_in_flight()

    def attach(self, model: nn.Module, index_of: dict[int, int]) -> None:
        """Hook into the modules of ``model`` that own parameters. ``index_of``: by ``id`` of the parameter."""
        self.wait()
        self.close()
        for module, parameters in _owners(model, set()):
            owner = _OwningModule([index_of[id(p)] for p in parameters if id(p) in index_of], self)
            if owner.parameters:
                self._owners.append(owner)
                self._hooks += [
                    module.register_forward_pre_hook(owner, prepend=True),  # weight_norm reads in such a hook
                    module.register_state_dict_pre_hook(owner.wait),
                    module.register_load_state_dict_pre_hook(owner.wait),
                ]
        self._observed = False
        self.use(self._buckets)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._owners.clear()

    def after_step(self) -> None:
        """Wait for the buckets that no module waits for."""
        if not self._observed and any(owner.called for owner in self._owners):
            self._observed = True
            self._choose_in_flight()
        for bucket in self._buckets:
            if bucket in self._in_flight:
                bucket.unsharding.guard()
            else:
                bucket.unsharding.wait()

    def wait(self) -> None:
        for bucket in self._buckets:
            bucket.unsharding.wait()

    def stop_overlapping(self) -> None:
        """Have every ``step`` wait from now on."""
        if is_capturing(self.device) and any(bucket.unsharding.pending is not None for bucket in self._buckets):
            raise ZeroOptimError(
                "a CUDA graph captures a forward while updated parameters are gathered: call opt.wait_for_parameters() "
                "before the capture"
            )
        self.wait()
        self.overlap = False
        self._choose_in_flight()

    def _choose_in_flight(self) -> None:
        covered = {index for owner in self._owners if owner.called for index in owner.parameters}
        covered -= {index for owner in self._owners if not owner.called for index in owner.parameters}
        free = {b for b in self._buckets if all(slot.param in covered for slot in b.layout.slots)}
        self._in_flight = free if self.overlap and self._observed else set()


def _owners(module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[nn.Module, Sequence[Tensor]]]:
    """List the modules that own parameters, each with these."""
    # Compiled in place, a module would have its own hook in the graph: it is left out, with all below.
    if module in seen or module._compiled_call_impl is not None:
        return
    seen.add(module)
    if isinstance(module, torch._dynamo.OptimizedModule):  # hooks within would break its graph
        yield module, list(module.parameters())
        return
    own = list(module.parameters(recurse=False))
    if own:
        yield module, own
    for child in module.children():
        yield from _owners(child, seen)
