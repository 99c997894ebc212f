"""The table of docs/topologies.md, topologies by features: each cell names the stages at which a test trains so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
HEAD = "| stages at which there is a test"

PIPELINES, UNITS = "face/test_pipelines.py", "units/test_stage3_parity.py"
NORMS = "face/test_norms_of_topologies.py::test_each_gradient_counts_once"
FUZZ = "random_programs/test_optimizers.py::test_programs_compute_what_plain_torch_does"
# What trains as one process does, by AdamW and by several rules, in one training that has all of the features.
ALL = "face/test_rules_on_topologies.py::test_trains_as_one_process_does"
BITS = "face/test_bits_of_topologies.py::test_every_cell_equals_the_oracle_bit_for_bit"
EVERYWHERE = (
    "hybrid",
    "tensor parallel",
    "hybrid × tensor parallel",
    "experts",
    "pipeline",
    "pipeline × tensor parallel",
    "context parallel",
    "plain slices",
)

MUON_SLICES = "rules/test_muon_tensor_parallel.py"
MUON_IN_SLICES = f"{MUON_SLICES}::test_it_has_the_bits_of_whole_matrices"


def _all(flat: tuple[str, ...], **more: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """``more``: further tests of a topology, whose name is written with underscores."""
    also = {name.replace("_", " "): of for name, of in more.items()}
    return {"flat": flat, **{topology: (ALL, *also.get(topology, ())) for topology in EVERYWHERE}}


TESTED = {
    "training": _all(
        (BITS, ALL, f"{UNITS}::test_given_gradients_make_what_the_oracle_makes"),
        hybrid=(BITS, "face/test_grids.py::test_stage_3_equals_stage_2_bit_for_bit"),
        tensor_parallel=(BITS,),
        experts=(BITS, "face/test_rules_on_topologies.py::test_experts_at_stage_3_are_refused"),
        plain_slices=(BITS,),
    ),
    "clipping": {
        topology: (*of, NORMS)
        for topology, of in _all(("step/test_clip.py::test_any_norm_of_gradients_of_any_size",)).items()
    },
    "overflow": _all(
        (
            "step/test_grad_scaler.py::test_one_ranks_overflow_skips_the_step_everywhere",
            f"{UNITS}::test_an_overflow_on_one_rank_skips_the_step_on_all",
        ),
        pipeline=(f"{PIPELINES}::test_what_is_not_finite_on_one_stage_skips_the_step_of_all",),
    ),
    "`no_sync`": _all((BITS, f"{UNITS}::test_every_cell_equals_stage_2_bit_for_bit"), hybrid=(BITS,)),
    "absent gradients": _all(
        (FUZZ, "grads/test_absent_gradients.py::test_a_skipped_parameter_keeps_state_value_and_step_count"),
        hybrid=(BITS,),
        tensor_parallel=(BITS, FUZZ),
        experts=(BITS,),
    ),
    "frozen parameters": _all(
        (FUZZ, "grads/test_frozen_and_growing.py::test_frozen_parameters_cost_no_state"),
        experts=(BITS,),
        pipeline=(f"{PIPELINES}::test_a_parameter_that_thaws_on_one_stage",),
    ),
    "state off the device": _all(
        ("stores/test_moving_between_stores.py::test_every_store_takes_over_from_every_other",), hybrid=(BITS,)
    ),
    "checkpoints": _all(
        ("checkpoint/test_any_to_any.py::test_at_the_same_scale_training_goes_on_bit_for_bit",),
        hybrid=("checkpoint/test_any_to_any.py::test_on_a_grid_training_goes_on_bit_for_bit",),
        tensor_parallel=(
            "checkpoint/test_tensor_parallel_checkpoints.py::test_loads_on_any_other_mesh_bit_for_bit",
            "checkpoint/test_tensor_parallel_checkpoints.py::test_what_replicas_of_shards_of_slices_have_saved_loads_bit_for_bit",
        ),
        plain_slices=(
            "checkpoint/test_plain_slices_checkpoints.py::test_loads_on_any_data_parallel_ranks_bit_for_bit",
        ),
        experts=("checkpoint/test_experts_checkpoints.py::test_loads_on_any_other_mesh_bit_for_bit",),
    ),
    "`full_state_dict`": _all(
        (
            "face/test_full_state.py::test_moving_over_worlds_and_stages_changes_no_bit",
            f"{UNITS}::test_full_states_carry_a_run_from_stage_2_to_3_and_back",
        )
    ),
    "Muon, against float64": {
        "flat": ("rules/test_muon_in_float64.py::test_each_update_is_that_in_float64",),
        "hybrid": (ALL, "rules/test_muon_replicas.py::test_it_has_the_bits_of_ranks_that_repeat_the_work"),
        "tensor parallel": (MUON_IN_SLICES,),
        "hybrid × tensor parallel": (f"{MUON_SLICES}::test_replicas_have_the_same",),
        "plain slices": (MUON_IN_SLICES, ALL),
        "experts": (ALL,),
        "pipeline": (ALL,),
        "context parallel": (ALL,),
    },
}
"""The tests of each cell, by feature and topology. They are parametrized by its stages, or walk them."""


def _cells() -> dict[tuple[str, str], str]:
    lines = (ROOT / "docs" / "topologies.md").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(HEAD))
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:])
    rows = rows[: next(number for number, row in enumerate(rows) if len(row) != len(head))]
    return {(row[0], topology): cell for row in rows for topology, cell in zip(head[1:], row[1:], strict=True)}


CELLS = _cells()


def test_what_has_a_test_is_in_the_table_and_nothing_else():
    tested = {(feature, topology) for feature, of in TESTED.items() for topology in of}
    assert tested == {place for place, cell in CELLS.items() if cell}


@pytest.mark.parametrize("place", [place for place, cell in CELLS.items() if cell], ids=" of ".join)
def test_a_cell_names_stages_and_has_tests_that_exist(place):
    assert re.fullmatch(r"[0-3]((, |–)[0-3])*(; 3: `\w+Error`)?", CELLS[place])
    for test in TESTED[place[0]][place[1]]:
        file, _, name = test.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
