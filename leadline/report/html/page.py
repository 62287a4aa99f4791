"""Renders a depth report as one HTML file that works offline."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from leadline.report.html import tabs, text
from leadline.report.html.charts import Chart, attention_maps
from leadline.report.layers import ReportData

# with this policy the browser refuses to fetch anything from anywhere
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class Tab(NamedTuple):
    """One tab of the page."""

    name: str
    html: str  # shown above the charts
    charts: list[Chart]


def page_tabs(report: ReportData, before: ReportData | None = None) -> list[Tab]:
    """Return the tabs of the page in order; heat maps and the comparison only if there is something to show."""
    pages = [
        Tab("Similarity", "", tabs.similarity(report)),
        Tab("Cosine", "", tabs.cosines(report)),
        Tab("Entropy", "", tabs.entropies(report)),
        Tab("Spectrum", "", tabs.spectrum(report)),
        Tab("Norms and rank", "", tabs.norms(report)),
    ]
    if report.heatmaps:
        pages.append(Tab("Attention", "", attention_maps(report.heatmaps)))
    if before is not None:
        pages.append(Tab("Before / after", text.comparison(before, report), tabs.before_and_after(before, report)))
    data = f"<h3>Settings</h3>{text.settings(report)}{text.table(report, 'Layer by layer')}"
    if before is not None:
        data += f"<h3>Settings, before</h3>{text.settings(before)}"
        data += text.table(before, "Layer by layer, before")
    pages.append(Tab("Data", data, []))
    empty = '<p class="soft">Not measured.</p>'
    return [tab if tab.html or tab.charts else tab._replace(html=empty) for tab in pages]


def render_page(report: ReportData, before: ReportData | None = None) -> str:
    """Return the whole page as text.

    Args:
        report: The report to show.
        before: A report of the same model before a change; one tab then shows both side by side.
    """
    buttons: list[str] = []
    panels: list[str] = []
    specs: list[dict[str, Any]] = []
    for i, tab in enumerate(page_tabs(report, before)):
        frames = []
        for chart in tab.charts:
            frames.append(_frame(chart, len(specs)))
            specs.append(chart.spec)
        on = i == 0
        buttons.append(
            f'<button type="button" role="tab" id="tab-{i}" aria-controls="panel-{i}" '
            f'aria-selected="{str(on).lower()}" tabindex="{0 if on else -1}">{escape(tab.name)}</button>'
        )
        panels.append(
            f'<section class="panel{" on" if on else ""}" role="tabpanel" id="panel-{i}" aria-labelledby="tab-{i}">'
            f'<h2>{escape(tab.name)}</h2>{tab.html}<div class="charts">{"".join(frames)}</div></section>'
        )
    assets = files("leadline.report.html") / "assets"
    css, chart_js, js = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "chart.js", "page.js"))
    title = f"Depth report: {report.model}"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">',
            f"<style>\n{css}</style>",
            '<script>document.documentElement.className = "js";</script>\n</head>\n<body>',
            f"<header><h1>{escape(title)}</h1>{_subtitle(report, before)}{text.verdict(report)}</header>",
            f'<main><div role="tablist" aria-label="Figures">{"".join(buttons)}</div>',
            "<noscript><p>The charts need JavaScript; the numbers are in the table below.</p></noscript>",
            f'<div class="panels">{"".join(panels)}</div></main>',
            "<footer>Made by Leadline. This file needs no network.</footer>",
            f'<script type="application/json" id="chart-data">{_json(specs)}</script>',
            f"<script>\n{chart_js}</script>\n<script>\n{js}</script>\n</body>\n</html>\n",
        ]
    )


def _subtitle(report: ReportData, before: ReportData | None) -> str:
    """Return the line below the title."""
    blocks = max(0, len(report.layers) - 1)
    words = f"{blocks} block{'' if blocks == 1 else 's'}"
    if "checkpoint" in report.settings:
        words += "; {checkpoint} on the {split} split of {data}".format(**report.settings)
    if before is not None:
        words += f"; compared with {before.model} before"
    return f'<p class="soft">{escape(words)}</p>'


def _frame(chart: Chart, index: int) -> str:
    """Return the frame of chart number ``index``, which the script fills."""
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    width = f' style="min-width:{chart.min_width}px"' if chart.min_width else ""
    return (
        f'<figure class="{"wide" if chart.wide else "half"}"><figcaption><h3>{escape(chart.title)}</h3>{note}'
        f'</figcaption><div class="scroll"><div class="chart" data-chart="{index}" '
        f'data-title="{escape(chart.title)}"{width}></div></div></figure>'
    )


def _json(value: object) -> str:
    """Encode as JSON that is safe inside a script element."""
    encoded = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
