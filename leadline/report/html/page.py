"""One HTML file that shows a depth report, offline: the verdict, curves, violins, heat maps and the data."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from leadline.report.html import charts as page_plots
from leadline.report.html import tabs as page_tabs
from leadline.report.html import text as page_text
from leadline.report.html.charts import Chart
from leadline.report.numbers import Report, write_whole

# the browser itself refuses to fetch anything from anywhere
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def save_page(report: Report, path: str | Path, before: Report | None = None) -> Path:
    """Write ``report`` as one self-contained HTML file, which needs no network; returns its path.

    With ``before``, a report of the same model before a change, one tab shows both side by side.
    """
    return write_whole(path, render(report, before).encode())


def tabs(report: Report, before: Report | None = None) -> list[tuple[str, str, list[Chart]]]:
    """(name, HTML above the charts, charts) of every tab that has something to show."""
    empty = '<p class="soft">Not measured.</p>'
    found = [
        ("Similarity", "", page_tabs.similarity(report)),
        ("Cosine", "", page_tabs.cosines(report)),
        ("Entropy", "", page_tabs.entropies(report)),
        ("Spectrum", "", page_tabs.spectrum(report)),
        ("Norms and rank", "", page_tabs.norms(report)),
    ]
    if report.heatmaps:
        found.append(("Attention", "", page_plots.attention(report.heatmaps)))
    if before is not None:
        found.append(("Before / after", page_text.comparison(before, report), page_tabs.compared(before, report)))
    numbers = f"<h3>Settings</h3>{page_text.settings(report)}{page_text.table(report, 'Layer by layer')}"
    if before is not None:
        numbers += f"<h3>Settings, before</h3>{page_text.settings(before)}"
        numbers += page_text.table(before, "Layer by layer, before")
    found.append(("Data", numbers, []))
    return [(name, above or ("" if charts else empty), charts) for name, above, charts in found]


def render(report: Report, before: Report | None = None) -> str:
    """The whole page as text."""
    buttons: list[str] = []
    panels: list[str] = []
    specs: list[dict[str, Any]] = []
    for i, (name, above, charts) in enumerate(tabs(report, before)):
        figures = []
        for chart in charts:
            figures.append(_figure(chart, len(specs)))
            specs.append(chart.spec)
        on = i == 0
        buttons.append(
            f'<button type="button" role="tab" id="tab-{i}" aria-controls="panel-{i}" '
            f'aria-selected="{str(on).lower()}" tabindex="{0 if on else -1}">{escape(name)}</button>'
        )
        panels.append(
            f'<section class="panel{" on" if on else ""}" role="tabpanel" id="panel-{i}" aria-labelledby="tab-{i}">'
            f'<h2>{escape(name)}</h2>{above}<div class="charts">{"".join(figures)}</div></section>'
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
            f"<header><h1>{escape(title)}</h1>{_subtitle(report, before)}{page_text.verdict(report)}</header>",
            f'<main><div role="tablist" aria-label="Figures">{"".join(buttons)}</div>',
            "<noscript><p>The charts need JavaScript; the numbers are in the table below.</p></noscript>",
            f'<div class="panels">{"".join(panels)}</div></main>',
            "<footer>Made by Leadline. This file needs no network.</footer>",
            f'<script type="application/json" id="chart-data">{_json(specs)}</script>',
            f"<script>\n{chart_js}</script>\n<script>\n{js}</script>\n</body>\n</html>\n",
        ]
    )


def _subtitle(report: Report, before: Report | None) -> str:
    blocks = max(0, len(report.layers) - 1)
    words = f"{blocks} block{'' if blocks == 1 else 's'}"
    if "checkpoint" in report.settings:
        words += "; {checkpoint} on the {split} split of {data}".format(**report.settings)
    if before is not None:
        words += f"; compared with {before.model} before"
    return f'<p class="soft">{escape(words)}</p>'


def _figure(chart: Chart, index: int) -> str:
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    width = f' style="min-width:{chart.min_width}px"' if chart.min_width else ""
    return (
        f'<figure class="{"wide" if chart.wide else "half"}"><figcaption><h3>{escape(chart.title)}</h3>{note}'
        f'</figcaption><div class="scroll"><div class="chart" data-chart="{index}" '
        f'data-title="{escape(chart.title)}"{width}></div></div></figure>'
    )


def _json(value: object) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
