"""TSE figure 4: token similarity and norms by block, pre-norm beside post-norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leadline.metrics import token_similarity
from leadline.papers.shared.algorithm1 import (
    Sizes,
    draw_tokens,
    draw_weights,
    layer_norm,
    measure_trials,
    post_norm,
    pre_norm,
)
from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.plots import panels, styles

NORMS = {"X": "X", "LN(X)": r"$\hat{X} = LN(X)$", "attention branch": r"$P(\hat{X})\hat{X}W$"}


def measure(context: Context) -> dict[str, Tensor]:
    """Measure what enters each block, by name (depth, trials). Both forms get the same tokens and weights."""
    setting = context.setting
    sizes = Sizes.of(setting)
    depth, trials = setting["depth"], setting["trials"]

    def some(start: int, count: int) -> dict[str, Tensor]:
        generator = context.generator(start)
        pre = post = draw_tokens(sizes, count, generator)
        rows: dict[str, list[Tensor]] = {name: [] for name in ("pre", "post", "expected", "actual", *NORMS)}
        for _ in range(depth):
            weights = draw_weights(sizes, (count,), generator)
            steps = pre_norm(pre, weights, sizes.heads)
            normed = layer_norm(pre)
            for name, X in zip(NORMS, (pre, normed, steps.branch), strict=True):
                rows[name].append(torch.linalg.matrix_norm(X))
            mixed = torch.linalg.matrix_norm(steps.P @ normed.unsqueeze(-3)).square().mean(-1)
            rows["expected"].append(torch.linalg.matrix_norm(pre).square() + mixed)  # (20)
            rows["actual"].append(torch.linalg.matrix_norm(steps.y1).square())
            rows["pre"].append(token_similarity(pre))
            rows["post"].append(token_similarity(post))
            pre, post = steps.y4, post_norm(post, weights, sizes.heads).y4
        return {name: torch.stack(values) for name, values in rows.items()}

    return measure_trials(context, trials, setting["chunk"], some)


def run(context: Context) -> Result:
    """Run the entry."""
    depth, trials = context.setting["depth"], context.setting["trials"]
    mean = {name: values.mean(-1) for name, values in measure(context).items()}
    last = {name: mean[name][-1].item() for name in ("pre", "post")}
    rise = mean["X"].diff().min().item()
    ratio = (mean["actual"] / mean["expected"]).tolist()
    off = max(ratio, key=lambda value: abs(value - 1))
    claims = [
        Claim(f"t_sim entering block {depth}, pre-norm", "shape", last["pre"], None,
              f"below post-norm's {last['post']:.4f}", last["pre"] < last["post"]),
        Claim("smallest rise of ||X|| from block to block", "shape", rise, None, "above 0", rise > 0),
        Claim("||Y||^2 over its expectation (20), the block farthest from 1", "digits", off, 1.0, "2%",
              abs(off - 1) < 0.02),
    ]  # fmt: skip
    size = {name: mean[name][[0, -1]].tolist() for name in NORMS}
    first, final = size["attention branch"]
    notes = [
        f"||X|| grows from {size['X'][0]:.0f} to {size['X'][1]:.0f}, while ||LN(X)|| stays at {size['LN(X)'][1]:.0f} "
        f"and bounds the branch. The branch grows from {first:.0f} to {final:.0f}, because averaging cancels less the "
        f"more alike tokens are. At block {depth} it is {final / size['X'][1]:.2f} of ||X||; in a post-norm block with "
        f"tokens as alike it would be {final / size['LN(X)'][1]:.2f} of it.",
    ]
    table = [
        {"block": b + 1, "pre-norm similarity": mean["pre"][b].item(), "post-norm similarity": mean["post"][b].item()}
        | {f"norm of {name}": mean[name][b].item() for name in NORMS}
        for b in range(depth)
    ]

    return Result(claims, {"blocks": table}, lambda: _plot(mean, depth, trials), notes)


def _plot(mean: dict[str, Tensor], depth: int, trials: int) -> Any:
    figure, (left, right) = panels(2)
    blocks = range(1, depth + 1)
    for name, style in zip(("pre", "post"), styles(), strict=False):
        left.plot(blocks, mean[name], label=f"{name}-norm", **style)
    left.set(xlabel="block", ylabel="token similarity", ylim=(0, 1.03))
    for name, style in zip(NORMS, styles(), strict=False):
        right.plot(blocks, mean[name], label=NORMS[name], **style)
    right.set(xlabel="block", ylabel="Frobenius norm", ylim=(0, None))
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"mean of {trials} trials", fontsize=10)
    return figure


ENTRY = Entry(
    "tse-fig4",
    "TSE figure 4: token similarity and norms in pre-norm blocks",
    run,
    {**Sizes()._asdict(), "depth": 20, "trials": 20, "chunk": 5},
)
