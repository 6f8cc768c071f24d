"""The syntax of faults, random moments, and the figures of a drill."""

import random

import pytest

from spmdkit.errors import ConfigError
from spmdkit.faults.injection.fault import Fault, parse
from spmdkit.tools.drill.figures import injection_row, pace_of, spread, summary
from spmdkit.tools.drill.timeline import Bars, InjectionResult, Start
from spmdkit.tools.drill.timing import Pace, draw


def test_fault_has_a_kind_process_and_moment():
    assert parse("kill:2@120", 4) == Fault("kill", 2, 120)
    assert parse("stop:0@2.5s", 4, count=3) == Fault("stop", 0, None, 2.5, 3)
    assert parse("kill:random@random", 4) == parse("kill:random", 4) == Fault("kill")
    assert parse("nan:1@random", 4) == Fault("nan", 1)
    assert parse("hang:1@save", 4) == Fault("hang", 1, phase="save")
    assert parse("service:0@step", 4) == Fault("service", 0, phase="step", from_step=3)
    assert [str(parse(text, 4)) for text in ("kill:2@120", "stop:0@2.5s", "bit-flip:random")] == [
        "kill:2@120",
        "stop:0@2.5s",
        "bit-flip:random@random",
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kil:1@20", ("unknown kind 'kil'", "kill, stop, term", "Did you mean", "--fault kill:1@20")),
        ("kill:4@20", ("no process 4", "0 to 3", "--fault kill:3@20")),
        ("kill:1@soon", ("invalid syntax", "a step (120), seconds (30s) or random", "--fault kill:1@20")),
        ("kill", ("invalid syntax",)),
        ("kill:1@sav", ("invalid syntax", "import, restore, data, step, hook, evaluation, save, end")),
        ("nan:1@save", ("invalid syntax", "not of slow, nan, bit-flip")),
        ("kill:1@0", ("the first step is 1",)),
        ("kill:1@0s", ("more than 0 s",)),
    ],
)
def test_invalid_fault_is_refused_with_the_repair(text, parts):
    with pytest.raises(ConfigError) as error:
        parse(text, 4)
    assert all(part in str(error.value) for part in parts), error.value


def test_random_moments_cover_every_phase():
    pace = Pace(start_s=4.0, step_s=0.1, save_steps=10)
    rng = random.Random(0)
    drawn = [draw(rng, pace, newest=100, steps_left=400, faults_left=20, idle=0) for _ in range(400)]
    counts = {at: sum(m.at == at for m in drawn) for at in ("start", "save", "step")}
    assert counts["start"] > 60 and counts["save"] > 60 and counts["step"] > 150
    assert all(101 <= m.number <= 120 for m in drawn if m.at == "step")
    assert all(0 <= m.delay_s <= 4.0 for m in drawn)
    assert {m.number for m in drawn if m.at == "save"} == {1}
    late = [draw(rng, Pace(1.0, 0.005, 10), 90, 10, 1, idle=0) for _ in range(400)]
    assert max(m.delay_s for m in late if m.at == "save") <= 0.025, "the run of 10 steps of 5 ms ends before the fault"
    after = [draw(rng, pace, 100, 400, 20, idle=2) for _ in range(50)]
    assert {(m.at, m.number) for m in after} == {("save", 2)}, "the save before is committed by then"
    assert draw(random.Random(3), pace, 0, 400, 9, 0) == draw(random.Random(3), pace, 0, 400, 9, 0), (
        "a seed fixes a drill"
    )


def test_figures_of_two_kills_one_overtaken():
    clean = [Start(begin=0.0, end=14.0, first_step=4.0)]
    attempts = [Start(100.0, 110.0, 104.0), Start(111.0, 113.0), Start(114.0, 124.0, 118.0)]
    first = InjectionResult(
        Fault("kill", 1, 30), 1, 1, None, fired=109.5, reached=30, detected=109.6, restored=20, overtaken=True
    )
    second = InjectionResult(
        Fault("kill"), 2, 0, None, fired=112.9, reached=30, detected=113.0, restored=20, recovered=119.5
    )
    found = summary([first, second], attempts, clean)
    assert found["detection_s"] == {"median": 0.1, "p90": 0.1, "max": 0.1, "count": 2}
    assert found["recovery_s"]["median"] == 6.6 and found["recovery_s"]["count"] == 1
    assert found["steps_lost"] == found["steps_repeated"] == 10, "the same steps are lost once"
    assert found["goodput"] == 0.5
    assert injection_row(first, 100.0)["at_s"] == 9.5 and injection_row(second, 100.0)["steps_lost"] == 10
    assert pace_of(clean, steps=100, num_saves=10) == Pace(4.0, 0.1, 10)
    assert spread([]) is None


def test_intervals_end_where_the_next_begins():
    bars = Bars()
    for kind, now in (("start", 0.0), ("start", 0.1), ("step", 0.2), ("step", 0.5), ("dead", 0.6)):
        bars.at(kind, now)
    expected = [("start", 0.0, 0.2), ("step", 0.2, 0.6), ("dead", 0.6, 0.6)]
    assert [(b.kind, b.begin, b.end) for b in bars.bars] == expected
