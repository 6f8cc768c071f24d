"""Which tests are `wide`: forms beyond the first of what a test shows, run by `make test` and not by `make quick`. In one place, since it is about time alone.

Where a form of a test compiles programs of its own, `make quick` runs the first quarter of its forms, one at least, and the whole of some tests not at all.
"""

import collections

import pytest

QUARTERED = frozenset(
    ("examples", "horovod", "natural", "ops", "plan", "program", "reducers", "run", "step", "sync", "verify")
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


def mark(items: list[pytest.Item]) -> None:
    """Marks what is `wide`; slow forms are not counted."""
    forms: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            forms[item.nodeid.removeprefix("tests/").partition("[")[0]].append(item)
    for name, of_test in forms.items():
        kept = -(-len(of_test) // 4) if name.partition("/")[0] in QUARTERED else len(of_test)
        for item in of_test[0 if name in NONE else kept :]:
            item.add_marker("wide")
