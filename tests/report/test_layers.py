"""The outline of a violin plot holds its histogram."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leadline.report import Distribution


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=200),
    st.integers(1, 60),
    st.lists(st.floats(0.01, 3), min_size=200, max_size=200),
)
def test_an_outline_has_the_area_and_range_of_its_histogram(counts, points, widths):
    edges = np.concatenate([[-1.0], -1 + np.cumsum(widths[: len(counts)])]).tolist()
    shape = Distribution(edges, counts, 0.0, 0.0, 0.0).outline(points)
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
    values, halves = Distribution([0, 1, 4], [10, 30], 0, 0, 0).outline()
    assert values == [0, 0.5, 2.5, 4]
    assert halves == [0, 1, 1, 0]
    # bins are merged, their counts added: 1+3, 2+2, 8 over widths 2, 2, 1
    values, halves = Distribution([0, 1, 2, 3, 4, 5], [1, 3, 2, 2, 8], 0, 0, 0).outline(points=3)
    assert values == [0, 1, 3, 4.5, 5]
    assert halves == [0, 0.25, 0.25, 1, 0]


def test_one_full_bin_is_a_rhombus():
    assert Distribution([0, 1, 2, 3], [0, 7, 0], 0, 0, 0).outline() == ([1, 1.5, 2], [0, 1, 0])
