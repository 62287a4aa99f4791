"""HOP appendix F: diversity, growth and residual by depth for every discretisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics import normalized_residual, residual, token_diversity
from leadline.models import ViT
from leadline.nn.schemes import KINDS, SCHEMES
from leadline.papers.shared.attention_nets import WIDTHS, network
from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.plots import panels, styles

MEASURES = ("diversity", "token length", "spread of scores", "residual")
STABLE = 1.05  # growth per layer, over the second half of the layers, up to which a scheme is stable


def by_layer(model: ViT, pixels: Tensor) -> Tensor:
    """Measure the output of each block, means over images: (4, depth), NaN after an overflow."""
    x, rope = model.embed(pixels)
    state, values = None, []
    for block in model.blocks.layers():
        x, state = block(x, state, rope=rope)
        if not (torch.isfinite(x).all() and torch.isfinite(state[0]).all()):
            values.append(torch.full((len(MEASURES),), math.nan))
            continue
        length = torch.linalg.vector_norm(x, dim=-1).mean()
        spread = residual(state[0].mT).square().mean().sqrt()  # within a row: softmax depends on nothing else
        means = (token_diversity(x).mean(), length, spread, normalized_residual(x).mean())
        values.append(torch.stack(means).cpu())
    return torch.stack(values, dim=1)


def measure(context: Context) -> dict[str, Tensor | str]:
    """Measure every scheme: (4, depth), or the reason why its implicit step has no solution."""
    setting = context.setting
    pixels = context.images(setting["count"], setting["image_size"])

    def solve(scheme: str) -> Tensor | str:
        model = network(context, context.seed, setting["init"], setting["alpha"], setting["alpha_prime"], scheme=scheme)
        try:
            return by_layer(model, pixels)
        except LeadlineError as error:
            return str(error)

    return dict(zip(SCHEMES, context.map(solve, SCHEMES), strict=True))


def growth(sizes: Tensor) -> float:
    """Return the factor per layer over the second half of the layers, or infinity after an overflow."""
    half = len(sizes) // 2
    if not torch.isfinite(sizes).all():
        return math.inf
    return (sizes[-1] / sizes[half - 1]).item() ** (1 / (len(sizes) - half))


def run(context: Context) -> Result:
    """Run the entry."""
    setting = context.setting
    measured = measure(context)
    solved = {scheme: values for scheme, values in measured.items() if isinstance(values, Tensor)}
    rates = {scheme: (growth(values[1]), growth(values[2])) for scheme, values in solved.items()}
    root = _root(setting)
    claims, near = [], f"theory {root:.3f} ± 10%"
    for kind in KINDS[2:]:
        for name, what, which in ((f"{kind}-backward", "tokens", 0), (f"forward-{kind}", "scores", 1)):
            ours = rates[name][which] if name in rates and math.isfinite(rates[name][which]) else None
            holds = ours is not None and abs(ours - root) <= 0.1 * root
            claims.append(Claim(f"growth of the {what} per layer, {name}", "digits", ours, None, near, holds))
    table: list[dict[str, Any]] = []
    for scheme, values in measured.items():
        for level in range(setting["depth"]):
            numbers = values[:, level].tolist() if isinstance(values, Tensor) else [None] * len(MEASURES)
            table.append({"scheme": scheme, "layer": level + 1, **dict(zip(MEASURES, numbers, strict=True))})
    notes = _notes(setting, measured, rates)
    return Result(claims, {"schemes": table}, lambda: _plot(solved, setting["depth"]), notes)


def _root(setting: Mapping[str, Any]) -> float:
    """Return the modulus of the growing root of a two-step form."""
    rho = 1 - setting["alpha"]
    return rho + math.sqrt(1 + rho**2)


def _notes(
    setting: Mapping[str, Any], measured: Mapping[str, Tensor | str], rates: Mapping[str, tuple[float, float]]
) -> list[str]:
    stable = [scheme for scheme, both in rates.items() if max(both) <= STABLE]
    unstable = [
        f"{scheme} ({tokens:.2f}, {scores:.2f})" for scheme, (tokens, scores) in rates.items() if scheme not in stable
    ]
    notes = [
        f"Stable (tokens and scores grow by at most {STABLE - 1:.0%} a layer): {', '.join(stable) or 'none'}.",
        f"Unstable (growth of tokens, of scores): {', '.join(unstable) or 'none'}. The two-step forms have a root of "
        f"modulus rho + sqrt(1 + rho^2) = {_root(setting):.3f}, with the printed and with the derived sign. What "
        "the layers themselves add comes on top.",
    ]
    unsolved = [f"{scheme} ({reason})" for scheme, reason in measured.items() if isinstance(reason, str)]
    if unsolved:
        notes.append(f"Without a solution of the implicit step: {'; '.join(unsolved)}.")
    if stable:
        last = {scheme: values[0, -1].item() for scheme in stable if isinstance(values := measured[scheme], Tensor)}
        notes.append(
            f"Diversity after {setting['depth']} layers of the stable ones: "
            + ", ".join(f"{scheme} {value:.3f}" for scheme, value in last.items())
            + "."
        )
    return notes


def _plot(solved: Mapping[str, Tensor], depth: int) -> Any:
    figure, axes = panels(len(KINDS), rows=len(MEASURES), width=3.0, height=2.2)
    x = range(1, depth + 1)
    for row, name in enumerate(MEASURES):
        for column, visible in enumerate(KINDS):
            axis = axes[len(KINDS) * row + column]
            for width, hidden, style in zip((4.5, 1.4, 3.0, 1.8), KINDS, styles(), strict=False):
                values = solved.get(f"{visible}-{hidden}")
                if values is not None:  # wide lines first: lines that coincide show below each other
                    axis.plot(x, values[row], label=hidden, **{**style, "linewidth": width, "marker": ""})
            if row in (1, 2):
                axis.set_yscale("log")
            else:
                axis.set_ylim(-0.03, 1.03)
            if row == 0:
                axis.set_title(f"visible: {visible}", fontsize=9)
            if column == 0:
                axis.set_ylabel(name)
            if row == len(MEASURES) - 1:
                axis.set_xlabel("layer")
    lines = {line.get_label(): line for axis in axes for line in axis.lines}
    names = [f"hidden: {name}" for name in lines]
    figure.legend(lines.values(), names, loc="outside lower center", ncols=len(KINDS), frameon=False)
    return figure


ENTRY = Entry(
    "hop-schemes",
    "HOP appendix F: diversity, growth and residual by depth for every discretisation",
    run,
    {**WIDTHS, "depth": 24, "count": 4, "init": "xavier_fused", "alpha": 0.5, "alpha_prime": 0.5},
    images=True,
)
