"""The FLOPs of a plan are those of the compiled program, the model's own those of the jaxpr: where replicas repeat
work, the first are more."""

from spmdkit.plan.document import plan_program
from spmdkit.plan.machine.target import parse_target
from tests.plan import bad_programs
from tests.support.core_runs import program_of

PRODUCTS = 2 * 2 * 512 * 256 * 512
"""The rollout times the weights, and the gradient of the weights."""


def test_what_every_replica_repeats_counts_on_each():
    made, settings = bad_programs.repeated_work()
    plan = plan_program(program_of(made, **settings), parse_target("gpu:h100:8"))
    assert plan["flops"] == plan["time"]["hlo_flops"] == PRODUCTS
    assert plan["model_flops"] == PRODUCTS / 8
