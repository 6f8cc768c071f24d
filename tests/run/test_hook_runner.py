"""What hooks ask for is done by all processes at one step, whoever asks. Processes are threads over one store."""

import threading
import types

import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.run.hook_runner import NOTHING, HookRunner
from tests.support.clusters import on_all

STEPS, NUM = 30, 3


def processes(make_hooks, body=None):
    """Returns what was decided, {step: decision} for each process: `make_hooks(process)` gives the hooks of one."""
    together = threading.Barrier(NUM, timeout=30)

    def train(due, decisions, process, dispatched):
        for step in range(1, STEPS + 1):
            dispatched()
            due.after_step(None, step, f"state of {process}", None)
            if (decision := due.decision(step)) is not NOTHING:
                decisions[step] = decision

    def run(cluster):
        decisions, process = {}, cluster.process_index
        try:
            (body or train)(HookRunner(make_hooks(process), cluster, STEPS, lag=2), decisions, process, together.wait)
        except ConfigError:
            together.abort()
            raise
        except threading.BrokenBarrierError:
            pass  # another process raises
        return decisions

    found = on_all(NUM, run)
    if errors := [each for each in found if isinstance(each, ConfigError)]:
        raise errors[0]
    return found


def asks(at, action, process=None, **options):
    """Returns a function of a process's number: a hook that asks for `action` at one step, on one process or all."""

    def make(own):
        wanted = process is None or own == process
        return sk.Hook("mine", after_step=lambda run, step, *_: action if wanted and step == at else None, **options)

    return make


@pytest.mark.parametrize("who", [0, 2])
def test_request_of_one_process_reaches_all(who):
    first, *others = processes(lambda process: [asks(5, sk.Stop(42, "it is told"), who)(process)])
    ((step, decision),) = first.items()
    assert step > 5 and decision.turn == sk.Stop(42, "it is told") and decision.save
    assert others == [first] * (NUM - 1)


def test_request_at_the_start_is_performed_before_the_first_step():
    def body(due, decisions, process, dispatched):
        due.call("begin", None, 0, None)
        decisions[0] = due.decision_at_start()

    def hook(process):
        return [sk.Hook("mine", begin=lambda run, step, state: sk.Stop(42) if process == 2 else None)]

    assert [d[0].turn for d in processes(hook, body)] == [sk.Stop(42)] * NUM


def test_all_processes_take_the_strongest_request():
    actions = [sk.Save(), sk.Rollback(to_step=3), sk.Stop(77, "the strongest")]
    found = processes(lambda process: [asks(5, actions[process])(process)])
    assert found == [found[0]] * NUM
    turns = [decision.turn for decision in found[0].values() if decision.turn is not None]
    assert turns[-1] in (sk.Stop(77, "the strongest"), sk.Rollback(to_step=3)) and sk.Stop(77, "the strongest") in turns


def test_known_actions_need_no_agreement():
    found = processes(lambda process: [asks(5, sk.Evaluate(known=True))(process)])
    assert [list(decisions) for decisions in found] == [[5]] * NUM


def test_hook_of_process_0_acts_for_all():
    called = []

    def hook(process):
        def after_step(run, step, *_):
            called.append(process)
            return sk.Save(known=True) if step == 5 else None  # what one process knows the others do not

        return [sk.Hook("mine", on="main", after_step=after_step)]

    found = processes(hook)
    assert set(called) == {0}
    assert found == [found[0]] * NUM and [d.save for d in found[0].values()] == [True] and next(iter(found[0])) > 5


def test_each_process_replaces_its_part_of_the_state():
    replace = lambda process: [
        sk.Hook("mine", after_step=lambda run, step, state, _: sk.ReplaceState(state + "!") if step == 5 else None)
    ]
    found = processes(replace)
    assert [decisions[5].turn.state for decisions in found] == [f"state of {process}!" for process in range(NUM)]
    with pytest.raises(ConfigError, match=r"hook 'mine': only process 0 requests sk\.ReplaceState"):
        processes(lambda process: [asks(5, sk.ReplaceState("x"), on="main")(process)])


def test_repeated_steps_are_agreed_on_again():
    def body(due, decisions, process, dispatched):
        for generation in range(3):
            for step in range(1, 12):
                dispatched()
                due.after_step(None, step, None, None)
                if (decision := due.decision(step)) is not NOTHING:
                    decisions[generation, step] = decision
                    break
            due.clear_requests()

    found = processes(lambda process: [asks(3, sk.Rollback(), process=1)(process)], body)
    assert found == [found[0]] * NUM
    assert [generation for generation, _ in found[0]] == [0, 1, 2]


def test_slow_hooks_are_reported_once():
    now = [0.0]

    def slow(run, step, *_):
        now[0] += 0.75 if step < 4 else 0.0

    hooks = [sk.Hook("samples", after_step=slow), sk.Hook("quick", after_step=lambda *_: None)]
    runner = HookRunner(hooks, types.SimpleNamespace(num_processes=1, is_main=True), STEPS, lag=2, clock=lambda: now[0])
    lines = []
    for step in range(1, 5):
        now[0] += 0.25
        runner.after_step(None, step, None, None)
        lines.append(runner.slow_hooks())
    reported = "hook 'samples' takes 75% of the time, 1.5 s up to here, including its waits for the devices"
    assert lines == [[], [reported], [], []]
