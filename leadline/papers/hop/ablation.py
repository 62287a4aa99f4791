"""Which of alpha and alpha' does the work: the metric of HOP's table 1 and token diversity over a grid of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leadline.metrics import normalized_residual, token_diversity
from leadline.papers.shared.attention_nets import WIDTHS, by_layer, network
from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.plots import panels

MEASURES = {"residual": normalized_residual, "diversity": token_diversity}
LABELS = {"residual": "normalised residual", "diversity": "token diversity"}


def measure(context: Context) -> dict[str, Tensor]:
    """By measure: (alphas, alpha_primes, depth), means over images and seeds."""
    setting = context.setting
    pixels = context.images(setting["count"], setting["image_size"])
    grid = setting["grid"]

    def at(job: tuple[float, float, int]) -> Tensor:
        alpha, alpha_prime, seed = job
        model = network(context, context.seed + seed, setting["init"], alpha, alpha_prime)
        return by_layer(model, pixels, lambda x: torch.stack([f(x) for f in MEASURES.values()])).mean(-1).cpu()

    jobs = [(alpha, alpha_prime, seed) for alpha in grid for alpha_prime in grid for seed in range(setting["seeds"])]
    values = torch.stack(context.map(at, jobs))  # (alphas alpha_primes seeds, depth, measures)
    values = values.unflatten(0, (len(grid), len(grid), -1)).mean(2).movedim(-1, 0)
    return dict(zip(MEASURES, values, strict=True))


def effects(values: Tensor, low: int, high: int) -> tuple[float, float]:
    """Mean rise of values (alphas, alpha_primes) from grid point ``low`` to ``high`` of alpha, and of alpha'."""
    return (values[high] - values[low]).mean().item(), (values[:, high] - values[:, low]).mean().item()


def conclude(alpha: float, alpha_prime: float, at: int) -> str:
    """The one sentence; it follows from the two effects."""
    said = (
        f"at depth {at}, raising alpha from 0 to .5 changes the metric by {alpha:+.3f} (mean over alpha'), and raising "
        f"alpha' from 0 to .5 by {alpha_prime:+.3f} (mean over alpha)"
    )
    if max(alpha, alpha_prime) < 0.05:
        return f"Neither does the work: {said}."
    if alpha > 5 * abs(alpha_prime):
        return f"It is alpha that does the work: {said}."
    if alpha_prime > 5 * abs(alpha):
        return f"It is alpha' that does the work: {said}."
    return f"Both have a part in it: {said}."


def run(context: Context) -> Result:
    setting = context.setting
    grid, depth = setting["grid"], setting["depth"]
    found = measure(context)
    at = min(6, depth) - 1
    zero, half = grid.index(0.0), grid.index(0.5)
    alpha, alpha_prime = effects(found["residual"][..., at], zero, half)
    alone = found["residual"][zero, half, at].item()
    claims = [
        Claim(f"alpha' = .5 alone, depth {at + 1} (Theorem D.3 bounds it as it would a skip connection)", "digits",
              alone, None, "above .1", alone > 0.1),
        Claim(f"alpha = .5 alone, depth {at + 1}", "digits", found["residual"][half, zero, at].item(), None, "above .1",
              found["residual"][half, zero, at].item() > 0.1),
    ]  # fmt: skip
    early = found["residual"][zero, :, 1]
    div = effects(found["diversity"][..., at], zero, half)
    notes = [
        conclude(alpha, alpha_prime, at + 1),
        f"Token diversity says the same: {div[0]:+.3f} for alpha and {div[1]:+.3f} for alpha'.",
        "Without alpha, the metric at depth 2 is "
        + ", ".join(f"{value:.2g} (alpha' {p:g})" for p, value in zip(grid, early.tolist(), strict=True))
        + ".",
    ]
    table = [
        {"alpha": a, "alpha_prime": p, "depth": level + 1, **{name: found[name][i, j, level].item() for name in found}}
        for i, a in enumerate(grid)
        for j, p in enumerate(grid)
        for level in range(depth)
    ]

    def plot() -> Any:
        levels = [level for level in (2, 6, 12) if level <= depth]
        figure, axes = panels(len(levels), rows=2, width=3.3, height=3.0)
        for axis, (name, level) in zip(axes, [(name, level) for name in found for level in levels], strict=True):
            values = found[name][..., level - 1]
            image = axis.imshow(values.numpy(), origin="lower", vmin=0, vmax=1, cmap="viridis")
            for i in range(len(grid)):
                for j in range(len(grid)):
                    value = values[i, j].item()
                    text = f"{value:.2f}" if value >= 0.005 else f"{value:.0e}".replace("e-0", "e-") if value else "0"
                    axis.text(j, i, text, ha="center", va="center", fontsize=6, color="w" if value < 0.6 else "k")
            axis.set_xticks(range(len(grid)), [f"{p:g}" for p in grid])
            axis.set_yticks(range(len(grid)), [f"{a:g}" for a in grid])
            axis.set(xlabel=r"$\alpha'$", ylabel=r"$\alpha$", title=f"{LABELS[name]}, depth {level}")
            axis.grid(False)
        figure.colorbar(image, ax=axes, shrink=0.6, label="normalised residual or token diversity")
        return figure

    return Result(claims, {"grid": table}, plot, notes)


ENTRY = Entry(
    "hop-ablation",
    "Which of alpha and alpha' does the work: normalised residual and token diversity over a grid",
    run,
    {**WIDTHS, "depth": 12, "count": 16, "seeds": 2, "init": "xavier_fused", "grid": [0.0, 0.1, 0.3, 0.5, 0.7, 0.9]},
    images=True,
)
