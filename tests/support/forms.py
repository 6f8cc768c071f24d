"""Which forms of a test run: every pair of values instead of every combination, and which of them are slow."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def pairwise(*dims: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns few combinations, one value of each dim, in which every pair of values of two dims occurs.

    Greedy and deterministic: each combination covers as many new pairs as one can. Three dims of 3, 8 and 2 values need
    24 combinations instead of 48.
    """
    product = list(itertools.product(*(range(len(dim)) for dim in dims)))
    pairs = {form: set(itertools.combinations(enumerate(form), 2)) for form in product}
    missing = set().union(*pairs.values())
    forms = []
    while missing:
        best = max(product, key=lambda form: len(pairs[form] & missing))
        missing -= pairs[best]
        forms.append(best)
    if len(dims) < 2:
        forms = product
    return [tuple(dim[i] for dim, i in zip(dims, form, strict=True)) for form in sorted(forms)]


def slow_except(fast: Collection[Any], forms: Iterable[Any]) -> list[Any]:
    """Returns the forms of a test, those marked slow that are not in `fast`."""
    return [
        form
        if form in fast
        else pytest.param(*form, marks=pytest.mark.slow)
        if isinstance(form, tuple)
        else pytest.param(form, marks=pytest.mark.slow)
        for form in forms
    ]
