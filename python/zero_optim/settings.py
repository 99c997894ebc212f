"""The options that every sharded optimizer has, beside its parameters and its rule: types, defaults and checks."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist

from .rules.codec import MASTERS, STATE_DTYPES, codecs_for, default_master
from .rules.options import EMA_DECAY, Decays, check_choice, listed_decays
from .rules.update_rule import UpdateRule
from .stores.offload import Offload, read_offload
from .validate import PARAMETER_DTYPES

Init = TypeVar("Init", bound=Callable[..., None])

# Ranks may write these in different ways: the described state shows what they come to.
_MAY_DIFFER = ("ema_decay", "master", "state_dtype")
_LEFT_OUT_WHERE_NONE = ("state_offload", "device_budget")


class RankOptions(TypedDict, total=False):
    """The options that name ranks; None by default."""

    process_group: dist.ProcessGroup | None
    mesh: dist.DeviceMesh | None
    tensor_parallel: dist.DeviceMesh | dist.ProcessGroup | None
    pipeline: dist.DeviceMesh | dist.ProcessGroup | None


class ShardingOptions(RankOptions, total=False):
    """The keyword arguments that every sharded optimizer has. ``ShardedOptimizer`` documents them, ``Settings`` has
    their defaults."""

    stage: int | None
    bucket_cap_mb: float | None
    grad_reduce_dtype: torch.dtype | None
    grad_accumulation_dtype: torch.dtype | None
    max_grad_norm: float | None
    skip_nonfinite: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    state_offload: str | None
    device_budget: int | str | None
    ema_decay: float | Sequence[float] | None
    master: str | None
    state_dtype: str
    telemetry: bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of ``ShardingOptions``, without ranks, as they were given or by default."""

    stage: int  # by default 3 for a sharded model, else 2
    bucket_cap_mb: float | None = None
    grad_reduce_dtype: torch.dtype | None = None
    grad_accumulation_dtype: torch.dtype | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    state_offload: str | None = None
    device_budget: int | str | None = None
    ema_decay: float | Sequence[float] | None = None
    master: str | None = None
    state_dtype: str = "fp32"
    telemetry: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any], *, default_stage: int) -> Settings:
        """Take the settings out of an optimizer's keyword arguments; None as ``stage`` is the default."""
        own = {name: value for name, value in options.items() if name not in RankOptions.__annotations__}
        stage = own.pop("stage", None)
        return cls(stage=default_stage if stage is None else stage, **own)

    def check(self) -> None:
        """Raise ValueError for the first option that is out of range."""
        if type(self.stage) is not int or self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage!r}")
        if self.bucket_cap_mb is not None and not 0 < self.bucket_cap_mb < math.inf:
            raise ValueError(f"bucket_cap_mb must be None or positive (MiB), got {self.bucket_cap_mb!r}")
        if self.grad_reduce_dtype not in (None, *PARAMETER_DTYPES):
            raise ValueError(
                f"grad_reduce_dtype must be None or one of {PARAMETER_DTYPES}, got {self.grad_reduce_dtype!r}"
            )
        self._check_accumulation()
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be None or positive, got {self.max_grad_norm!r}")
        check_choice("master", self.master, (None, *MASTERS))
        check_choice("state_dtype", self.state_dtype, STATE_DTYPES)
        if not isinstance(self.telemetry, bool):
            raise ValueError(f"telemetry must be True or False, got {self.telemetry!r}")
        read_offload(self.state_offload, self.device_budget)

    def _check_accumulation(self) -> None:
        if self.grad_accumulation_dtype not in (None, torch.float32):
            raise ValueError(
                f"grad_accumulation_dtype must be None or torch.float32, got {self.grad_accumulation_dtype!r}"
            )
        if self.grad_accumulation_dtype is not None and self.stage == 0:
            raise ValueError(
                "grad_accumulation_dtype: at stage 0 gradients add up in .grad; leave it out, or take stage=1"
            )
        if self.grad_accumulation_dtype is not None and self.stage == 1 and not self.overlap_grad_reduce:
            raise ValueError(
                "grad_accumulation_dtype: at stage 1 with overlap_grad_reduce=False gradients add up in .grad until "
                "step; leave one of the two out, or take stage=2"
            )

    @property
    def offload(self) -> Offload:
        """Where the state lives."""
        return read_offload(self.state_offload, self.device_budget)

    @property
    def group_defaults(self) -> Mapping[str, Any]:
        """The options that parameter groups have, with their defaults."""
        return {} if self.ema_decay is None else {EMA_DECAY: self.ema_decay}

    def applied_to(self, rule: UpdateRule, groups: Sequence[Mapping[str, Any]], *, plain_slices: int = 1) -> UpdateRule:
        """Make ``rule`` ready for its first parameter groups, with state in the form that was asked for, and averages.

        ``plain_slices``: see ``UpdateRule``.
        """
        rule = rule.for_groups(groups)
        master = self.master or default_master(tensor.dtype for group in groups for tensor in group["params"])
        codecs = codecs_for(rule.tensors, rule.nonnegative, master, self.state_dtype)
        rule = rule.with_codecs(codecs | {**rule.codecs})  # a copy
        rule.plain_slices = plain_slices
        if self.ema_decay is not None:
            rule = rule.with_averages(Decays(EMA_DECAY, listed_decays(self.ema_decay)))
        rule.check()
        return rule

    def described(self) -> dict[str, Any]:
        """Describe the options, by name, for all ranks to agree on, beside the rules as they were applied."""
        given = {name: value for name, value in vars(self).items() if name not in _MAY_DIFFER}
        return {name: value for name, value in given.items() if name not in _LEFT_OUT_WHERE_NONE or value is not None}


def _option_parameters() -> list[inspect.Parameter]:
    """The options as keyword-only parameters, with types and defaults."""
    defaults = {field.name: field.default for field in fields(Settings) if field.name != "stage"}
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, kind, default=defaults.get(name), annotation=getattr(hint, "__forward_arg__", hint))
        for name, hint in ShardingOptions.__annotations__.items()
    ]


def shows_options(init: Init, base: type | None = None) -> Init:
    """Show in the signature of a constructor, for ``help`` and editors, what it takes as ``**kwargs``: the options, or
    the keyword-only arguments of the class ``base``, options included."""
    *own, kwargs = inspect.signature(init).parameters.values()
    assert kwargs.kind is inspect.Parameter.VAR_KEYWORD
    more = _option_parameters() if base is None else inspect.signature(base).parameters.values()
    names = {parameter.name for parameter in own}
    shown = [p for p in more if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in names]
    init.__signature__ = inspect.Signature([*own, *shown], return_annotation="None")  # type: ignore[attr-defined]
    return init


def check_keywords(optimizer: type, base: type, given: Iterable[str]) -> None:
    """Raise TypeError for the first keyword argument that none of ``optimizer``'s classes, up to ``base``, has."""
    if all(keyword in ShardingOptions.__annotations__ for keyword in given):
        return
    classes = [cls for cls in optimizer.__mro__ if issubclass(cls, base)]
    shown = [name for cls in classes for name in inspect.signature(cls).parameters]
    known = list(dict.fromkeys(shown))
    for keyword in given:
        if keyword not in ShardingOptions.__annotations__:
            near = difflib.get_close_matches(keyword, known, n=1)
            meant = [*near, *(other for other in known if other.endswith(f"_{keyword}"))][:1]
            hint = f"; did you mean {meant[0]}?" if meant else ""
            raise TypeError(f"{optimizer.__name__} has no argument {keyword!r}{hint}")
