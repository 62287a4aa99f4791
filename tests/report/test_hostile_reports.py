"""A report file from anybody: it is refused in one line, or becomes a page in which nothing of it runs."""

import ast
import copy
import json
import math
import os
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
from report_samples import report as sample

from leadline.errors import LeadlineError
from leadline.report import DepthReport, html, read_report, schema

ATTACK = (
    """"'><img src=x onerror="window.hit=1"><script>window.hit=1</script></script>"""
    "<svg onload=window.hit=1>{0}{name}$\\frac{["
)
VALUES = [
    ATTACK, "", None, True, -1, 0, 1.5, 1e308, -1e300, 1e300, 5e-324, 2**63, 10**400, [], [ATTACK], [[ATTACK]], [None],
    {}, {ATTACK: ATTACK}, {ATTACK: 1.0}, {"a": {"b": [ATTACK]}}, [1e300, -1e300], [0.0, 0.0],
]  # fmt: skip


def small():
    """The JSON of a report in which every field is measured, as small as it can be."""
    report = sample(depth=2, heads=2)
    for layer in report.layers:
        for histogram in [layer.cosines, *(layer.entropies or [])]:
            histogram.edges, histogram.counts = histogram.edges[:3], [1, 2]
    report.heatmaps = report.heatmaps[:1]
    report.heatmaps[0].weights = [[0.5, 0.5], [0.1, 0.9]]
    report.verdict.trials[0].entropy = [1.0, 2.0]
    return json.loads(report.to_json())


def places(value, path=()):
    """Every place in a JSON value, of the items of a list only the last."""
    yield path
    items = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        items = list(enumerate(value))[-1:]
    for key, item in items:
        yield from places(item, (*path, key))


def with_value(data, path, value):
    data = copy.deepcopy(data)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


class Elements(HTMLParser):
    """Collects the elements of a page, and attributes that could run something."""

    def __init__(self):
        super().__init__()
        self.tags, self.running = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.running += [name for name, value in attrs if name.startswith("on") or "script:" in (value or "")]


def check_page(report, before=None):
    page = html.page.render_page(report, before)
    elements = Elements()
    elements.feed(page)
    assert elements.tags.count("script") == 4  # ours
    assert elements.running == []
    assert not {"img", "svg", "iframe", "object"} & set(elements.tags)
    return page


def read(text):
    """The report, or None and the message of the refusal."""
    try:
        return DepthReport.from_json(text), ""
    except LeadlineError as error:
        return None, str(error)


def test_hostile_values_in_every_field_are_refused_or_rendered_as_text():
    data = small()
    clean = DepthReport.from_json(json.dumps(data))
    counts = {"refused": 0, "rendered": 0}
    for path in places(data):
        for value in VALUES if path else [[], 1, "x", None, True]:
            report, message = read(json.dumps(with_value(data, path, value) if path else value))
            if report is None:
                assert len(message.splitlines()) == 1
                assert len(message) < 400
                counts["refused"] += 1
                continue
            check_page(clean, report)
            check_page(report)
            str(report)
            counts["rendered"] += 1
    assert counts["refused"] > 300
    assert counts["rendered"] > 200


def texts(data):
    """Paths of every text in a report, keys of mappings left out."""
    for path in places(data):
        at = data
        for key in path:
            at = at[key]
        if isinstance(at, str):
            yield path


def hostile():
    """A report with the attack in every text and in every mapping with free keys."""
    data = small()
    for path in list(texts(data)):
        data = with_value(data, path, ATTACK)
    for mapping in (
        data["layers"][1]["rates"],
        data["verdict"]["trials"][0]["cure"],
        data["verdict"]["recommendation"],
    ):
        mapping[ATTACK] = 1.0
    data["verdict"]["passes"][ATTACK] = 1
    data["settings"] |= {ATTACK: [ATTACK, {ATTACK: ATTACK}], "checkpoint": ATTACK, "split": ATTACK, "data": ATTACK}
    return DepthReport.from_json(json.dumps(data))


def test_a_report_whose_every_text_is_an_attack_is_a_page_and_a_figure(tmp_path):
    report = hostile()
    page = check_page(report, report)
    assert ATTACK not in page
    for kind in ("svg", "png"):
        report.save(tmp_path / f"x.{kind}", before=report)


@pytest.mark.skipif(browser.find() is None, reason="no Chromium on the path")
def test_nothing_runs_in_a_browser(tmp_path):
    report = hostile()
    page = check_page(report, report)
    policy = page.index('<meta http-equiv="Content-Security-Policy"')
    end = page.index(">", policy) + 1
    open_page = page[:policy] + page[end:]
    attack = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
    files = {
        "escaped": open_page,  # without the policy: escaping alone must hold
        "policy": page.replace("<h1>", f"<h1>{attack}"),  # without escaping: the policy alone must hold
        "neither": open_page.replace("<h1>", f"<h1>{attack}"),  # the attack itself works
    }
    hits = {}
    program = browser.Browser(browser.find())
    try:
        for name, text in files.items():
            file = tmp_path / f"{name}.html"
            file.write_text(text)
            program.open(file)
            if name != "neither":  # our own scripts run under the policy
                program.until("document.querySelectorAll('.chart:not(:has(.drawing))').length === 0")
            hits[name] = program.run("new Promise(done => setTimeout(() => done(window.hit === 1), 200))")
    finally:
        program.close()
    assert hits == {"escaped": False, "policy": False, "neither": True}


def test_templates_are_the_only_source_of_html():
    folder = Path(html.__file__).parent
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text())
        templates = {
            id(part)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "markup"
            for part in ast.walk(call.args[0])
            if isinstance(part, ast.Constant)
        }
        for call in ast.walk(tree):  # a template is a constant: no value was put into it before
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "markup":
                assert isinstance(call.args[0], ast.Constant), f"{file.name}:{call.lineno}"
        for part in ast.walk(tree):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and "</" in part.value:
                assert id(part) in templates or part.value == "</script>", f"{file.name}:{part.lineno}"


def test_files_that_are_no_report(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    good = sample(depth=1, heads=1).to_json()
    for text in ("[" * 100_000, '{"a":' * 100_000, '"\\ud800"', "NaN", "9" * 5000, good.replace('"bert', '"\\ud800')):
        file.write_text(text)
        with pytest.raises(LeadlineError, match="no report"):
            read_report(file)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LeadlineError, match=r"cannot be read \(it is no regular file\)"):
        read_report(tmp_path / "pipe")
    file.write_text(good)
    monkeypatch.setattr(schema, "LARGEST_FILE", 1000)
    with pytest.raises(LeadlineError, match="larger than"):
        read_report(file)


def test_numbers_out_of_range_are_named():
    data = json.loads(sample(depth=2, heads=2).to_json())
    for path, value, words in [
        (("layers", 1, "index"), -1, r"layers\[1\].index is -1"),
        (("layers", 1, "index"), True, r"layers\[1\].index is True"),
        (("layers", 0, "similarity"), "0.5", r"layers\[0\].similarity is '0.5'"),
        (("layers", 0, "similarity"), 1e301, r"similarity is 1e\+301"),
        (("heatmaps", 0, "weights", 0, 0), -0.5, r"heatmaps\[0\] has weights below 0"),
        (("layers", 0, "cosines", "edges", 1), 9, r"layers\[0\].cosines has edges that do not increase"),
        (("layers", 0, "cosines", "counts"), [1], r"has 81 edges for 1 counts"),
        (("settings", "tokens"), 10**400, "settings.'tokens' is "),
    ]:
        with pytest.raises(LeadlineError, match=words):
            DepthReport.from_json(json.dumps(with_value(data, path, value)))
    assert math.isnan(DepthReport.from_json(json.dumps(with_value(data, ("layers", 0, "norm"), None))).layers[0].norm)
