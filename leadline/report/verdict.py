"""Judges the metrics by layer: what collapses, in words and as data, and which cure to recommend."""

from __future__ import annotations

import math
from collections.abc import Sequence

from leadline.report.layers import LayerData, Trial, Verdict

LEVELS = {".5": 0.5, ".9": 0.9, ".99": 0.99}
_COLLAPSED = 0.9  # smallest similarity after the last layer that counts as collapse
_FLOOR = 1e-5  # diversity below which float32 leaves no digits to fit
_GREW = 2.0  # least growth of the odds of similarity from input to last layer that is blamed on depth
_ONE_TOKEN = 0.1  # entropy as a share of that of uniform attention, below which it has collapsed
_REDUNDANT = 0.05  # ||Y - X|| / ||X|| below which a block is redundant
_MOVED = 0.05  # least improvement of similarity, or of entropy's share, by a cure that helps
_UNMOVED = 0.01  # change below which a cure does nothing
_AS_GOOD = 0.1  # cures whose improvements differ by at most this count as equally good
TREND_BLOCKS = 8  # with fewer blocks the extrapolated depth differs many times over from sample to sample
_FAR = 10  # no extrapolation beyond this multiple of the depth


def judge(layers: Sequence[LayerData]) -> Verdict:
    """Return the verdict that follows from the metrics alone, before any cure is tried.

    Args:
        layers: Metrics by layer; index 0 is the input of the first block.
    """
    similarity = [layer.similarity for layer in layers]
    passes = {name: _first_above(similarity, level) for name, level in LEVELS.items()}
    rate = fitted_rate(layers)
    gains = [layer.gain for layer in layers if layer.gain is not None]
    expected = math.exp(sum(math.log1p(gain**2) for gain in gains) / len(gains)) if gains else None
    entropy_layers = [layer.index for layer in layers if (share := entropy_share(layer)) and share < _ONE_TOKEN]
    blocks = len(layers) - 1
    rank = [layer.effective_rank for layer in layers]
    rank_collapse = blocks > 0 and rank[-1] < 2 and rank[-1] < rank[0] / 2
    collapsed = similarity[-1] >= _COLLAPSED and odds(layers[-1]) >= _GREW * odds(layers[0])
    kind = "no collapse"
    if collapsed or rank_collapse:
        kind = "collapse"
    elif len(entropy_layers) >= max(1, blocks / 4):
        kind = "entropy collapse"
    verdict = Verdict(
        kind=kind,
        text="",
        passes=passes,
        rate=rate,
        expected_rate=expected,
        collapse_depth=_collapse_depth(layers, passes[".99"]),
        redundant=[layer.index for layer in layers if layer.change is not None and layer.change < _REDUNDANT],
        rank_collapse=rank_collapse,
        entropy_collapse=entropy_layers,
    )
    verdict.text = describe(verdict, layers)
    return verdict


def severity(verdict: Verdict, layers: Sequence[LayerData]) -> tuple[int, float]:
    """Return how bad a verdict is, to find the worst part of a model; equal among parts in which nothing collapses."""
    if verdict.kind == "no collapse":
        return 0, 0.0
    return 2 if verdict.kind == "collapse" else 1, layers[-1].similarity


def odds(layer: LayerData) -> float:
    """Return t_sim / t_div, which attention with a skip multiplies by up to 1 + gain^2 per layer (TSE, remark 2.8)."""
    return layer.similarity / max(layer.diversity, 1e-30)


def fitted_rate(layers: Sequence[LayerData]) -> float | None:
    """Return the growth of t_sim / t_div per layer, by least squares on its logarithm over depth.

    Layers whose diversity is lost in rounding are left out. None with fewer than three layers.
    """
    points = [(float(x.index), math.log(odds(x))) for x in layers if x.diversity > _FLOOR and x.similarity > 0]
    if len(points) < 3:
        return None
    mean_x, mean_y = (sum(point[i] for point in points) / len(points) for i in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return math.exp(slope)


def entropy_share(layer: LayerData) -> float | None:
    """Return the mean entropy of the heads as a share of that of uniform attention to all visible tokens."""
    if not layer.entropy or not layer.entropy_uniform:
        return None
    return sum(layer.entropy) / len(layer.entropy) / layer.entropy_uniform


def _first_above(similarity: Sequence[float], level: float) -> int | None:
    return next((i for i, value in enumerate(similarity) if value > level), None)


def _collapse_depth(layers: Sequence[LayerData], passed: int | None) -> float | None:
    """Return the layer where .99 was passed, or where the trend of the last half of the layers leads to it."""
    if passed is not None:
        return float(passed)
    rate = fitted_rate(layers[len(layers) // 2 :])
    if len(layers) <= TREND_BLOCKS or rate is None or rate <= 1 or layers[-1].similarity <= 0:
        return None
    depth = layers[-1].index + math.log(0.99 / 0.01 / odds(layers[-1])) / math.log(rate)
    return depth if depth < _FAR * layers[-1].index else None


def depth_of_collapse(ahead: float, blocks: int) -> int:
    """Round an extrapolated depth to whole layers, always more than the ``blocks`` that there are."""
    return max(blocks + 1, round(ahead))


def describe(verdict: Verdict, layers: Sequence[LayerData]) -> str:
    """Return the verdict in a few sentences."""
    first, last, blocks = layers[0], layers[-1], len(layers) - 1
    path = f"Similarity goes from {_n(first.similarity)} at the input to {_n(last.similarity)} after {_layers(blocks)}"
    passed = [f"{name} at layer {at}" for name, at in verdict.passes.items() if at]
    path += f", passing {', '.join(passed)}." if passed else "."
    sentences = []
    if verdict.kind == "collapse":
        alike = last.similarity >= _COLLAPSED
        sentences.append("Tokens collapse: with depth they become alike." if alike else "The tokens' rank collapses.")
        sentences += [path, *_rate_words(verdict)]
    elif verdict.kind == "entropy collapse":
        shares = [share for layer in layers if (share := entropy_share(layer)) is not None]
        sentences.append(
            f"Attention's entropy collapses: in {len(verdict.entropy_collapse)} of {_layers(blocks)} it is below "
            f"{_n(_ONE_TOKEN)} of what uniform attention has ({_n(sum(shares) / len(shares))} on average), so a query "
            "looks at next to one token."
        )
        sentences.append(path)
    else:
        sentences.append(f"Leave it alone: {_scope(layers)}")
        sentences.append(path)
        if first.similarity >= _COLLAPSED and last.similarity >= _COLLAPSED:
            sentences.append("The tokens are alike from the start; depth is not the cause.")
        elif verdict.collapse_depth is not None and verdict.collapse_depth > blocks:
            deeper = depth_of_collapse(verdict.collapse_depth, blocks)
            sentences.append(
                f"Its present depth is no trouble: by the trend of its last half, a model of the same kind would pass "
                f".99 only if it were made about {deeper} layers deep."
            )
    if verdict.rank_collapse:
        sentences.append(f"Effective rank falls from {first.effective_rank:.1f} to {last.effective_rank:.1f}.")
    if verdict.redundant:
        names = ", ".join(map(str, verdict.redundant[:8])) + (", ..." if len(verdict.redundant) > 8 else "")
        one = len(verdict.redundant) == 1
        sentences.append(
            f"Layer{'' if one else 's'} {names} change{'s' if one else ''} the tokens by less than "
            f"{_REDUNDANT:.0%}: redundant on this input."
        )
    return " ".join(sentences)


def _scope(layers: Sequence[LayerData]) -> str:
    """Return that nothing collapses, as far as it was measured."""
    seen = sum(layer.entropy is not None for layer in layers[1:])
    if seen == len(layers) - 1:
        return "nothing collapses here."
    if not seen:
        return "the tokens do not collapse. The entropy of attention was not measured."
    return (
        f"the tokens do not collapse. The entropy of attention was measured in {seen} of {_layers(len(layers) - 1)} "
        "and does not collapse there."
    )


def _rate_words(verdict: Verdict) -> list[str]:
    if verdict.rate is None:
        return []
    words = f"The odds of similarity grow by a factor of {verdict.rate:.3g} a layer"
    if verdict.expected_rate is None:
        return [f"{words}."]
    gain = math.sqrt(verdict.expected_rate - 1)
    return [
        f"{words}; attention alone makes it 1 + gain^2 = {verdict.expected_rate:.3g} at the gain measured, {gain:.2g}."
    ]


def with_trials(verdict: Verdict, layers: Sequence[LayerData], trials: list[Trial], before: Trial) -> Verdict:
    """Complete a verdict with the trials of candidate cures on one batch, and recommend one that helps.

    Args:
        verdict: What ``judge`` returned; it is changed in place.
        layers: Metrics by layer.
        trials: The candidates in the order of preference: of those about equally good, the first is recommended.
        before: The same batch without a cure.

    Returns:
        The verdict.
    """
    about_entropy = verdict.kind == "entropy collapse"
    uniform = [layer.entropy_uniform for layer in layers if layer.entropy_uniform is not None]

    def number(trial: Trial) -> float | None:
        if trial.error is not None:
            return None
        if about_entropy:
            return sum(trial.entropy) / sum(uniform) if trial.entropy and len(trial.entropy) == len(uniform) else None
        return trial.similarity[-1]

    start = number(before)
    improvement: dict[str, float] = {}  # by name of the trial
    for trial in trials:
        end = number(trial)
        if start is not None and end is not None and math.isfinite(end):
            improvement[trial.name] = end - start if about_entropy else start - end
            trial.helps = improvement[trial.name] >= _MOVED
    helpful = [trial for trial in trials if trial.helps]
    chosen = None
    if helpful:
        best = max(improvement[trial.name] for trial in helpful)
        chosen = next(
            trial for trial in helpful if improvement[trial.name] >= best - _AS_GOOD
        )  # the first is the mildest
    verdict.trials, verdict.before = trials, before.similarity
    verdict.recommendation = None if chosen is None else dict(chosen.cure)
    verdict.text = f"{describe(verdict, layers)} {_trial_words(verdict, start, improvement, chosen)}"
    return verdict


def _trial_words(
    verdict: Verdict,
    start: float | None,
    improvement: dict[str, float],
    chosen: Trial | None,
) -> str:
    complete = [trial for trial in verdict.trials if trial.name in improvement]
    if start is None or not complete:
        reasons = sorted({trial.error for trial in verdict.trials if trial.error})
        return f"No cure could be tried: {'; '.join(reasons)}." if reasons else "No cure could be tried."
    about_entropy = verdict.kind == "entropy collapse"
    what = "mean entropy, as a share of uniform attention's" if about_entropy else "similarity after the last layer"
    results = []
    for trial in complete:
        by = improvement[trial.name]
        results.append(f"{trial.name} {_n(start + by if about_entropy else start - by)}{_remark(by)}")
    words = f"Tried on the first batch, {what}: as it is {_n(start)}, {', '.join(results)}."
    if chosen is None:
        return f"{words} None of them helps here, so none is recommended."
    arguments = ", ".join(f"{name}={_n(value)}" for name, value in chosen.cure.items())
    return f"{words} Recommended: leadline.cure(model, {arguments})."


def _remark(by: float) -> str:
    """Return a remark on a cure that improved the number by ``by``; empty for one that helps."""
    if by >= _MOVED:
        return ""
    if by <= -_MOVED:
        return " (makes it worse)"
    return " (does nothing for it)" if abs(by) < _UNMOVED else " (too little)" if by > 0 else " (slightly worse)"


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _n(value: float | None) -> str:
    """Format a number between 0 and 1: .5, .999, and never 1.000 for .9998."""
    if value is None:
        return "?"
    text = f"{value:.3f}" if value < 0.9995 or value >= 1 else f"{value:.6f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return (text.removeprefix("0") if text.startswith("0.") else text) or "0"
