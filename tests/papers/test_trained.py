"""Claims, notes and tables that trained entries derive from their records, and the data of their runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leadline.errors import LeadlineError
from leadline.papers import ENTRIES
from leadline.papers.shared import vits
from leadline.papers.shared.entry import Context, Entry
from leadline.papers.shared.peaks import near_one, peak_layers, peak_sentence, peaks_at_one
from leadline.papers.shared.trained import describe_difference, difference, end_loss, percent, training_setting
from leadline.report.layers import Distribution, LayerData
from leadline.training.runs import Job, Record
from leadline.training.runs.jobs import recipe_of, stem

MODEL = {"name": "vit_tiny", "depth": 1, "dim": 16, "heads": 2, "patch_size": 8, "pool": "max"}


def test_cifar_is_trained_on_where_it_lies(tmp_path: Path) -> None:
    recipe = {"model": MODEL, "data": {"name": "cifar10"}, "length": "4 steps", "graph": True, "compile": "blocks",
              "precision": "bf16"}  # fmt: skip
    job = Job("a b", recipe)
    plain = Context({}, 0, torch.device("cpu"), data=tmp_path / "copy", out=tmp_path)
    completed = recipe_of(training_setting(plain), job)
    assert (completed.data.name, completed.data.path) == ("cifar10", str(tmp_path / "copy"))
    assert (completed.graph, completed.compile, completed.precision) == (False, "none", "float32")  # on a CPU
    elsewhere = replace(plain, data=tmp_path / "other")
    assert stem(training_setting(plain), job) == stem(training_setting(elsewhere), job)
    gpu = replace(plain, device=torch.device("cuda"))
    assert recipe_of(training_setting(gpu), job).graph
    assert stem(training_setting(gpu), job) != stem(training_setting(plain), job)


def histogram(**shares: int) -> Distribution:
    """Counts of cosines by percent: p97=5 is five pairs in [.97, .98)."""
    counts = [0] * 200
    for name, count in shares.items():
        counts[100 + int(name[1:])] = count
    return Distribution([-1 + 0.01 * i for i in range(201)], counts, 0.0, 0.0, 0.0)


def test_peak_at_one() -> None:
    assert near_one(histogram(p99=3, p98=1, p97=4, p10=2)) == pytest.approx(0.4)
    assert peaks_at_one(histogram(p99=3, p95=4, p10=93))
    assert not peaks_at_one(histogram(p99=1, p95=10, p10=89))  # falls towards 1
    assert not peaks_at_one(histogram(p99=1, p10=999))  # too few
    layers = [LayerData(i, "x", 0, 1, 0, 1, 1, cosines=h) for i, h in enumerate(
        [histogram(p99=9), histogram(p99=3, p10=97), histogram(p10=9), histogram(p99=5, p10=5)])]  # fmt: skip
    assert peak_layers(layers) == ([1, 3], 0.5)


def test_sentences_follow_from_the_numbers() -> None:
    peak = [LayerData(i, "x", 0, 1, 0, 1, 1, cosines=histogram(p99=5, p10=5)) for i in range(3)]
    flat = [LayerData(i, "x", 0, 1, 0, 1, 1, cosines=histogram(p10=5)) for i in range(3)]
    line = peak_sentence({"standard": peak, "alpha only": flat, "alpha' only": peak})
    assert line == (
        "The peak at cosine 1 appears with standard attention in layers 1–2 of 2: up to 50 % of the token pairs have a "
        "cosine above 0.98. It is gone with alpha only (at most 0 %). It stays with alpha' only (layers 1–2, 50 %)."
    )
    few, fewer = (
        [LayerData(i, "x", 0, 1, 0, 1, 1, cosines=histogram(p99=n, p95=12, p10=88 - n)) for i in range(3)]
        for n in (4, 3)
    )
    assert peak_sentence({"standard": few, "alpha' only": fewer}).endswith(
        "With alpha' only (at most 3 %) it no longer stands out in any layer, but there are nearly as many such pairs."
    )
    line = peak_sentence({"standard": flat, "both": peak})
    assert line.startswith("A peak at cosine 1 does not appear with standard attention")
    assert line.endswith("It appears with both.")
    assert percent([0.5, 0.6, 0.7]) == "60.0 ± 10.0"
    assert percent([0.5]) == "50.0"
    mean, error = difference([0.5, 0.6, 0.7], [0.4, 0.4, 0.7])
    assert (mean, error) == pytest.approx((10.0, 10 / 3**0.5))
    assert "within the noise of 3 seeds" in describe_difference("x", [0.5, 0.6, 0.7], [0.4, 0.4, 0.7])
    assert "beyond the noise of 3 seeds" in describe_difference("x", [0.5, 0.6, 0.7], [0.1, 0.21, 0.3])
    assert describe_difference("x", [0.5], [0.4]) == "x +10.0 points (one seed)"


def test_a_net_that_guesses_is_named() -> None:
    runs = {arm: [Record(arm, {"diverged": None, "test_accuracy": value})] for arm, value in (("a", 0.6), ("b", 0.11))}
    context = Context({}, 0, torch.device("cpu"))
    assert " b: little better than guessing (10)" in vits.accuracy_note(context, runs)
    assert "guessing" not in vits.accuracy_note(context, {"a": runs["a"]})
    hundred = Context({"image_set": "cifar100"}, 0, torch.device("cpu"))
    assert "guessing" not in vits.accuracy_note(hundred, runs)


def test_the_loss_at_the_end_is_of_the_last_tenth() -> None:
    rows = [{"epoch": 0.1 * i, "loss": float(i)} for i in range(1, 101)]
    assert end_loss(Record("a", {"training": rows})) == pytest.approx(95.5)
    assert end_loss(Record("a", {"training": rows[:3]})) == 3.0


def test_every_trained_entry_of_vision_is_there() -> None:
    ids = {entry.id for entry in ENTRIES if entry.group == "trained" and entry.images}
    figures = {f"hop-fig{i}" for i in (5, 6, 7, 8, 13, 14, 15, 16)}
    assert {"tse-fig6", "hop-skipless", "hop-vit", *figures} <= ids
    for entry in ENTRIES:
        if entry.budgets:
            assert entry.with_budget("short").setting["budget"] == "short"
            with pytest.raises(LeadlineError, match="unknown budget 'long'"):
                entry.with_budget("long")
    plain = next(entry for entry in ENTRIES if not entry.budgets)
    assert isinstance(plain, Entry)
    assert plain.with_budget("full") is plain
