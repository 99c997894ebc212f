"""Which of the order programs run: on every pair of streams, or where there are none, or for want of time, fewer.

``ZERO_KERNELS_ORDER_PROGRAMS=few`` is for want of time.
"""

from __future__ import annotations

import gc
import os

from order_programs import STREAMS, WHAT, OrderProgram, few_programs
from places import ON_GPU

FEW = os.environ.get("ZERO_KERNELS_ORDER_PROGRAMS") == "few"
WIDTH = 256 if ON_GPU else 16


def of_one_rank(*, few: bool = FEW) -> list[OrderProgram]:
    if ON_GPU:
        return few_programs(WIDTH) if few else _all_programs()
    return _once_each(0) if few else _programs_on_one_stream()


def of_ranks(world_size: int) -> list[OrderProgram]:
    """On a CPU all on two ranks, and each once on four, at another stage than on one. Few: every fifth of these, which
    has every stage. On a GPU, which ranks may have to share, a quarter. Few are a quarter of that, and a third of it
    again on four ranks: without, those of stage 1 took 70 s."""
    if ON_GPU:
        return few_programs(WIDTH, each=1)[:: 3 if world_size > 2 else 1] if FEW else few_programs(WIDTH)
    if FEW:
        return _once_each(world_size // 2)[::5]
    return _once_each(world_size // 2) if world_size > 2 else _programs_on_one_stream()


def few_objects() -> None:
    """Before many programs in a row. The first backward of every optimizer looks for a DDP among all objects that
    Python tracks. From here on those that are there now are not among them, and no collection looks at them again."""
    import zero_optim  # noqa: F401

    gc.collect()
    gc.freeze()


def _all_programs() -> list[OrderProgram]:
    return [
        OrderProgram(stage, what, made_on, trained_on, WIDTH)
        for what, stages in WHAT.items()
        for stage in stages
        for made_on, trained_on in STREAMS
    ]


def _programs_on_one_stream() -> list[OrderProgram]:
    return list(dict.fromkeys(program.on_one_stream for program in _all_programs()))


def _once_each(turn: int) -> list[OrderProgram]:
    """Each key of WHAT at one of its stages. Other turns have other stages."""
    return [
        OrderProgram(stages[(number + turn) % len(stages)], what, width=WIDTH)
        for number, (what, stages) in enumerate(WHAT.items())
    ]
