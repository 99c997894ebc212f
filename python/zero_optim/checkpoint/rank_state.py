"""One rank's state: what ``state_dict`` gives, and how ``load_state_dict`` takes it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine import Engine
from ..step.optimizer_state import Copy
from .state_dict import Groups, load_groups, make_state_dict, match_state, saved_order, step_counts


def save(engine: Engine, groups: Groups) -> dict[str, Any]:
    """Tensors are views of the live state."""
    engine.keep_edits()
    return make_state_dict(groups, engine.states.export(), engine.hyper.steps.float())


def load(engine: Engine, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Collective. Nothing is changed on any rank unless the state fits on all. The caller has settled the engine."""
    everyone, parameters = engine.sharding.everyone, engine.parameters
    saved: dict[int, Mapping[str, Any]] = {}
    copies: list[Copy] = []
    with everyone.raising_together("load_state_dict"):
        saved = match_state(state_dict, parameters, engine.rule)
    engine.reducer.restore_order(everyone.gather_objects(saved_order(saved), "load_state_dict")[0])
    with everyone.raising_together("load_state_dict"):
        copies = engine.states.plan_load(saved, parameters.labels)
    engine.states.load(copies)
    engine.states.restart(set(parameters.trained) - set(saved))
    engine.hyper.steps.copy_(step_counts(saved, len(engine.hyper.steps)))
    load_groups(groups, state_dict["param_groups"])
    engine.exchange.outdate()  # gradients may have been dropped
