"""The page in a real browser. Skipped where no Chromium is installed."""

import browser
import pytest
from report_samples import bare, report

PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"no {', '.join(browser.NAMES)} on the path")
DRAWN = "document.querySelectorAll('.chart:not(:has(.drawing))').length === 0"
READ_OUT = "Array.from(document.querySelectorAll('.tip:not([hidden])'), t => t.innerText).join()"


@pytest.fixture(scope="module")
def chromium():
    program = browser.Browser(PROGRAM)
    yield program
    program.close()
    assert program.process.poll() is not None


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    reports = {
        "collapse": report(),
        "compared": report("no collapse"),
        "entropy": report("entropy collapse", depth=6, heads=3),
        "deep": report(depth=100, heads=12),
        "bare": bare(),
    }
    files = {name: folder / f"{name}.html" for name in reports}
    for name, each in reports.items():
        each.save(files[name], before=reports["collapse"] if name == "compared" else None)
    return files


def clean(chromium) -> None:
    assert chromium.console == []
    away = [url for url in chromium.requests if not url.startswith(("file:", "data:", "blob:"))]
    assert away == []
    assert len([url for url in chromium.requests if url.startswith("file:")]) == 1


@pytest.mark.parametrize("name", ["collapse", "compared", "entropy", "deep", "bare"])
@pytest.mark.parametrize(("width", "height", "phone"), [(1280, 800, False), (390, 844, True)], ids=["laptop", "phone"])
def test_curves_are_drawn_tabs_switch_and_nothing_is_fetched(chromium, pages, name, width, height, phone):
    chromium.size(width, height, phone)
    chromium.open(pages[name])
    chromium.until(DRAWN)
    assert chromium.run("document.title").startswith("Depth report: ")
    tabs = chromium.run("Array.from(document.querySelectorAll('[role=tab]'), t => t.textContent)")
    assert tabs[0] == "Similarity"
    assert tabs[-1] == "Data"
    assert ("Before / after" in tabs) == (name == "compared")
    for i in range(len(tabs)):
        chromium.click(f"#tab-{i}")
        shown = chromium.run(
            "Array.from(document.querySelectorAll('.panel')).filter(p => p.offsetHeight > 0 && "
            "getComputedStyle(p).visibility === 'visible').map(p => p.id)"
        )
        assert shown == [f"panel-{i}"]
        assert chromium.run("document.querySelectorAll('[aria-selected=true]').length") == 1
        # what is drawn in each chart: length of its longest line, number of its marks and images
        drawn = chromium.run(
            f"Array.from(document.querySelectorAll('#panel-{i} .chart'), c => ["
            "Math.max(0, ...Array.from(c.querySelectorAll('path.line'), p => p.getTotalLength())), "
            "c.querySelectorAll('.plot path.mark').length, c.querySelectorAll('.drawing image').length, "
            "c.querySelectorAll('path.violin').length])"
        )
        for length, marks, images, violins in drawn:
            assert length > 20 or marks > 0 or images > 0 or violins > 0
        if name == "collapse" and tabs[i] == "Similarity":
            assert len(drawn) == 4
            assert all(length > 100 for length, *_ in drawn)
        if name == "collapse" and tabs[i] == "Cosine":
            assert drawn == [[0, 3 * 13, 0, 13]]  # mode, median and mean of thirteen violins
        if name == "collapse" and tabs[i] == "Attention":
            assert len(drawn) == 4
            assert all(images == 1 for _, _, images, _ in drawn)
    assert chromium.run("document.documentElement.scrollWidth") <= width  # no sideways scrolling of the page
    clean(chromium)


def test_these_checks_see_a_fetch_and_a_message(chromium, tmp_path):
    file = tmp_path / "bad.html"
    file.write_text('<script src="http://127.0.0.1:9/x.js"></script><script>console.log("hello"); nothing()</script>')
    chromium.open(file)
    assert "http://127.0.0.1:9/x.js" in chromium.requests
    assert any("hello" in line for line in chromium.console)
    assert any("nothing is not defined" in line for line in chromium.console)
    with pytest.raises(AssertionError):
        clean(chromium)


def middle(chromium, chart):
    """Where the middle of a chart's drawing is in the window, after scrolling to it."""
    plot = f"document.querySelector('.chart[data-title=\"{chart}\"] .plot')"
    chromium.run(f"{plot}.scrollIntoView({{block: 'center'}})")
    return chromium.run(f"(r => [r.left + r.width / 2, r.top + r.height / 2])({plot}.getBoundingClientRect())")


@pytest.mark.parametrize(
    ("tab", "chart", "words"),
    [
        (
            0,
            "Token similarity",
            ["layer 6", "similarity (t_sim) 0.57", "mean cosine 0.55", "similarity, patches only 0.57"],
        ),
        (2, "Cosine of token pairs", ["layer 6, encoder.layer.5", "mode 0.", "median 0.", "mean 0."]),
        (4, "delta", ["layer 6", "mean over heads 0.", "head "]),
        (6, "Layer 1, head 0", ["key ", "query ", "0."]),
    ],
)
def test_hover_reads_out_the_numbers(chromium, pages, tab, chart, words):
    chromium.size(1280, 800)
    chromium.open(pages["collapse"])
    chromium.until(DRAWN)
    chromium.click(f"#tab-{tab}")
    x, y = middle(chromium, chart)
    x += (
        -150 if tab == 6 else 24
    )  # the square lies to the left; the middle layer is right of the middle, beside the axis
    chromium.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    chromium.until(f"{READ_OUT} !== ''")
    text = chromium.run(READ_OUT)
    for word in words:
        assert word in text
    chromium.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    chromium.until(f"{READ_OUT} === ''")
    clean(chromium)


def test_a_chart_answers_to_the_keyboard(chromium, pages):
    chromium.size(1280, 800)
    chromium.open(pages["collapse"])
    chromium.until(DRAWN)
    chromium.run("document.querySelector('.plot').focus()")
    for key, expected in (("ArrowRight", "input"), ("ArrowRight", "layer 1"), ("ArrowLeft", "input")):
        chromium.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        assert expected in chromium.run(READ_OUT)
    assert f"similarity (t_sim) {report().layers[0].similarity:.5g}" in chromium.run(READ_OUT)
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
    assert chromium.run(READ_OUT) == ""


def test_the_legend_switches_curves_off_and_on(chromium, pages):
    chromium.size(1280, 800)
    chromium.open(pages["collapse"])
    chromium.until(DRAWN)
    lines = "document.querySelectorAll('.chart path.line').length"
    before = chromium.run(lines)
    for pressed, count in (("false", before - 1), ("true", before)):
        chromium.click(".chart .key")
        assert chromium.run("document.querySelector('.chart .key').getAttribute('aria-pressed')") == pressed
        assert chromium.run(lines) == count
    keys = chromium.run("document.querySelectorAll('.chart')[0].querySelectorAll('.key').length")
    for _ in range(keys):  # with nothing left to draw the axes stay
        chromium.click(".chart .key[aria-pressed=true]")
    assert chromium.run("document.querySelectorAll('.chart')[0].querySelectorAll('path.line').length") == 0
    clean(chromium)


def test_dragging_zooms_and_a_button_goes_back(chromium, pages):
    chromium.size(1280, 800)
    chromium.open(pages["collapse"])
    chromium.until(DRAWN)
    ticks = "Array.from(document.querySelectorAll('.chart')[0].querySelectorAll('.drawing text'), t => t.textContent)"
    whole = chromium.run(ticks)
    x, y = middle(chromium, "Token similarity")
    for kind, at in (("mousePressed", (x - 40, y - 30)), ("mouseMoved", (x, y)), ("mouseReleased", (x + 40, y + 30))):
        chromium.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", buttons=1, clickCount=1)
    zoomed = chromium.run(ticks)
    assert zoomed != whole
    assert "12" not in zoomed
    chromium.click(".chart .back")
    assert chromium.run(ticks) == whole
    assert chromium.run("getComputedStyle(document.querySelector('.chart .back')).display") == "none"
    clean(chromium)


def test_a_tap_reads_out_on_a_phone(chromium, pages):
    chromium.size(390, 844, True)
    chromium.open(pages["collapse"])
    chromium.until(DRAWN)
    x, y = middle(chromium, "Token similarity")
    chromium.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    chromium.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    chromium.until(f"{READ_OUT} !== ''")
    assert "layer " in chromium.run(READ_OUT)
    box = chromium.run("(r => [r.left, r.right])(document.querySelector('.tip').getBoundingClientRect())")
    assert box[0] >= 0
    assert box[1] <= 390
    clean(chromium)


def test_tabs_answer_to_the_keyboard(chromium, pages):
    chromium.open(pages["bare"])
    chromium.run("document.getElementById('tab-0').focus()")
    for key, expected in (("ArrowRight", "tab-1"), ("End", "tab-6"), ("ArrowRight", "tab-0"), ("ArrowLeft", "tab-6")):
        chromium.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        assert chromium.run("document.activeElement.id") == expected
        assert chromium.run("document.querySelector('[aria-selected=true]').id") == expected


def test_charts_follow_the_window(chromium, pages):
    chromium.size(1280, 800)
    chromium.open(pages["collapse"])
    chromium.until(DRAWN)
    widest = "Math.max(...Array.from(document.querySelectorAll('#panel-2 .drawing'), s => s.clientWidth))"
    assert chromium.run(widest) > 1000
    chromium.size(500, 800)
    chromium.until(f"{widest} <= 500")
    clean(chromium)


def test_print_shows_every_tab(chromium, pages):
    chromium.size(390, 844, True)
    chromium.open(pages["collapse"])
    chromium.run(
        "window.addEventListener('beforeprint', () => { window.seen = "
        "Array.from(document.querySelectorAll('.chart'), c => c.querySelector('.drawing').clientWidth) })"
    )
    data = chromium.pdf()
    assert data.startswith(b"%PDF")
    assert data.count(b"/Type /Page\n") >= 5
    seen = chromium.run("window.seen")
    assert len(seen) == chromium.run("document.querySelectorAll('.chart').length")
    assert set(seen) == {670}  # all of them, the width of the paper
    chromium.call("Emulation.setEmulatedMedia", media="print")
    hidden = chromium.run(
        "Array.from(document.querySelectorAll('.panel')).filter(p => p.offsetHeight < 50 || "
        "getComputedStyle(p).visibility !== 'visible').length"
    )
    bar = chromium.run("getComputedStyle(document.querySelector('[role=tablist]')).display")
    chromium.call("Emulation.setEmulatedMedia", media="")
    assert hidden == 0
    assert bar == "none"
    clean(chromium)


def test_without_javascript_the_numbers_are_there(chromium, pages):
    chromium.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.size(1280, 800)
        chromium.open(pages["collapse"])
        assert chromium.run("document.querySelector('table.layers').offsetHeight") > 200
        assert chromium.run("getComputedStyle(document.querySelector('#panel-6')).visibility") == "visible"
    finally:
        chromium.call("Emulation.setScriptExecutionDisabled", value=False)
