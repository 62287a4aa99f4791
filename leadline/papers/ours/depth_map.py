"""Depth of collapse over alpha, alpha', tau, gain and norm placement: predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from leadline.errors import need
from leadline.metrics import token_similarity
from leadline.nn import BlockConfig, TransformerBlock, TransformerStack
from leadline.papers.shared.attention_nets import seeded
from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.mean_field import PLACEMENTS, Point, collapse_depth, rank_correlation, similarity_curve
from leadline.papers.shared.plots import panels

AXES = (("alpha_prime", "alpha"), ("tau", "alpha"), ("gain", "alpha"))  # of the maps: across and up
RANGES = {"alpha": (0.0, 0.9), "alpha_prime": (0.0, 0.9), "tau": (0.0, 0.6), "gain": (0.1, 2.5)}
TITLES = {"post": "post-norm", "pre": "pre-norm", "post, no skip": "post-norm, no skip"}
LINES = (2, 5, 10, 20, 50, 100)  # depths with a contour line on the maps
LABELS = {"alpha": r"$\alpha$", "alpha_prime": r"$\alpha'$", "tau": r"$\tau$", "gain": "gain"}
MEASURED = {
    "alpha_prime": [(0.0, 0.0), (0.5, 0.0), (0.85, 0.0), (0.0, 0.3), (0.0, 0.6), (0.0, 0.1), (0.5, 0.5), (0.85, 0.8)],
    "tau": [(0.01, 0.0), (0.05, 0.0), (0.15, 0.0), (0.22, 0.0), (0.4, 0.0), (0.05, 0.4), (0.15, 0.5), (0.1, 0.2)],
    "gain": [(0.25, 0.0), (0.5, 0.0), (0.7, 0.0), (2.0, 0.0), (1.5, 0.1), (0.5, 0.4), (2.0, 0.4), (2.0, 0.7)],
}


def at(placement: str, **values: Any) -> Point:
    """Return a point that differs from the standard setting in ``values``."""
    return replace(Point(placement), **values)


def points() -> list[Point]:
    """Return the measured points of every placement and map."""
    return [
        at(placement, **{across: x, up: y})
        for placement in PLACEMENTS
        for across, up in AXES
        for x, y in MEASURED[across]
    ]


def stack(point: Point, setting: Mapping[str, Any], device: torch.device) -> TransformerStack:
    """Build blocks with the weights that the prediction assumes: torch's default for the FFN, TSE's for the scores."""
    dim = setting["d"]
    blocks = TransformerStack(
        BlockConfig(
            depth=setting["depth"],
            dim=dim,
            heads=setting["heads"],
            ffn=setting["ffn"],
            mlp="relu",
            norm="pre" if point.placement == "pre" else "post",
            skip=point.placement != "post, no skip",
            gain=point.gain,
            attention="hopfield",
            alpha=point.alpha,
            alpha_prime=point.alpha_prime,
            de_escalation=point.tau,
            qkv_bias=False,
            bias=False,
        )
    )
    with torch.no_grad():
        for block in blocks.layers():
            q, k, v = block.attention.qkv.weight.chunk(3)
            for part in (q, k):
                nn.init.uniform_(part, -1 / math.sqrt(dim), 1 / math.sqrt(dim))
            for part in (v, block.attention.proj.weight):
                nn.init.normal_(part, std=1 / math.sqrt(dim))
    return blocks.to(device).eval()


def predict(point: Point, setting: Mapping[str, Any]) -> int:
    """Predict the depth of collapse from the setting.

    s^2 = 1/9 and f = 1/18 follow from the weights: uniform in +-1/sqrt(fan in) has variance 1/(3 fan in).
    """
    curve = similarity_curve(point, setting["n"], setting["depth"], s2=1 / 9, v=1.0, f=1 / 18)
    return collapse_depth(curve, setting["level"])


def measure(context: Context, point: Point) -> int:
    """Measure the depth of collapse in real blocks, by the mean similarity over inputs and draws of the weights."""
    setting = context.setting
    nets: list[tuple[list[TransformerBlock], Tensor, Any]] = []
    for seed in range(setting["seeds"]):
        with seeded(context.seed + seed):
            blocks = list(stack(point, setting, context.device).layers())
            nets.append((blocks, torch.randn(setting["samples"], setting["n"], setting["d"]).to(context.device), None))
    curve: list[float] = []
    for level in range(setting["depth"]):
        nets = [(blocks, *blocks[level](x, state)) for blocks, x, state in nets]
        curve.append(sum(token_similarity(x).mean().item() for _, x, _ in nets) / len(nets))
        if curve[-1] > setting["level"]:
            break
    return level + 1 if curve[-1] > setting["level"] else setting["depth"] + 1


def grid(placement: str, across: str, up: str, setting: Mapping[str, Any]) -> tuple[list[float], list[float], Tensor]:
    """Predict a map; return its values across, its values up and the depths (up, across)."""
    steps = setting["map"]
    xs, ys = (
        [low + (high - low) * i / (steps - 1) for i in range(steps)] for low, high in (RANGES[across], RANGES[up])
    )
    values = [[predict(at(placement, **{across: x, up: y}), setting) for x in xs] for y in ys]
    return xs, ys, torch.tensor(values, dtype=torch.float64)


def run(context: Context) -> Result:
    """Run the entry."""
    setting = context.setting
    level, depth = setting["level"], setting["depth"]
    chosen = [point for point in points() if point.placement in setting["placements"]]
    distinct = list(dict.fromkeys(chosen))
    measured = context.map(lambda point: measure(context, point), distinct)
    table = [
        {**asdict(point), "predicted": predict(point, setting), "measured": at_block}
        for point, at_block in zip(distinct, measured, strict=True)
    ]
    both = [(float(row["predicted"]), float(row["measured"])) for row in table]
    correlation = rank_correlation([p for p, _ in both], [m for _, m in both])
    inside = [(p, m) for p, m in both if max(p, m) <= depth]
    inner = rank_correlation([p for p, _ in inside], [m for _, m in inside])
    apart = sum(abs(p - m) for p, m in inside) / len(inside)
    agree = sum((p > depth) == (m > depth) for p, m in both)
    claims = [
        Claim("measured points", "digits", float(len(both)), None, "at least 30", len(both) >= 30),
        Claim("rank correlation of predicted and measured depth", "digits", correlation, None, "above 0.9",
              correlation > 0.9),
        Claim(f"the same, only points that collapse within {depth} blocks", "digits", inner, None, "above 0.9",
              inner > 0.9),
    ]  # fmt: skip
    notes = [
        f"Depth of collapse: the first block after which t_sim is above {level:g}. Spearman's rank correlation is "
        f"{correlation:.3f} over all {len(both)} points. It is {inner:.3f} over the {len(inside)} points that collapse "
        f"within {depth} blocks both as predicted and as measured; these two depths differ by {apart:.1f} blocks on "
        f"average. Whether tokens collapse within {depth} blocks is predicted correctly for {agree} of {len(both)}.",
        "The prediction iterates the energies of the token mean and of the rest through a block; the formula is in "
        "`leadline/papers/shared/mean_field.py`. Its inputs are n, the variances of the weights and the setting; "
        "it takes no measurement.",
    ]

    return Result(claims, {"points": table}, lambda: _plot(setting, table), notes)


def _plot(setting: Mapping[str, Any], table: Sequence[Mapping[str, Any]]) -> Any:
    """Draw, for each placement, the predicted maps with the measured points on them, and predicted against measured."""
    rows, depth, width = setting["placements"], setting["depth"], len(AXES) + 1
    figure, axes = panels(width, rows=len(rows), width=3.2, height=2.9)
    colours = need("matplotlib.colors", "plot").LogNorm(1, depth + 1)
    for r, placement in enumerate(rows):
        *maps, scatter = axes[r * width : (r + 1) * width]
        measured = [row for row in table if row["placement"] == placement]
        for axis, (across, up) in zip(maps, AXES, strict=True):
            image = _draw_map(axis, placement, across, up, setting, colours)
            _draw_points(axis, measured, across, up, colours)
        scatter.plot([1, depth + 1], [1, depth + 1], color="grey", linewidth=0.8)
        pairs = [(row["predicted"], row["measured"]) for row in measured]
        scatter.scatter(*zip(*pairs, strict=True), s=18, c="#0072B2", alpha=0.7)
        scatter.set(xscale="log", yscale="log", xlim=(0.8, 1.4 * depth), ylim=(0.8, 1.4 * depth))
        scatter.set(xlabel="predicted depth", ylabel="measured depth", title=TITLES[placement])
        for side in (scatter.xaxis, scatter.yaxis):
            side.set_major_formatter("{x:g}")
    label = f"blocks until t_sim > {setting['level']:g}; {depth + 1}: not within {depth}; rings: measured"
    figure.colorbar(image, ax=axes, shrink=0.5, label=label, format="{x:g}")
    return figure


def _draw_map(axis: Any, placement: str, across: str, up: str, setting: Mapping[str, Any], colours: Any) -> Any:
    xs, ys, values = grid(placement, across, up, setting)
    image = axis.pcolormesh(xs, ys, values, norm=colours, cmap="viridis", shading="nearest", rasterized=True)
    if values.amin() < values.amax():  # lines at round depths, so that the map reads without colour too
        lines = axis.contour(xs, ys, values, LINES, colors="black", linewidths=0.7)
        axis.clabel(lines, fontsize=7, fmt="%g")
    axis.set(xlabel=LABELS[across], ylabel=LABELS[up], title=TITLES[placement])
    axis.grid(False)
    return image


def _draw_points(axis: Any, rows: Sequence[Mapping[str, Any]], across: str, up: str, colours: Any) -> None:
    """Draw the measured points that lie on the plane of the map, as rings of the colour of their depth."""
    for row in rows:
        base = asdict(Point(row["placement"]))
        if all(row[name] == value for name, value in base.items() if name not in (across, up)):
            axis.scatter(row[across], row[up], c="black", s=80, clip_on=False, zorder=3)
            axis.scatter(row[across], row[up], c=[row["measured"]], norm=colours, cmap="viridis", s=42,
                         edgecolors="white", linewidths=1.2, clip_on=False, zorder=4)  # fmt: skip


ENTRY = Entry(
    "ours-depth-map",
    "Depth of collapse over alpha, alpha', tau, gain and norm placement: predicted, with measured points",
    run,
    {
        "n": 64,
        "d": 128,
        "heads": 2,
        "ffn": 512,
        "depth": 100,
        "level": 0.9,
        "seeds": 2,
        "samples": 4,
        "map": 40,
        "placements": list(PLACEMENTS),
    },
)
