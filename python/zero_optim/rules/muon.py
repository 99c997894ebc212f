"""Muon: momentum whose matrix is made orthogonal before it is subtracted (Jordan et al., "Muon: An optimizer for hidden
layers in neural networks", 2024), as ``torch.optim.Muon`` has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..params.layout import WholeParameters
from ..params.storage_order import flat_of
from .codec import Codec
from .options import Fixed, Flag, Number, is_number
from .state_tensor import Begins, StateTensor
from .update_rule import MASTER, ShardUpdate, UpdateRule, Whole

_BUFFER = "momentum_buffer"
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of torch's iteration. Singular values grow fast where they are small; most end between 0.6 and 1.25."""

ITERATION = ("ns_coefficients", "ns_steps", "eps")
"""Options of the iteration, in the order of ``orthogonalized``."""

SCALES = (None, "original", "match_rms_adamw", "spectral_unclamped")
"""What ``adjust_lr_fn`` may be; see ``scale_of``."""

_HEADS = ("head", "lm_head", "output", "classifier", "score")
"""Names of modules that ``split_for_muon`` takes for heads."""


class _Scale(Fixed):
    """``adjust_lr_fn``, of which None means "original"."""

    def same(self, value: Any, other: Any) -> bool:
        return (value or "original") == (other or "original")


class Muon(UpdateRule):
    """One momentum, 4 bytes a parameter less than AdamW; for matrices alone.

    Options of its own, the same for all groups: ``ns_coefficients``, ``ns_steps`` and ``eps`` of the Newton-Schulz
    iteration, and ``adjust_lr_fn``, by which the rate depends on a matrix's shape; see ``scale_of``.
    """

    options = (
        Number("lr", 1e-3, rate=True),
        Number("weight_decay", 0.1),
        Number("momentum", 0.95),
        Flag("nesterov", True),
        Fixed("ns_coefficients", QUINTIC),
        Fixed("eps", 1e-7),
        Fixed("ns_steps", 5),
        _Scale("adjust_lr_fn", None),
    )
    tensors = (StateTensor(MASTER, Begins.PARAMETER), StateTensor(_BUFFER))
    own_columns = ("lr", "decay", "momentum", "share", "nesterov")
    counterparts = frozenset(("Muon",))
    needs_steps = False
    layout = WholeParameters()
    measures_rows = False

    def check(self) -> None:
        super().check()
        coefficients, steps, eps = (self.defaults[name] for name in ITERATION)
        listed = isinstance(coefficients, tuple | list) and len(coefficients) == 3
        if not listed or not all(is_number(number) and math.isfinite(number) for number in coefficients):
            raise ValueError(f"ns_coefficients must be three numbers, got {coefficients!r}")
        if type(steps) is not int or not 1 <= steps < 100:
            raise ValueError(f"ns_steps must be a number from 1 to 99, got {steps!r}")
        if not is_number(eps) or not eps > 0:
            raise ValueError(f"eps must be a number above 0, got {eps!r}")
        if self.defaults["adjust_lr_fn"] not in SCALES:
            known = ", ".join(map(repr, SCALES))
            raise ValueError(f"adjust_lr_fn must be one of {known}, got {self.defaults['adjust_lr_fn']!r}")

    def refuse_saved(self, number: int, group: Mapping[str, Any]) -> str | None:
        foreign = next((name for name in ("betas", "dampening") if name in group), None)
        if foreign is None:
            return None
        return (
            f"parameter group {number} of the state has {foreign}: it is of another optimizer, whose momentum means "
            "something else than Muon's. Load the model alone, and let the momentum begin anew"
        )

    def refuse_parameter(self, parameter: Tensor) -> str | None:
        if parameter.dim() == 2:
            return None
        return (
            f"has {parameter.dim()} dimensions, and Muon makes matrices orthogonal: give it to a group with another "
            'rule, {"params": others, "rule": rules.AdamW()}, as embeddings, heads, norms and biases. '
            "ShardedMuon.split(model) sorts them"
        )

    def make_columns(self, given: Mapping[str, Tensor], steps: Tensor) -> Mapping[str, Tensor]:
        """``decay`` multiplies the parameter, ``share`` is that of the new gradient in the momentum."""
        return {**given, "decay": 1 - given["lr"] * given["weight_decay"], "share": 1 - given["momentum"]}

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        """Matrix by matrix, by the same operations wherever it lies: so the result depends on no number of ranks."""
        for shard in shards:
            skipped = None if shard.found_inf is None else shard.found_inf.reshape(()) != 0
            for whole in shard.wholes:
                self._update(shard, whole, skipped)

    def _update(self, shard: ShardUpdate, whole: Whole, skipped: Tensor | None) -> None:
        """``skipped``: [] bool, whether nothing is updated; None: it is."""
        c = dict(zip(self.columns, shard.hyper[whole.param], strict=True))
        scale = c["grad_factor"] if shard.grad_scale is None else c["grad_factor"] * shard.grad_scale
        g = whole.of(shard.grad).float() * scale
        live = c["active"] != 0
        if skipped is not None:
            shard.marks[whole.param] |= (skipped & live & ~g.isfinite().all()).int()
            live = live & ~skipped
        buffer, p = (self._read(shard, name, whole) for name in (_BUFFER, MASTER))
        momentum = torch.lerp(buffer, g, c["share"])
        ahead = torch.where(c["nesterov"] != 0, torch.lerp(g, momentum, c["momentum"]), momentum)
        iteration = [self.defaults[name] for name in ITERATION]
        direction = flat_of(orthogonalized(whole.shaped(ahead), *iteration), whole.order).float()
        new = p * c["decay"] - direction * (c["lr"] * scale_of(whole.shape, self.defaults["adjust_lr_fn"]))
        self._write(shard, _BUFFER, whole, torch.where(live, momentum, buffer))
        self._write(shard, MASTER, whole, torch.where(live, new, p))
        if shard.parameter.dtype != torch.float32:  # else it is its own master
            parameter = whole.of(shard.parameter)
            parameter.copy_(torch.where(live, new.to(parameter.dtype), parameter))
        rates = () if shard.rates is None else shard.rates[whole.param]
        for name, rate in zip(self.averages, rates, strict=True):
            average = whole.of(shard.state[name])
            average.copy_(torch.where(live, average + rate * (new - average), average))

    def _read(self, shard: ShardUpdate, name: str, whole: Whole) -> Tensor:
        """[numel] fp32: a view of what is stored, or a copy that was decoded."""
        codec, tensor = self._codec(shard, name), StateTensor(name)
        if codec is None:
            return whole.of(shard.state.get(name, shard.parameter))
        parts = [shard.state[part.name].narrow(0, *part.span(whole.start, whole.numel)) for part in codec.parts(tensor)]
        return codec.decode_flat(tensor, [*parts, whole.of(shard.parameter)] if codec.reads_parameter else parts)

    def _write(self, shard: ShardUpdate, name: str, whole: Whole, values: Tensor) -> None:
        codec, tensor = self._codec(shard, name), StateTensor(name)
        if codec is None:
            whole.of(shard.state.get(name, shard.parameter)).copy_(values)
            return
        for part, encoded in zip(codec.parts(tensor), codec.encode_flat(values), strict=True):
            shard.state[part.name].narrow(0, *part.span(whole.start, whole.numel)).copy_(encoded)

    def _codec(self, shard: ShardUpdate, name: str) -> Codec | None:
        """The one that this shard has the state by: fp32 parameters have no master, and so none that is split."""
        codec = self.codecs.get(name)
        return codec if codec and codec.parts(StateTensor(name))[0].name in shard.state else None


def orthogonalized(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Make the singular values of ``matrix`` about 1, by Newton-Schulz iterations: X <- a X + (b A + c A A) X, A being
    X X^T.

    Where a matrix is zero the result is zero. The operations are those of ``torch.optim.Muon``, one by one.

    Args:
        matrix: [rows, columns] of any floating dtype; it is not changed.
        coefficients: (a, b, c), of each step.
        eps: the least norm that the matrix is divided by.

    Returns [rows, columns] bf16, in another memory format perhaps.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16, copy=True)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def scale_of(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Give what multiplies the rate of a matrix of this shape.

    None and "original": sqrt(max(1, rows / columns)), by Jordan. "match_rms_adamw": 0.2 sqrt(max(rows, columns)), with
    which AdamW's rate and weight decay may stay (Liu et al., "Muon is Scalable for LLM Training", 2025).
    "spectral_unclamped": sqrt(rows / columns) (Bernstein, "Deriving Muon", 2025).
    """
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / max(columns, 1)
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(1.0, ratio))


def split_for_muon(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """See ``ShardedMuon.split``."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    embedded, vocabularies = {id(table.weight) for table in tables}, {table.num_embeddings for table in tables}
    matrices: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        in_head = name.split(".")[-2:-1] in [[head] for head in _HEADS]
        hidden = parameter.dim() == 2 and id(parameter) not in embedded and parameter.shape[0] not in vocabularies
        (matrices if hidden and not in_head else others).append((name, parameter))
    return matrices, others
