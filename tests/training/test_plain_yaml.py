"""YAML of a recipe: small, flat, without tags; everything else is one line, at once."""

import time

import pytest

from leadline.errors import LeadlineError
from leadline.training import load_recipe
from leadline.training.recipe.plain_yaml import read_yaml


def bomb(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    return "\n".join([*lines, *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels))])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bomb(9), "more than 5,000 values"),
        (f"a: [{', '.join('x' * 6000)}]", "more than 5,000 values"),
        ("[" * 3000, "more than 20 levels"),
        ("- " * 3000 + "x", "more than 20 levels"),
        ("a: &a [*a]", "alias .* before its anchor is complete"),
        ("a: *b", "alias .* before its anchor is complete"),
        ("a: !!python/object:os.system x", "has the tag"),
        ("a: !!int x", "has the tag"),
        ("a: !!set {b}", "has the tag"),
        ("seed: 0777", "0777', which some read as octal; write it without the 0"),
        ("seed: -012", "octal"),
        (f"seed: {'9' * 5000}", "a number of 5000 digits"),
        ("? [a]: b", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("<<: 1", "is not YAML"),
        ("a: 1\na: 2", "comes twice"),
        ("x" * 2_000_000, "has 2,000,000 characters"),
    ],
)
def test_what_is_refused(text, words, tmp_path):
    began = time.monotonic()
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    for call in (lambda: read_yaml(text, "it"), lambda: load_recipe(file)):
        with pytest.raises(LeadlineError, match=words) as error:
            call()
        assert len(str(error.value).splitlines()) == 1
        assert len(str(error.value)) < 700
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 0x", "0x"), ("a: 0b_", "0b_"), ("a: 1:30", "1:30"), ("a: 2001-01-01", "2001-01-01"), ("a: '0777'", "0777"),
        ("a: 1_000", 1000), ("a: -3", -3), ("a: 1.5e+3", 1500.0), ("a: .5", 0.5), ("a: 0", 0), ("a: yes", True),
        ("a: ~", None), ("a: [1, {b: c}]", [1, {"b": "c"}]), ("a: &x [1]\nb: *x", [1]), ("a: 0.5", 0.5),
    ],
)  # fmt: skip
def test_plain_values(text, value):
    assert read_yaml(text, "it")["a"] == value


def test_merged_keys_still_work():
    assert read_yaml("a: &x {b: 1}\nc:\n  <<: *x\n  b: 2", "it")["c"] == {"b": 2}
