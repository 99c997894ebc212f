"""Packs a bucket's gradients into one flat tensor, ready for its reduction."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

import zero_kernels

from ..comm.sharding import Sharding
from ..errors import GradientError
from ..params.flat_params import FlatParams
from ..params.layout import BucketLayout
from ..params.storage_order import as_stored
from ..params.tensor_slice import is_term, local_gradient

_dtype_of, _layout_of = operator.attrgetter("dtype"), operator.attrgetter("layout")
_STRIDED = {torch.strided}

ADDED = "grad_added_to_main_grad"  # True where a layer has added its weight's gradient to ``main_grad`` itself

Sources = list[tuple[int, Tensor]]
"""Gradients of this rank, each with the number of its slot."""


class Packing:
    """Packs gradients, casts and scales them, and sums terms over the tensor-parallel ranks.

    Attributes:
        nonfinite: [slots] int32, 1 where the gradient that this rank last packed was not finite; ``Buckets`` gives it.
        terms: slots whose gradients, in any reduction until now, were terms of a sum over the tensor-parallel ranks.
        refused: by parameter, why this rank's gradient was left out; ``Buckets`` gives it. The others' count, and the
            exchange raises on all.
    """

    def __init__(self, layout: BucketLayout, flat: FlatParams, labels: Sequence[str], sharding: Sharding) -> None:
        self._layout, self._flat, self._labels, self._sharding = layout, flat, labels, sharding
        self.refused: dict[int, str] = {}
        self.nonfinite = torch.zeros(len(flat.params), dtype=torch.int32, device=flat.device)
        self.terms: set[int] = set()
        self._marked = [i for i, p in enumerate(flat.params) if sharding.of_plain_slices and is_term(p)]
        self._offsets = [slot.offset for slot in layout.slots]
        self._absent = torch.empty(0, dtype=flat.dtype, device=flat.device)  # ``pack`` takes it for a missing gradient
        self._dtypes = {flat.dtype, torch.float32}  # that gradients may have
        self._main_grads = {i: getattr(p, "main_grad", None) for i, p in enumerate(flat.params) if hasattr(p, ADDED)}
        self._pack_op = zero_kernels.Prepared("pack")

    def pack(self, sources: Sources, full: Tensor, scale: float, accumulate: bool = False) -> tuple[Sources, list[int]]:
        """Pack ``sources`` into ``full`` [numel], times ``scale``; slots without a gradient become zeros.

        ``accumulate``: slots that were marked non-finite before stay so.

        Returns the gradients as tensors of this rank, of ``DTensor``s the local ones; and the slots of those that are
        terms of a sum over the tensor-parallel ranks.
        """
        terms: list[int] = []
        if self._flat.sliced:
            found = [(index, *local_gradient(self._flat.params[index], grad)) for index, grad in sources]
            sources = [(index, grad) for index, grad, _ in found]
            terms = [index for index, _, is_term in found if is_term]
        grads = [grad for _, grad in sources]
        usual = self._dtypes.issuperset(map(_dtype_of, grads)) and _STRIDED.issuperset(map(_layout_of, grads))
        if self._flat.permuted:  # autograd gives a gradient in the parameter's memory format, so these are contiguous
            grads = [as_stored(grad, self._flat.orders[index]) for index, grad in sources]
        if not usual or not all(map(Tensor.is_contiguous, grads)):  # torch lets none be on another device
            grads = [self._checked_or_refused(index, grad) for (index, _), grad in zip(sources, grads, strict=True)]
        if len(grads) < len(self._offsets):
            present, grads = grads, [self._absent] * len(self._offsets)
            for (index, _), grad in zip(sources, present, strict=True):
                grads[index] = grad
        flags = torch.empty_like(self.nonfinite) if accumulate else self.nonfinite
        self._pack_op(grads, self._offsets, full, scale, flags)  # zeroes the gaps
        if accumulate:
            torch.maximum(self.nonfinite, flags, out=self.nonfinite)
        for index, grad in sources if self._main_grads else ():
            if grad is self._main_grads.get(index):
                grad.zero_()  # for the next micro-batch
        return sources, terms

    def is_packed(self, sources: Sources) -> bool:
        """Whether the gradient of the one slot is there, with nothing to cast, to move or to reset."""
        grad = sources[0][1] if sources else self._absent
        dtype = self._sharding.reduce_dtype(self._flat.dtype)
        usual = grad.dtype == dtype and grad.layout == torch.strided and grad.is_contiguous()
        return usual and grad.numel() > 0 and not self._main_grads

    def sum_terms(self, slots: Sequence[int], full: Tensor) -> None:
        """Sum these slots of ``full`` over the tensor-parallel ranks."""
        places = [self._layout.slots[index] for index in slots]
        self._sharding.sum_over_slices([full.narrow(0, place.offset, place.numel) for place in places])

    def sum_all_terms(self, terms: Sequence[int], sources: Sources, full: Tensor) -> None:
        """Sum all terms before the reduction of ``full``: those packed now, and those known from earlier reductions."""
        # All tensor-parallel ranks must sum the same slots. They go through the same forward and backward, but a
        # gradient may have been dropped on this rank alone: it adds zeros. Marked slots are summed in any case.
        self.terms.update(terms)
        dropped = self.terms.difference(index for index, _ in sources)
        self.sum_terms([*sorted({*terms, *dropped}), *self._marked], full)

    def _checked_or_refused(self, index: int, grad: Tensor) -> Tensor:
        device, param = self._flat.device, self._layout.slots[index].param
        if grad.layout is torch.strided and grad.dtype in self._dtypes and grad.device == device:
            return grad.detach().contiguous()
        dense = "Leave the parameter's grad_dtype and device as they are"
        remedy = dense if grad.layout is torch.strided else "For an embedding, build it with sparse=False"
        message = (
            f"the gradient of {self._labels[param]} is {grad.dtype} {grad.layout} on "
            f"{grad.device}; expected a dense {' or '.join(sorted(map(str, self._dtypes)))} on {device}. {remedy}"
        )
        # Alone, a rank raises at once. Of several, to raise here would leave the others waiting in the reduction.
        if not self._sharding.agrees:
            raise GradientError(message)
        self.refused[param] = message
        return self._absent
