"""Chooses the charts of each tab of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from leadline.report.html.charts import LAYER, Chart, Line, by_head, column, curves, heat_of, per_head, violins
from leadline.report.layers import LayerData, ReportData
from leadline.report.presentation import finite, mean_of, outline


def similarity(report: ReportData) -> list[Chart]:
    """Return curves of similarity, diversity, rate of escalation, and of the cures tried."""
    layers, x = report.layers, [layer.index for layer in report.layers]
    massive = [layer.index for layer in layers if layer.massive_tokens]
    lines = [
        ("similarity (t_sim)", *column(report, lambda f: f.similarity)),
        ("robust similarity", *column(report, lambda f: f.similarity_robust)),
        ("mean cosine", *column(report, lambda f: f.cosine)),
        ("between samples", *column(report, lambda f: f.cosine_samples)),
        ("after the next norm", *column(report, lambda f: f.similarity_normed)),
        ("similarity, patches only", *column(report, lambda f: f.similarity_patches)),
        ("robust, patches only", *column(report, lambda f: f.robust_patches)),
    ]
    charts = curves(
        "Token similarity",
        "1 means that all tokens are the same vector. Thin lines: .5, .9 and .99."
        + (" Shaded: layers with a massive token." if massive else ""),
        "similarity",
        lines,
        zero=True,
    )
    for chart in charts:
        chart.spec["levels"] = [0.5, 0.9, 0.99]
        chart.spec["bands"] = [[a - 0.5, b + 0.5] for a, b in _runs(massive)]
    charts += curves(
        "Token diversity",
        "1 minus similarity, on a logarithmic axis: a straight fall is a constant rate of escalation.",
        "diversity",
        [("diversity", *column(report, lambda f: f.diversity))],
        log=True,
    )
    parts = sorted({part for layer in layers for part in layer.rates})
    lines = [("whole block", *column(report, lambda f: f.rate))]
    lines += [(part, x, [layer.rates.get(part) for layer in layers]) for part in parts]
    expected = finite(report.verdict.expected_rate)
    if expected is not None:
        lines.append(("1 + gain², near collapse", x, [expected] * len(x)))
    charts += curves(
        "Rate of escalation",
        "Diversity before divided by diversity after, of a block and of its parts: above 1 tokens grow alike.",
        "rate",
        lines,
    )
    return charts + trials(report)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive numbers."""
    starts = [n for n in numbers if n - 1 not in numbers]
    return list(zip(starts, [n for n in numbers if n + 1 not in numbers], strict=True))


def depth_use(report: ReportData) -> list[Chart]:
    """Return what removal of each layer costs, the angles between layers, the logit lens, influence and sinks."""
    use, x = report.depth_use, [layer.index for layer in report.layers]
    unit = "change" if use is None else {"loss": "loss (nats)", "kl": "KL (nats)"}.get(use.unit, "1 - cosine")
    charts = curves(
        "Each layer left out",
        "Change of the output when one layer is left out; near 0 the output does not need it.",
        unit,
        [
            ("the block", *column(report, lambda f: f.removal)),
            ("its attention alone", *column(report, lambda f: f.removal_attention)),
            ("its MLP alone", *column(report, lambda f: f.removal_mlp)),
        ],
        zero=True,
    )
    for chart in charts:
        chart.spec["bars"] = True
        if use is not None and finite(use.threshold) is not None:
            chart.spec["levels"] = [use.threshold]
    if use is not None and use.angles:
        heat = heat_of([list(row) for row in use.angles], ("layer", "layer"), low=0.0) | {"square": True}
        spec = {"x": {"title": "layer"}, "y": {"title": "layer"}, "heat": heat}
        note = "Mean angle between the same token after two layers, over pi; dark blocks are layers that change little."
        charts.append(Chart("Angles between layers", note, spec))
    charts += curves(
        "Block influence",
        "1 minus the mean cosine of a token before and after the block, and the angle between them over pi.",
        "influence",
        [
            ("block influence", *column(report, lambda f: f.influence)),
            ("angle / pi", *column(report, lambda f: f.angle)),
        ],
        zero=True,
    )
    charts += curves(
        "Logit lens",
        "KL of the output from what the final norm and head make of each layer.",
        "KL (nats)",
        [("divergence", *column(report, lambda f: f.lens))],
        zero=True,
    )
    charts += curves(
        "Where the final prediction leads",
        "Share of predictions whose first choice is the final one, and where it leads for the first time.",
        "share",
        [
            ("agrees with the output", *column(report, lambda f: f.lens_agrees)),
            ("leads for the first time", *column(report, lambda f: f.lens_first)),
        ],
        zero=True,
    )
    charts += curves(
        "Attention sinks",
        "A sink is a key that gets more than .3 of the attention, mean over queries.",
        "share of heads",
        [("heads with a sink", x, [layer.sink_share for layer in report.layers])],
        zero=True,
    )
    charts += by_head(report, "Largest mean weight of a key", "head", lambda f: f.sink_weight)
    return charts + by_head(report, "Largest score", "head", lambda f: f.largest_score)


def parts(report: ReportData) -> list[Chart]:
    """Return one chart with the similarity of every part of the model."""
    lines = [(name, *column(part, lambda f: f.similarity)) for name, part in report.parts.items()]
    return curves("Token similarity of the parts", "A curve for each list of blocks.", "similarity", lines, zero=True)


def trials(report: ReportData) -> list[Chart]:
    """Return similarity by layer without a cure and with each cure that was tried; also entropy where measured."""
    ran = [trial for trial in report.verdict.trials if trial.error is None and trial.similarity]
    if not ran:
        return []
    words = [f"{trial.name} ({'helps' if trial.helps else 'does not help'})" for trial in ran]
    robust = bool(report.verdict.before_robust)
    before = report.verdict.before_robust or report.verdict.before or [layer.similarity for layer in report.layers]
    lines: list[Line] = [("as it is", range(len(before)), before)]
    ends = [trial.robust if robust else trial.similarity for trial in ran]
    lines += [(word, range(len(curve)), curve) for word, curve in zip(words, ends, strict=True)]
    what = "Robust similarity" if robust else "Similarity"
    note = f"{what} on the same batch as the model is, and with each cure that was tried."
    charts = curves("Cures tried", note, "similarity", lines, zero=True)
    measured = [layer for layer in report.layers if layer.entropy]
    places = [layer.index for layer in measured]
    lines = [("as it is", places, [mean_of(layer.entropy) for layer in measured])]
    lines += [
        (word, places, trial.entropy)
        for word, trial in zip(words, ran, strict=True)
        if trial.entropy and len(trial.entropy) == len(places)
    ]
    if len(lines) > 1:
        note = "Mean attention entropy in nats with each cure that was tried; as it is, over the whole input."
        charts += curves("Cures tried: entropy", note, "entropy", lines, zero=True)
    return charts


def cosines(report: ReportData, title: str = "Cosine of token pairs") -> list[Chart]:
    """Return violins of the cosine of token pairs by layer."""
    places = [(layer.index, f"layer {layer.index}, {layer.name}", layer.cosines) for layer in report.layers]
    note = "Each shape is the histogram of the cosine over all pairs of tokens; each is drawn to the same width."
    return violins(title, note, LAYER, "cosine", places)


def entropies(report: ReportData, most: int = 96) -> list[Chart]:
    """Return curves and violins of attention entropy.

    Args:
        report: The report to show.
        most: Largest number of violins in a chart, unless one layer has more heads.
    """
    layers = [layer for layer in report.layers if layer.entropies]
    charts = curves(
        "Mean attention entropy",
        "In nats, mean over queries and heads; 0 means that every query looks at one token only.",
        "entropy",
        [
            ("mean over heads", *column(report, lambda f: mean_of(f.entropy))),
            ("lowest head", *column(report, lambda f: min(_known(f.entropy), default=None))),
            ("highest head", *column(report, lambda f: max(_known(f.entropy), default=None))),
            ("uniform attention", *column(report, lambda f: f.entropy_uniform)),
        ],
        zero=True,
    )
    charts += by_head(report, "Entropy by layer and head", "head", lambda f: f.entropy)
    heads = max((len(layer.entropies or ()) for layer in layers), default=1)
    group = max(1, most // heads)
    ends = [v for f in layers for d in f.entropies or () if (o := outline(d)) for v in (o[0][0], o[0][-1])]
    low, top = min(ends, default=0.0), max(ends, default=1.0)
    low = 0.0 if low < top / 2 else low - 0.5 * (top - low)  # from 0 on, unless all of them are far from it
    for start in range(0, len(layers), group):
        part = layers[start : start + group]
        places, ticks = [], []
        for slot, layer in enumerate(part):
            left = slot * (heads + 1)
            ticks.append((left + (heads - 1) / 2, str(layer.index)))
            places += [(left + h, f"layer {layer.index}, head {h}", d) for h, d in enumerate(layer.entropies or ())]
        names = f"layer {part[0].index}" if len(part) == 1 else f"layers {part[0].index} to {part[-1].index}"
        drawn = violins(
            f"Attention entropy, {names}",
            "One shape a head, over all queries; the heads of a layer stand side by side.",
            "layer",
            "entropy (nats)",
            places,
            points=24,
            ticks=ticks,
        )
        for chart in drawn:
            edge = 0.04 * (top - low)
            chart.spec["y"]["range"] = [low - edge, top + edge]  # the same in all of them
        charts += drawn
    return charts


def _known(values: Sequence[float] | None) -> list[float]:
    """Return the finite values."""
    return [v for v in values or () if finite(v) is not None]


def spectrum(report: ReportData) -> list[Chart]:
    """Return delta, omega and the second eigenvalue by layer and head."""
    return [
        *per_head(
            report,
            "delta",
            "The most that attention keeps of what differs between tokens; near 0 one layer mixes everything.",
            "delta",
            lambda f: f.delta,
        ),
        *per_head(
            report,
            "omega",
            "How much of what differs between tokens attention brings into their mean.",
            "omega",
            lambda f: f.omega,
        ),
        *per_head(
            report,
            "|lambda₂|",
            "Modulus of the second eigenvalue of the attention matrix.",
            "|lambda₂|",
            lambda f: f.second_eigenvalue,
        ),
    ]


def norms(report: ReportData) -> list[Chart]:
    """Return token norm, effective rank, change and gradient norm by layer."""
    one = [
        ("Length of a token", "Mean over tokens.", "norm", lambda f: f.norm, {"zero": True}),
        (
            "Effective rank",
            "How many directions the tokens use: 1 means that all lie on one line.",
            "effective rank",
            lambda f: f.effective_rank,
            {"zero": True},
        ),
        (
            "What a block changes",
            "Length of the change against the length of what enters; near 0 the block could be left out.",
            "change",
            lambda f: f.change,
            {"zero": True},
        ),
        (
            "Gradient norm",
            "Of the loss with respect to the weights of each block, on a logarithmic axis.",
            "gradient norm",
            lambda f: f.gradient_norm,
            {"log": True},
        ),
    ]
    return [
        chart
        for title, note, label, get, axis in one
        for chart in curves(title, note, label, [(label, *column(report, get))], **axis)
    ]


def before_and_after(before: ReportData, after: ReportData) -> list[Chart]:
    """Return curves of both reports in the same axes, then their cosine violins side by side."""

    def both(title: str, note: str, ylabel: str, get: Callable[[LayerData], float | None], **axis: Any) -> list[Chart]:
        return curves(title, note, ylabel, [("before", *column(before, get)), ("after", *column(after, get))], **axis)

    charts = [
        *both("Similarity, before and after", "", "similarity", lambda f: f.similarity, zero=True),
        *both("Diversity, before and after", "Logarithmic axis.", "diversity", lambda f: f.diversity, log=True),
        *both("Rate, before and after", "", "rate", lambda f: f.rate),
        *both("Effective rank, before and after", "", "effective rank", lambda f: f.effective_rank, zero=True),
        *both("Length of a token, before and after", "", "norm", lambda f: f.norm, zero=True),
        *both("Mean entropy, before and after", "", "entropy (nats)", lambda f: mean_of(f.entropy), zero=True),
    ]
    pair = [*cosines(before, "Cosine of token pairs, before"), *cosines(after, "Cosine of token pairs, after")]
    values = [v for chart in pair for item in chart.spec["violins"]["items"] for v in item[2]]
    for chart in pair:
        chart.spec["y"]["range"] = [min(values) - 0.03, max(values) + 0.03]  # the same in both
        chart.wide, chart.min_width = False, chart.min_width // 2
    return charts + pair
