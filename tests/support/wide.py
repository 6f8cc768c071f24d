"""Which tests are `wide`: forms beyond the first few of what a test shows, run by `make test` and not by `make quick`. One table, since it is about time alone."""

import collections

import pytest

KEPT = {
    "examples/test_example_configs.py::test_batch_statistics_and_dropout_do_not_depend_on_the_mesh": 1,
    "examples/test_example_configs.py::test_digits_are_read_as_well_as_the_header_says": 0,
    "examples/test_example_configs.py::test_the_mesh_changes_nothing_but_where_the_gpt_lives": 2,
    "examples/test_example_configs.py::test_the_mesh_changes_nothing_but_where_the_recurrent_model_lives": 0,
    "examples/test_example_configs.py::test_the_mesh_changes_nothing_of_the_mixture_of_experts": 0,
    "horovod/test_coming_from.py::test_a_row_gives_what_one_device_gives": 8,
    "natural/test_inner_derivatives.py::test_every_derivative_at_a_constant_is_that_of_one_device": 3,
    "ops/test_derivatives.py::test_derivatives_through_attention_are_those_of_one_device": 4,
    "ops/test_derivatives.py::test_derivatives_through_other_ops_are_those_of_one_device": 3,
    "ops/test_moe.py::test_a_mesh_is_one_device": 1,
    "ops/test_pipeline.py::test_a_pipeline_is_one_device": 1,
    "ops/test_pipeline.py::test_the_models_arithmetic_is_that_without_stages": 1,
    "reducers/test_reducer_calls.py::test_every_call_has_a_state_of_its_own": 1,
    "reducers/test_reducer_contract.py::test_a_mistake_with_the_state_is_seen_in_the_sum": 5,
    "reducers/test_reducer_contract.py::test_a_run_at_lossless_options_equals_that_of_the_sum": 7,
    "reducers/test_reducer_contract.py::test_replicas_hold_the_same_bits_and_the_form_is_that_of_the_sum": 9,
    "reducers/test_reducer_contract.py::test_what_was_applied_and_what_is_owed_add_up_to_the_true_sum": 5,
    "reducers/test_reducer_runs.py::test_replicas_hold_the_same_bits_after_200_steps_and_have_learned": 3,
    "reducers/test_reducer_runs.py::test_with_microbatches_clipping_an_average_and_mixed_precision_it_is_the_sum_where_nothing_is_lost": 2,
    "reducers/test_reducer_warmup.py::test_steps_of_the_warm_up_are_those_of_sum_and_later_ones_those_of_the_reducer": 1,
    "step/test_equal_to_one_device.py::test_a_short_last_batch_is_that_of_one_device_for_the_gpt_and_for_masked_batch_norm": 0,
    "step/test_equal_to_one_device.py::test_loss_gradient_parameters_and_evaluation_are_those_of_one_device": 12,
    "sync/test_streaming.py::test_it_is_a_loop_written_by_hand": 2,
    "sync/test_sync_contract.py::test_a_step_sends_nothing_between_groups_and_an_agreement_only_there": 8,
    "sync/test_sync_contract.py::test_agreeing_after_every_step_is_synchronous_training": 4,
    "sync/test_sync_contract.py::test_groups_are_those_of_a_loop_written_by_hand": 8,
    "verify/test_verify_cases.py::test_a_right_task_is_equal_to_one_device": 2,
    "verify/test_verify_handmade.py::test_a_fault_in_the_lm1b_example_is_seen": 0,
    "verify/test_verify_located.py::test_the_line_that_is_wrong_is_told": 1,
    "verify/test_verify_mutants.py::test_a_mutant_is_caught": 8,
}
"""Test -> how many of its forms `make quick` runs, the first ones."""


def mark(items: list[pytest.Item]) -> None:
    """Marks the forms of each test of the table beyond the first as `wide`; slow ones are not counted."""
    seen = collections.Counter[str]()
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        if name in KEPT and item.get_closest_marker("slow") is None:
            seen[name] += 1
            if seen[name] > KEPT[name]:
                item.add_marker("wide")
