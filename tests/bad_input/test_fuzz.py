"""A few of the cases of `make fuzz`: configs, files and damages from a seed. Each has the right code, at most 25 lines
and no traceback."""

import os

import pytest

from tests.support.fuzz import KEYS, KINDS, Case, Fuzz, Ran, wrong

COUNT, SLOW = 40, 2
SEED = 2026


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    mask = os.umask(0o022)
    yield Fuzz(tmp_path_factory.mktemp("fuzz"), SEED)
    os.umask(mask)


def test_every_case_ends_as_it_must(fuzz):
    found, kinds, codes = {}, set(), set()
    for number in range(COUNT):
        case, ran, problems = fuzz.case(number, slow=number < SLOW)
        kinds.add(case.kind)
        codes.add(ran.code)
        if problems := [p for p in problems if not p.endswith(" s")]:  # seconds: on a machine that does nothing else
            found[number] = case, problems, ran.error[:500]
    assert found == {}, f"python -m tests.support.fuzz --seed {SEED} --case {next(iter(found))} --slow {SLOW}"
    assert len(kinds) == len(KINDS) + 1 and {0, 78, 79} <= codes, "it would not see anything"


def test_a_case_is_the_same_each_time(fuzz):
    first, second = (fuzz.case(40) for _ in range(2))
    assert first[0] == second[0] and first[1].code == second[1].code


def test_what_is_wrong_is_seen():
    case = Case("", [], {78}, "")
    good = Ran(78, "", "told", 0.1)
    assert wrong(case, good) == []
    errors = ("", "Traceback (most recent", "x\n" * 26, "this is a bug in spmdkit")
    bad = [good._replace(code=70), good._replace(output="\x1b[2J"), good._replace(seconds=3.5)]
    bad += [good._replace(error=error) for error in errors]
    assert all(len(wrong(case, each)) == 1 for each in bad)
    assert len(KEYS) > 60
