"""What tells one data set from another: which rows are looked at, in bounded time, and the same ones everywhere."""

import itertools

import numpy as np
import pytest

from spmdkit.data import open_source
from spmdkit.data.fingerprint import FINGERPRINT_S, MIN_READ, ROWS_READ, VARIES, fingerprint, rows_vary


class Rows:
    """Row i is i; `other` is another row, `bad` raises so often; each read takes `read_s` of its own clock."""

    def __init__(self, num=10_000, other=None, bad=None, times=0, read_s=0.0):
        self.num, self.other, self.bad, self.times, self.read_s, self.now = num, other, bad, times, read_s, 0.0

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        self.now += self.read_s
        if i == self.bad and self.times > 0:
            self.times -= 1
            raise OSError("not now")
        return np.float32(i if i != self.other else -1.0)


def rows(data, retries=0):
    return fingerprint(open_source(data), retries, lambda: data.now).rows


def test_sample_of_64_rows_detects_each_change():
    expected = rows(Rows())
    assert len(expected) == ROWS_READ == 64 and {"row 0", "row 9999"} <= expected.keys()
    assert rows(Rows()) == expected
    for row in list(expected)[::9]:
        number = int(row.removeprefix("row "))
        assert [name for name, digest in rows(Rows(other=number)).items() if digest != expected[name]] == [row]
    assert len(rows(Rows(num=5))) == 5


@pytest.mark.parametrize("read_s", [0.01, 10.0], ids=["slow", "very slow"])
def test_slow_source_is_sampled_for_bounded_time(read_s):
    """Whoever is slower reads fewer of the same rows, so that there is something to compare, and it is spread over
    all."""
    fast, data = rows(Rows()), Rows(read_s=read_s)
    found = rows(data)
    assert found.items() <= fast.items() and MIN_READ <= len(found) < ROWS_READ
    assert data.now <= FINGERPRINT_S + (MIN_READ + 4) * read_s
    places = sorted(int(row.removeprefix("row ")) for row in found)
    assert (places[0], places[-1]) == (0, 9999)
    assert max(b - a for a, b in itertools.pairwise(places)) < 4500


def test_row_is_retried_as_in_training():
    middle = next(int(row.removeprefix("row ")) for row in rows(Rows()) if row != "row 0")
    known = rows(Rows())
    assert rows(Rows(bad=middle, times=2)) == known, "three readings at least"
    assert f"row {middle}" not in rows(Rows(bad=middle, times=5))
    assert rows(Rows(bad=middle, times=5), retries=5) == known


def test_random_rows_are_not_compared():
    class Noise(Rows):
        def __getitem__(self, i):
            return np.random.default_rng().normal()

    assert rows(Noise()) == {"rows": VARIES}


class Augmented(Rows):
    """Rows with augmentation in `__getitem__`, drawn in one of several ways."""

    def __init__(self, kind, num=100):
        super().__init__(num)
        self.kind, self.rng = kind, np.random.default_rng(0)

    def __getitem__(self, i):
        row = np.arange(4.0, dtype=np.float32) + i
        if self.kind == "noise":
            return row + np.random.normal(size=4).astype(np.float32)
        if self.kind == "generator of the data set":
            return row * np.float32(self.rng.uniform())
        if self.kind == "flip":
            return row[:: self.rng.choice([-1, 1])].copy()
        if self.kind == "position in the file":
            self.now += 1
            return row + np.float32(self.now)
        return row + np.random.default_rng(i).normal(size=4).astype(np.float32)


@pytest.mark.parametrize("kind", ["noise", "generator of the data set", "flip", "position in the file", "by index"])
def test_rows_that_differ_when_read_again_are_found(kind):
    assert rows_vary(open_source(Augmented(kind))) == (kind != "by index")
    if kind != "flip":
        assert rows_vary(open_source(Augmented(kind, num=1))) == (kind != "by index")
    assert not rows_vary(open_source(np.ones((5, 3), np.float32)))
    assert not rows_vary(open_source(Rows(bad=9_999, times=5)))
