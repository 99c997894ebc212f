"""What ``make test`` leaves out, and ``make test-all`` runs: the table ``STAYS`` says what stays of each dear test.

A test that is not in the table stays whole. Cells of a test are left out where others meet the same code:

- ``pairs``: of a product of settings, few cells stay, in which every two values meet.
- ``every(n)``: of a list of like cells each n-th stays.
- ``Only(...)``: these cells stay; ``newest``: of files with results, the last of each kind.
- ``none("...")``: no cell stays; the words say which quicker test sees the same faults.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

Cell = tuple[int, ...]  # where its values stand among those of each parameter
Choice = Callable[[Mapping[str, Cell]], Iterable[str]]  # of cells by id: the ids of those that stay


def pairs(cells: Mapping[str, Cell]) -> list[str]:
    """Few of the cells, with every pair of values that all of them have.

    Greedy: next comes the cell with most pairs that are not there yet, the first of equals.
    """
    met = {name: set(itertools.combinations(enumerate(cell), min(2, len(cell)))) for name, cell in cells.items()}
    missing = set().union(*met.values())
    found: list[str] = []
    while missing:
        found.append(max(met, key=lambda name: len(met[name] & missing)))
        missing -= met[found[-1]]
    return found


def every(n: int, first: int = 0) -> Choice:
    return lambda cells: [*cells][first::n]


class Only:
    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, cells: Mapping[str, Cell]) -> tuple[str, ...]:
        return self.names


def newest(cells: Mapping[str, Cell]) -> list[str]:
    """Of results called ``DATE-COMMIT-KIND``, the newest of each kind."""
    return [*{name[21:]: name for name in sorted(cells)}.values()]


def none(instead: str) -> Choice:
    """``instead``: the test that sees the same faults."""
    return lambda cells: []


STAYS: dict[str, Choice] = {
    # Each kind of order program stays under one of the two simulations. `make race-check` runs all under four.
    "simulated_gpu/test_order_programs.py::test_with_streams": every(2),
    "simulated_gpu/test_order_programs.py::test_held_until_waited_for": every(2, first=1),
    "simulated_gpu/test_grids.py::test_the_bits_of_gloo_without_a_race": Only(
        "streams:never-stage 1",
        "streams:never-stage 2, in tiny buckets",
        "streams:never-stage 3, kept by nodes",
        "held+bound-stage 2, no_sync",
        "held+bound-stage 2, state on the host",
        "held+bound-stage 3",
    ),
    "simulated_gpu/test_faults.py::test_it_is_caught": every(2),
    "simulated_gpu/test_alarms.py::test_ranks_raise_in_the_same_step_and_train_on": pairs,
    "simulated_gpu/test_alarms.py::test_all_stages_of_a_pipeline_skip_what_one_skips": every(2, first=1),
    "simulated_gpu/test_alarms.py::test_they_do_whatever_comes_before_step": pairs,
    # Two ranks show what three do but for the order of three gradients, which the parity of bits shows.
    "fuzz/test_random_programs_of_the_face.py::test_programs_do_what_the_model_says": Only(
        "plain-flavour0-13-2",
        "empty parameters, three ranks-flavour3-4-3",
        "one rank-flavour4-10-1",
        "steps on three ranks",
        "stores on two ranks",
        "stage 3-flavour10-8-2",
        "slices of two tensor-parallel ranks-flavour12-8-4",
        "rules by group, three ranks-flavour15-3-3",
        "several optimizers, three ranks-flavour17-2-3",
    ),
    "units/test_shard_module_models.py::test_compiled_units": Only("False-False-aot_eager", "True-True-aot_eager"),
    "units/test_stage3_parity.py::test_every_cell_equals_stage_2_bit_for_bit": every(2),
    "units/test_stage3_parity.py::test_given_gradients_make_what_the_oracle_makes": every(2),
    "units/test_stage3_memory.py::test_the_peak_of_a_step_is_a_few_units_whatever_the_depth": Only(
        "plain", "re-entrant of two"
    ),
    "units/test_stage3_traffic.py::test_a_step_communicates_what_the_formula_says": Only("3"),
    "units/test_shard_module_errors.py::test_ranks_that_part_end_in_a_typed_error": Only("orders differ", "one stops"),
    "units/test_part_programs.py::test_programs_compute_what_plain_modules_do": Only("2"),
    "grads/test_interrupted_programs.py::test_after_some_gradients": Only("0-one rank", "1-both", "2-one rank"),
    "grads/test_interrupted_programs.py::test_before_the_first_gradient_on_all_ranks": Only("0", "2"),
    "grads/test_interrupted_programs.py::test_ranks_that_wait_for_each_other_in_vain_are_told_within_seconds": Only(
        "0-zero_grad", "2-backward"
    ),
    "grads/test_rounds_apart.py::test_two_ranks": Only("0-True", "2-True"),
    "grads/test_ready_often.py::test_backwards_in_which_parameters_become_ready_often": Only("two", "no_sync before"),
    "grads/test_absent_gradients.py::test_any_use_of_the_model_on_any_rank": Only("3"),
    "grads/test_frozen_and_growing.py::"
    "test_thawed_and_frozen_parameters_train_as_if_they_had_no_gradient_meanwhile": Only("1", "3"),
    "grads/test_frozen_and_growing.py::test_thawing_at_any_moment_of_a_step": Only("2"),
    "grads/test_zeroed_after_a_raise.py::test_zeroed_between_a_forward_and_its_backward": Only(
        "True-False", "False-True"
    ),
    "step/test_sleep.py::test_it_wakes_as_it_was_and_trains_as_if_it_had_not_slept": Only("2"),
    "step/test_norms.py::test_clips_of_all_and_of_some_equal_torchs": Only("0-1", "1-2", "2-1"),
    "step/test_clip.py::test_any_norm_of_gradients_of_any_size": every(2),
    "step/test_weight_edits.py::test_edits_through_the_parameter_hold": Only("bf16-2", "fp32-1"),
    "comm/test_standstill.py::test_waiting_in_different_groups": Only("within a node"),
    "comm/test_standstill.py::test_ranks_out_of_step_are_told_and_live_on": Only(
        "3-_another_backward_after_a_raise", "0-_one_backward_more"
    ),
    "comm/test_standstill.py::test_ranks_that_have_parted_are_refused_at_once": Only("3"),
    "comm/test_collectives.py::test_calls_and_bytes_of_one_step": Only("3"),
    "clients/test_meshes_of_clients.py::test_accelerate_by_a_parallelism_config": none(
        "clients/test_accelerate.py, and test_trainer_with_models_that_are_cut for slices"
    ),
    "clients/test_example_scripts.py::test_two_processes": Only("torchrun-accelerate", "torchrun-lightning"),
    "clients/test_transformers_client.py::test_the_loop_on_two_ranks": none(
        "test_sharded_trainer.py, which has Trainer's own loop on two ranks"
    ),
    "clients/test_transformers_client.py::test_a_model_trains_as_with_adamw": Only("llama"),
    "clients/test_sharded_trainer.py::test_every_stage_trains_saves_and_resumes": Only("2"),
    "clients/test_sharded_trainer.py::test_the_example": Only("2"),
    "clients/test_sharded_trainer.py::test_every_precision": none("test_every_stage_trains_saves_and_resumes, in bf16"),
    "clients/test_sharded_strategy.py::test_every_stage_trains_saves_and_resumes": Only("2"),
    "clients/test_sharded_strategy.py::test_every_precision": none(
        "test_every_stage_trains_saves_and_resumes, in bf16"
    ),
    "clients/test_channels_last_client.py::test_it_trains_as_under_adamw": Only("1-2", "2-3"),
    "train/test_train_ranks.py::test_a_resumed_run_repeats_the_whole_one": none(
        "test_a_run_goes_on_with_fewer_and_with_more_ranks, and test_train_one_rank.py"
    ),
    "train/test_train_ranks.py::test_every_stage_gives_the_same_losses": Only("1"),
    "train/test_train_one_rank.py::test_a_resumed_run_repeats_the_whole_one": Only(
        "bf16-small-state", "fp16-accumulate"
    ),
    "train/test_train_sharded.py::test_stage_3_is_stage_2": Only("fp16-accumulate"),
    "train/test_smaller_state_trains.py::test_a_smaller_state_reaches_the_same_loss": Only(
        "split-fp32", "split8-fp32", "fp32-int8", "split8-int8"
    ),
    "bench/test_scale.py::test_a_grid_reduces_within_a_replica_and_then_across": none(
        "face/test_grids.py counts the calls and bytes of both legs"
    ),
    "bench/test_bench_stages.py::test_slices_train_alike_whoever_shares_them": none("face/test_tensor_parallel.py"),
    "bench/test_bench_endurance.py::test_garbage_that_leaves_garbage_is_not_counted": none(
        "test_a_tensor_that_is_kept_shows_in_memory, by the same census"
    ),
    "bench/test_memory_walkthrough.py::test_what_is_counted_is_what_the_optimizer_says_that_it_keeps": none(
        "memory/test_live.py"
    ),
    "report/test_bench_page.py::test_every_result_here_is_drawn": newest,
    "report/test_run_page.py::test_a_very_long_run_keeps_its_peaks": none("the tests of thinned lines in that file"),
    "report/test_browser.py::test_it_opens_without_a_complaint_and_fits": Only("run_page-380", "bench_page-1400"),
    "gpu_check/test_gpu_check.py::test_phases_are_rehearsed": Only("some"),
    "gpu_check/test_gpu_check.py::test_the_programs_are_rehearsed_on_ranks": Only("some"),
    "gpu_check/test_gpu_check.py::test_its_files_are_few_and_flat": Only("some"),
    "gpu_check/test_gpu_memory.py::test_a_plan_that_is_off_fails": Only("cpu-2-1", "cuda-4-1"),
}


def mark(items: Iterable[pytest.Item], *, whole: bool) -> None:
    """Mark what does not stay as slow.

    Args:
        whole: every test was collected, so that whatever the table names has to be there.

    Raises:
        pytest.UsageError: the table names a test, or a cell, that is not there.
    """
    tests: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        tests.setdefault(_name(item), {})[_id(item)] = item
    for name in tests.keys() & STAYS.keys():
        cells = tests[name]
        stay = {*STAYS[name]({cell: _indices(item) for cell, item in cells.items()})}
        for cell in cells.keys() - stay:
            cells[cell].add_marker(pytest.mark.slow)
    if whole and (gone := not_there({name: [*cells] for name, cells in tests.items()})):
        raise pytest.UsageError(f"tests/slow.py names what is not there: {', '.join(gone)}")


def not_there(tests: Mapping[str, Sequence[str]], stays: Mapping[str, Choice] = STAYS) -> list[str]:
    """List the names in the table that no test or cell has. ``tests``: the ids of the cells of each test.

    A file of which nothing was collected is left alone: something that it imports is not installed.
    """
    files = {name.partition("::")[0] for name in tests}
    here = {name: choice for name, choice in stays.items() if name.partition("::")[0] in files}
    gone = [name for name in here if name not in tests]
    for name, choice in here.items():
        if name in tests and isinstance(choice, Only):
            gone += [f"{name}[{cell}]" for cell in choice.names if cell not in tests[name]]
    return gone


def _name(item: pytest.Item) -> str:
    """``FILE::TEST``, the file as a path from ``tests``."""
    file = item.path.relative_to(TESTS).as_posix() if TESTS in item.path.parents else item.path.name
    return f"{file}::{getattr(item, 'originalname', item.name)}"


def _id(item: pytest.Item) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""


def _indices(item: pytest.Item) -> Cell:
    return tuple(item.callspec.indices.values()) if hasattr(item, "callspec") else ()
