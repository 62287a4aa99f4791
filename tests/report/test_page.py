import base64
import html
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from report_samples import bare, report
from torch import nn

from leadline.errors import LeadlineError
from leadline.probing import probe
from leadline.report import DepthReport, Heatmap, Trial, Verdict
from leadline.report.html import charts as page_charts
from leadline.report.html import tabs as tab_charts
from leadline.report.html import text as page_text
from leadline.report.html.page import page_tabs, render_page
from leadline.report.presentation import number
from leadline.report.rows import csv_text

SAMPLES = {
    "collapse": lambda: report(),
    "no collapse": lambda: report("no collapse"),
    "entropy collapse": lambda: report("entropy collapse", heads=12),
    "bare": bare,
    "one layer": lambda: report(depth=1, heads=1),
    "100 layers": lambda: report(depth=100, heads=12),
}


class _Reader(HTMLParser):
    """Checks that every element is closed in order, and collects text, addresses and ids."""

    VOID = ("meta", "link", "br")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.addresses, self.ids = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        values = dict(attrs)
        self.addresses += [values[key] for key in ("href", "src", "action", "data") if key in values]
        self.ids += [values["id"]] if "id" in values else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    return reader


def heat_values(heat: dict) -> np.ndarray:
    """The numbers of a heat map as the page decodes them, (rows, columns)."""
    codes = np.frombuffer(base64.b64decode(heat["values"]), "<u2").reshape(heat["rows"], heat["columns"])
    return np.where(codes == 65535, np.nan, heat["low"] + codes / 65534 * (heat["top"] - heat["low"]))


@pytest.mark.parametrize("name", SAMPLES)
def test_every_chart_is_whole(name):
    """One thing to draw in each, with as many numbers on one side as on the other, all of them finite or None."""
    sample = SAMPLES[name]()
    charts = [chart for _, _, part in page_tabs(sample, before=report("no collapse")) for chart in part]
    assert charts
    for chart in charts:
        spec = chart.spec
        json.dumps(spec, allow_nan=False)
        assert chart.title
        assert spec["x"]["title"]
        assert spec["y"]["title"]
        assert len({"lines", "violins", "heat"} & set(spec)) == 1
        for line in spec.get("lines", []):
            assert len(line["x"]) == len(line["y"]) == len(line.get("labels", line["x"]))
            assert any(v is not None for v in line["y"])
        for _, _, values, halves, *marks in spec.get("violins", {}).get("items", []):
            assert len(values) == len(halves) >= 3
            assert values == sorted(values)
            assert max(halves) == 100
            assert len(marks) == 3
        if "heat" in spec:
            assert not np.isnan(heat_values(spec["heat"])).all()


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_is_well_formed_and_points_nowhere(name):
    sample = SAMPLES[name]()
    reader = read(render_page(sample))
    assert reader.addresses[0] == "data:,"
    kind, content = reader.addresses[1].split(",")  # the table, to be saved
    assert kind == "data:text/csv;base64"
    assert base64.b64decode(content).decode() == csv_text(sample)
    assert len(reader.addresses) == 2
    text = "".join(reader.text)
    assert sample.verdict.text in text
    assert sample.model in text


def test_text_is_escaped_everywhere():
    evil = '</script><img src="x" onerror="alert(1)">&amp;'
    sample = report(depth=2, heads=2, model=evil)
    sample.settings = {evil: evil, "nested": {"a": [evil]}}
    sample.verdict.text = evil
    sample.verdict.recommendation = {evil: 1.0}
    sample.verdict.kind = evil
    sample.verdict.trials = [
        Trial(evil, {}, [0.1, 0.2, 0.3], True),
        Trial("broken", {}, [], False, error=evil),
    ]
    for layer in sample.layers:
        layer.name = evil
        layer.rates = {evil: 1.0}
    html = render_page(sample, sample)
    assert "<img" not in html
    assert html.count("</script>") == 4
    reader = read(html)
    assert "".join(reader.text).count(evil) > 10
    # the page writes names as text, letter for letter
    charts = json.loads(re.search(r'id="chart-data">(.*?)</script>', html, re.S)[1])
    assert any(line["name"] == evil for chart in charts for line in chart.get("lines", []))


def test_the_verdict_and_its_numbers_are_on_top():
    sample = report()
    top = "".join(read(render_page(sample)).text).partition("Token similarity")[0]
    verdict = sample.verdict
    for words in (
        verdict.text,
        "leadline.cure(model, alpha=0.9)",
        f"{sample.layers[-1].similarity:.4g}",
        f"layer {verdict.passes['.5']}",
        f"{verdict.rate:.4g}",
        f"{verdict.expected_rate:.4g}",
        "6 of 12",
        "layers 6–11",
    ):
        assert words in top, words


def test_trials_are_told_as_they_came():
    rows = re.findall(r"<tr.*?</tr>", page_text.trials(report()), re.S)[2:]
    assert len(rows) == 4
    helped, best, useless, failed = rows
    assert "yes" in helped
    assert "recommended" not in helped
    assert "yes; recommended" in best
    assert "no, it moved the number too little or the wrong way" in useless
    assert "could not be tried: no place to put &lt;it&gt; in this model" in failed


def test_before_of_the_trials_is_the_batch_they_ran_on():
    sample = report(depth=3)
    sample.verdict.before = [0.1, 0.2, 0.3, 0.75]
    sample.verdict.trials = [Trial("alpha .5", {"alpha": 0.5}, [0.1, 0.2, 0.3, 0.5], True)]
    assert "<td>0.75</td><td>0.5</td><td>-0.25</td>" in page_text.trials(sample)
    (chart,) = tab_charts.trials(sample)
    assert chart.spec["lines"][0]["y"] == [0.1, 0.2, 0.3, 0.75]


def test_entropy_is_shown_where_the_verdict_is_about_it():
    sample = report("entropy collapse", depth=4, heads=2)
    assert "mean entropy (nats)" in page_text.trials(sample)
    assert [chart.title for chart in tab_charts.trials(sample)] == ["Cures tried", "Cures tried: entropy"]
    assert "next to one token in layers 1–4" in page_text.verdict(sample)


@pytest.mark.parametrize(
    ("kind", "trials", "words"),
    [
        ("no collapse", [], "Leave it alone: the tokens do not collapse. The entropy"),
        ("collapse", [], "No recommendation: no cure was tried."),
        ("collapse", [Trial("a", {}, [], False, error="x")], "No recommendation: no cure could be tried."),
        ("collapse", [Trial("a", {}, [1.0], False)], "No recommendation: none of the 1 cures tried moved the number"),
    ],
)
def test_advice_without_a_recommendation(kind, trials, words):
    sample = DepthReport("m", {}, [], Verdict(kind, "", {}, None, None, None, trials=trials))
    assert page_text.advice(sample).startswith(words)


@pytest.mark.parametrize(
    ("ahead", "shown"),
    [
        (75.2, ("75 layers", "by its trend, if it were made that deep; it has 12 blocks")),
        (12.2, ("13 layers", "by its trend, if it were made that deep; it has 12 blocks")),
        (9.0, ("layer 9", "within its 12 blocks")),
        (None, ("–", ".99 is not in sight")),
    ],
)
def test_a_depth_of_collapse_that_it_does_not_have_is_no_layer_of_it(ahead, shown):
    sample = report("no collapse", depth=12)
    sample.verdict.collapse_depth = ahead
    assert {what: words for what, *words in page_text.facts(sample)}["Depth of collapse"] == list(shown)


def test_few_layers_show_no_trend():
    sample = report("no collapse", depth=4)
    sample.verdict.collapse_depth = None
    assert ("Depth of collapse", "–", "too few layers to show a trend") in page_text.facts(sample)


def test_what_was_not_measured_is_said_and_not_drawn():
    sample = bare()
    names = {name: (above, charts) for name, above, charts in page_tabs(sample)}
    assert names["Spectrum"] == ('<p class="soft">Not measured.</p>', [])
    assert names["Cosine"][1] == []  # an empty histogram is no violin
    assert "Attention" not in names
    assert "Before / after" not in names
    table = page_text.table(sample, "x")
    assert "nan" not in table
    assert "omega</th>" not in table
    assert "∞" in table


def test_no_report_is_too_small():
    empty = DepthReport("nothing", {}, [], Verdict("no collapse", "", {}, None, None, None))
    read(render_page(empty, empty))


def test_curves_hold_the_numbers_of_the_report():
    sample = report(depth=5)
    charts = tab_charts.similarity(sample)
    similarity = charts[0].spec["lines"][0]
    assert similarity["x"] == [0, 1, 2, 3, 4, 5]
    assert similarity["y"] == pytest.approx([layer.similarity for layer in sample.layers], rel=1e-6)
    assert charts[1].spec["y"]["log"]
    sample.layers[2].similarity = math.nan
    assert tab_charts.similarity(sample)[0].spec["lines"][0]["y"][2] is None


def test_lines_differ_without_colour():
    looks = {(style["dash"], style["symbol"], style["open"]) for style in map(page_charts.style, range(10))}
    assert len(looks) == 10
    # and later lines differ from all others in colour or shape
    keys = [json.dumps(page_charts.style(i)) for i in range(20)]
    assert len(set(keys)) == 20


def test_violins_are_polygons_of_the_histograms():
    sample = report(depth=3)
    (chart,) = tab_charts.cosines(sample)
    items = chart.spec["violins"]["items"]
    assert [item[0] for item in items] == [0, 1, 2, 3]  # one shape a layer
    for item, layer in zip(items, sample.layers, strict=True):
        histogram = layer.cosines
        assert item[4:] == pytest.approx([histogram.mode, histogram.median, histogram.mean], abs=1e-4)
        full = [i for i, count in enumerate(histogram.counts) if count]
        assert item[2][0] == pytest.approx(histogram.edges[full[0]], abs=1e-3)
        assert item[2][-1] == pytest.approx(histogram.edges[full[-1] + 1], abs=1e-3)
        assert item[3][0] == item[3][-1] == 0


def test_entropy_violins_cover_every_head_of_a_deep_model():
    sample = report(depth=100, heads=12)
    charts = [chart for chart in tab_charts.entropies(sample) if chart.title.startswith("Attention entropy")]
    violins = [chart.spec["violins"]["items"] for chart in charts]
    assert sum(map(len, violins)) == 1200
    assert max(map(len, violins)) <= 96
    assert len({tuple(chart.spec["y"]["range"]) for chart in charts}) == 1


def test_a_large_heat_map_is_averaged():
    sample = report(depth=1, heads=1)
    size = 400
    sample.heatmaps[0].weights = [[1.0 if i == j else 0.0 for j in range(size)] for i in range(size)]
    (chart,) = page_charts.attention_maps(sample.heatmaps)
    rows = heat_values(chart.spec["heat"])
    assert rows.shape == (134, 134)  # 3 x 3 cells each
    np.testing.assert_allclose(np.diag(rows)[:-1], 1 / 3, atol=1e-4)
    assert rows[0, 1] == 0
    assert "mean of 3 x 3" in chart.note


def test_joined_tokens_keep_their_numbers():
    (chart,) = page_charts.attention_maps([Heatmap(1, 0, [[1.0, 0.0], [0.5, 0.5]], tokens=5)])
    assert "2.5 neighbours are joined" in chart.note
    assert chart.spec["heat"]["dx"] == chart.spec["heat"]["dy"] == 2.5


def test_a_heat_map_keeps_its_numbers_and_its_gaps():
    sample = report(depth=3, heads=2)
    sample.layers[2].entropy = [0.25, math.nan]
    (chart,) = page_charts.by_head(sample, "x", "head", lambda f: f.entropy)
    values = heat_values(chart.spec["heat"])
    expected = np.array([layer.entropy for layer in sample.layers[1:]]).T
    np.testing.assert_allclose(values, expected, atol=1e-4 * np.nanmax(expected))
    assert np.isnan(values[1, 1])
    assert chart.spec["heat"]["x0"] == 1


def test_before_and_after_stand_side_by_side():
    before, after = report(depth=4), report("no collapse", depth=6)
    charts = tab_charts.before_and_after(before, after)
    assert [(line["name"], len(line["x"])) for line in charts[0].spec["lines"]] == [("before", 5), ("after", 7)]
    one, two = charts[-2:]
    assert (one.title, two.title) == ("Cosine of token pairs, before", "Cosine of token pairs, after")
    assert one.spec["y"]["range"] == two.spec["y"]["range"]
    ends = [number(sample.layers[-1].similarity_robust) for sample in (before, after)]
    assert f"<td>{ends[0]}</td><td>{ends[1]}</td>" in (page_text.comparison(before, after))


@pytest.fixture(scope="module")
def probed():
    """A real probe: post-norm, ten layers, with attention, gradients, heat maps and cures tried."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 10, enable_nested_tensor=False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=1 / math.sqrt(32))
    return probe(model, torch.randn(2, 12, 32), loss=lambda out: out.square().mean(), heatmaps=True)


def test_the_page_of_a_real_probe(probed, tmp_path):
    charts = {name: drawn for name, _, drawn in page_tabs(probed)}
    assert all(charts[name] for name in ("Similarity", "Cosine", "Entropy", "Spectrum", "Norms and rank", "Attention"))
    assert len(charts["Cosine"][0].spec["violins"]["items"]) == 11
    text = "".join(read(render_page(probed, probed)).text)
    assert probed.verdict.text in text
    # a report read back from JSON gives the same page
    again = DepthReport.from_json(probed.to_json())
    assert render_page(again) == render_page(probed)
    for name in ("depth.html", "depth.pdf"):
        probed.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000


def test_a_page_is_one_file(tmp_path):
    file = tmp_path / "depth.html"
    report().save(file)
    html = file.read_text(encoding="utf-8")
    assert len(html) < 200_000
    assert html.startswith("<!DOCTYPE html>")
    assert "<title>Depth report: bert &lt;tiny&gt; &amp; co</title>" in html
    assert [path.name for path in tmp_path.iterdir()] == ["depth.html"]


def test_the_page_of_a_deep_model_is_small(tmp_path):
    """100 layers of 12 heads, before and after, with 36 heat maps of 64 x 64: what a repository still takes."""
    deep = report(depth=100, heads=12)
    weights = np.random.default_rng(0).dirichlet(np.ones(64), 64).tolist()
    deep.heatmaps = [Heatmap(layer, head, weights) for layer in (1, 50, 100) for head in range(12)]
    deep.save(tmp_path / "depth.html", before=deep)
    assert (tmp_path / "depth.html").stat().st_size < 1 << 20


def test_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(LeadlineError, match="create it first"):
        bare().save(tmp_path / "a" / "depth.html")
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_of_two_models_says_so():
    one, two = report("collapse", depth=12), report("no collapse", depth=12)
    two.model, two.settings = one.model, dict(one.settings)
    assert "Not one model" not in page_text.comparison(one, two)
    two.model, two.settings["tokens"] = "ViT<b>", 64
    html_text = page_text.comparison(one, two)
    assert f"model {html.escape(one.model)} and ViT&lt;b&gt;" in html_text
    assert f"tokens {one.settings['tokens']} and 64" in html_text


def test_depth_in_use_is_on_its_tab():
    sample = report(depth=6)
    tab = {tab.name: tab for tab in page_tabs(sample)}["Depth in use"]
    titles = [chart.title for chart in tab.charts]
    assert titles[:3] == ["Each layer left out", "Angles between layers", "Block influence"]
    assert tab.charts[0].spec["lines"][0]["y"][1:] == pytest.approx([layer.removal for layer in sample.layers[1:]])
    assert tab.charts[0].spec["levels"] == [0.05]
    np.testing.assert_allclose(heat_values(tab.charts[1].spec["heat"]), sample.depth_use.angles, atol=1e-4)
    assert "A note &lt;b&gt;." in tab.html
    assert '<td class="word">5–6</td><td>+0.03</td><td>0.01</td>' in tab.html
    assert tab_charts.similarity(sample)[0].spec["bands"] == [[2.5, 6.5]]
    facts = {what: words for what, *words in page_text.facts(sample)}
    assert facts["Depth in use"] == ["4 of 6", "the others cost at most 0.05 nats"]
    assert "so it helps only if the model is then trained with it" in page_text.advice(sample)
    assert "yes; recommended; loss (nats) +0.4" in page_text.trials(sample)


def test_without_removal_nothing_is_called_redundant():
    sample = report("no collapse", depth=6)
    facts = {what: words for what, *words in page_text.facts(sample)}
    assert facts["Redundant layers"] == ["–", "not measured: no layer, or not every layer, was left out"]
    assert "depth_use=True" in {tab.name: tab for tab in page_tabs(sample)}["Depth in use"].html
