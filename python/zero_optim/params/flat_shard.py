"""``FlatShard``: a tensor in a parameter's shape, of which this rank holds one flat range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..callers import called_from
from ..comm.handle import Arrivals
from ..errors import ParameterError, ShardAccessError
from . import dcp
from .arrangement import Cut
from .remedies import REMEDIES, Use, kind_of, use_of
from .storage_order import StorageOrder, storage_order, strides_of
from .tensor_slice import TensorSlice

aten = torch.ops.aten
_DESCRIBES = "torch._subclasses.meta_utils"
_SAME_SHARD = {aten.detach.default, aten.alias.default}
_NEW = {
    *(aten.new_empty.default, aten.new_empty_strided.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}


class FlatShard(Tensor):
    """A parameter's gradient or state in its true shape, dtype and device, with only ``local`` in memory.

    Attributes:
        local: 1-D tensor, this rank's elements; empty where the rank owns none. Its dtype may be wider than that
            of the whole: gradients can be reduced in fp32. Reading it waits for what is on its way to it.
        order: of the elements, as the whole tensor would lie in memory: its strides tell, as with any other tensor.
        start: flat index in the whole tensor, in that order, of the first element of ``local``.
        label: what it is, for messages ("gradient of 'fc.weight'").
        arrivals: reductions that are on their way to ``local``; None: there never are any.
        slice: the tensor-parallel slice of which ``local`` is a flat range from ``start`` on; None: it is of the whole.

    Metadata, ``detach``, ``zero_``, ``to``, ``new_zeros`` and its kind work. ``torch.distributed.checkpoint`` takes
    it. Everything else that would read or change values raises ``ShardAccessError``: no rank has the whole tensor, and
    an answer from a shard alone would be silently wrong.
    """

    start: int
    label: str
    arrivals: Arrivals | None
    slice: TensorSlice | None
    _local: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        start: int,
        shape: Sequence[int],
        label: str,
        dtype: torch.dtype | None = None,
        order: StorageOrder = None,
        slice: TensorSlice | None = None,
    ) -> FlatShard:
        shard = Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides_of(shape, order), dtype=dtype or local.dtype, device=local.device
        )
        shard._local, shard.start, shard.label, shard.arrivals, shard.slice = local, start, label, None, slice
        return shard

    @property
    def local(self) -> Tensor:
        if self.arrivals is not None:
            self.arrivals.wait()
        return self._local

    @local.setter
    def local(self, local: Tensor) -> None:
        self._local = local

    @property
    def order(self) -> StorageOrder:
        return storage_order(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the disabled one, without a class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _SAME_SHARD:
            return args[0]._again()
        if func is aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            return args[0]._unfilled(kwargs)
        if func in _NEW:  # no value is read: what is made is a plain tensor
            return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **(kwargs or {}))
        if func is aten._to_copy.default:
            return args[0]._moved(kwargs)
        if func is aten.zero_.default:
            return args[0]._zero()
        if func is aten._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        shard = next(a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, FlatShard))
        if func is aten.add_.Tensor and shard is args[0] and torch._C._current_graph_task_id() != -1:
            # Autograd accumulates: a cast has given the parameter a node of autograd that has no hook of ours.
            raise ParameterError(
                f"{shard.label.removeprefix('gradient of ')} was moved or cast after the optimizer was made, with its "
                "gradient: call .to() / .half() before, or make a new optimizer"
            )
        raise shard._refusal(str(func), use_of(func, args, kwargs or {}, shard))

    def item(self) -> Any:
        raise self._refusal("item()", Use.READ)

    def tolist(self) -> Any:
        raise self._refusal("tolist()", Use.READ)

    def numpy(self, *, force: bool = False) -> Any:
        raise self._refusal("numpy()", Use.READ)

    def share_memory_(self) -> Any:
        raise self._refusal("share_memory_()", Use.COPY)

    def __dlpack__(self, **options: Any) -> Any:
        raise self._refusal("__dlpack__()", Use.READ)

    def __dlpack_device__(self) -> Any:
        raise self._refusal("__dlpack_device__()", Use.READ)

    # Code that writes a tensor's memory into a file asks for these: safetensors for one.
    def untyped_storage(self) -> Any:
        # torch.compile describes a parameter together with its gradient, and reads nothing of either.
        if called_from(_DESCRIBES):
            return torch.UntypedStorage(self.numel() * self.itemsize, device="meta")
        raise self._refusal("untyped_storage()", Use.COPY)

    def storage(self) -> Any:
        raise self._refusal("storage()", Use.COPY)

    def _refusal(self, what: str, use: Use) -> ShardAccessError:
        return ShardAccessError(
            f"{what} on the {self.label}: it is sharded, {self.what_is_here()}. {REMEDIES[kind_of(self.label)][use]}"
        )

    def what_is_here(self) -> str:
        """Say how much of it this rank holds, for messages."""
        here, whole = self._local.numel(), self.numel()
        if not whole:
            return "it has no elements"
        elements = "its one element" if whole == 1 else f"all {whole} elements of it"
        if not here:
            return f"{'another rank holds' if whole == 1 else 'other ranks hold'} {elements}"
        if here == whole:
            return f"this rank holds {elements}, and other ranks none"
        return f"this rank holds {here} of its {whole} elements"

    def same_range(self, other: FlatShard) -> bool:
        """True if this rank's elements are those that ``other`` has."""
        ranges = {(shard.start, shard._local.numel(), shard.order, shard.slice) for shard in (self, other)}
        return self.shape == other.shape and len(ranges) == 1

    def _of_same_range(self, local: Tensor, dtype: torch.dtype | None = None) -> FlatShard:
        """Make a shard of the same range, with its elements in ``local``. ``dtype``: of the whole; None: this one's."""
        return FlatShard(local, self.start, self.shape, self.label, dtype or self.dtype, self.order, self.slice)

    def _again(self) -> FlatShard:
        with torch.inference_mode(False):  # torch gives it the version counter of this one, which one of those has not
            again = self._of_same_range(self._local)
        again.arrivals = self.arrivals
        return again

    def _moved(self, options: Mapping[str, Any]) -> FlatShard:
        """Copy to another device or dtype, as clients move an optimizer's state about."""
        local = self.local.to(options.get("device"), options.get("dtype"), copy=True)
        return self._of_same_range(local, options.get("dtype"))

    def _unfilled(self, options: Mapping[str, Any]) -> FlatShard:
        """Do as ``new_empty`` of the same shape: for ``dcp.async_save``, which then fills it."""
        local = torch.empty_like(self._local, dtype=options.get("dtype"), device=options.get("device"))
        return self._of_same_range(local, options.get("dtype"))

    def _zero(self) -> FlatShard:
        if self.arrivals is not None:
            self.arrivals.zero(self._local)
        else:
            self._local.zero_()
        return self

    # -- what torch.distributed.checkpoint asks for --------------------------------------------------------------

    def __create_write_items__(self, fqn: str, tensor: object) -> list[Any]:
        return dcp.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        return dcp.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return dcp.chunk_at(self, index.offset)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = f"[{self.start}:{self.start + self._local.numel()}]"
        return f"FlatShard({self.label}, shape={tuple(self.shape)}, dtype={self.dtype}, local={held} of {self.numel()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        return self._of_same_range(self.local.clone())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        parts = (self.local, self.start, tuple(self.shape), self.label, self.dtype, self.order, self.slice)
        return rebuild_flat_shard, parts


def rebuild_flat_shard(
    local: Tensor,
    start: int,
    shape: tuple[int, ...],
    label: str,
    dtype: torch.dtype,
    order: StorageOrder = None,
    slice: TensorSlice | None = None,
) -> FlatShard:
    """Unpickle a ``FlatShard``. Registered with torch, so ``torch.load(weights_only=True)`` accepts it."""
    return FlatShard(local, start, shape, label, dtype, order, slice)


torch.serialization.add_safe_globals([rebuild_flat_shard, TensorSlice, Cut])
