"""The separate effects of alpha and alpha': normalised residual and diversity over a grid of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Measure a grid of nets, means over images and seeds: by measure, (alphas, alpha_primes, depth)."""
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
    """Return how much values (alphas, alpha_primes) rise on average along alpha and along alpha'.

    Args:
        values: A measure over the grid.
        low: Index of the grid point to start from.
        high: Index of the grid point to end at.
    """
    return (values[high] - values[low]).mean().item(), (values[:, high] - values[:, low]).mean().item()


def conclude(alpha: float, alpha_prime: float, at: int) -> str:
    """Describe which of the two changes the metric."""
    effect = (
        f"at depth {at}, raising alpha from 0 to .5 changes the metric by {alpha:+.3f} (mean over alpha'), and raising "
        f"alpha' from 0 to .5 by {alpha_prime:+.3f} (mean over alpha)"
    )
    if max(alpha, alpha_prime) < 0.05:
        return f"Neither does the work: {effect}."
    if alpha > 5 * abs(alpha_prime):
        return f"It is alpha that does the work: {effect}."
    if alpha_prime > 5 * abs(alpha):
        return f"It is alpha' that does the work: {effect}."
    return f"Both have a part in it: {effect}."


def run(context: Context) -> Result:
    """Run the entry."""
    setting = context.setting
    grid, depth = setting["grid"], setting["depth"]
    measured = measure(context)
    at = min(6, depth) - 1
    zero, half = grid.index(0.0), grid.index(0.5)
    alpha, alpha_prime = effects(measured["residual"][..., at], zero, half)
    prime_alone, alpha_alone = (measured["residual"][i, j, at].item() for i, j in ((zero, half), (half, zero)))
    claims = [
        Claim(f"alpha' = .5 alone, depth {at + 1} (Theorem D.3 bounds it as it would a skip connection)", "digits",
              prime_alone, None, "above .1", prime_alone > 0.1),
        Claim(f"alpha = .5 alone, depth {at + 1}", "digits", alpha_alone, None, "above .1", alpha_alone > 0.1),
    ]  # fmt: skip
    early = measured["residual"][zero, :, 1]
    div = effects(measured["diversity"][..., at], zero, half)
    notes = [
        conclude(alpha, alpha_prime, at + 1),
        f"Token diversity says the same: {div[0]:+.3f} for alpha and {div[1]:+.3f} for alpha'.",
        "Without alpha, the metric at depth 2 is "
        + ", ".join(f"{value:.2g} (alpha' {p:g})" for p, value in zip(grid, early.tolist(), strict=True))
        + ".",
    ]
    table = [
        {
            "alpha": a,
            "alpha_prime": p,
            "depth": level + 1,
            **{name: measured[name][i, j, level].item() for name in measured},
        }
        for i, a in enumerate(grid)
        for j, p in enumerate(grid)
        for level in range(depth)
    ]

    return Result(claims, {"grid": table}, lambda: _plot(measured, grid, depth), notes)


def _plot(measured: Mapping[str, Tensor], grid: Sequence[float], depth: int) -> Any:
    levels = [level for level in (2, 6, 12) if level <= depth]
    figure, axes = panels(len(levels), rows=2, width=3.3, height=3.0)
    for axis, (name, level) in zip(axes, [(name, level) for name in measured for level in levels], strict=True):
        values = measured[name][..., level - 1]
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


ENTRY = Entry(
    "hop-ablation",
    "Which of alpha and alpha' does the work: normalised residual and token diversity over a grid",
    run,
    {**WIDTHS, "depth": 12, "count": 16, "seeds": 2, "init": "xavier_fused", "grid": [0.0, 0.1, 0.3, 0.5, 0.7, 0.9]},
    images=True,
)
