"""Renders the words and tables of the page as escaped HTML: verdict, trials, comparison, data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from leadline.report.layers import LayerData, ReportData, Trial
from leadline.report.presentation import NONE, as_text, cure_call, finite, mean_of, number, spans
from leadline.report.verdict import TREND_BLOCKS, depth_of_collapse, entropy_share

_KINDS = {
    "collapse": "▲ Collapse: tokens become alike",
    "no collapse": "● No collapse",
    "entropy collapse": "■ Entropy collapse: attention looks at single tokens",
}


def _last(report: ReportData) -> float | None:
    return finite(report.layers[-1].similarity) if report.layers else None


def _passes(report: ReportData) -> list[tuple[str, str]]:
    levels = report.verdict.passes.items()
    return [(level, "never" if layer is None else f"layer {layer}") for level, layer in levels]


def facts(report: ReportData) -> list[tuple[str, str, str]]:
    """Return the numbers behind the verdict: name, number and remark of each."""
    verdict, depth = report.verdict, max(0, len(report.layers) - 1)
    entry = finite(report.layers[0].similarity) if report.layers else None
    redundant = spans(verdict.redundant)
    ahead = finite(verdict.collapse_depth)
    where = NONE if ahead is None else f"layer {number(float(f'{ahead:.3g}'))}"
    if ahead is None:
        remark = ".99 is not in sight" if depth >= TREND_BLOCKS else "too few layers to show a trend"
    elif ahead > depth:
        where = f"{depth_of_collapse(ahead, depth)} layers"
        remark = f"by its trend, if it were made that deep; it has {depth} blocks"
    else:
        remark = f"within its {depth} blocks"
    ranks = [number(layer.effective_rank) for layer in report.layers] or [NONE]
    share = mean_of([value for layer in report.layers if (value := entropy_share(layer)) is not None])
    sharp = spans(verdict.entropy_collapse)
    return [
        ("Similarity after the last layer", number(_last(report)), f"at the input {number(entry)}"),
        *((f"Similarity passes {level}", where, "") for level, where in _passes(report)),
        ("Rate of escalation", number(verdict.rate), "fitted: growth of similarity / diversity a layer"),
        ("Rate by theory", number(verdict.expected_rate), "1 + gain² at the gain measured"),
        ("Depth of collapse", where, remark),
        ("Effective rank at the end", ranks[-1], f"at the input {ranks[0]}" + "; it collapses" * verdict.rank_collapse),
        (
            "Entropy of attention",
            NONE if share is None else f"{number(share)} of uniform",
            f"next to one token in layers {sharp}" if sharp else "mean over layers and heads",
        ),
        (
            "Redundant layers",
            f"{len(set(verdict.redundant))} of {depth}" if redundant else "none",
            f"layers {redundant}" if redundant else "every layer changes something",
        ),
    ]


def advice(report: ReportData) -> str:
    """Return the advice, one sentence of HTML."""
    verdict = report.verdict
    if verdict.recommendation:
        return f"Recommended, because it moved the number: <code>{escape(cure_call(verdict.recommendation))}</code>"
    if verdict.kind == "no collapse":
        return "Leave it alone: nothing collapses here."
    ran = [trial for trial in verdict.trials if trial.error is None]
    if not ran:
        return (
            "No recommendation: no cure could be tried." if verdict.trials else "No recommendation: no cure was tried."
        )
    return f"No recommendation: none of the {len(ran)} cures tried moved the number the verdict is about."


def _step(before: float | None, after: float | None) -> list[str]:
    """Return three cells: before, after and the change."""
    change = NONE
    if before is not None and after is not None:
        change = ("+" if after > before else "") + number(float(f"{after - before:.3g}"))
    return [number(before), number(after), change]


def _trial_row(trial: Trial, pairs: list[tuple[float | None, float | None]], best: bool) -> str:
    """Return the row of one trial.

    Args:
        trial: The cure that was tried.
        pairs: Before and after of each number shown.
        best: Whether this cure is recommended.
    """
    cells = [cell for before, after in pairs for cell in _step(before, after)]
    if trial.error is not None:
        word = f"could not be tried: {trial.error}"
    else:
        word = ("yes" if trial.helps else "no, it moved the number too little or the wrong way") + (
            "; recommended" if best else ""
        )
    return (
        f'<tr{" class=best" if best else ""}><td class="word">{escape(trial.name)}</td>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f'<td class="word">{escape(word)}</td></tr>'
    )


def trials(report: ReportData) -> str:
    """Return a table of every cure that was tried, helpful or not; empty if none was."""
    verdict = report.verdict
    if not verdict.trials:
        return ""
    similarity = finite(verdict.before[-1]) if verdict.before else _last(report)
    about_entropy = any(trial.entropy for trial in verdict.trials)
    entropy = mean_of([value for layer in report.layers if (value := mean_of(layer.entropy)) is not None])
    rows = []
    for trial in verdict.trials:
        ran = trial.error is None
        pairs = [(similarity, finite(trial.similarity[-1]) if ran and trial.similarity else None)]
        if about_entropy:
            pairs.insert(0, (entropy, mean_of(trial.entropy)))
        rows.append(_trial_row(trial, pairs, ran and trial.cure == verdict.recommendation))
    groups = ["similarity after the last layer"]
    note = ""
    if about_entropy:
        groups.insert(0, "mean entropy (nats)")
        note = '<p class="soft">Entropy before is over the whole input, after over the batch of the trials.</p>'
    heads = "".join(f'<th colspan="3" class="group">{group}</th>' for group in groups)
    return (
        '<div class="scroll"><table class="trials"><caption>Cures tried on the same batch</caption><thead>'
        f'<tr><th class="word" rowspan="2">cure</th>{heads}<th class="word" rowspan="2">did it help?</th></tr><tr>'
        + "<th>before</th><th>after</th><th>change</th>" * len(groups)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def verdict(report: ReportData) -> str:
    """Return the top of the page: verdict, advice, numbers and trials."""
    kind = _KINDS.get(report.verdict.kind, report.verdict.kind)
    tiles = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for what, value, remark in facts(report)
    )
    sentence = advice(report)
    paragraph = "" if sentence in report.verdict.text else f'<p class="advice">{sentence}</p>'
    return (
        f'<section class="verdict" aria-label="Verdict"><p class="kind">{escape(kind)}</p>'
        f'<p class="text">{escape(report.verdict.text)}</p>{paragraph}</section>'
        f'<dl class="tiles">{tiles}</dl>{trials(report)}'
    )


def comparison(before: ReportData, after: ReportData) -> str:
    """Return a table of both verdicts and their numbers, side by side."""
    second = {what: value for what, value, _ in facts(after)}
    pairs = [("Model", before.model, after.model), ("Verdict", before.verdict.kind, after.verdict.kind)]
    pairs += [(what, value, second.get(what, NONE)) for what, value, _ in facts(before)]
    rows = "".join(
        f'<tr><td class="word">{escape(what)}</td><td>{escape(one)}</td><td>{escape(two)}</td></tr>'
        for what, one, two in pairs
    )
    return _unlike(before, after) + (
        '<div class="scroll"><table class="compared"><thead><tr><th class="word">number</th><th>before</th>'
        f"<th>after</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _unlike(before: ReportData, after: ReportData) -> str:
    """Return a warning if the reports are not of one model on one input; otherwise nothing."""
    sides = [{"model": report.model, "blocks": len(report.layers) - 1, **report.settings} for report in (before, after)]
    names = ("model", "blocks", "samples", "tokens")
    pairs = [(name, *(side.get(name) for side in sides)) for name in names]
    words = escape(", ".join(f"{name} {as_text(one)} and {as_text(two)}" for name, one, two in pairs if one != two))
    return f"<p><strong>Not one model on one input:</strong> {words}. Differences may come from that.</p>" * bool(words)


def settings(report: ReportData) -> str:
    """Return the list of settings."""
    items = [("model", report.model), *report.settings.items()]
    rows = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(as_text(value))}</dd>" for key, value in items)
    return f'<dl class="settings">{rows}</dl>'


def table(report: ReportData, caption: str) -> str:
    """Return a table with a row per layer, without the columns in which nothing was measured."""
    parts = sorted({part for layer in report.layers for part in layer.rates})

    def of(part: str) -> Callable[[LayerData], float | None]:
        return lambda f: f.rates.get(part)

    columns: Sequence[tuple[str, Callable[[LayerData], float | None]]] = [
        ("similarity", lambda f: f.similarity),
        ("sim. patches", lambda f: f.similarity_patches),
        ("diversity", lambda f: f.diversity),
        ("cosine", lambda f: f.cosine),
        ("rate", lambda f: f.rate),
        *((f"rate {part}", of(part)) for part in parts),
        ("gain", lambda f: f.gain),
        ("change", lambda f: f.change),
        ("norm", lambda f: f.norm),
        ("eff. rank", lambda f: f.effective_rank),
        ("entropy", lambda f: mean_of(f.entropy)),
        ("delta", lambda f: mean_of(f.delta)),
        ("omega", lambda f: mean_of(f.omega)),
        ("|λ₂|", lambda f: mean_of(f.second_eigenvalue)),
        ("gradient", lambda f: f.gradient_norm),
    ]
    used = [(name, get) for name, get in columns if any(finite(get(layer)) is not None for layer in report.layers)]
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in used)
    rows = "".join(
        f'<tr><td>{layer.index}</td><td class="word">{escape(layer.name)}</td>'
        + "".join(f"<td>{number(get(layer))}</td>" for _, get in used)
        + "</tr>"
        for layer in report.layers
    )
    return (
        f'<div class="scroll"><table class="layers"><caption>{escape(caption)}</caption><thead><tr><th>layer</th>'
        f'<th class="word">module</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        '<p class="soft">Entropy, delta, omega and |λ₂| are means over heads.</p>'
    )
