"""Selects the forms of a test that run by default. The remaining forms are slow.

`@pytest.mark.forms(n)` on a parametrized test: n of its forms run by default, chosen to cover the most values and pairs
of values of its parameters. The remaining forms are slow.
"""

import collections
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def slow_except(fast: Collection[Any], forms: Iterable[Any]) -> list[Any]:
    """Returns the forms of a test; forms that are not in `fast` are marked slow."""
    return [
        form
        if form in fast
        else pytest.param(*form, marks=pytest.mark.slow)
        if isinstance(form, tuple)
        else pytest.param(form, marks=pytest.mark.slow)
        for form in forms
    ]


def mark_slow_forms(items: Iterable[pytest.Item]) -> None:
    """Marks as slow the forms that the mark `forms` of their test excludes."""
    forms: dict[Any, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("forms") is not None and item.get_closest_marker("slow") is None:
            forms[item.function].append(item)
    for of_test in forms.values():
        number = of_test[0].get_closest_marker("forms").args[0]
        for i in set(range(len(of_test))) - set(covering([item.callspec.indices for item in of_test], number)):
            of_test[i].add_marker("slow")


def covering(forms: Sequence[dict[str, int]], number: int) -> list[int]:
    """Returns the forms (parameter -> index of its value) that cover the most values, then the most pairs of values,
    then have the largest distance."""
    values = [set(form.items()) for form in forms]
    pairs = [set(itertools.combinations(form.items(), 2)) for form in forms]
    chosen: list[int] = []
    seen_values: set[Any] = set()
    seen_pairs: set[Any] = set()
    while len(chosen) < min(number, len(forms)):
        apart = [min((abs(i - j) for j in chosen), default=-i) for i in range(len(forms))]
        gains = [(len(values[i] - seen_values), len(pairs[i] - seen_pairs), apart[i], i) for i in range(len(forms))]
        best = max(gain for gain in gains if gain[-1] not in chosen)[-1]
        chosen.append(best)
        seen_values |= values[best]
        seen_pairs |= pairs[best]
    return chosen
