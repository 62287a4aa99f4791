"""Judges the metrics by layer: what collapses, in words and as data, and which cure to recommend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from leadline.report.layers import DepthUse, LayerData, Massive, Trial, Verdict

LEVELS = {".5": 0.5, ".9": 0.9, ".99": 0.99}
COLLAPSED = 0.9  # smallest similarity after the last layer that counts as collapse
_FLOOR = 1e-5  # diversity below which float32 leaves no digits to fit
_GREW = 2.0  # least growth of the odds of similarity from input to last layer that is blamed on depth
_ONE_TOKEN = 0.1  # entropy as a share of that of uniform attention, below which it has collapsed
_MOVED = 0.05  # least improvement of similarity, or of entropy's share, by a cure that helps
_UNMOVED = 0.01  # change below which a cure does nothing
_AS_GOOD = 0.1  # cures whose improvements differ by at most this count as equally good
_PART = 0.1  # difference from which the raw and the robust similarity count as parted
_NAMED = 3  # massive tokens, or channels, that the notes name one by one
COSTS = {"loss": 0.05, "kl": 0.05, "cosine": 0.01}  # largest change of the output that costs nothing, by its unit
TREND_BLOCKS = 8  # with fewer blocks the extrapolated depth differs many times over from sample to sample
_FAR = 10  # no extrapolation beyond this multiple of the depth

_ILLNESSES = {"unused depth": 1, "entropy collapse": 2, "collapse": 3}  # kinds of verdict, the worst last


def judge(layers: Sequence[LayerData], use: DepthUse | None = None, initialised: bool | None = None) -> Verdict:
    """Return the verdict that follows from the metrics alone, before any cure is tried.

    It rests on the robust similarity where that was measured; reports of old versions have only the raw one.

    Args:
        layers: Metrics by layer; index 0 is the input of the first block.
        use: What the removal of layers did to the output, if that was measured.
        initialised: Whether the weights are as initialised, so that the output means nothing; None: not known. The
            trend of a trained model is not extrapolated, since a deeper one would be trained to other weights.
    """
    similarity = [figure(layer) for layer in layers]
    passes = {name: _first_above(similarity, level) for name, level in LEVELS.items()}
    rate = fitted_rate(layers)
    gains = [layer.gain for layer in layers if layer.gain is not None]
    expected = math.exp(sum(math.log1p(gain**2) for gain in gains) / len(gains)) if gains else None
    entropy_layers = [layer.index for layer in layers if (share := entropy_share(layer)) and share < _ONE_TOKEN]
    blocks = len(layers) - 1
    rank = [layer.effective_rank for layer in layers]
    dwarfed = bool(layers[-1].massive_tokens or layers[-1].massive_channels)  # the rank is then theirs alone
    rank_collapse = blocks > 0 and rank[-1] < 2 and rank[-1] < rank[0] / 2 and not dwarfed
    alike = similarity[-1] >= COLLAPSED and odds(layers[-1]) >= _GREW * odds(layers[0])
    in_use = not initialised and use is not None and use.tail is not None and use.tail.change > use.threshold
    kind = "no collapse"
    if rank_collapse or (alike and not in_use):
        kind = "collapse"
    elif alike:
        kind = "common direction"
    elif len(entropy_layers) >= max(1, blocks / 4):
        kind = "entropy collapse"
    elif use is not None and use.unused and not initialised:
        kind = "unused depth"
    verdict = Verdict(
        kind=kind,
        text="",
        passes=passes,
        rate=rate,
        expected_rate=expected,
        collapse_depth=_collapse_depth(layers, passes[".99"], extrapolate=initialised is not False),
        redundant=None if use is None else use.unused,
        rank_collapse=rank_collapse,
        entropy_collapse=entropy_layers,
        notes=_notes(layers),
        initialised=bool(initialised),
    )
    verdict.text = describe(verdict, layers, use)
    return verdict


def figure(layer: LayerData) -> float:
    """Return the robust similarity of a layer; the raw one in reports that lack it."""
    return layer.similarity if layer.similarity_robust is None else layer.similarity_robust


def _shares(layer: LayerData) -> tuple[float, float]:
    """Return t_sim and t_div of n tokens of one length at the robust cosine c, (1 + (n-1) c) / n and the rest."""
    c, n = layer.similarity_robust, layer.tokens
    if c is None or n is None:
        return layer.similarity, layer.diversity
    return (1 + (n - 1) * c) / n, (n - 1) * (1 - c) / n


def severity(verdict: Verdict, layers: Sequence[LayerData]) -> tuple[int, float]:
    """Return how bad a verdict is, to find the worst part of a model; equal among parts in which nothing collapses."""
    rank = _ILLNESSES.get(verdict.kind, 0)
    return rank, figure(layers[-1]) if rank else 0.0


def odds(layer: LayerData) -> float:
    """Return t_sim / t_div, which attention with a skip multiplies by up to 1 + gain^2 per layer (TSE, remark 2.8).

    Both are those of tokens of one length at the robust cosine, so massive tokens and channels do not move them.
    """
    similarity, diversity = _shares(layer)
    return similarity / max(diversity, 1e-30)


def fitted_rate(layers: Sequence[LayerData]) -> float | None:
    """Return the growth of t_sim / t_div per layer, by least squares on its logarithm over depth.

    Layers whose diversity is lost in rounding are left out. None with fewer than three layers.
    """
    points = [(float(x.index), math.log(odds(x))) for x in layers if _shares(x)[1] > _FLOOR and odds(x) > 0]
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


def tail_layers(layers: Sequence[LayerData]) -> list[int]:
    """Return the layers after the first one whose robust similarity reaches .9; none where the last is below it."""
    if not figure(layers[-1]) >= COLLAPSED:
        return []
    first = next(layer.index for layer in layers if figure(layer) >= COLLAPSED)
    return list(range(first + 1, len(layers)))


def _collapse_depth(layers: Sequence[LayerData], passed: int | None, extrapolate: bool) -> float | None:
    """Return the layer where .99 was passed, or where the trend of the last half of the layers leads to it."""
    if passed is not None:
        return float(passed)
    if not extrapolate:
        return None
    rate = fitted_rate(layers[len(layers) // 2 :])
    if len(layers) <= TREND_BLOCKS or rate is None or rate <= 1 or not odds(layers[-1]) > 0:
        return None
    depth = layers[-1].index + math.log(0.99 / 0.01 / odds(layers[-1])) / math.log(rate)
    return depth if depth < _FAR * layers[-1].index else None


def depth_of_collapse(ahead: float, blocks: int) -> int:
    """Round an extrapolated depth to whole layers, always more than the ``blocks`` that there are."""
    return max(blocks + 1, round(ahead))


def describe(verdict: Verdict, layers: Sequence[LayerData], use: DepthUse | None = None) -> str:
    """Return the verdict in a few sentences."""
    first, last, blocks = layers[0], layers[-1], len(layers) - 1
    start, end = figure(first), figure(last)
    path = f"Similarity goes from {_n(start)} at the input to {_n(end)} after {_layers(blocks)}"
    passed = [f"{name} at layer {at}" for name, at in verdict.passes.items() if at]
    path += f", passing {', '.join(passed)}." if passed else "."
    sentences = []
    if verdict.kind == "collapse":
        alike = end >= COLLAPSED
        sentences.append("Tokens collapse: with depth they become alike." if alike else "The tokens' rank collapses.")
        sentences += [path, *_rate_words(verdict)]
        if alike and not verdict.initialised:
            sentences.append(_tail_words(layers, use))
    elif verdict.kind == "common direction":
        sentences += ["The tokens share a common direction, and the model uses it: no collapse.", path]
        sentences.append(_tail_words(layers, use))
    elif verdict.kind == "entropy collapse":
        shares = [share for layer in layers if (share := entropy_share(layer)) is not None]
        sentences.append(
            f"Attention's entropy collapses: in {len(verdict.entropy_collapse)} of {_layers(blocks)} it is below "
            f"{_n(_ONE_TOKEN)} of what uniform attention has ({_n(sum(shares) / len(shares))} on average), so a query "
            "looks at next to one token."
        )
        sentences.append(path)
    else:
        unused = verdict.kind == "unused depth"
        sentences.append(
            "Nothing collapses, and some layers are not in use." if unused else f"Leave it alone: {_scope(layers)}"
        )
        sentences.append(path)
        if start >= COLLAPSED and end >= COLLAPSED:
            sentences.append("The tokens are alike from the start; depth is not the cause.")
        elif verdict.collapse_depth is not None and verdict.collapse_depth > blocks:
            deeper = depth_of_collapse(verdict.collapse_depth, blocks)
            sentences.append(
                f"Its present depth is no trouble: by the trend of its last half, a model of the same kind would pass "
                f".99 only if it were made about {deeper} layers deep."
            )
    if verdict.kind == "unused depth" and all(layer.entropy is None for layer in layers):
        sentences.insert(2, "Attention was not measured, so nothing is said of its entropy.")
    sentences += _parting_words(layers)
    if verdict.rank_collapse:
        sentences.append(f"Effective rank falls from {first.effective_rank:.1f} to {last.effective_rank:.1f}.")
    if use is not None:
        sentences += _use_words(layers, use)
        if verdict.initialised:
            sentences.append("The weights are as initialised, so what removal does to the output means nothing yet.")
    return " ".join(sentences)


def _tail_words(layers: Sequence[LayerData], use: DepthUse | None) -> str:
    """Say what the layers after the first similar one are worth."""
    tail = tail_layers(layers)
    if not tail:
        return "It becomes that high after the last layer only, so no layer works on such tokens."
    if use is None or use.tail is None:
        return (
            f"Whether {_spans(tail)}, which work on such tokens, matter to the output was not tried (depth_use=True)."
        )
    does = _change_words(use.tail.change, use.unit, use.tail.error)
    return f"Leaving out {_spans(tail)} together, which work on such tokens, {does}."


def _use_words(layers: Sequence[LayerData], use: DepthUse) -> list[str]:
    """Say how much of the depth is in use, by removal."""
    blocks = len(layers) - 1
    tried = [(layer.removal, layer.index) for layer in layers if layer.removal is not None]
    if not tried:
        return []
    cost, cheapest = min(tried)
    does = _change_words(cost, use.unit, layers[cheapest].removal_error)
    alone = f"leaving out layer {cheapest}, the cheapest, {does}"
    if use.in_use is None:
        return [f"Depth in use is not known: {len(tried)} of {_layers(blocks)} were left out; {alone}."]
    words = f"Depth in use: {use.in_use} of {_layers(blocks)}"
    if not use.unused:
        return [f"{words}; {alone}."]
    removal = next((r for r in use.together if r.layers == use.unused), None)
    if removal is None:
        return [f"{words}."]
    does = _change_words(removal.change, use.unit, removal.error)
    if len(use.unused) == 1:
        return [f"{words}: leaving out {_spans(use.unused)} {does}, so it is redundant."]
    return [f"{words}: leaving out {_spans(use.unused)} together {does}, so they are redundant."]


def _change_words(change: float, unit: str, error: float | None = None) -> str:
    """Say what a change does to the output, as the end of a sentence."""
    size = f"{_signed(change)}" + ("" if error is None else f" ± {_signed(error).lstrip('+')}")
    if unit == "loss":
        return f"changes the loss by {size} nats"
    if unit == "kl":
        return f"moves the predicted distribution by {size.lstrip('+')} nats (KL)"
    return f"turns the last hidden state by {size.lstrip('+')} (1 - cosine)"


def _parting_words(layers: Sequence[LayerData]) -> list[str]:
    """Say in which layers the raw and the robust similarity part, and why."""
    parted = [layer for layer in layers if abs(layer.similarity - _shares(layer)[0]) > _PART]
    if not parted:
        return []
    most = max(parted, key=lambda layer: abs(layer.similarity - _shares(layer)[0]))
    token, channel = _largest(layer.massive_tokens for layer in parted), _largest(x.massive_channels for x in parted)
    reasons = []
    if token is not None:
        reasons.append(f"token {token.index} is up to {token.ratio:.0f} times as long as the median one")
    if channel is not None:
        reasons.append(f"channel {channel.index} carries up to {channel.share:.0%} of the energy")
    why = " and ".join(reasons) or "tokens differ in length"
    return [
        f"The raw t_sim and the robust figure part in {_spans([layer.index for layer in parted])} "
        f"({_n(most.similarity)} and {_n(_shares(most)[0])} after layer {most.index}), because {why}."
    ]


def _largest(groups: Iterable[list[Massive]]) -> Massive | None:
    """Return the massive token or channel with the largest share of the energy."""
    return max((item for group in groups for item in group), key=lambda item: item.share, default=None)


def _notes(layers: Sequence[LayerData]) -> list[str]:
    """Name massive tokens and channels, with their layers and their share of the energy."""
    notes = []
    tokens = _by_index([(layer.index, layer.massive_tokens) for layer in layers])
    for index, places in list(tokens.items())[:_NAMED]:
        length, share = max(m.ratio for _, m in places), max(m.share for _, m in places)
        notes.append(
            f"Token {index} is massive in {_spans([at for at, _ in places])}: up to {length:.3g} times as long as the "
            f"median token, with up to {_percent(share)} of the energy. Trained models often have such a token; it is "
            "no illness."
        )
    if len(tokens) > _NAMED:
        notes.append(f"{len(tokens) - _NAMED} more tokens are massive in some layer.")
    entries = [layer.index for layer in layers if layer.massive_entries]
    if entries:
        notes.append(f"By the rule for scalars (above 100 and 1000 times the median) in {_spans(entries)}.")
    channels = _by_index([(layer.index, layer.massive_channels) for layer in layers])
    for index, places in list(channels.items())[:_NAMED]:
        share = max(m.share for _, m in places)
        notes.append(
            f"Channel {index} is massive in {_spans([at for at, _ in places])}, with up to {_percent(share)} of the "
            "energy; the robust similarity leaves it out."
        )
    if len(channels) > _NAMED:
        notes.append(f"{len(channels) - _NAMED} more channels are massive in some layer.")
    return notes


def _by_index(layers: Sequence[tuple[int, list[Massive]]]) -> dict[int, list[tuple[int, Massive]]]:
    """Group massive tokens or channels by their index, those of most layers first."""
    groups: dict[int, list[tuple[int, Massive]]] = {}
    for layer, items in layers:
        for item in items:
            groups.setdefault(item.index, []).append((layer, item))
    return dict(sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[0])))


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


def with_trials(
    verdict: Verdict, layers: Sequence[LayerData], trials: list[Trial], before: Trial, use: DepthUse | None = None
) -> Verdict:
    """Complete a verdict with the trials of candidate cures on one batch, and recommend one that helps.

    Args:
        verdict: What ``judge`` returned; it is changed in place.
        layers: Metrics by layer.
        trials: The candidates in the order of preference: of those about equally good, the first is recommended.
        before: The same batch without a cure.
        use: What the removal of layers did to the output, if that was measured.

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
        return (trial.robust or trial.similarity)[-1]

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
    verdict.trials, verdict.before, verdict.before_robust = trials, before.similarity, before.robust
    verdict.recommendation = None if chosen is None else dict(chosen.cure)
    verdict.text = f"{describe(verdict, layers, use)} {_trial_words(verdict, start, improvement, chosen)}"
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
        cost = "" if verdict.initialised else _cost(trial)
        results.append(f"{trial.name} {_n(start + by if about_entropy else start - by)}{_remark(by)}{cost}")
    words = f"Tried on the first batch, {what}: as it is {_n(start)}, {', '.join(results)}."
    if chosen is None:
        return f"{words} None of them helps here, so none is recommended."
    arguments = ", ".join(f"{name}={_n(value)}" for name, value in chosen.cure.items())
    return f"{words} Recommended: leadline.cure(model, {arguments}).{price(verdict, chosen)}"


def _cost(trial: Trial) -> str:
    """Return the change of the output by a cure, in brackets; empty where it was not measured."""
    if trial.change is None:
        return ""
    what = {"loss": "loss", "kl": "KL of the output"}.get(trial.unit or "", "1 - cosine of the output")
    return f" ({what} {_signed(trial.change)})"


def price(verdict: Verdict, trial: Trial) -> str:
    """Return what a recommended cure costs at once, as a sentence with a space before it."""
    if verdict.initialised:
        return " The weights are as initialised, so what it does to the output means nothing."
    if trial.change is None or trial.unit not in COSTS:
        return " What it does to the output was not measured."
    does = _change_words(trial.change, trial.unit, trial.change_error)
    if trial.change <= COSTS[trial.unit]:
        return f" At once it {does}."
    return f" At once it {does}, so it helps only if the model is then trained with it."


def _remark(by: float) -> str:
    """Return a remark on a cure that improved the number by ``by``; empty for one that helps."""
    if by >= _MOVED:
        return ""
    if by <= -_MOVED:
        return " (makes it worse)"
    return " (does nothing for it)" if abs(by) < _UNMOVED else " (too little)" if by > 0 else " (slightly worse)"


def _spans(layers: Sequence[int]) -> str:
    """Return "layer 5", or "layers 3 to 9, 12"."""
    runs: list[list[int]] = []
    for at in sorted(set(layers)):
        if runs and at == runs[-1][1] + 1:
            runs[-1][1] = at
        else:
            runs.append([at, at])
    words = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)
    return f"layer{'' if words.isdigit() else 's'} {words}"


def _percent(share: float) -> str:
    """Return a share in percent, and never 100 % for less than all."""
    return f"{share:.2%}" if share > 0.99 else f"{share:.1%}"


def _signed(value: float) -> str:
    return f"{value:+.3g}" if abs(value) >= 1e-3 or value == 0 else f"{value:+.1e}"


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _n(value: float | None) -> str:
    """Format a number of at most 1: .5, .999, never 1.000 for .9998, never -0 for -1e-7."""
    if value is None:
        return "?"
    if abs(value) < 0.0005:
        return "0"
    text = f"{value:.3f}" if value < 0.9995 or value >= 1 else f"{value:.6f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return (text.removeprefix("0") if text.startswith("0.") else text) or "0"
