"""Renders a depth report as one HTML file that works offline."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any, NamedTuple

from leadline.report.html import tabs, text
from leadline.report.html.charts import Chart, attention_maps
from leadline.report.html.markup import Html, join, markup
from leadline.report.layers import ReportData
from leadline.report.presentation import as_text

# with this policy the browser fetches nothing, and runs the page's own scripts alone, which are known by their hashes
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_MARK_SCRIPTING = 'document.documentElement.className = "js";'  # the style sheet hides what needs no script


class Tab(NamedTuple):
    """One tab of the page."""

    name: str
    html: Html  # shown above the charts
    charts: list[Chart]


def page_tabs(report: ReportData, before: ReportData | None = None) -> list[Tab]:
    """Return the tabs of the page in order; heat maps and the comparison only if there is something to show."""
    none = markup("")
    pages = [
        Tab("Similarity", none, tabs.similarity(report)),
        Tab("Depth in use", text.depth_use(report), tabs.depth_use(report)),
        Tab("Cosine", none, tabs.cosines(report)),
        Tab("Entropy", none, tabs.entropies(report)),
        Tab("Spectrum", none, tabs.spectrum(report)),
        Tab("Norms and rank", none, tabs.norms(report)),
    ]
    if report.parts:
        pages.insert(1, Tab("Parts", text.parts(report), tabs.parts(report)))
    if report.heatmaps:
        pages.append(Tab("Attention", none, attention_maps(report.heatmaps)))
    if before is not None:
        pages.append(Tab("Before / after", text.comparison(before, report), tabs.before_and_after(before, report)))
    data = [markup("<h3>Settings</h3>"), text.settings(report), text.measured(report), text.download(report, "depth")]
    data += [text.table(report, "Layer by layer")]
    if before is not None:
        data += [markup("<h3>Settings, before</h3>"), text.settings(before)]
        data += [text.download(before, "depth-before"), text.table(before, "Layer by layer, before")]
    pages.append(Tab("Data", join(data), []))
    empty = markup('<p class="soft">Not measured.</p>')
    return [tab if tab.html or tab.charts else tab._replace(html=empty) for tab in pages]


def render_page(report: ReportData, before: ReportData | None = None) -> str:
    """Return the whole page as text.

    Args:
        report: The report to show.
        before: A report of the same model before a change; one tab then shows both side by side.
    """
    buttons: list[Html] = []
    panels: list[Html] = []
    specs: list[dict[str, Any]] = []
    for i, tab in enumerate(page_tabs(report, before)):
        frames = []
        for chart in tab.charts:
            frames.append(_frame(chart, len(specs)))
            specs.append(chart.spec)
        on = i == 0
        buttons.append(
            markup(
                '<button type="button" role="tab" id="tab-{i}" aria-controls="panel-{i}" '
                'aria-selected="{on}" tabindex="{index}">{name}</button>',
                i=i,
                on=str(on).lower(),
                index=0 if on else -1,
                name=tab.name,
            )
        )
        panels.append(
            markup(
                '<section class="panel{on}" role="tabpanel" id="panel-{i}" aria-labelledby="tab-{i}">'
                '<h2>{name}</h2>{html}<div class="charts">{frames}</div></section>',
                on=" on" if on else "",
                i=i,
                name=tab.name,
                html=tab.html,
                frames=join(frames),
            )
        )
    assets = files("leadline.report.html") / "assets"
    css, chart_js, js = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "chart.js", "page.js"))
    scripts = [_MARK_SCRIPTING, f"\n{chart_js}", f"\n{js}"]
    first, *others = (Html(f"<script>{script}</script>") for script in scripts)
    return markup(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<title>{title}</title>\n<link rel="icon" href="data:,">\n'
        "<style>\n{css}</style>\n{first}\n</head>\n<body>\n"
        "<header><h1>{title}</h1>{subtitle}{verdict}</header>\n"
        '<main><div role="tablist" aria-label="Figures">{buttons}</div>\n'
        "<noscript><p>The charts need JavaScript; the numbers are in the table below.</p></noscript>\n"
        '<div class="panels">{panels}</div></main>\n'
        "<footer>Made by Leadline. This file needs no network.</footer>\n"
        '<script type="application/json" id="chart-data">{specs}</script>\n{scripts}\n</body>\n</html>\n',
        policy=Html(_POLICY.format(scripts=" ".join(map(_hash, scripts)))),  # it has quotes and no value of a report
        title=f"Depth report: {report.model}",
        css=Html(css),
        first=first,
        subtitle=_subtitle(report, before),
        verdict=text.verdict(report),
        buttons=join(buttons),
        panels=join(panels),
        specs=_json(specs),
        scripts=Html("\n".join(others)),
    )


def _hash(script: str) -> str:
    """Return the source expression by which a content policy permits one inline script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _subtitle(report: ReportData, before: ReportData | None) -> Html:
    """Return the line below the title."""
    blocks = max(0, len(report.layers) - 1)
    words = f"{blocks} block{'' if blocks == 1 else 's'}"
    if {"checkpoint", "split", "data"} <= report.settings.keys():
        checkpoint, split, data = (as_text(report.settings[name]) for name in ("checkpoint", "split", "data"))
        words += f"; {checkpoint} on the {split} split of {data}"
    if before is not None:
        words += f"; compared with {before.model} before"
    return markup('<p class="soft">{words}</p>', words=words)


def _frame(chart: Chart, index: int) -> Html:
    """Return the frame of chart number ``index``, which the script fills."""
    return markup(
        '<figure class="{width}"><figcaption><h3>{title}</h3>{note}</figcaption><div class="scroll">'
        '<div class="chart" data-chart="{index}" data-title="{title}"{style}></div></div></figure>',
        width="wide" if chart.wide else "half",
        title=chart.title,
        note=markup("<p>{note}</p>", note=chart.note) if chart.note else "",
        index=index,
        style=markup(' style="min-width:{width}px"', width=chart.min_width) if chart.min_width else "",
    )


def _json(value: object) -> Html:
    """Encode as JSON that is safe inside a script element, where HTML's escapes have no meaning."""
    encoded = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Html(encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
