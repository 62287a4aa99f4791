"""Numbers, settings and cures as people read them."""

import math

import pytest

from leadline.report.numbers import as_text, cure_call, mean_of, number, short, spans


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
