"""Which tests are `wide`: forms beyond the first of what a test shows, run by `make test` and not by `make quick`; and
forms that are `slow`. In one place, since it is about time alone.

Where a form of a test compiles programs of its own, `make quick` runs the first quarter of its forms, one at least, and
the whole of some tests not at all.
"""

import collections

import pytest

QUARTERED = frozenset(
    ("communication", "examples", "horovod", "natural", "ops", "plan", "program", "run", "step", "verify")
)
"""Folders of which the forms of a test are many, and dear."""

NONE = frozenset(
    (
        "examples/test_example_configs.py::test_a_physics_informed_network_has_the_numbers_of_one_device_and_comes_near_the_solution",
        "examples/test_example_configs.py::test_the_mesh_changes_nothing_of_the_mixture_of_experts",
        "examples/test_example_configs.py::test_the_mesh_changes_nothing_but_where_the_recurrent_model_lives",
        "examples/test_gpt_model.py::test_its_marks_keep_and_offload_on_meshes_that_cut_it",
        "ops/test_pipeline.py::test_a_pipeline_is_one_device",
        "ops/test_pipeline_wire.py::test_memory_of_1f1b_is_bounded_by_the_stages",
        "plan/test_search_and_diff.py::test_the_best_is_compiled_ranked_written_and_loads",
        "run/test_parameter_server.py::test_a_server_that_dies_comes_back_from_the_checkpoint",
        "step/test_equal_to_one_device.py::test_a_short_last_batch_is_that_of_one_device_for_the_gpt_and_for_masked_batch_norm",
        "tasks/test_mlm_nsp.py::test_it_is_the_plain_script",
        "verify/test_verify_handmade.py::test_a_fault_in_the_lm1b_example_is_seen",
    )
)
"""Tests that `make quick` leaves out: some ten seconds each, for what others show in part."""


_GPT = "step/test_equal_to_one_device.py::test_loss_gradient_parameters_and_evaluation_are_those_of_one_device[gpt-"
_LIVES = "examples/test_example_configs.py::test_the_mesh_changes_nothing_but_where_the_"
_LM1B = "verify/test_verify_handmade.py::test_a_fault_in_the_lm1b_example_is_seen"
_DERIVATIVE = "natural/test_inner_derivatives.py::test_every_derivative_at_a_constant_is_that_of_one_device"
_ALONE = "communication/reducers/test_gradients_alone.py::test_a_reducer_that_spoils_all_that_it_is_given_spoils_gradients_alone"
_ROUNDING = "system/test_processes.py::test_rounding_reducers_over_two_processes_are_those_of_one_with_the_same_devices"

THOROUGH = frozenset(
    (
        f"{_GPT}fsdp 8 zero 1-4]",
        f"{_GPT}fsdp 8 zero 2-4]",
        f"{_GPT}replica 2 x data 4-4]",
        f"{_LIVES}gpt_lives[context]",
        f"{_LIVES}gpt_lives[pipeline]",
        f"{_LIVES}recurrent_model_lives[context: 2, tensor: 2, pipeline: 2]",
        "examples/test_gpt_model.py::test_its_marks_keep_and_offload_on_meshes_that_cut_it[{fsdp: 2, context: 2, tensor: 2}]",
        f"{_LM1B}[means]",
        f"{_LM1B}[axis]",
        "natural/test_diffrax_flow.py::test_a_flow_of_diffrax_is_that_of_one_device[one device]",
        f"{_DERIVATIVE}[replica 2 x data 4-1]",
        f"{_DERIVATIVE}[fsdp 8 zero 2-1]",
        f"{_DERIVATIVE}[data 2 x fsdp 4-1]",
        "communication/reducers/test_reducer_runs.py::test_replicas_hold_the_same_bits_after_200_steps_and_have_learned[float8]",
        "communication/reducers/test_reducer_runs.py::test_replicas_hold_the_same_bits_after_200_steps_and_have_learned[sign]",
        "communication/reducers/test_reducer_warmup.py::test_steps_of_the_warm_up_are_those_of_sum_and_later_ones_those_of_the_reducer[bfloat16-mapped]",
        f"{_ALONE}[mapped-sum]",
        f"{_ALONE}[mapped, zero 2-share]",
        f"{_ALONE}[a step of each replica-share]",
        f"{_ROUNDING}[int8-{{data: 4}}]",
        "verify/test_verify_tasks.py::test_no_mutant_is_missed[tagging]",
    )
)
"""Forms that `make thorough` runs: some seconds each, of what another form or test of `make test` shows as well. The
regression is on every mesh, for one."""


def mark(items: list[pytest.Item]) -> None:
    """Marks what is `slow` and `wide`; slow forms are not counted for the second."""
    for item in items:
        if item.nodeid.removeprefix("tests/") in THOROUGH:
            item.add_marker("slow")
    forms: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            forms[item.nodeid.removeprefix("tests/").partition("[")[0]].append(item)
    for name, of_test in forms.items():
        kept = -(-len(of_test) // 4) if name.partition("/")[0] in QUARTERED else len(of_test)
        for item in of_test[0 if name in NONE else kept :]:
            item.add_marker("wide")
