"""TSE figure 2: similarity, energy ratios, delta and omega by block, over random trials."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from leadline.metrics import delta, energy_ratios, escalation_rate, omega, token_similarity
from leadline.papers.shared.algorithm1 import (
    STREAM,
    Sizes,
    draw_tokens,
    draw_weights,
    measure_trials,
    post_norm,
    rate_tends,
)
from leadline.papers.shared.entry import Claim, Context, Entry, Result, below, first_above, within
from leadline.papers.shared.plots import panels, styles

STEPS = ("SA + residual", "LN", "FFN + residual", "LN (second)")


def measure(context: Context, gain: float, trials: int, depth: int, stream: int, full: bool) -> dict[str, Tensor]:
    """Measure random post-norm blocks.

    Args:
        context: The context of the entry.
        gain: Gain of the attention branch.
        trials: Number of trials.
        depth: Number of blocks.
        stream: Which experiment this is; each has its own random numbers.
        full: Whether to measure "ratios", "delta" and "omega" too.

    Returns:
        Quantities by block, (depth, trials) each; "ratios" is (4, depth, trials).
    """
    setting = context.setting
    sizes = Sizes.of(setting)

    def some(start: int, count: int) -> dict[str, Tensor]:
        generator = context.generator(STREAM * stream + start)
        X = draw_tokens(sizes, count, generator)
        rows: dict[str, list[Tensor]] = {name: [] for name in ("similarity", "rate", "ratios", "delta", "omega")}
        for _ in range(depth):
            steps = post_norm(X, draw_weights(sizes, (count,), generator), sizes.heads, gain)
            rows["similarity"].append(token_similarity(X))
            rows["rate"].append(escalation_rate(X, steps.y1))
            if full:
                path = (X, steps.y1, steps.y2, steps.y3, steps.y4)
                pairs = [energy_ratios(a, b) for a, b in pairwise(path)]
                rows["ratios"].append(torch.stack([first / second for first, second in pairs]))
                rows["delta"].append(delta(steps.P, method="iterative").mean(-1))
                rows["omega"].append(omega(X, steps.P).mean(-1))
            X = steps.y4
        return {name: torch.stack(values, dim=-2) for name, values in rows.items() if values}

    return measure_trials(context, trials, setting["chunk"], some)


def similarity_claims(similarity: Tensor, pass_by: int) -> list[Claim]:
    """Return the claims that t_sim rises from block to block, and passes .99 by block ``pass_by``.

    ``similarity`` (depth,) is the mean over trials of t_sim of what enters each block.
    """
    rise = similarity.diff().min().item()
    passed = first_above(similarity, 0.99)
    return [
        Claim("smallest rise of t_sim from block to block", "shape", rise, None, "above 0", rise > 0),
        below("block at which t_sim passes .99", passed, pass_by + 0.5, paper=float(pass_by)),
    ]


def run(context: Context) -> Result:
    """Run the entry."""
    setting = context.setting
    depth, trials = setting["depth"], setting["trials"]
    values = measure(context, 1.0, trials, depth, 0, full=True)
    mean = {name: by_trial.mean(-1) for name, by_trial in values.items()}
    worst = max(mean["ratios"][0].tolist(), key=lambda ratio: abs(ratio - 2))
    claims = [
        *similarity_claims(mean["similarity"], 15),
        within("xi_1/xi_2 of step 1, the block farthest from 2", worst, 2.0, 0.05, kind="shape"),
        rate_tends("r of the last blocks, gain 1", mean["rate"], 1.0),
    ]
    for i, (gain, gain_depth) in enumerate(setting["gains"], start=1):
        rate = measure(context, gain, setting["gain_trials"], gain_depth, i, full=False)["rate"].mean(-1)
        claims.append(rate_tends(f"r of the last blocks, gain {gain:g}, depth {gain_depth}", rate, gain))
    table = [
        {
            "block": block + 1,
            "similarity": mean["similarity"][block].item(),
            **{f"xi1/xi2 step {i + 1}": mean["ratios"][i, block].item() for i in range(4)},
            "r step 1": mean["rate"][block].item(),
            "delta": mean["delta"][block].item(),
            "omega": mean["omega"][block].item(),
        }
        for block in range(depth)
    ]
    return Result(claims, {"blocks": table}, lambda: _plot(mean, depth, trials), _notes(mean))


def _notes(mean: dict[str, Tensor]) -> list[str]:
    other = (mean["ratios"][1:, 1:] - 1).abs().max().item()
    return [
        f"xi_1/xi_2 of the other three steps is {mean['ratios'][2, 0]:.2f} for the FFN at block 1, where t_sim is "
        f"{mean['similarity'][0]:.3f} and ReLU gives tokens a common part; from block 2 on it is within {other:.2f} "
        "of 1. The paper calls it negligible, which is right for t_sim: the FFN moves a small number.",
        f"delta falls from {mean['delta'][0]:.3f} to {mean['delta'][-1]:.1e} and omega from {mean['omega'][0]:.3f} to "
        f"{mean['omega'][-1]:.1e}. Scores are scaled by 1/sqrt(d/h); with 1/sqrt(d), as (2) prints, delta would start "
        "near .04. W has variance 1/d: with h/d, as section 2.4 prints, xi_1/xi_2 would be about 9 and not 2.",
    ]


def _plot(mean: dict[str, Tensor], depth: int, trials: int) -> Any:
    figure, (left, middle, right) = panels(3)
    blocks = range(1, depth + 1)
    left.plot(blocks, mean["similarity"], **next(styles()))
    left.set(xlabel="block", ylabel="token similarity", ylim=(0, 1.03))
    for name, curve, style in zip(STEPS, mean["ratios"], styles(), strict=False):
        middle.plot(blocks, curve, label=name, **style)
    middle.set(xlabel="block", ylabel=r"$\xi_1/\xi_2$", ylim=(0.5, 2.5))
    middle.legend(frameon=False, fontsize=8)
    for name, style in zip(("delta", "omega"), styles(), strict=False):
        right.plot(blocks, mean[name], label=rf"$\{name}$", **style)
    right.set(xlabel="block", ylim=(0, None))
    right.legend(frameon=False)
    figure.suptitle(f"mean of {trials} trials", fontsize=10)
    return figure


ENTRY = Entry(
    "tse-fig2",
    "TSE figure 2: token similarity, energy ratios, delta and omega by block, 50 trials",
    run,
    {
        **Sizes()._asdict(),
        "depth": 20,
        "trials": 50,
        "chunk": 5,
        "gains": [[0.5, 30], [2.0, 20]],
        "gain_trials": 6,
    },
)
