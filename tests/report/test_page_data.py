import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.errors import LeadlineError
from leadline.report import DepthReport, Distribution, Verdict
from leadline.report.numbers import as_text, cure_call, mean_of, number, short, spans
from leadline.report.paper import evenly


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


def test_evenly_spaced_items_keep_the_last():
    assert evenly(range(10), 20) == list(range(10))
    assert evenly(range(1, 101), 12) == [1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100]
    assert evenly([], 3) == []
    for size in range(1, 40):
        for most in range(1, 12):
            items = evenly(range(size), most)
            assert len(items) <= most
            assert items[-1] == size - 1


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


def report(model):
    return DepthReport(model, {}, [], Verdict("no collapse", "", {}, None, None, None))


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    old, new = report("old"), report("new")
    old.save(str(file))
    content = file.read_bytes()

    def full(self, target=None, missing_ok=True):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(LeadlineError, match=r"cannot write .*report.json': No space left on device"):
            new.save(file)
        with monkeypatch.context() as read_only:
            read_only.setattr("pathlib.Path.unlink", full)
            with pytest.raises(LeadlineError, match=r"cannot write .*report.json': No space left on device"):
                new.save(file)
        for draft in tmp_path.glob("*.new"):
            draft.unlink()
    assert file.read_bytes() == content
    assert DepthReport.from_json(content.decode()) == old
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_path_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(LeadlineError, match=r"no folder .*nowhere; create it first") as error:
        report("x").save(tmp_path / "nowhere" / "x.html")
    assert "\n" not in str(error.value)
    (tmp_path / "x.json").mkdir()
    with pytest.raises(LeadlineError, match="it is a folder"):
        report("x").save(tmp_path / "x.json")
