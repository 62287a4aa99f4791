"""Renders the words and tables of the page as escaped HTML: verdict, trials, comparison, data."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence

from leadline.report.html.markup import Html, join, markup
from leadline.report.layers import LayerData, ReportData, Trial
from leadline.report.presentation import NONE, as_text, cure_call, finite, mean_of, number, spans
from leadline.report.rows import csv_text, massive_share
from leadline.report.verdict import TREND_BLOCKS, depth_of_collapse, entropy_share, figure, price

_KINDS = {
    "collapse": "▲ Collapse: tokens become alike",
    "common direction": "◆ A common direction, in use: no collapse",
    "unused depth": "▼ Unused depth: layers that the output does not need",
    "no collapse": "● No collapse",
    "entropy collapse": "■ Entropy collapse: attention looks at single tokens",
}


UNITS = {"loss": "loss (nats)", "kl": "output (KL, nats)", "cosine": "output (1 - cosine)"}


def _last(report: ReportData) -> float | None:
    return finite(figure(report.layers[-1])) if report.layers else None


def _raw(report: ReportData) -> str:
    """Return the raw similarity after the last layer as a remark, where another one is shown."""
    if not report.layers or report.layers[-1].similarity_robust is None:
        return ""
    return f"; raw t_sim at the end {number(report.layers[-1].similarity)}"


def _passes(report: ReportData) -> list[tuple[str, str]]:
    levels = report.verdict.passes.items()
    return [(level, "never" if layer is None else f"layer {layer}") for level, layer in levels]


def facts(report: ReportData) -> list[tuple[str, str, str]]:
    """Return the numbers behind the verdict: name, number and remark of each."""
    verdict, depth = report.verdict, max(0, len(report.layers) - 1)
    entry = finite(figure(report.layers[0])) if report.layers else None
    redundant = spans(verdict.redundant or [])
    ahead = finite(verdict.collapse_depth)
    where = NONE if ahead is None else f"layer {number(float(f'{ahead:.3g}'))}"
    if ahead is None and _trained(report):
        remark = "not predicted for trained weights"
    elif ahead is None:
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
        ("Similarity after the last layer", number(_last(report)), f"at the input {number(entry)}{_raw(report)}"),
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
        _depth_in_use(report, depth),
        (
            "Redundant layers",
            NONE if verdict.redundant is None else f"{len(set(verdict.redundant))} of {depth}" if redundant else "none",
            _redundant_words(verdict.redundant, redundant),
        ),
    ]


def _trained(report: ReportData) -> bool:
    """Return whether the weights are known to be trained."""
    return report.settings.get("initialised") is False


def _depth_in_use(report: ReportData, depth: int) -> tuple[str, str, str]:
    """Return the number of layers in use: name, number and remark."""
    use = report.depth_use
    if use is None:
        return "Depth in use", NONE, "not measured; depth_use=True leaves out each layer"
    if use.in_use is None:
        return "Depth in use", NONE, "only some layers were left out"
    limit = f"{number(use.threshold)} {'nats' if use.unit != 'cosine' else '(1 - cosine)'}"
    words = f"no layer can be left out for {limit}" if use.in_use == depth else f"the others cost at most {limit}"
    return "Depth in use", f"{use.in_use} of {depth}", words


def _redundant_words(layers: list[int] | None, words: str) -> str:
    if layers is None:
        return "not measured: no layer, or not every layer, was left out"
    return f"layers {words}, left out together" if words else "each was left out, and the output needs it"


def advice(report: ReportData) -> Html:
    """Return the advice, one sentence of HTML."""
    verdict = report.verdict
    if verdict.recommendation:
        chosen = next((trial for trial in verdict.trials if trial.cure == verdict.recommendation), None)
        return markup(
            "Recommended, because it moved the number: <code>{call}</code>.{price}",
            call=cure_call(verdict.recommendation),
            price="" if chosen is None else price(verdict, chosen),
        )
    if verdict.kind in ("common direction", "unused depth"):
        return markup("No cure is recommended: nothing collapses here.")
    if verdict.kind == "no collapse":
        if any(layer.entropy is not None for layer in report.layers):
            return markup("Leave it alone: nothing collapses here.")
        return markup("Leave it alone: the tokens do not collapse. The entropy of attention was not measured.")
    ran = [trial for trial in verdict.trials if trial.error is None]
    if not ran:
        return markup("No recommendation: no cure {word} tried.", word="could be" if verdict.trials else "was")
    return markup(
        "No recommendation: none of the {count} cures tried moved the number the verdict is about.", count=len(ran)
    )


def _step(before: float | None, after: float | None) -> list[str]:
    """Return three cells: before, after and the change."""
    change = NONE
    if before is not None and after is not None:
        change = ("+" if after > before else "") + number(float(f"{after - before:.3g}"))
    return [number(before), number(after), change]


def _trial_row(trial: Trial, pairs: list[tuple[float | None, float | None]], best: bool) -> Html:
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
        if trial.change is not None:
            word += f"; {UNITS.get(trial.unit or '', 'output')} {trial.change:+.3g}"
    return markup(
        '<tr{kind}><td class="word">{name}</td>{cells}<td class="word">{word}</td></tr>',
        kind=markup(" class=best") if best else "",
        name=trial.name,
        cells=join(markup("<td>{cell}</td>", cell=cell) for cell in cells),
        word=word,
    )


def trials(report: ReportData) -> Html:
    """Return a table of every cure that was tried, helpful or not; empty if none was."""
    verdict = report.verdict
    if not verdict.trials:
        return markup("")
    robust = bool(verdict.before_robust)
    start = verdict.before_robust if robust else verdict.before
    similarity = finite(start[-1]) if start else _last(report)
    about_entropy = any(trial.entropy for trial in verdict.trials)
    entropy = mean_of([value for layer in report.layers if (value := mean_of(layer.entropy)) is not None])
    rows = []
    for trial in verdict.trials:
        ran = trial.error is None
        curve = trial.robust if robust else trial.similarity
        pairs = [(similarity, finite(curve[-1]) if ran and curve else None)]
        if about_entropy:
            pairs.insert(0, (entropy, mean_of(trial.entropy)))
        rows.append(_trial_row(trial, pairs, ran and trial.cure == verdict.recommendation))
    groups = ["similarity after the last layer"]
    note = markup("")
    if about_entropy:
        groups.insert(0, "mean entropy (nats)")
        note = markup('<p class="soft">Entropy before is over the whole input, after over the batch of the trials.</p>')
    return markup(
        '<div class="scroll"><table class="trials"><caption>Cures tried on the same batch</caption><thead>'
        '<tr><th class="word" rowspan="2">cure</th>{groups}<th class="word" rowspan="2">did it help?</th></tr><tr>'
        "{columns}</tr></thead><tbody>{rows}</tbody></table></div>{note}",
        groups=join(markup('<th colspan="3" class="group">{group}</th>', group=group) for group in groups),
        columns=join(markup("<th>before</th><th>after</th><th>change</th>") for _ in groups),
        rows=join(rows),
        note=note,
    )


def verdict(report: ReportData) -> Html:
    """Return the top of the page: verdict, advice, numbers and trials."""
    kind = _KINDS.get(report.verdict.kind, report.verdict.kind)
    tiles = join(
        markup(
            "<div><dt>{what}</dt><dd>{value}<small>{remark}</small></dd></div>", what=what, value=value, remark=remark
        )
        for what, value, remark in facts(report)
    )
    sentence = advice(report)
    known = sentence in report.verdict.text
    return markup(
        '<section class="verdict" aria-label="Verdict"><p class="kind">{kind}</p><p class="text">{text}</p>'
        '{paragraph}{notes}</section><dl class="tiles">{tiles}</dl>{trials}',
        kind=kind,
        text=report.verdict.text,
        paragraph="" if known else markup('<p class="advice">{sentence}</p>', sentence=sentence),
        notes=_notes(report),
        tiles=tiles,
        trials=trials(report),
    )


def _notes(report: ReportData) -> Html:
    """Return what is no illness, as a list; empty if there is nothing."""
    if not report.verdict.notes:
        return markup("")
    items = join(markup("<li>{note}</li>", note=note) for note in report.verdict.notes)
    return markup('<ul class="notes">{items}</ul>', items=items)


def depth_use(report: ReportData) -> Html:
    """Return the words and the table above the charts of depth in use."""
    use = report.depth_use
    if use is None:
        return markup('<p class="soft">No layer was left out: leadline.probe(..., depth_use=True) does that.</p>')
    words = [*use.notes]
    if use.rank_correlation is not None:
        words.append(
            f"Rank correlation of block influence with measured removal: {number(use.rank_correlation)} (Spearman)."
        )
    if report.verdict.initialised:
        words.append("The weights are as initialised, so the output means nothing yet.")
    sets = [*use.together, *([use.tail] if use.tail is not None else [])]
    rows = join(
        markup(
            '<tr><td class="word">{layers}</td><td>{change}</td><td>{error}</td></tr>',
            layers=spans(removal.layers),
            change=f"{removal.change:+.4g}",
            error=number(removal.error),
        )
        for removal in sets
    )
    paragraphs = join(markup("<p>{word}</p>", word=word) for word in words)
    if not sets:
        return paragraphs
    return markup(
        '{paragraphs}<div class="scroll"><table><caption>Layers left out together</caption><thead><tr>'
        '<th class="word">layers</th><th>change of the {what}</th><th>standard error</th></tr></thead>'
        "<tbody>{rows}</tbody></table></div>",
        paragraphs=paragraphs,
        what=UNITS.get(use.unit, use.unit),
        rows=rows,
    )


def download(report: ReportData, name: str) -> Html:
    """Return a link that saves the table as CSV; the data lie in the link, so that no network is needed."""
    data = base64.b64encode(csv_text(report).encode()).decode()
    return markup(
        '<p><a class="download" download="{name}.csv" href="data:text/csv;base64,{data}">Save as CSV</a></p>',
        name=name,
        data=data,
    )


def comparison(before: ReportData, after: ReportData) -> Html:
    """Return a table of both verdicts and their numbers, side by side."""
    second = {what: value for what, value, _ in facts(after)}
    pairs = [("Model", before.model, after.model), ("Verdict", before.verdict.kind, after.verdict.kind)]
    pairs += [(what, value, second.get(what, NONE)) for what, value, _ in facts(before)]
    rows = join(
        markup('<tr><td class="word">{what}</td><td>{one}</td><td>{two}</td></tr>', what=what, one=one, two=two)
        for what, one, two in pairs
    )
    return markup(
        '{warning}<div class="scroll"><table class="compared"><thead><tr><th class="word">number</th><th>before</th>'
        "<th>after</th></tr></thead><tbody>{rows}</tbody></table></div>",
        warning=_unlike(before, after),
        rows=rows,
    )


def _unlike(before: ReportData, after: ReportData) -> Html:
    """Return a warning if the reports are not of one model on one input; otherwise nothing."""
    sides = [{"model": report.model, "blocks": len(report.layers) - 1, **report.settings} for report in (before, after)]
    names = ("model", "blocks", "samples", "tokens")
    pairs = [(name, *(side.get(name) for side in sides)) for name in names]
    words = ", ".join(f"{name} {as_text(one)} and {as_text(two)}" for name, one, two in pairs if one != two)
    if not words:
        return markup("")
    return markup(
        "<p><strong>Not one model on one input:</strong> {words}. Differences may come from that.</p>", words=words
    )


def settings(report: ReportData) -> Html:
    """Return the list of settings."""
    items = [("model", report.model), *report.settings.items()]
    rows = join(markup("<dt>{key}</dt><dd>{value}</dd>", key=key, value=as_text(value)) for key, value in items)
    return markup('<dl class="settings">{rows}</dl>', rows=rows)


def measured(report: ReportData) -> Html:
    """Return what was measured and what was left out, if the report says so."""
    if report.measured is None:
        return markup("")
    items = [("blocks", f"{report.measured.blocks} of {report.measured.part}"), ("layout", report.measured.layout)]
    items.append(("attention seen", f"in {report.measured.attention_seen} of {report.measured.blocks} layers"))
    items += [(f"not seen in {name}", reason) for name, reason in report.measured.attention_unseen.items()]
    items += [(f"left out: {name}", reason) for name, reason in report.measured.left_out.items()]
    rows = join(markup("<dt>{name}</dt><dd>{value}</dd>", name=name, value=value) for name, value in items)
    return markup('<h3>Measured</h3><dl class="settings">{rows}</dl>', rows=rows)


def parts(report: ReportData) -> Html:
    """Return a fold for each part of the model, one open at a time: its verdict and its table."""
    return join(
        markup(
            '<details name="parts"{open}><summary>{name}: {kind}</summary><p>{words}</p>{measured}{table}</details>',
            open=markup("") if i else markup(" open"),
            name=name,
            kind=part.verdict.kind,
            words=part.verdict.text,
            measured=measured(part),
            table=table(part, "Layer by layer"),
        )
        for i, (name, part) in enumerate(report.parts.items())
    )


def table(report: ReportData, caption: str) -> Html:
    """Return a table with a row per layer, without the columns in which nothing was measured."""
    parts = sorted({part for layer in report.layers for part in layer.rates})

    def of(part: str) -> Callable[[LayerData], float | None]:
        return lambda f: f.rates.get(part)

    columns: Sequence[tuple[str, Callable[[LayerData], float | None]]] = [
        ("similarity", lambda f: f.similarity),
        ("robust", lambda f: f.similarity_robust),
        ("sim. patches", lambda f: f.similarity_patches),
        ("robust patches", lambda f: f.robust_patches),
        ("diversity", lambda f: f.diversity),
        ("cosine", lambda f: f.cosine),
        ("between samples", lambda f: f.cosine_samples),
        ("after next norm", lambda f: f.similarity_normed),
        ("massive", lambda f: massive_share(f) or None),
        ("influence", lambda f: f.influence),
        ("removal", lambda f: f.removal),
        ("lens", lambda f: f.lens),
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
    head = join(markup("<th>{name}</th>", name=name) for name, _ in used)
    rows = join(
        markup(
            '<tr><td>{index}</td><td class="word">{name}</td>{cells}</tr>',
            index=layer.index,
            name=layer.name,
            cells=join(markup("<td>{cell}</td>", cell=number(get(layer))) for _, get in used),
        )
        for layer in report.layers
    )
    return markup(
        '<div class="scroll"><table class="layers"><caption>{caption}</caption><thead><tr><th>layer</th>'
        '<th class="word">module</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        '<p class="soft">Entropy, delta, omega and |λ₂| are means over heads.</p>',
        caption=caption,
        head=head,
        rows=rows,
    )
