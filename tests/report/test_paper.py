"""Figures for paper: every report can be drawn, and what is drawn are its numbers."""

import re
import struct
import warnings
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from report_samples import bare, report

from leadline.errors import LeadlineError
from leadline.report.paper import cosine_violins, diversity_curves, entropy_violins, evenly, similarity_curves


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_the_suffix_chooses_the_format(tmp_path, suffix):
    file = tmp_path / f"depth{suffix}"
    report(depth=3, heads=2).save(file)
    data = file.read_bytes()
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix.lower()]
    assert data.startswith(start)
    if suffix == ".png":
        width, height = struct.unpack(">II", data[16:24])
        assert width == round(6.75 * 300)  # text width at 300 dots an inch
        assert height < 8 * 300
    if suffix == ".pdf":
        assert b"/Type3" not in data


@pytest.mark.parametrize("name", ["bare", "one layer", "deep", "entropy", "compared"])
def test_every_report_can_be_drawn_without_a_warning(tmp_path, name):
    drawn, before = {
        "bare": (bare(), None),
        "one layer": (report(depth=1, heads=1), None),
        "deep": (report(depth=100, heads=12), None),
        "entropy": (report("entropy collapse", heads=3), None),
        "compared": (report("no collapse", depth=4), bare()),
    }[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn.save(tmp_path / "x.svg", before=before)
    assert (tmp_path / "x.svg").stat().st_size > 5000


def test_violins_of_two_reports_are_to_one_scale_and_whole(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    report("no collapse", heads=2).save(tmp_path / "x.svg", before=report("entropy collapse", heads=2))
    for axes in ([a for a in drawn[0].axes if a.get_ylabel().startswith(what)] for what in ("entropy", "cosine")):
        one, two = axes
        assert one.get_ylim() == two.get_ylim()
        low, high = one.get_ylim()
        for axis in axes:
            (shapes,) = [c for c in axis.collections if isinstance(c, PolyCollection)]
            heights = np.concatenate([path.vertices[:, 1] for path in shapes.get_paths()])
            assert low <= heights.min() < heights.max() <= high


def test_the_same_report_gives_the_same_file(tmp_path):
    for suffix in (".svg", ".pdf"):
        files = [tmp_path / f"{i}{suffix}" for i in range(2)]
        for file in files:
            report(depth=2).save(file)
        assert files[0].read_bytes() == files[1].read_bytes()


def test_drawing_leaves_matplotlib_as_it_was(tmp_path):
    settings, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    report(depth=2).save(tmp_path / "x.png")
    assert dict(matplotlib.rcParams) == settings
    assert matplotlib.get_backend() == backend


@pytest.mark.parametrize("name", ["x.tiff", "x", "x.jpg"])
def test_another_suffix_is_one_line(tmp_path, name):
    with pytest.raises(
        LeadlineError, match=re.escape("the name must end in .html, .json, .csv, .png, .svg or .pdf")
    ) as error:
        bare().save(tmp_path / name)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(LeadlineError, match="create it first"):
        bare().save(tmp_path / "no" / "x.png")


def _marks(axis):
    return {mark.get_label(): mark.get_offsets() for mark in axis.collections if isinstance(mark, PathCollection)}


def test_cosine_violins_hold_the_histograms():
    layers = report(depth=4).layers
    axis = Figure().subplots()
    cosine_violins(axis, layers)
    (shapes,) = [c for c in axis.collections if isinstance(c, PolyCollection)]
    assert len(shapes.get_paths()) == 5
    for path, layer in zip(shapes.get_paths(), layers, strict=True):
        full = np.flatnonzero(layer.cosines.counts)
        low, high = path.vertices.min(0), path.vertices.max(0)
        np.testing.assert_allclose([low[0], high[0]], [layer.index - 0.42, layer.index + 0.42])
        np.testing.assert_allclose(low[1], layer.cosines.edges[full[0]])
        np.testing.assert_allclose(high[1], layer.cosines.edges[full[-1] + 1])
    marks = _marks(axis)
    assert set(marks) == {"mode", "median", "mean"}
    for name, points in marks.items():
        np.testing.assert_allclose(points, [(f.index, getattr(f.cosines, name)) for f in layers])


def test_entropy_violins_have_one_a_head_that_do_not_touch():
    layers = report(depth=3, heads=4).layers
    axis = Figure().subplots()
    entropy_violins(axis, layers)
    (shapes,) = [c for c in axis.collections if isinstance(c, PolyCollection)]
    spans = sorted((p.vertices[:, 0].min(), p.vertices[:, 0].max()) for p in shapes.get_paths())
    assert len(spans) == 12
    assert all(one[1] < two[0] for one, two in pairwise(spans))
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1", "2", "3"]
    np.testing.assert_allclose(_marks(axis)["mean"][:4, 1], [d.mean for d in layers[1].entropies])


def test_curves_have_gaps_and_no_zero_on_the_logarithmic_axis():
    axis, log = Figure().subplots(1, 2)
    similarity_curves(axis, {"": bare()})
    np.testing.assert_array_equal(axis.lines[0].get_ydata(), [0.1, np.nan, 1.0])
    diversity_curves(log, {"": bare()})
    assert log.get_yscale() == "log"
    np.testing.assert_array_equal(log.lines[0].get_ydata(), [0.9, np.nan, np.nan])
    both = Figure().subplots()
    similarity_curves(both, {"before": report(depth=2), "after": report("no collapse", depth=3)})
    assert [line.get_label() for line in both.lines] == ["before", "after"]
    assert len({(line.get_linestyle(), line.get_marker()) for line in both.lines}) == 2


def test_evenly_spaced_items_keep_the_last():
    assert evenly(range(10), 20) == list(range(10))
    assert evenly(range(1, 101), 12) == [1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100]
    assert evenly([], 3) == []
    for size in range(1, 40):
        for most in range(1, 12):
            items = evenly(range(size), most)
            assert len(items) <= most
            assert items[-1] == size - 1
