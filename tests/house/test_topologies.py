"""The table of docs/topologies.md, topologies by features: each cell names the stages at which a test trains so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
HEAD = "| stages at which there is a test"

GRIDS, TENSOR, EXPERTS = "face/test_grids.py", "face/test_tensor_parallel.py", "face/test_experts.py"
PIPELINES, UNITS = "face/test_pipelines.py", "units/test_stage3_parity.py"
NORMS = "face/test_norms_of_topologies.py::test_each_gradient_counts_once"
FUZZ = "random_programs/test_optimizers.py::test_programs_compute_what_plain_torch_does"
# What trains as one process does, in ways that have many of the features.
GRID = (f"{GRIDS}::test_every_cell_equals_the_oracle_bit_for_bit",)
ALL_ON_GRID = f"{GRIDS}::test_all_that_may_happen"
GRID_3 = (*GRID, f"{GRIDS}::test_stage_3_equals_stage_2_bit_for_bit", ALL_ON_GRID)
CUT = (f"{TENSOR}::test_trains_as_one_process_does",)
CUT_GRID = (f"{TENSOR}::test_replicas_of_shards_of_slices",)
OF_EXPERTS = (f"{EXPERTS}::test_trains_as_one_process_does",)
ALL_OF_EXPERTS = (f"{EXPERTS}::test_all_that_may_happen",)
PIPELINE = (f"{PIPELINES}::test_a_pipeline_trains_like_one_process",)
ALL_IN_PIPELINE = f"{PIPELINES}::test_all_that_may_happen"
PLAIN = ("face/test_plain_slices.py::test_trains_as_one_process_does",)
ALL_IN_SLICES = ("face/test_plain_slices.py::test_all_that_may_happen",)
THREE = ("face/test_three_dimensions.py::test_pipeline_tensor_parallelism_and_sharing_train_as_one_process_does",)
ALL_IN_CONTEXT = ("face/test_context_parallel.py::test_all_that_may_happen",)
CONTEXT = ("face/test_context_parallel.py::test_gradients_are_averaged_over_both_dimensions", *ALL_IN_CONTEXT)

MUON_SLICES = "rules/test_muon_tensor_parallel.py"
MUON_IN_SLICES = f"{MUON_SLICES}::test_it_has_the_bits_of_whole_matrices"
MUON_ANYWHERE = "face/test_muon_on_topologies.py::test_each_update_is_that_in_float64_and_a_wrong_rate_is_found"

TESTED = {
    "training": {
        "flat": (
            "face/test_parity.py::test_every_cell_equals_the_oracle_bit_for_bit",
            f"{UNITS}::test_given_gradients_make_what_the_oracle_makes",
        ),
        "hybrid": GRID_3,
        "tensor parallel": CUT,
        "hybrid × tensor parallel": CUT_GRID,
        "experts": (*OF_EXPERTS, f"{EXPERTS}::test_stage_3_is_refused"),
        "pipeline": PIPELINE,
        "context parallel": CONTEXT,
        "plain slices": (*PLAIN, "face/test_plain_slices.py::test_every_cell_equals_the_oracle_bit_for_bit"),
        "pipeline × tensor parallel": THREE,
    },
    "clipping": {
        "flat": ("step/test_clip.py::test_any_norm_of_gradients_of_any_size",),
        "hybrid": (f"{GRIDS}::test_norms_count_each_gradient_once", ALL_ON_GRID),
        "tensor parallel": CUT,
        "hybrid × tensor parallel": (*CUT_GRID, NORMS),
        "experts": (*OF_EXPERTS, NORMS),
        "pipeline": (*PIPELINE, NORMS),
        "pipeline × tensor parallel": (*THREE, NORMS),
        "context parallel": CONTEXT,
        "plain slices": (*PLAIN, NORMS),
    },
    "overflow": {
        "flat": (
            "step/test_grad_scaler.py::test_one_ranks_overflow_skips_the_step_everywhere",
            f"{UNITS}::test_an_overflow_on_one_rank_skips_the_step_on_all",
        ),
        "hybrid": (f"{GRIDS}::test_an_overflow_on_one_rank_skips_the_step_on_all", ALL_ON_GRID),
        "tensor parallel": CUT,
        "experts": OF_EXPERTS,
        "pipeline": (
            f"{PIPELINES}::test_what_is_not_finite_on_one_stage_skips_the_step_of_all",
            ALL_IN_PIPELINE,
            "face/test_muon_on_topologies.py::test_what_is_not_finite_on_one_stage_leaves_no_trace_on_any",
        ),
        "plain slices": PLAIN,
        "hybrid × tensor parallel": CUT_GRID,
        "pipeline × tensor parallel": THREE,
        "context parallel": ALL_IN_CONTEXT,
    },
    "`no_sync`": {
        "flat": (
            "face/test_parity.py::test_every_cell_equals_the_oracle_bit_for_bit",
            f"{UNITS}::test_every_cell_equals_stage_2_bit_for_bit",
        ),
        "hybrid": GRID_3,
        "tensor parallel": CUT,
        "hybrid × tensor parallel": CUT_GRID,
        "experts": OF_EXPERTS,
        "pipeline": PIPELINE,
        "plain slices": PLAIN,
        "pipeline × tensor parallel": THREE,
        "context parallel": ALL_IN_CONTEXT,
    },
    "absent gradients": {
        "flat": (FUZZ, "grads/test_absent_gradients.py::test_a_skipped_parameter_keeps_state_value_and_step_count"),
        "hybrid": (*GRID, ALL_ON_GRID),
        "tensor parallel": (*CUT, FUZZ),
        "experts": OF_EXPERTS,
        "plain slices": ALL_IN_SLICES,
        "hybrid × tensor parallel": CUT_GRID,
        "pipeline": (ALL_IN_PIPELINE,),
        "pipeline × tensor parallel": THREE,
        "context parallel": ALL_IN_CONTEXT,
    },
    "frozen parameters": {
        "flat": (FUZZ, "grads/test_frozen_and_growing.py::test_frozen_parameters_cost_no_state"),
        "tensor parallel": CUT,
        "experts": (*ALL_OF_EXPERTS, "face/test_experts_bits.py::test_every_cell_equals_the_oracle_bit_for_bit"),
        "plain slices": ALL_IN_SLICES,
        "pipeline": (f"{PIPELINES}::test_a_parameter_that_thaws_on_one_stage", ALL_IN_PIPELINE),
        "hybrid": (ALL_ON_GRID,),
        "hybrid × tensor parallel": CUT_GRID,
        "pipeline × tensor parallel": THREE,
        "context parallel": ALL_IN_CONTEXT,
    },
    "state off the device": {
        "flat": ("stores/test_moving_between_stores.py::test_every_store_takes_over_from_every_other",),
        "hybrid": GRID_3,
        "tensor parallel": CUT,
        "experts": ALL_OF_EXPERTS,
        "pipeline": (f"{PIPELINES}::test_a_pipeline_with_state_off_the_device", ALL_IN_PIPELINE),
        "plain slices": ALL_IN_SLICES,
        "hybrid × tensor parallel": CUT_GRID,
        "pipeline × tensor parallel": THREE,
        "context parallel": ALL_IN_CONTEXT,
    },
    "checkpoints": {
        "flat": ("checkpoint/test_any_to_any.py::test_at_the_same_scale_training_goes_on_bit_for_bit",),
        "hybrid": ("checkpoint/test_any_to_any.py::test_on_a_grid_training_goes_on_bit_for_bit", ALL_ON_GRID),
        "tensor parallel": (
            "checkpoint/test_tensor_parallel_checkpoints.py::test_loads_on_any_other_mesh_bit_for_bit",
        ),
        "pipeline": (f"{PIPELINES}::test_a_stage_is_saved_and_loaded_by_itself", ALL_IN_PIPELINE),
        "plain slices": (
            "checkpoint/test_plain_slices_checkpoints.py::test_loads_on_any_data_parallel_ranks_bit_for_bit",
        ),
        "experts": ("checkpoint/test_experts_checkpoints.py::test_loads_on_any_other_mesh_bit_for_bit",),
        "hybrid × tensor parallel": (
            "checkpoint/test_tensor_parallel_checkpoints.py::test_what_replicas_of_shards_of_slices_have_saved_loads_bit_for_bit",
        ),
        "pipeline × tensor parallel": THREE,
        "context parallel": ALL_IN_CONTEXT,
    },
    "`full_state_dict`": {
        "flat": (
            "face/test_full_state.py::test_moving_over_worlds_and_stages_changes_no_bit",
            f"{UNITS}::test_full_states_carry_a_run_from_stage_2_to_3_and_back",
        ),
        "hybrid": GRID_3,
        "tensor parallel": CUT,
        "hybrid × tensor parallel": CUT_GRID,
        "experts": OF_EXPERTS,
        "plain slices": PLAIN,
        "pipeline": (ALL_IN_PIPELINE,),
        "pipeline × tensor parallel": THREE,
        "context parallel": ALL_IN_CONTEXT,
    },
    "Muon, against float64": {
        "flat": ("rules/test_muon_in_float64.py::test_each_update_is_that_in_float64",),
        "hybrid": (MUON_ANYWHERE, "rules/test_muon_replicas.py::test_it_has_the_bits_of_ranks_that_repeat_the_work"),
        "tensor parallel": (MUON_IN_SLICES,),
        "hybrid × tensor parallel": (f"{MUON_SLICES}::test_replicas_have_the_same",),
        "plain slices": (MUON_IN_SLICES, MUON_ANYWHERE),
        "experts": (MUON_ANYWHERE,),
        "pipeline": (MUON_ANYWHERE,),
        "context parallel": (MUON_ANYWHERE,),
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
