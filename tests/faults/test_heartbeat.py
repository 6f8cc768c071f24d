"""What is concluded from beats, without a process and without a clock."""

import sys
import threading
from types import SimpleNamespace

import pytest

from spmdkit.errors import RendezvousError
from spmdkit.faults import stacks
from spmdkit.faults import watchdog as watchdog_module
from spmdkit.faults.heartbeat import (
    Beat,
    Limits,
    OneSidedHooks,
    Stragglers,
    blocking_processes,
    describe_phases,
    find_silent,
    from_text,
    hang_report,
    straggler,
    straggler_text,
    to_text,
)
from spmdkit.faults.watchdog import Watchdog
from spmdkit.foundation import phase
from spmdkit.foundation.clock import RunningClock
from spmdkit.foundation.deadline import Deadline
from spmdkit.run.hooks.watchdog import make

LIMITS = Limits(
    step_timeout_s=None,
    import_timeout_s=1,
    compile_timeout_s=2,
    restore_timeout_s=3,
    save_timeout_s=4,
    evaluation_timeout_s=5,
)


def beat(phase, phase_s, limit_s=10.0, step=812, detail="", spent=None, **fields):
    return Beat(phase, detail, step, phase_s, limit_s, spent or {}, **fields)


def watchdog(board, process, num, now):
    timeouts = {"heartbeat_timeout_s": 30.0, "interpreter_timeout_s": None}
    return Watchdog(board, "w", process, num, LIMITS, **timeouts, exit_process=lambda code: None, clock=lambda: now[0])


def in_jax(phase, phase_s, step=812):
    return beat(phase, phase_s, step=step, in_jax=True)


def cut_off(phase):
    return beat(phase, 11, in_jax=True, unanswered=True)


def reads(phase_s):
    return beat("evaluation", phase_s, detail="reading data")


def test_beat_is_read_as_written():
    said = beat("data", 1.5, None, detail="x", spent={"data": 2.0})
    assert from_text(to_text(said)) == said


@pytest.mark.parametrize(
    ("name", "beats", "quiet", "blamed"),
    [
        ("all is well", {0: beat("step", 1), 1: beat("data", 2)}, [], ()),
        ("who works too long, whatever the others do", {0: beat("step", 5), 1: beat("data", 11)}, [], (1,)),
        ("a slow evaluation holds nobody up", {0: beat("step", 99), 1: beat("evaluation", 99, 3600)}, [], ()),
        ("in an evaluation who reads", {0: beat("evaluation", 12), 1: reads(11)}, [], (1,)),
        ("who waits in an evaluation for one who reads", {0: beat("evaluation", 12), 1: reads(9)}, [], ()),
        ("in an evaluation nobody stands out", {0: beat("evaluation", 12), 1: beat("evaluation", 11)}, [], (0, 1)),
        ("a pager that stands still holds nobody up", {0: beat("printing", 99, 3600), 1: beat("step", 99)}, [], ()),
        ("in the step not all are overdue", {0: beat("step", 11), 1: beat("step", 9)}, [], ()),
        ("in the step the one who is behind", {0: beat("step", 11), 1: beat("step", 11, step=811)}, [], (1,)),
        ("in the step the one without a beat", {0: beat("step", 11), 1: beat("step", 11)}, [1], (1,)),
        ("in the step nobody stands out", {0: beat("step", 11), 1: beat("step", 11)}, [], (0, 1)),
        ("in the step who is not in jax", {0: beat("step", 11), 1: in_jax("step", 12)}, [], (0,)),
        ("the others have just begun the step", {0: beat("step", 11), 1: in_jax("step", 2)}, [], (0,)),
        ("the last one has just begun the step", {0: beat("step", 9), 1: in_jax("step", 11)}, [], ()),
        ("in the step not all are overdue, in jax", {0: in_jax("step", 11), 1: in_jax("step", 9)}, [], ()),
        ("who waits before the others", {0: in_jax("step", 11), 1: beat("waiting", 9, None, 811)}, [], (1,)),
        ("another has begun a later step", {0: beat("step", 11), 1: beat("step", 2, step=813)}, [], ()),
        ("in the step all are in jax", {0: in_jax("step", 11), 1: in_jax("step", 12)}, [], (0, 1)),
        ("in the step one is behind, in jax", {0: beat("step", 11), 1: in_jax("step", 11, 811)}, [], (1,)),
        ("in an evaluation who is not in jax", {0: beat("evaluation", 9), 1: in_jax("evaluation", 11)}, [], (0,)),
        ("in an evaluation all are in jax", {0: in_jax("evaluation", 9), 1: in_jax("evaluation", 11)}, [], (1,)),
        ("in an evaluation who is silent", {0: in_jax("evaluation", 9), 1: in_jax("evaluation", 11)}, [0], (0,)),
        ("a broken connection", {0: cut_off("step"), 1: cut_off("step"), 2: in_jax("step", 11, 811)}, [], (0, 1)),
        ("the same in an evaluation", {0: cut_off("evaluation"), 1: in_jax("evaluation", 12)}, [], (0,)),
        ("a broken connection and a callback", {0: cut_off("step"), 1: beat("step", 11, callback="x")}, [], (1,)),
        ("who has just arrived", {0: beat("evaluation", 0.5), 1: in_jax("evaluation", 11)}, [], (1,)),
        (
            "in the step the one in a callback",
            {0: beat("step", 11, callback=" at a.py:3"), 1: beat("step", 11)},
            [],
            (0,),
        ),
        (
            "a callback holds the step while its process waits",
            {0: beat("step", 11), 1: beat("waiting", 9, None, 814, callback=" at a.py:3")},
            [],
            (1,),
        ),
        (
            "a beat is missing, and a callback waits",
            {0: beat("step", 11, callback="x"), 1: beat("step", 11)},
            [1],
            (1,),
        ),
        ("who waits before the step of others", {0: beat("step", 11), 1: beat("waiting", 9, None, 811)}, [], (1,)),
        ("who waits for a later step", {0: beat("step", 11), 1: beat("waiting", 9, None, 814)}, [], (0,)),
        ("who waits at a barrier is not asked", {0: beat("waiting", 99, None), 1: beat("import", 5, 60)}, [], ()),
        ("a hang in an import", {0: beat("waiting", 99, None), 1: beat("import", 61, 60)}, [], (1,)),
    ],
)
def test_culprits_of_a_hang(name, beats, quiet, blamed):
    assert blocking_processes(beats, quiet) == blamed, name


@pytest.mark.parametrize(
    ("name", "seen", "lost"),
    [
        ("all beat", {1: 99.0, 2: 98.0}, []),
        ("one has stopped", {1: 69.0, 2: 99.0}, [1]),
        ("several have", {2: 60.0, 1: 69.0}, [1, 2]),
        ("one never came", {1: 99.0}, [2]),
    ],
)
def test_silent_processes(name, seen, lost):
    assert find_silent(100.0, seen, [1, 2], 30.0) == lost, name


def test_silent_store_delays_all_deadlines():
    """Seen before on three hosts, of which that of process 0 was cut off: the others called each other silent."""

    now, responds = [0.0], [True]

    def entries(folder):
        """Always the same beat of process 1."""
        if not responds[0]:
            raise RendezvousError("gone")
        text = to_text(beat("step", 1.0))
        return {"beat/0": f"{now[0]} {text}", "beat/1": f"7 {text}"}

    board = SimpleNamespace(put=lambda *_, **__: None, entries=entries)
    dog = watchdog(board, 2, 3, now)

    def pass_(seconds):
        for _ in range(round(seconds / 0.5)):
            now[0] += 0.5
            dog.clock.tick()
            dog._exchange()

    pass_(1.0)
    responds[0] = False
    verdicts = []
    for _ in range(66):
        pass_(0.5)
        verdicts.append((dog._lost(dog.clock.now) or {}).get("why"))
    assert set(verdicts) == {None, "unreachable"} and verdicts.index("unreachable") > 58
    responds[0] = True
    pass_(1.0)
    assert dog._lost(dog.clock.now) is None
    pass_(31.0)
    assert dog._lost(dog.clock.now) == {"code": 75, "processes": [1], "why": "silent"}


@pytest.mark.parametrize(("why", "blamed"), [("unreachable", []), ("silent", [0])])
def test_process_without_the_service_names_no_other(why, blamed, monkeypatch):
    """It may be cut off itself."""
    reports = []
    monkeypatch.setattr(watchdog_module.exit_handler, "write_message", lambda *report: reports.append(report))
    monkeypatch.setattr(watchdog_module.exit_handler.taken_over, "set", lambda: None)
    dog = watchdog(SimpleNamespace(put=lambda *_, **__: None, entries=lambda folder: {}), 1, 2, [0.0])
    dog._end({"code": 75, "processes": [0], "why": why})
    ((code, text, named, _),) = reports
    assert (code, named) == (75, blamed) and ("coordination service" in text) == (why == "unreachable")


@pytest.mark.parametrize("responds", [True, False])
def test_old_heartbeat_blames_no_hook(responds, monkeypatch):
    """A process whose network is broken, or that of the store, was in a hook at its last heartbeat."""
    now, ends = [0.0], []
    inside = Beat("hook 'a'", "", 3, 0.0, None, {}, "'a' at mine.py:3", 4)

    def entries(folder):
        if now[0] > 1 and not responds:
            raise RendezvousError("gone")
        return {"beat/1": f"7 {to_text(inside)}"}

    dog = watchdog(SimpleNamespace(put=lambda *_, **__: None, entries=entries), 0, 2, now)
    dog._one_sided_hooks = OneSidedHooks(10.0)
    monkeypatch.setattr(dog, "_end", lambda verdict: ends.append(verdict["why"]))
    dog._mine = Beat("step", "", 3, 0.0, None, {}, "", 5)
    for _ in range(80):
        now[0] += 0.5
        dog._exchange()
        dog._judge(dog.clock.tick())
    assert set(ends) == {"silent" if responds else "unreachable"}


def test_beat_shows_whether_the_training_thread_waits_in_jax(monkeypatch):
    monkeypatch.setattr(watchdog_module.stacks, "in_jax", lambda thread: thread == threading.get_ident())
    now, shown = [0.0], []
    dog = watchdog(None, 0, 1, now)
    phase.begin()
    for name, seconds in (("step", 2), ("evaluation", 2), ("hook", 2), ("step", 0.5)):
        phase.enter(name, 5)
        dog._beat()
        for _ in range(4):
            now[0] += seconds / 4
            dog.clock.tick()
        shown.append(dog._beat().in_jax)
    phase.end()
    assert shown == [True, True, False, False]


@pytest.mark.parametrize(
    ("file", "is_in"), [("/lib/jax/_src/array.py", True), ("/lib/spmdkit/run/loop.py", False), ("/jax/a.py", False)]
)
def test_innermost_code_of_a_thread_is_that_of_jax(file, is_in):
    lock, scope = threading.Lock(), {}
    exec(compile("def wait(acquire): acquire()", file, "exec"), scope)
    with lock:
        thread = threading.Thread(target=scope["wait"], args=(lock.acquire,))
        thread.start()
        waits = lambda: sys._current_frames()[thread.ident].f_code.co_filename == file
        Deadline(20).wait_for(waits, 0.01)
        assert stacks.in_jax(thread.ident) is is_in
    thread.join(20)
    assert stacks.in_jax(thread.ident) is False and stacks.in_jax(None) is False


def test_hang_report_names_every_phase():
    beats = {3: beat("data", 41.2), 0: beat("step", 40), 1: beat("step", 40), 2: beat("waiting", 3, detail="committed")}
    assert describe_phases(beats, [3]) == (
        "p3 has been reading data for 41 s at step 812; p0, p1 wait in the step; p2 waits at 'committed'"
    )
    text = hang_report({"why": "hang", "code": 76, "processes": [3]}, beats, "The newest checkpoint is of step 800.")
    for part in ("no progress: p3 has been", "It may take 10 s (watchdog.step_timeout_s)", "of step 800"):
        assert part in text


def test_running_clock_skips_pauses():
    times = iter([0.0, 0.2, 0.4, 300.4, 300.6, 300.0])
    clock = RunningClock(lambda: next(times))
    assert [round(clock.tick(), 1) for _ in range(5)] == [0.2, 0.4, 1.4, 1.6, 1.6]


def test_pause_stretches_no_deadline():
    now = [0.0]
    dog = watchdog(None, 0, 1, now)
    run, hook = SimpleNamespace(watchdog=dog, is_log_step=lambda step: True), make(SimpleNamespace(watchdog=LIMITS))
    hook.begin(run, 0, None)
    for step in (1, 2):
        now[0] += 300.0 if step == 1 else 0.0  # suspended in the very first step that is measured
        for _ in range(10):
            now[0] += 0.2
            dog.clock.tick()
        hook.after_step(run, step, None, None)
        assert dog.step_s == pytest.approx(3.0 if step == 1 else 2.5, abs=0.3), "a step of two seconds, and a tick"


def test_limits_of_every_phase():
    assert LIMITS.of("step", None) == 2, "the first step: as long as compiling"
    assert LIMITS.of("data", None) == 300
    assert LIMITS.of("step", 0.01) == LIMITS.of("data", 0.01) == 60
    assert LIMITS.of("step", 30.0) == 1200, "sixteen of them are waited for at once"
    assert Limits(**{**vars(LIMITS), "step_timeout_s": 7}).of("data", 30.0) == 7
    assert [LIMITS.of(p, None) for p in ("import", "compile", "restore", "save", "evaluation")] == [1, 2, 3, 4, 5]
    assert LIMITS.of("hook 'mine'", None) == 5
    assert LIMITS.of("waiting", None) is None


@pytest.mark.parametrize(
    ("name", "after", "named"),
    [
        ("slow data of one", {0: {"data": 0.1}, 1: {"data": 4.1}, 2: {"data": 0.2}}, (1, "data")),
        ("a slow hook of one", {0: {"data": 1.0}, 1: {"data": 1.0, "hook": 5}, 2: {"data": 1.0}}, (1, "hook")),
        ("all are slow alike", {0: {"data": 8.0}, 1: {"data": 8.5}, 2: {"data": 7.9}}, None),
        ("who waits in the step is not slow", {0: {"step": 9.0}, 1: {"step": 1.0}, 2: {"step": 9.0}}, None),
        ("one process", {0: {"data": 9.0}}, None),
    ],
)
def test_straggler_is_found_by_phase_times(name, after, named):
    found = straggler({p: {} for p in after}, after, wall_s=10.0)
    assert (found and (found.process, found.phase)) == named, name
    if found is not None:
        assert straggler_text(found).startswith(f"process {named[0]} holds up the others: ")


def test_straggler_is_named_after_two_windows():
    update, said = Stragglers(window_s=10.0), []
    for second in range(61):
        slow = float(second) if second < 10 or second > 20 else 10.0  # but not in the second window
        said += [(second, *update.update(second, {0: {"data": 0.0}, 1: {"data": slow}}))]
    assert [second for second, *lines in said if lines] == [40, 60]


def test_hook_of_one_process_is_limited_once_another_has_left_it():
    inside = lambda passed: Beat("hook 'a'", "", 3, 0.0, None, {}, "'a' at mine.py:3", passed)
    outside = lambda passed: Beat("step", "", 3, 0.0, None, {}, "", passed)
    hooks = OneSidedHooks(60.0)
    assert hooks.update(0.0, {0: inside(4), 1: inside(4), 2: outside(4)}) == ()  # nobody has left it: 2 comes later
    assert hooks.update(500.0, {0: inside(4), 1: outside(5), 2: inside(4)}) == ()
    assert hooks.update(550.0, {0: inside(4), 1: outside(5), 2: outside(5)}) == ()
    assert hooks.update(561.0, {0: inside(4), 1: inside(5), 2: outside(5)}) == (0,)
    assert hooks.update(562.0, {0: inside(5), 1: outside(6), 2: outside(6)}) == ()  # another call
    verdict = {"why": "hang", "processes": [0], "hook": "'a' at mine.py:3"}
    text = hang_report(verdict, {0: inside(4), 1: outside(5)}, "No checkpoint was saved yet.")
    assert "process 0 is in hook 'a' at mine.py:3" in text and "run.gather(tree) on all processes" in text
    held = Beat("waiting", "", 3, 0.0, None, {}, "'a' at mine.py:3", 4, requested="sk.ReplaceState")
    text = hang_report(verdict | {"requested": held.requested}, {0: held, 1: outside(5)}, "")
    assert "hook 'a' at mine.py:3 returned sk.ReplaceState on process 0" in text and "run.gather" not in text


def test_time_counts_from_when_the_other_left_the_hook():
    """Its heartbeat arrives later."""
    inside = lambda hook_s: Beat("hook 'a'", "", 3, hook_s, None, {}, "'a' at mine.py:3", 4)
    outside = lambda passed_s: Beat("step", "", 3, 0.0, None, {}, "", 5, passed_s=passed_s)
    hooks = OneSidedHooks(10.0)
    assert hooks.update(100.0, {0: inside(2.0), 1: outside(0.9)}) == ()
    assert hooks.update(109.0, {0: inside(11.0), 1: outside(9.9)}) == ()
    assert hooks.update(109.2, {0: inside(11.2), 1: outside(10.1)}) == (0,)
    hooks = OneSidedHooks(10.0)
    assert hooks.update(100.0, {0: inside(0.5), 1: outside(60.0)}) == ()  # it has just entered the hook
    assert hooks.update(109.4, {0: inside(9.9), 1: outside(69.4)}) == ()
    assert hooks.update(109.6, {0: inside(10.1), 1: outside(69.6)}) == (0,)


def test_requested_action_is_passed_once_performed():
    phase.begin()
    counts = []
    for act in (phase.pass_hook, lambda: phase.hold_hook("'a' at b.py:3", "sk.Stop"), phase.pass_hook):
        act()
        counts.append(phase.current_hook())
    assert counts == [("", 1, ""), ("'a' at b.py:3", 1, "sk.Stop"), ("", 3, "")]
    phase.hold_hook("'a' at b.py:3", "sk.Rollback")
    phase.settle_hook()
    phase.settle_hook()
    assert phase.current_hook() == ("", 4, "")
    phase.end()
