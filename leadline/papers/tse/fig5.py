"""TSE figure 5: token diversity with de-escalation (21) at the end of each block, and the critical tau."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from leadline.metrics import token_diversity
from leadline.papers.shared.algorithm1 import Sizes, de_escalate, draw_tokens, draw_weights, post_norm
from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.plots import COLOURS, panels, styles
from leadline.papers.tse.fig2 import STREAM
from leadline.theory import critical_tau


def measure(
    context: Context, taus: Sequence[float], trials: int, chunk: int, depth: int, stream: int
) -> tuple[Tensor, Tensor]:
    """Diversity before and after (21) at the end of each block, (taus, depth, trials) each.

    All taus share tokens and weights.
    """
    setting = context.setting
    sizes = Sizes(*(setting[name] for name in Sizes._fields))

    def some(start: int) -> Tensor:
        generator = context.generator(STREAM * stream + start)
        count = min(chunk, trials - start)
        tokens = [draw_tokens(sizes, count, generator)] * len(taus)
        rows = []
        for _ in range(depth):
            weights = draw_weights(sizes, (count,), generator)
            before = [post_norm(X, weights, sizes.heads).y4 for X in tokens]
            tokens = [de_escalate(X, tau) for X, tau in zip(before, taus, strict=True)]
            rows.append(torch.stack([torch.stack([token_diversity(X) for X in at]) for at in (before, tokens)]))
        return torch.stack(rows, dim=2)  # (2, taus, depth, count)

    before_after = torch.cat(context.map(some, range(0, trials, chunk)), dim=-1).cpu()
    return before_after[0], before_after[1]


def crossing(taus: Sequence[float], diversity: Sequence[float], level: float = 0.5) -> float | None:
    """The tau at which diversity rises through ``level``, linear between the two nearest."""
    points = list(zip(taus, diversity, strict=True))
    for (t0, d0), (t1, d1) in pairwise(points):
        if d0 < level <= d1:
            return t0 + (t1 - t0) * (level - d0) / (d1 - d0)
    return None


def run(context: Context) -> Result:
    setting = context.setting
    sizes = Sizes(*(setting[name] for name in Sizes._fields))
    taus, scan, depth, deep = setting["taus"], setting["scan"], setting["depth"], setting["scan_depth"]
    trials, few = setting["trials"], setting["scan_trials"]
    before, after = (part.mean(-1) for part in measure(context, taus, trials, setting["chunk"], depth, 0))
    scanned = measure(context, scan, few, 1, deep, 1)[1].mean(-1)

    claims = []
    readings = {"after (21)": after, "before (21)": before}
    for reading, curves in readings.items():
        final = curves[:, -1].tolist()
        least = min(upper - lower for lower, upper in pairwise(final))
        claims.append(
            Claim(f"smallest step in diversity from tau to tau, {reading}", "shape", least, None, "above 0", least > 0)
        )
        large = min(value for tau, value in zip(taus, final, strict=True) if tau >= 0.5)
        claims.append(Claim(f"least diversity for tau >= .5, {reading}", "shape", large, None, "above .9", large > 0.9))
        for tau, value in zip(taus, final, strict=True):
            shown = {0.1: 0.0, 0.5: 0.5, 1.0: 1.0}.get(tau)
            if shown is not None:
                close = abs(value - shown) < 0.05
                claims.append(Claim(f"diversity, tau {tau:g}, {reading}", "digits", value, shown, "0.05", close))
    limit, printed = critical_tau(), critical_tau(math.sqrt(sizes.heads))
    found = crossing(scan, scanned[:, -1].tolist())
    close = found is not None and abs(found - limit) < 0.05
    near = f"theory {limit:.3f} ± 0.05"
    claims.append(Claim(f"tau at which diversity passes .5 after {deep} blocks", "digits", found, None, near, close))
    growth = (setting["n"] - 1) ** (1 / deep)
    notes = [
        f"Theory: with o = t_sim/t_div, attention multiplies o by 1 + gain^2 = 2 and (21) by (1 - tau)^2, so any tau "
        f"above 1 - 1/sqrt(2) = {limit:.3f} keeps diversity near 1. At a finite depth the crossing comes earlier: from "
        f"o = 1/(n-1) to 1 in {deep} blocks gives {1 - math.sqrt(growth / 2):.3f}.",
        "The paper's plot shows about .5 for tau = .5. Both readings here, before and after (21), are near 1, as the "
        "theory says they must be for any tau above the critical one; nothing was tuned to the plot. The scale of W "
        f"decides: with variance h/d, as section 2.4 prints, the critical tau is {printed:.3f} and tau = .5 "
        "would collapse; a level near .5 at tau = .5 belongs to neither.",
    ]
    tables = {
        "blocks": [
            {"block": b + 1, "tau": tau, **{name: curves[i, b].item() for name, curves in readings.items()}}
            for i, tau in enumerate(taus)
            for b in range(depth)
        ],
        "tau": [
            {"tau": tau, f"after {depth} blocks": scanned[i, depth - 1].item(), f"after {deep}": scanned[i, -1].item()}
            for i, tau in enumerate(scan)
        ],
    }

    def plot() -> Any:
        figure, (left, right) = panels(2)
        for i, (tau, style) in enumerate(zip(taus, styles(), strict=False)):
            left.plot(range(1, depth + 1), after[i], label=rf"$\tau$ = {tau:g}, after (21)", **style)
            thin = {**style, "linestyle": ":", "marker": "", "linewidth": 1.0}
            left.plot(range(1, depth + 1), before[i], label="before", **thin)
        left.set(xlabel="block", ylabel="token diversity", ylim=(-0.03, 1.03))
        left.legend(frameon=False, fontsize=8, loc="center right")
        for at, style in zip((depth, deep), styles(), strict=False):
            right.plot(scan, scanned[:, at - 1], label=f"after {at} blocks", **style)
        right.axvline(limit, color=COLOURS[4], linewidth=0.9)
        right.text(limit + 0.01, 0.05, rf"critical $\tau$ = {limit:.3f}", fontsize=8)
        right.set(xlabel=r"$\tau$", ylabel="token diversity after (21)", ylim=(-0.03, 1.03))
        right.legend(frameon=False, fontsize=8)
        figure.suptitle(f"mean of {trials} runs (left), {few} runs (right)", fontsize=10)
        return figure

    return Result(claims, tables, plot, notes)


ENTRY = Entry(
    "tse-fig5",
    "TSE figure 5: token diversity under de-escalation, before and after (21), and the critical tau",
    run,
    {
        **Sizes()._asdict(),
        "depth": 20,
        "trials": 20,
        "chunk": 5,
        "taus": [0.1, 0.5, 1.0],
        "scan": [0.1, 0.15, 0.2, 0.225, 0.25, 0.275, 0.3, 0.35, 0.4, 0.5],
        "scan_trials": 4,
        "scan_depth": 60,
    },
)
