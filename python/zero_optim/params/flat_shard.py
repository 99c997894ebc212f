"""``FlatShard``: a tensor in a parameter's shape, of which this rank holds one flat range.

``torch.distributed.checkpoint`` knows tensors as unions of hyper-rectangles. A flat range of an N-dimensional tensor is
at most 2N-1 of them, each a view of the shard's memory::

    . . . # #     the rest of a row
    # # # # #     whole rows
    # # . . .     the start of a row

For a channels_last tensor they are cut with its dimensions in the order of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..callers import DCP_SAVER, called_from, locals_of_callers
from ..comm.handle import Arrivals
from ..errors import ParameterError, ShardAccessError
from .storage_order import Cut, StorageOrder, storage_order, stored_dims, strides_of, tensor_dims, view_of
from .tensor_slice import TensorSlice

aten = torch.ops.aten
_DESCRIBES = "torch._subclasses.meta_utils"
SAME_SHARD = {aten.detach.default, aten.alias.default}
_NEW = {
    *(aten.new_empty.default, aten.new_empty_strided.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}


class FlatShard(Tensor):
    """A parameter's gradient or state in its true shape, dtype and device, with only ``local`` in memory.

    Attributes:
        local: 1-D tensor, this rank's elements; empty where the rank owns none. Its dtype may be wider than that
            of the whole: gradients can be reduced in fp32. Reading it waits for what is on its way to it.
        order: of the elements, as the whole tensor would lie in memory: read off its strides, as with any other tensor.
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
        device: torch.device | None = None,
    ) -> FlatShard:
        shard = Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides_of(shape, order), dtype=dtype or local.dtype, device=device or local.device
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
        kwargs = kwargs or {}
        if func in SAME_SHARD:
            with torch.inference_mode(False):  # torch gives it the version counter of the first, which it lacks in one
                again = args[0]._of_same_range(args[0]._local)
            again.arrivals = args[0].arrivals
            return again
        if func is aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):  # ``dcp.async_save`` fills it
            dtype = kwargs.get("dtype")
            local = torch.empty_like(args[0]._local, dtype=dtype, device=kwargs.get("device"))
            return args[0]._of_same_range(local, dtype)
        if func in _NEW:  # no value is read: what is made is a plain tensor
            return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
        if func is aten._to_copy.default:  # as clients move an optimizer's state about
            dtype = kwargs.get("dtype")
            return args[0]._of_same_range(args[0].local.to(kwargs.get("device"), dtype, copy=True), dtype)
        if func is aten.zero_.default:
            return args[0]._zero()
        if func is aten._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        shard = next(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, FlatShard))
        if func is aten.add_.Tensor and shard is args[0] and torch._C._current_graph_task_id() != -1:
            # Autograd accumulates: a cast has given the parameter a node of autograd that has no hook of ours.
            raise ParameterError(
                f"{shard.label.removeprefix('gradient of ')} was moved or cast after the optimizer was made, with its "
                "gradient: call .to() / .half() before, or make a new optimizer"
            )
        raise shard._refusal(str(func))

    # Code that writes a tensor's memory into a file asks for its storage: safetensors for one.
    def untyped_storage(self) -> Any:
        # torch.compile describes a parameter together with its gradient, and reads nothing of either.
        if called_from(_DESCRIBES):
            return torch.UntypedStorage(self.numel() * self.itemsize, device="meta")
        raise self._refusal("untyped_storage()")

    def _refusal(self, what: str) -> ShardAccessError:
        remedy = REMEDIES.get(self.label.partition(" ")[0], REMEDIES["state"])
        return ShardAccessError(f"{what} on the {self.label}: it is sharded, {self.what_is_here()}. {remedy}")

    def what_is_here(self) -> str:
        """Describe how much of it this rank holds, for messages."""
        return f"this rank holds {self._local.numel()} of its {self.numel()} elements"

    def _of_same_range(self, local: Tensor, dtype: torch.dtype | None = None) -> FlatShard:
        """Make a shard of the same range, with its elements in ``local``. ``dtype``: of the whole; None: this one's."""
        return FlatShard(local, self.start, self.shape, self.label, dtype or self.dtype, self.order, self.slice)

    def _zero(self) -> FlatShard:
        if self.arrivals is not None:
            self.arrivals.zero(self._local)
        else:
            self._local.zero_()
        return self

    # -- what torch.distributed.checkpoint asks for --------------------------------------------------------------

    def __create_write_items__(self, fqn: str, tensor: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        # DCP does not pass the storage on, but it is a local of a caller.
        for writer in map(type, locals_of_callers("storage_writer", DCP_SAVER)):
            if any(kind.__name__ == "HuggingFaceStorageWriter" for kind in writer.__mro__):
                raise ShardAccessError(
                    f"the {self.label} is sharded, and {writer.__name__} keeps one piece of a tensor for each name and "
                    "file: the others would be lost. Use DCP's file system storage, or zero_optim.checkpoint.save; of "
                    "what that has written, `zero-optim export` makes Hugging Face's files"
                )
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in _parts(self)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for part in _parts(self):
            if part.offsets == tuple(index.offset):
                return view_of(self.local.narrow(0, part.first, math.prod(part.sizes)), part.sizes, self.order)
        raise ShardAccessError(f"this rank has no part of the {self.label} that begins at {tuple(index.offset)}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = f"[{self.start}:{self.start + self._local.numel()}]"
        return f"FlatShard({self.label}, shape={tuple(self.shape)}, dtype={self.dtype}, local={held} of {self.numel()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        return self._of_same_range(self.local.clone())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        parts = (self.local, self.start, tuple(self.shape), self.label, self.dtype, self.order, self.slice)
        return rebuild_flat_shard, parts


def rebuild_flat_shard(*parts: Any) -> FlatShard:
    """Unpickle a ``FlatShard``. Registered with torch, so ``torch.load(weights_only=True)`` accepts it."""
    return FlatShard(*parts)


torch.serialization.add_safe_globals([rebuild_flat_shard, TensorSlice, Cut])


# -- what is refused -----------------------------------------------------------------------------------------------

_LOCAL = "`.local` is this rank's part, a flat tensor"
REMEDIES = {
    "gradient": f"{_LOCAL}. The norm over all ranks is what opt.clip_grad_norm_(max_norm) returns; step then clips. "
    "For loss scaling use zero_optim.GradScaler. With stage=0 gradients are whole",
    "parameter": "Calling a module brings in the others, and so does a method that was given to "
    "zero_optim.register_forward_method; to read it here, enter zero_optim.gather_parameters(model) on every rank, to "
    "write it, with writeback=True. To save it, call zero_optim.checkpoint.save, or "
    "zero_optim.full_model_state_dict(model) for whole weights, on every rank",
    "state": "zero_optim.full_state_dict(opt) gives whole tensors, on every rank, and "
    "zero_optim.load_full_state_dict(opt, state) takes them, with your changes. To save it, call "
    f"zero_optim.checkpoint.save. {_LOCAL}",
}
"""By the first word of a label; state has other words."""


def _refusing(method: str) -> Any:
    """Make a method of ``FlatShard`` that is refused: what it does never reaches ``__torch_dispatch__``."""

    def refuse(self: FlatShard, *args: Any, **options: Any) -> Any:
        raise self._refusal(f"{method}()")

    return refuse


for method in ("item", "tolist", "numpy", "__dlpack__", "__dlpack_device__", "share_memory_", "storage"):
    setattr(FlatShard, method, _refusing(method))


# -- rectangles, for torch.distributed.checkpoint ------------------------------------------------------------------


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor: from ``offsets`` on, of ``sizes``. It begins at element ``first`` of the flat range."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


def rectangles(shape: Sequence[int], start: int, numel: int) -> Iterator[Rectangle]:
    """Cut a flat range, ``numel`` elements from ``start`` on, into rectangles. A tensor without elements is one."""
    if 0 in shape:
        yield Rectangle((0,) * len(shape), tuple(shape), 0)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    at, end = start, start + numel
    while at < end:
        # The outermost dimension of which a whole slice begins at ``at`` and fits.
        fitting = (dim for dim, stride in enumerate(strides) if at % stride == 0 and stride <= end - at)
        dim = next(fitting, None)
        if dim is None:  # of no dimensions: a scalar
            yield Rectangle((), (), 0)
            return
        offsets = tuple(at // stride % size for stride, size in zip(strides, shape, strict=True))
        count = min((end - at) // strides[dim], shape[dim] - offsets[dim])
        yield Rectangle(offsets, (*[1] * dim, count, *shape[dim + 1 :]), at - start)
        at += count * strides[dim]


def _parts(shard: FlatShard) -> Iterator[Rectangle]:
    """The rectangles of ``shard``, in the dimensions of its tensor."""
    order, own = shard.order, shard.slice
    if own is not None and own.cut is not None and shard.shape != own.shape:
        raise ShardAccessError(
            f"the {shard.label} has values for rows of this tensor-parallel rank's slice, which mean nothing "
            "elsewhere, and torch.distributed.checkpoint would take them for a part of one tensor: use "
            "zero_optim.checkpoint"
        )
    shape = shard.shape if own is None else own.local_shape
    for part in rectangles(stored_dims(shape, order), shard.start, shard._local.numel()):
        offsets = tensor_dims(part.offsets, order)
        if own is not None and own.cut is not None:
            offsets = tuple(at + own.offset * (dim == own.cut.dim) for dim, at in enumerate(offsets))
        yield replace(part, offsets=offsets, sizes=tensor_dims(part.sizes, order))
