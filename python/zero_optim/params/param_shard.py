"""Stand-ins for a parameter while it is sharded, and the class of one that is in flight."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..callers import called_from, called_within
from ..errors import ParameterError, ShardAccessError
from .flat_shard import SAME_SHARD, FlatShard
from .storage_order import flat_of, storage_order
from .tensor_slice import is_distributed, local_of, slice_of

aten = torch.ops.aten
_PIPELINE_BACKWARD = "torch.distributed.pipelining._backward"
_REMEDY = "enter zero_optim.gather_parameters(model) on every rank"


class StateDictShard(FlatShard):
    """The stand-in for a sharded parameter in ``state_dict()``.

    It loads into the same rank's shard again, and ``torch.distributed.checkpoint`` takes it. It cannot be pickled into
    a file, which would silently lack what other ranks hold.
    """

    def _of_same_range(self, local: Tensor, dtype: torch.dtype | None = None) -> FlatShard:
        return StateDictShard(local, self.start, self.shape, self.label, dtype or self.dtype, self.order, self.slice)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        raise ShardAccessError(
            f"the {self.label} is sharded and cannot be pickled or saved: {self.what_is_here()}. On every rank, call "
            "zero_optim.full_model_state_dict(model) for weights to save, "
            f"or zero_optim.checkpoint.save, in which each writes its part; to pickle a module, {_REMEDY} around it"
        )


def _of_plain(name: str) -> Any:
    """Make an attribute of ``ParamShard`` that is its plain parameter's."""
    return property(
        lambda shard: getattr(shard.plain, name),
        lambda shard, value: setattr(shard.plain, name, value),
        lambda shard: setattr(shard.plain, name, None),
    )


class ParamShard(StateDictShard):
    """A ``torch.nn.Parameter`` in all but its values, of which this rank holds a flat range.

    Gradient, hooks and ``requires_grad`` are those of ``plain``. A whole tensor, or the same shard, can be copied into
    it, as ``load_state_dict`` does. All else that would read or change values raises ``ShardAccessError``.

    Attributes:
        plain: the parameter that takes its place while the unit is unsharded.
        flat: the flat parameters that it is a part of.
    """

    plain: Tensor
    flat: Any  # ``FlatParams``, whose module imports this one; None until they are split, before anybody uses it

    @staticmethod
    def __new__(cls, local: Tensor, start: int, plain: Tensor, name: str) -> ParamShard:
        order, own, label = storage_order(plain), slice_of(plain), f"parameter {name!r}"
        shard: Any = FlatShard.__new__(cls, local, start, plain.shape, label, plain.dtype, order, own, plain.device)
        shard.plain, shard.flat = plain, None
        shard._is_param = True
        return shard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as in FlatShard
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten.copy_.default and isinstance(args[0], ParamShard):
            return args[0]._copy(args[1])
        if func in SAME_SHARD and args[0].on_disk:
            with args[0].flat.memory.opened() as shard, torch.inference_mode(False):
                return args[0]._of_same_range(args[0].part_of(shard).clone())
        if func is aten.zero_.default or func is aten._foreach_zero_.default:
            raise (args[0] if isinstance(args[0], ParamShard) else args[0][0])._refusal(str(func))
        if func is aten._to_copy.default:
            raise ParameterError(
                f"{args[0].label} is sharded: move or cast the model, or change its memory format, before "
                "zero_optim.shard_module(model, ...)"
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _refusal(self, what: str) -> ShardAccessError:
        refused = super()._refusal(what)
        if not called_within(_PIPELINE_BACKWARD):
            return refused
        return ShardAccessError(
            f"{refused}. A schedule with backwards of inputs and of weights apart, such as ZBVZeroBubble, asks for "
            "parameters that are gone when it does: at stage 3 take Schedule1F1B or ScheduleInterleaved1F1B, or take "
            "stage 2"
        )

    # Python code finds these; torch's own code in C++ does not.
    grad, requires_grad, grad_dtype = _of_plain("grad"), _of_plain("requires_grad"), _of_plain("grad_dtype")
    main_grad, grad_added_to_main_grad = _of_plain("main_grad"), _of_plain("grad_added_to_main_grad")
    register_hook = _of_plain("register_hook")
    register_post_accumulate_grad_hook = _of_plain("register_post_accumulate_grad_hook")
    device_mesh, placements = _of_plain("device_mesh"), _of_plain("placements")  # of a ``DTensor``

    def part_of(self, shard: Tensor) -> Tensor:
        """View this rank's elements in ``shard``, all of the flat parameters' shard."""
        return shard.narrow(0, self._local.storage_offset(), self._local.numel())

    @property
    def on_disk(self) -> bool:
        """Whether its elements rest on a disk."""
        return self.flat is not None and self.flat.memory.on_disk

    @property  # type: ignore[misc]  # the base class may set it
    def local(self) -> Tensor:
        if self.on_disk:
            raise ShardAccessError(f"`.local` of the {self.label}, which rests on a disk: to read it, {_REMEDY}")
        return super().local

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # as when a model is moved to where it is
            raise self._refusal("assigning .data")

    def requires_grad_(self, requires_grad: bool = True) -> ParamShard:
        self.plain.requires_grad_(requires_grad)
        return self

    def _copy(self, source: Tensor) -> ParamShard:
        # True if a shard has the elements that this rank has.
        shards = (self, source) if isinstance(source, FlatShard) else (self,)
        same = len({(shard.start, shard._local.numel(), shard.order, shard.slice) for shard in shards}) == 1
        if source.shape != self.shape or not same:
            given = repr(source) if isinstance(source, FlatShard) else f"a tensor of shape {tuple(source.shape)}"
            raise ShardAccessError(
                f"the {self.label} cannot take over {given}: give it a whole tensor of shape "
                f"{tuple(self.shape)}, or the shard that as many ranks saved with the same units"
            )
        if self.flat.shown:
            if isinstance(source, FlatShard):
                raise ShardAccessError(
                    f"the {self.label} is whole now, and takes a whole tensor: load shards outside of "
                    "gather_parameters, with model.load_state_dict"
                )
            self.plain.detach().copy_(source)
        else:
            with self.flat.memory.recording():
                values = source.local if isinstance(source, FlatShard) else self._own_range(source.detach())
                shard = self.flat.memory.open()  # only now: ``source`` may be a shard of the same that is to be read
                try:
                    self.part_of(shard).copy_(values)
                finally:
                    self.flat.memory.close(written=True)
        torch.autograd.graph.increment_version((self.plain, self._local))  # below autograd nothing counts the write
        return self

    def _own_range(self, source: Tensor) -> Tensor:
        """Take what this rank has of ``source``, a whole tensor or a ``DTensor``."""
        if is_distributed(source):
            flat = local_of(source.redistribute(placements=self.placements)).reshape(-1)  # type: ignore[attr-defined]
        else:
            flat = flat_of(source if self.slice is None else self.slice.of(source), self.order)
        return flat.narrow(0, self.start, self._local.numel())

    def module_load(self, other: Tensor, assign: bool = False) -> ParamShard:
        """Serve ``load_state_dict`` under ``torch.__future__.set_swap_module_params_on_conversion(True)``: torch swaps
        the parameter with what is returned. So return another shard over the same memory, of the same parameter."""
        self.copy_(other)
        same = ParamShard(self._local, self.start, self.plain, "")
        same.label, same.flat, same.arrivals = self.label, self.flat, self.arrivals
        return same

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        raise ShardAccessError(
            f"the {self.label} is sharded and cannot be copied: to copy the model or this module, {_REMEDY} around it"
        )


def plain_parameter(parameter: Tensor) -> Tensor:
    """Find the parameter that a module's forward uses, which holds gradient and hooks."""
    return parameter.plain if isinstance(parameter, ParamShard) else parameter


arriving: dict[int, Any] = {}
"""The ``Bucket`` of each parameter that is in flight, by the parameter's ``id``."""

_FIELDS = ("grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "_version")
_GRAD: Any = Tensor.grad
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in (*_FIELDS, "is_cuda", "is_cpu", "is_meta", "is_sparse")),
    *(_GRAD.__set__, _GRAD.__delete__, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
}
"""What reads or writes no values."""


def _order_after_arrival(parameter: Tensor) -> None:
    if (bucket := arriving.get(id(parameter))) is not None:  # else another thread has waited meanwhile
        bucket.order_reader()


class ArrivingParameter(nn.Parameter):
    """The class of a parameter from ``step`` until its all-gather is waited for, with ``overlap_param_gather``.

    It has stale values then. Whoever first reads or writes it waits for its bucket, whose parameters are plain again
    from then on. Calls of modules never see it, as their hooks have waited. Not seen here is what takes a tensor past
    ``__torch_function__``: ``torch.func``, a scripted function, an extension built by pybind.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _METADATA:
            for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
                if type(tensor) is ArrivingParameter:
                    _order_after_arrival(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # ``nn.Parameter(p)`` has seen this class, and wants a tensor of the class that ``p`` has now.
        made = func is Tensor.detach and called_from("torch.nn.parameter")
        return torch.Tensor._make_subclass(nn.Parameter, result) if made else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _order_after_arrival(self)  # first: a copy must be of the class that it has then
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _order_after_arrival(self)
        return self.__reduce_ex__(protocol)
