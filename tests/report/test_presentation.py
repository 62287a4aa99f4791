"""Numbers, settings and cures as text; the outline of a violin holds its histogram."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.report import Distribution
from leadline.report.presentation import as_text, cure_call, mean_of, number, outline, short, spans


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (0.0, "0"),
        (12.0, "12"),
        (0.48213, "0.4821"),
        (0.99984, "0.9998"),
        (0.999999987, "1 - 1.3e-8"),
        (-0.999999, "-1"),
        (1.23e-7, "1.23e-7"),
        (123456.7, "1.23e5"),
        (1e12, "1e12"),
    ],
)
def test_numbers_read_well(value, text):
    assert number(value) == text


def test_words():
    assert spans([5, 3, 4, 9, 4]) == "3–5, 9"
    assert spans([]) == ""
    assert as_text({"torch": "2.11", "half": False, "scale": 0.125, "shape": (2, None)}) == (
        "torch 2.11, half no, scale 0.125, shape 2, –"
    )
    assert cure_call({"alpha": 0.5, "alpha_prime": 0.25}) == "leadline.cure(model, alpha=0.5, alpha_prime=0.25)"
    assert mean_of([1.0, math.nan, 3.0]) == 2.0
    assert mean_of([math.nan]) is None
    assert mean_of(None) is None
    assert short(math.inf) is None
    assert short(0.123456789, 4) == 0.1235


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=200),
    st.integers(1, 60),
    st.lists(st.floats(0.01, 3), min_size=200, max_size=200),
)
def test_an_outline_has_the_area_and_range_of_its_histogram(counts, points, widths):
    edges = np.concatenate([[-1.0], -1 + np.cumsum(widths[: len(counts)])]).tolist()
    shape = outline(Distribution(edges, counts, 0.0, 0.0, 0.0), points)
    if not any(counts):
        assert shape is None
        return
    values, halves = shape
    assert len(values) == len(halves) <= points + 2
    assert max(halves) == 1
    assert halves[0] == halves[-1] == 0
    assert values == sorted(values)
    full = np.flatnonzero(counts)
    assert values[0] == edges[full[0]]
    assert values[-1] == edges[full[-1] + 1]


def test_an_outline_follows_the_density_and_not_the_count():
    # the same density in a bin of width 1 and one of width 3: equally wide
    values, halves = outline(Distribution([0, 1, 4], [10, 30], 0, 0, 0))
    assert values == [0, 0.5, 2.5, 4]
    assert halves == [0, 1, 1, 0]
    # bins are merged, their counts added: 1+3, 2+2, 8 over widths 2, 2, 1
    values, halves = outline(Distribution([0, 1, 2, 3, 4, 5], [1, 3, 2, 2, 8], 0, 0, 0), points=3)
    assert values == [0, 1, 3, 4.5, 5]
    assert halves == [0, 0.25, 0.25, 1, 0]


def test_one_full_bin_is_a_rhombus():
    assert outline(Distribution([0, 1, 2, 3], [0, 7, 0], 0, 0, 0)) == ([1, 1.5, 2], [0, 1, 0])
