"""Programs that once went wrong: the first fourteen at commit 3cffa92, the others as random programs found them."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from fuzz.program import (
    AllReduce,
    Backward,
    Boom,
    Chain,
    Clip,
    Evaluate,
    Group,
    ModuleZero,
    Net,
    Op,
    Optim,
    Program,
    Renew,
    Save,
    SaveFull,
    SetLr,
    Step,
    Unit,
    Use,
    Zero,
)


def _optim(count: int, stage: int = 2, size: int = 600, **options: object) -> Optim:
    units = {"units": tuple(range(count))} if stage == 3 else {}
    return Optim(shapes=((size,),) * count, stage=stage, groups=(Group(tuple(range(count))),), **units, **options)


def _all(o: int, count: int, c: float = 1.0) -> tuple[Use, ...]:
    return tuple(Use(o, p, c) for p in range(count))


def _both(*ranks: Chain, no_sync: tuple[int, ...] = ()) -> Backward:
    return Backward(ranks if len(ranks) == 2 else (ranks[0], ranks[0]), no_sync)


def _alone(chain: Chain) -> tuple[Op, ...]:
    return (Backward((chain,)), Step(0), Zero(0))


def _loop(chain: Chain, *optims: int) -> tuple[Op, ...]:
    return (_both(chain), *(Step(o) for o in optims), *(Zero(o) for o in optims))


D, G = _all(0, 6), _all(1, 6)
D_AND_G = _both((*G, *D), (*_all(1, 6, 2.0), *_all(0, 6, -0.5)))
D_ALONE = _both(D, _all(0, 6, 2.0))


def _gan(zero: type, *more: Op) -> tuple[Op, ...]:
    """An iteration of a GAN: the second backward goes through both, and steps one."""
    return (zero(0), D_ALONE, D_ALONE, Step(0), zero(1), D_AND_G, Step(1), *more)


def _net(*units: int, after: int | None = None, o: int = 0) -> tuple[Net]:
    """Calls of units that each use the parameter of their number; what raises comes after one of them."""
    links: list[Unit | Boom] = []
    for k in units:
        links.append(Unit(k, ((k, 1.0),)))
        if k == after:
            links.append(Boom())
    return (Net(o, tuple(links)),)


ONE = (_optim(8),)
OF_ALL_SIZES = (replace(_optim(4, stage=3), shapes=((600,), (5,), (300,), (40, 10))),)
IN_CLOSURE = (_both(_net(0, 1, 2, 3), _net(0, 1, 2)),)
PAIR = (_optim(6), _optim(6, bucket_cap_mb=25.0))
SHARDED = (_optim(6, stage=3),)
EIGHT, HALF = _all(0, 8), (*_all(0, 4), Boom(), *_all(0, 8)[4:])
EVERY = _net(0, 1, 2, 3, 4, 5)
RAISED = (*_loop(EIGHT, 0), *_loop(EIGHT, 0), _both(HALF, EIGHT))

KNOWN: dict[str, Program] = {
    "two optimizers, one left out under no_sync": Program(
        2,
        (_optim(1), _optim(1)),
        (
            *_loop((Use(0, 0), Use(1, 0)), 0, 1),
            _both((Use(0, 0), Use(1, 0))),
            _both((Use(0, 0), Use(1, 0)), (Use(1, 0),), no_sync=(0, 1)),
            Step(0),
            Step(1),
        ),
    ),
    "the loop of DCGAN": Program(2, PAIR, _gan(ModuleZero) * 4),
    "two optimizers, module.zero_grad": Program(
        2,
        (_optim(6), _optim(2)),
        (
            _both((*_all(0, 6), *_all(1, 2))),
            ModuleZero(0),
            ModuleZero(1),
            _both((*_all(0, 6, -1.0), *_all(1, 2))),
            Step(0),
        )
        * 4,
    ),
    "a raise on one rank, module.zero_grad": Program(
        2, ONE, (*RAISED, ModuleZero(0), _both(_all(0, 8, -1.0), _all(0, 8, -2.0)), Step(0))
    ),
    "gradients to zero after no_sync": Program(
        2, (_optim(2, stage=0),), (_both(EIGHT[:2]), _both(EIGHT[:2], no_sync=(0,)), ModuleZero(0, False), Step(0))
    ),
    "two optimizers, a plain gradient": Program(
        2,
        (_optim(1), _optim(1)),
        (
            _both(
                (
                    Use(0, 0),
                    Use(1, 0),
                )
            ),
        ),
    ),
    "a GAN and the user's all_reduce": Program(2, PAIR, _gan(Zero, AllReduce(1.0)) * 6),
    "a GAN's checkpoint": Program(2, PAIR, _gan(Zero, SaveFull(0), SaveFull(1)) * 3),
    "a raise on one rank, full_state_dict": Program(2, ONE, (*RAISED, SaveFull(0), Step(0))),
    "a raise on one rank, close": Program(2, ONE, (*RAISED, Renew(0, 2), _both(EIGHT), Step(0))),
    "stage 3, the last units skipped": Program(
        2, SHARDED, (*_loop(EVERY, 0), _both(EVERY, _net(0, 1)), Step(0), Zero(0), _both(EVERY, _net(0, 3)), Step(0))
    ),
    "stage 3, a raise on one rank, no_sync": Program(
        2,
        SHARDED,
        (
            *_loop(EVERY, 0),
            _both(EVERY, _net(0, 1, 2, 3, 4, 5, after=3)),
            _both(EVERY, no_sync=(0,)),
            _both(EVERY),
            Step(0),
        ),
    ),
    "a raise before the first gradient, zero_grad": Program(
        2, ONE, (*_loop(EIGHT, 0), *_loop(EIGHT, 0), _both((*EIGHT, Boom()), EIGHT), Zero(0), *_loop(EIGHT, 0))
    ),
    "a clip, then no_sync on one rank": Program(
        2,
        (_optim(2),),
        (*_loop(EIGHT[:2], 0), _both(EIGHT[:2]), Clip(0, 1.0), _both(EIGHT[:2], None, no_sync=(0,)), Step(0)),
    ),
    "a raise on one rank, zeroed in place before anything left": Program(
        2, (_optim(1, stage=0),), (_both((Boom(), Use(0, 0)), (Use(0, 0),)), ModuleZero(0, False), Step(0))
    ),
    "two sharded models in a backward, units of the first skipped": Program(
        2,
        (_optim(2, stage=3), _optim(3, stage=3)),
        (
            _both((*_net(0, 1, 2, o=1), *_net(0, 1))),
            _both((*_net(0, 1), *_net(0, 1, 2, o=1)), (*_net(0, 1), *_net(1, o=1))),
            Step(0),
            Step(1),
        ),
    ),
    "a raise in a sharded model under no_sync, then another's step": Program(
        2,
        (_optim(2), _optim(2, stage=3)),
        (
            _both((*_net(0, 1, o=1), *_all(0, 2))),
            Step(1),
            _both((Net(1, ()),), (Net(1, (Boom(),)),), no_sync=(1,)),
            Step(0),
            Step(1),
        ),
    ),
    "stage 3, a raise under no_sync, zeroed in place beside an average": Program(
        2,
        (_optim(2, stage=3),),
        (
            _both(_net(0, 1)),
            _both((Boom(), Net(0, ())), (Boom(), *_net(0, 1)), no_sync=(0,)),
            ModuleZero(0, False),
            Step(0),
        ),
    ),
    "stages 0 and 3, a raise in a unit or before it": Program(
        3,
        (_optim(1, stage=0), _optim(2, stage=3)),
        (
            Backward(((*_net(0, 1, o=1), Use(0, 0)),) * 3),
            Step(1),
            Step(0),
            Backward(
                (
                    (Net(1, (*_net(0, 1, o=1)[0].links, Boom())), Use(0, 0)),
                    (*_net(0, o=1), Boom(), Use(0, 0)),
                    (*_net(1, o=1), Boom(), Use(0, 0)),
                )
            ),
            Step(1),
            Step(0),
        ),
    ),
    "stages 0 and 3 in a backward, units skipped": Program(
        2,
        (_optim(3, stage=3, prefetch=0), _optim(1, stage=0)),
        (
            _both((*_net(0, 1, 2), Use(1, 0))),
            Step(0),
            Step(1),
            _both((Net(0, (Unit(2, ()),)), Use(1, 0)), (*_net(0), Use(1, 0))),
            Step(0),
            Step(1),
        ),
    ),
    "two optimizers of stage 0, a raise on one rank": Program(
        2,
        (_optim(1, stage=0), _optim(1, stage=0)),
        (_both((Use(0, 0), Use(1, 0)), (Boom(), Use(0, 0), Use(1, 0))), Step(1), Step(0)),
    ),
    "stage 3, a raise in the root, zeroed in place after no_sync": Program(
        2,
        (_optim(2, stage=3),),
        (
            _both(_net(0, 1), no_sync=(0,)),
            _both(_net(1), (Net(0, (Unit(1, ((1, 1.0),)), Boom())),)),
            ModuleZero(0, False),
            Step(0),
        ),
    ),
    "reductions in step alone, and a raise on one rank after a clip": Program(
        2,
        (_optim(1, stage=1, overlap_grad_reduce=False),),
        (_both((Use(0, 0),)), Clip(0, 0.25), _both((Boom(), Use(0, 0)), (Use(0, 0),)), Step(0), Step(0), Zero(0)),
    ),
    "stage 3, a raise before any unit of a backward without gradients, after a clip": Program(
        2,
        (_optim(2, stage=3),),
        (_both(_net(0, 1), no_sync=(0,)), Clip(0, 0.25), _both((Net(0, ()),), (Net(0, ()), Boom())), Step(0)),
    ),
    "a raise in one sharded model under no_sync, then another's forward": Program(
        2,
        (_optim(2, stage=3), _optim(2, stage=3)),
        (
            _both((Net(0, (*_net(0, 1)[0].links, Boom())),), _net(0, 1), no_sync=(0,)),
            _both(_net(0, 1, o=1)),
            Step(0),
            Step(1),
        ),
    ),
    "stage 3, a raise in the root, zeroed to None, then another forward": Program(
        2,
        (_optim(2, stage=3),),
        (
            _both(_net(0, 1), no_sync=(0,)),
            _both(_net(0), _net(0, after=0)),
            ModuleZero(0, True),
            _both(_net(1)),
            Step(0),
        ),
    ),
    "stage 3, zeroed to None after no_sync, then a raise in the root": Program(
        2,
        (_optim(2, stage=3),),
        (
            *_loop(_net(0, 1), 0),
            _both(_net(0), _net(0, 1), no_sync=(0,)),
            ModuleZero(0, True),
            _both(_net(0), _net(0, after=0)),
            Step(0),
        ),
    ),
    "zeroed in place between two clips": Program(
        2,
        tuple(_optim(1, stage=stage) for stage in (0, 1, 2)),
        (
            _both(tuple(Use(o, 0, 1.0) for o in range(3))),
            *(op for o in range(3) for op in (Clip(o, 1.0), ModuleZero(o, False), Clip(o, 1.0), Step(o))),
        ),
    ),
    "two optimizers of stage 0, a raise in one, then a backward of the other on one rank": Program(
        2,
        (_optim(1, stage=0), _optim(1, stage=0)),
        (_both((Boom(), Use(1, 0))), _both((Use(0, 0),), None), Step(0), Step(1)),
    ),
    "dropped after a clip, and then steps without gradients": Program(
        2,
        (_optim(1, stage=2),),
        (Clip(0, 1.0), ModuleZero(0, True), Step(0), Step(0), _both(_all(0, 1)), Step(0)),
    ),
    "stage 3, zeroed in place between two clips": Program(
        2,
        (_optim(1, stage=3),),
        (_both(_net(0)), Clip(0, 1.0), ModuleZero(0, False), Clip(0, 1.0), Step(0)),
    ),
    "stage 3, another order in the first forward that trains": Program(
        2,
        (_optim(2, stage=3),),
        (
            Evaluate((_net(0, 1)[0], _net(0, 1)[0])),
            _both(_net(1, 0)),
            Step(0),
            _both(_net(1), _net(1, 0)),
            Step(0),
        ),
    ),
    "stage 3, a raise in units of another order, then a step with a closure": Program(
        2,
        OF_ALL_SIZES,
        (*_loop(_net(0, 1, 2, 3), 0), _both(_net(3, 1, 0, 2), _net(3, 1, 0, 2, after=0)), Step(0, IN_CLOSURE)),
    ),
    "stage 3, a raise before the first unit, then a step with a closure": Program(
        2,
        OF_ALL_SIZES,
        (
            *_loop(_net(0, 1, 2, 3), 0),
            _both(_net(0, 1, 2, 3), (*_net(0, 1, 2, 3), Boom())),
            Step(0, IN_CLOSURE, before=(SetLr(0, 0, 0.25),), after=(Zero(0),)),
        ),
    ),
    "stage 3, a raise before the first unit under no_sync, then a step with a closure": Program(
        2,
        OF_ALL_SIZES,
        (
            *_loop(_net(0, 1, 2, 3), 0),
            _both(_net(0, 1, 2, 3), (*_net(0, 1, 2, 3), Boom()), no_sync=(0,)),
            Step(0, IN_CLOSURE),
        ),
    ),
    "stage 3, twice no backward after a forward, once under no_sync, then a step with a closure": Program(
        2,
        OF_ALL_SIZES,
        (
            *_loop(_net(0, 1, 2, 3), 0),
            _both(_net(0, 1), (*_net(0, 1), Boom()), no_sync=(0,)),
            Step(0),
            _both(_net(0, 3), (*_net(0, 1), Boom())),
            Step(0, IN_CLOSURE),
        ),
    ),
    "stage 3, a raise before any unit of a backward without gradients, then a step with a closure": Program(
        2,
        OF_ALL_SIZES,
        (*_loop(_net(0, 1, 2, 3), 0), _both((Net(0, ()),), (Net(0, ()), Boom())), Step(0, IN_CLOSURE)),
    ),
    "stage 3, gradients on one rank, then a step with a closure": Program(
        2,
        OF_ALL_SIZES,
        (*_loop(_net(0, 1, 2, 3), 0), _both(_net(0, 1), (Net(0, ()),)), Step(0, IN_CLOSURE)),
    ),
    "stage 3, a forward without gradients, then a step with a closure that reaches one rank": Program(
        2,
        (_optim(2, stage=3),),
        (
            _both((Net(0, (Unit(0, ()), Unit(1, ()))),)),
            Step(0, (_both(_net(1), (Net(0, ()),)),)),
        ),
    ),
    "stage 3, a raise, the module's zero_grad, then a backward without gradients": Program(
        2,
        (_optim(1, stage=3),),
        (
            _both((Net(0, (Boom(), Unit(0, ((0, 1.0),)))),), _net(0)),
            ModuleZero(0, True),
            _both((Net(0, ()),)),
            Step(0),
        ),
    ),
    "stage 3 on one rank, parameters off the device, a step that skips without one unit": Program(
        1,
        (_optim(2, stage=3, store="cpu", param_offload=True),),
        (*(op for _ in range(2) for op in _alone(_net(0, 1))), *_alone((Net(0, (Unit(1, ((1, inf),)),)),))),
    ),
    "gradients zeroed after they were copied to the host": Program(
        2,
        (_optim(2, dtype="bfloat16", store="cpu"),),
        (*_loop(EIGHT[:2], 0), *_loop(EIGHT[:2], 0), _both(EIGHT[:2]), ModuleZero(0, False), Step(0)),
    ),
    "slices at stage 0, a copy of the state of the second parameter": Program(
        4,
        (Optim(shapes=((5,), (5,)), stage=0, groups=(Group((0, 1)),), cut=(0, 0)),),
        (Backward((_all(0, 2),) * 4), Step(0), Save(0)),
    ),
    "stages 0 and 3, a raise between units, then a backward of stage 0": Program(
        2,
        (_optim(2, stage=0), _optim(3, stage=3)),
        (
            _both(_net(0, 1, 2, o=1), no_sync=(1,)),
            _both((*_net(0, 1, 2, o=1), *_all(0, 2)), (*_net(0, 1, 2, o=1, after=1), *_all(0, 2))),
            _both(_all(0, 2)),
            Step(0),
            Step(1),
        ),
    ),
    "stage 3 over a grid, a raise before the first unit on all ranks but one, zeroed in place": Program(
        4,
        (_optim(3, stage=3, mesh=True),),
        (
            Zero(0, to_none=False),
            Backward(
                ((*_net(0, 1, 2), Boom()),) * 3 + ((Net(0, (Unit(0, ((0, 0.5),)), Boom(), Unit(1, ()), Unit(2, ()))),),)
            ),
            Zero(0, to_none=False),
        ),
    ),
}
