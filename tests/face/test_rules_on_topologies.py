"""Every topology at every stage, by one rule and by several: it trains as one process does, whatever happens.

In each training a rank overflows, parameters are frozen and absent, gradients add up under ``no_sync``, steps are
clipped by every norm, and another optimizer goes on from a checkpoint: see ``eventful_cases``.
"""

from __future__ import annotations

from pathlib import Path

import eventful_cases
import pytest
from cells import slow_where
from harness import run_ranks
from topology_cases import TOPOLOGIES

QUICK = {
    "AdamW": {
        "flat": (0,),
        "hybrid": (3,),
        "context parallel": (1,),
        "tensor parallel": (3,),
        "hybrid × tensor parallel": (2,),
        "plain slices": (0,),
        "plain slices alone": (1,),
        "experts": (2, 3),
        "experts as slices": (0, 3),
        "pipeline, GPipe": (1,),
        "pipeline, 1F1B": (2,),
        "pipeline, Interleaved1F1B": (3,),
        "pipeline × tensor parallel": (3,),
        "hybrid, state over all": (2,),
    },
    "Muon, AdamW and Lion": {
        "flat": (3,),
        "experts as slices": (3,),
        "hybrid": (1,),
        "plain slices": (3,),
        "pipeline of two ranks": (2,),
        "hybrid, state over all": (3,),
        "hybrid × tensor parallel, state over all": (3,),
    },
}
"""The cells of ``make test``: each kind of topology, and each stage. The others are slow."""
LEFT_OUT = [("Muon, AdamW and Lion", "pipeline × tensor parallel")]  # eight ranks, which the grid has as well


def cells() -> list[tuple[str, str, int]]:
    """Every topology by each of the rules, at a stage of their own; and the quick ones."""
    return [
        (rule, name, stage)
        for number, (name, topology) in enumerate(TOPOLOGIES.items())
        for stage in topology.stages
        for turn, rule in enumerate(QUICK)
        if stage in QUICK[rule].get(name, ())
        or ((number + 2 * turn) % len(topology.stages) == stage and (rule, name) not in LEFT_OUT)
    ]


def trained(rank: int, world_size: int, name: str, rule: str, stage: int, folder: str) -> eventful_cases.Outcome:
    return eventful_cases.train(TOPOLOGIES[name].make, rule, stage, folder)


@pytest.mark.parametrize(
    ("rule", "name", "stage"), slow_where(lambda cell: cell[2] not in QUICK[cell[0]].get(cell[1], ()), cells())
)
def test_trains_as_one_process_does(rule: str, name: str, stage: int, tmp_path: Path) -> None:
    """AdamW as torch's does; by several rules each update is that in float64."""
    topology = TOPOLOGIES[name]
    outcomes = run_ranks(topology.ranks, trained, name, rule, stage, str(tmp_path), timeout=180)
    eventful_cases.assert_went_well(outcomes)
    together = topology.together or topology.ranks
    eventful_cases.assert_each_update_is_exact(outcomes, together, matrices=rule != "AdamW")
    model, backwards = topology.alone()
    if rule == "AdamW":
        eventful_cases.assert_as_in_one_process(outcomes, model, backwards, topology.tolerance, topology.part)
    else:  # in bf16
        eventful_cases.assert_first_norm(outcomes, model, backwards, 0.02)
