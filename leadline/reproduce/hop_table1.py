"""HOP table 1: the normalised residual by depth, at initialisation, for three initialisations and four columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leadline.metrics import normalized_residual
from leadline.reproduce.base import Claim, Context, Entry, Result, within
from leadline.reproduce.hop_nets import COLUMNS, WIDTHS, by_layer, network
from leadline.reproduce.plots import panels, styles

PAPER = {
    "standard": [0.48887348, 0.07732825, 0.00081001734, 1.7725031e-6, 1.809994e-6, 1.7835139e-6, 1.7920005e-6,
                 1.7568021e-6, 1.75397e-6, 1.7860738e-6, 1.82849e-6, 1.7818496e-6],
    "both": [0.8797747, 0.8309065, 0.80018705, 0.7630522, 0.71199465, 0.67957425, 0.6251911, 0.5860811, 0.52244353,
             0.46130562, 0.432442, 0.39708787],
}  # fmt: skip


def measure(context: Context) -> dict[tuple[str, str], Tensor]:
    """(initialisation, column): the mean over images, (depth, seeds)."""
    setting = context.setting
    pixels = context.images(setting["count"], setting["image_size"])
    found: dict[tuple[str, str], list[Tensor]] = {}
    total, done = len(setting["inits"]) * setting["seeds"] * len(COLUMNS), 0
    for init in setting["inits"]:
        for seed in range(setting["seeds"]):
            for column, (alpha, alpha_prime) in COLUMNS.items():
                model = network(context, context.seed + seed, init, alpha, alpha_prime)
                values = by_layer(model, pixels, normalized_residual).mean(-1).cpu()
                found.setdefault((init, column), []).append(values)
                done += 1
                context.progress(done, total)
    return {key: torch.stack(values, dim=-1) for key, values in found.items()}


def run(context: Context) -> Result:
    setting = context.setting
    found = measure(context)
    mean = {key: values.mean(-1) for key, values in found.items()}
    main, depth, seeds = setting["inits"][0], setting["depth"], setting["seeds"]
    claims = []
    for init in setting["inits"]:
        low = mean[init, "standard"][:4].min().item()
        claims.append(
            Claim(
                f"standard attention by depth 4, {init}", "shape", low, PAPER["standard"][3], "below 1e-4", low < 1e-4
            )
        )
        high = mean[init, "both"][5].item()
        claims.append(Claim(f"both .5 at depth 6, {init}", "shape", high, PAPER["both"][5], "above .1", high > 0.1))
    for column, numbers in PAPER.items():
        for level, number in enumerate(numbers[:depth], start=1):
            claims.append(within(f"{column}, depth {level}, {main}", mean[main, column][level - 1].item(), number, 0.1))
    first = {init: found[init, "standard"][0] for init in setting["inits"]}
    notes = [
        _which(found, main, depth, seeds),
        "The paper does not state its initialisation, and the digits depend on it: at the last depth 'both' is "
        + ", ".join(f"{mean[init, 'both'][-1]:.3f} ({init})" for init in setting["inits"])
        + f" against the paper's {PAPER['both'][depth - 1]:.3f}, and at depth 2 standard attention is "
        + ", ".join(f"{mean[init, 'standard'][1]:.2g} ({init})" for init in setting["inits"])
        + f" against {PAPER['standard'][1]:.2g}. The spread over seeds is wide too; standard attention at depth 1 is "
        + ", ".join(f"{at.min():.2f} to {at.max():.2f} ({init})" for init, at in first.items())
        + f" against {PAPER['standard'][0]:.2f}.",
        f"The floor of standard attention is float32's rounding, {mean[main, 'standard'][-1]:.1g} here and 1.8e-6 in "
        "the paper: a property of the order in which a machine adds, not of the net.",
    ]
    table = [
        {"init": init, "column": column, "depth": level + 1, "mean": mean[init, column][level].item(),
         "spread": found[init, column][level].std().item(),
         "paper": PAPER.get(column, [None] * depth)[level] if level < 12 else None}
        for init, column in found
        for level in range(depth)
    ]  # fmt: skip

    def plot() -> Any:
        figure, axes = panels(len(setting["inits"]), width=3.8, height=3.4)
        x = range(1, depth + 1)
        for axis, init in zip(axes, setting["inits"], strict=True):
            for column, style in zip(COLUMNS, styles(), strict=False):
                values = found[init, column]
                axis.plot(x, mean[init, column], label=column, **style)
                axis.fill_between(x, values.amin(-1), values.amax(-1), color=style["color"], alpha=0.15)
            for column, marker in (("standard", "+"), ("both", "x")):
                axis.plot(x, PAPER[column][:depth], linestyle="", marker=marker, color="grey", label=f"paper, {column}")
            axis.set(xlabel="depth", yscale="log", title=init, ylim=(1e-8, 2))
        axes[0].set_ylabel(r"$\|res(Y)\|_{1,\infty}\,/\,\|Y\|_{1,\infty}$")
        axes[-1].legend(frameon=False, fontsize=7)
        return figure

    return Result(claims, {"residual": table}, plot, notes)


def _which(found: dict[tuple[str, str], Tensor], init: str, depth: int, seeds: int) -> str:
    """Which column does it, in a sentence that follows from the numbers at the last depth."""
    last = {column: found[init, column][-1] for column in COLUMNS}
    said = ", ".join(f"{column} {values.mean():.2g} ± {values.std():.1g}" for column, values in last.items())
    apart = (last["both"] - last["alpha only"]).mean().item()
    error = 2 * (last["both"] - last["alpha only"]).std().item() / seeds**0.5
    verdict = (
        f"alpha' on top of alpha changes it by {apart:+.3f}, "
        + ("within" if abs(apart) <= error else "beyond")
        + f" two standard errors ({error:.3f})"
    )
    return f"At depth {depth} ({init}, mean and spread over {seeds} seeds): {said}; {verdict}."


ENTRY = Entry(
    "hop-table1",
    "HOP table 1: normalised residual of attention-only nets by depth, at initialisation",
    run,
    {**WIDTHS, "depth": 12, "count": 64, "seeds": 3, "inits": ["xavier_fused", "xavier", "trunc_normal"]},
    images=True,
)
