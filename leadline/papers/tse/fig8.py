"""TSE figure 8: eta (14) as X leaves rank one, with standard errors.

eta = E[xi_1]/E[xi_2] - xi_1/xi_2.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from leadline.metrics import eta
from leadline.ops import attention_weights
from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.plots import panels, styles


def measure(context: Context, d: int, times: Tensor) -> Tensor:
    """Measure eta (times, samples) for X = e v^T + t Q and Y = X + P X W, W ~ N(0, I/d), P by (2) with one head."""
    n, samples = context.setting["n"], context.setting["samples"]
    generator = context.generator(d)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=context.device)

    v, Q = normal(d), normal(n, d)
    w_q, w_k = ((2 * torch.rand(d, d, generator=generator, device=context.device) - 1) / math.sqrt(d) for _ in "qk")
    X = v / math.sqrt(n) + times.to(context.device).view(-1, 1, 1) * Q  # (times, n, d)
    P = attention_weights((X @ w_q) @ (X @ w_k).mT / math.sqrt(d))
    W = normal(len(times), samples, d, d) / math.sqrt(d)
    X, P = X.unsqueeze(1), P.unsqueeze(1)
    Y = X + (P @ X) @ W
    return eta(X.expand_as(Y), Y, P.expand(-1, samples, -1, -1)).cpu()


def run(context: Context) -> Result:
    """Run the entry."""
    widths, samples, count = context.setting["widths"], context.setting["samples"], context.setting["times"]
    times = torch.linspace(1 / count, 1, count)
    values = {}
    for i, d in enumerate(widths, start=1):
        values[d] = measure(context, d, times)
        context.progress(i, len(widths))
    mean = {d: by_draw.mean(-1) for d, by_draw in values.items()}
    error = {d: by_draw.std(-1) / math.sqrt(samples) for d, by_draw in values.items()}
    claims = []
    for d in widths:
        spread = values[d].std(-1).mean().item()
        ours = spread / math.sqrt(6 / d)
        name = f"spread of eta over sqrt(6/d), mean over t, d = {d}"
        claims.append(Claim(name, "digits", ours, None, "theory 1 ± 20%", abs(ours - 1) < 0.2))
    sizes = [mean[d].abs().mean().item() for d in widths]
    smaller = all(a > b for a, b in pairwise(sizes))
    spreads = values[widths[0]].std(-1)
    low, high = spreads[times <= 0.3].mean().item(), spreads[times >= 0.7].mean().item()
    notes = [
        "Mean |average eta| over t: "
        + ", ".join(f"{size:.3f} for d = {d}" for d, size in zip(widths, sizes, strict=True))
        + (", falling with d as the paper says." if smaller else "; it does not fall with d in this draw."),
        f"With error bars: at d = {widths[0]} the spread of eta is {low:.2f} for t <= .3 and {high:.2f} for t >= .7, "
        f"beside sqrt(6/d) = {math.sqrt(6 / widths[0]):.2f}. "
        + (
            "So it is about the same at every t. The paper reads its curves as calmer near rank one, which is not seen "
            "here."
            if low > 0.8 * high
            else "So eta is calmer near rank one, as the paper says."
        ),
    ]
    table = [
        {"d": d, "t": t, "eta": mean[d][i].item(), "standard error": error[d][i].item()}
        for d in widths
        for i, t in enumerate(times.tolist())
    ]

    def plot() -> Any:
        figure, axes = panels(len(widths), width=3.4, height=2.8)
        top = max((mean[d].abs() + 2 * error[d]).max().item() for d in widths) * 1.05
        for axis, d, style in zip(axes, widths, styles(), strict=False):
            bar = {**style, "linestyle": "-", "elinewidth": 0.7}
            axis.errorbar(times, mean[d], yerr=error[d], **bar)
            axis.axhline(0, color="black", linewidth=0.7)
            axis.set(xlabel="t", title=f"d = {d}", ylim=(-top, top))
        axes[0].set_ylabel(r"average $\eta$, standard error")
        return figure

    return Result(claims, {"eta": table}, plot, notes)


ENTRY = Entry(
    "tse-fig8",
    "TSE figure 8: average of eta over 50 draws of W as X leaves rank one",
    run,
    {"n": 100, "widths": [10, 20, 40], "samples": 50, "times": 20},
)
