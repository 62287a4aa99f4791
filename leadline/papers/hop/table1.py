"""HOP table 1: normalised residual by depth of attention-only nets at initialisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.metrics import normalized_residual
from leadline.models import ViT
from leadline.papers.shared.attention_nets import COLUMNS, WIDTHS, by_layer, network, redraw_patches, redraw_projections
from leadline.papers.shared.entry import Claim, Context, Entry, Result, first_above, within
from leadline.papers.shared.plots import panels, styles

PAPER = {
    "standard": [0.48887348, 0.07732825, 0.00081001734, 1.7725031e-6, 1.809994e-6, 1.7835139e-6, 1.7920005e-6,
                 1.7568021e-6, 1.75397e-6, 1.7860738e-6, 1.82849e-6, 1.7818496e-6],
    "both": [0.8797747, 0.8309065, 0.80018705, 0.7630522, 0.71199465, 0.67957425, 0.6251911, 0.5860811, 0.52244353,
             0.46130562, 0.432442, 0.39708787],
}  # fmt: skip
LOW = 1e-4  # standard attention falls below it by depth 4
IMAGE = 32  # CIFAR-10's own size


class Variant(NamedTuple):
    """Another choice for one thing that the paper leaves open.

    Args:
        init: The initialisation.
        redraw: Draws some weights anew, or None.
        nearest: Whether images are enlarged without interpolation.
    """

    init: str
    redraw: Callable[[ViT], None] | None = None
    nearest: bool = False


def _no_class_token(model: ViT) -> None:
    if model.class_token is not None:
        model.class_token.zero_()


VARIANTS = {
    "patches as torch draws them": Variant("xavier_fused", partial(redraw_patches, kind="torch")),
    "patches normal with 1/sqrt(fan in)": Variant("xavier_fused", partial(redraw_patches, kind="fan in")),
    "patches Xavier-uniform": Variant("xavier_fused", partial(redraw_patches, kind="xavier")),
    "output projections as torch draws them": Variant("xavier_fused", redraw_projections),
    "class token 0": Variant("xavier_fused", _no_class_token),
    "images enlarged without interpolation": Variant("xavier_fused", nearest=True),
    "q, k, v separate and patches with 1/sqrt(fan in)": Variant("xavier", partial(redraw_patches, kind="fan in")),
}


Measured = Mapping[tuple[str, str], Tensor]  # by initialisation or variant and column


def measure(context: Context) -> dict[tuple[str, str], Tensor]:
    """Measure the metric by initialisation or variant and column: means over images, (depth, seeds)."""
    setting = context.setting
    size = setting["image_size"]
    pixels = context.images(setting["count"], size)
    blocky = F.interpolate(context.images(setting["count"], IMAGE), size=(size, size), mode="nearest")
    variants: Mapping[str, Variant] = {**{init: Variant(init) for init in setting["inits"]}, **VARIANTS}
    keys = [(name, column) for name in setting["inits"] for column in COLUMNS]
    keys += [(name, column) for name in VARIANTS for column in PAPER]

    def residuals(job: tuple[str, str, int]) -> Tensor:
        name, column, seed = job
        variant = variants[name]
        model = network(context, context.seed + seed, variant.init, *COLUMNS[column], redraw=variant.redraw)
        return by_layer(model, blocky if variant.nearest else pixels, normalized_residual).mean(-1).cpu()

    jobs = [(*key, seed) for key in keys for seed in range(setting["seeds"])]
    values = context.map(residuals, jobs)
    return {
        key: torch.stack([by_depth for job, by_depth in zip(jobs, values, strict=True) if job[:2] == key], dim=-1)
        for key in keys
    }


def rounding_floor(tokens: int, width: int, generator: torch.Generator) -> float:
    """Return the metric of tokens that are all equal when float32 adds them one by one, mean over 64 draws."""
    token = torch.randn(64, width, generator=generator, device=generator.device)
    total = torch.zeros_like(token)
    for _ in range(tokens):
        total += token
    error, token = (total / tokens - token).abs(), token.abs()
    ratio = (error.amax(-1) / token.amax(-1)) * (error.sum(-1) / token.sum(-1))  # equal rows: tokens cancel
    return ratio.sqrt().mean().item()


def bracket(values: Mapping[str, float], number: float) -> str:
    """Describe which settings have the values next to ``number``, one on each side."""
    lower = max((item for item in values.items() if item[1] <= number), key=lambda item: item[1], default=None)
    upper = min((item for item in values.items() if item[1] > number), key=lambda item: item[1], default=None)
    if lower is None or upper is None:
        return "outside of what these settings give"
    return f"between {lower[1]:.2g} ({lower[0]}) and {upper[1]:.2g} ({upper[0]})"


def run(context: Context) -> Result:
    """Run the entry."""
    setting = context.setting
    measured = measure(context)
    mean = {key: values.mean(-1) for key, values in measured.items()}
    main, depth, seeds = setting["inits"][0], setting["depth"], setting["seeds"]
    tokens = (setting["image_size"] // setting["patch_size"]) ** 2 + 1
    floor = rounding_floor(tokens, setting["dim"], context.generator())
    claims = []
    for init in setting["inits"]:
        low = mean[init, "standard"][:4].min().item()
        paper = PAPER["standard"][3]
        claims.append(Claim(f"standard attention by depth 4, {init}", "shape", low, paper, "below 1e-4", low < LOW))
        high = mean[init, "both"][5].item()
        claims.append(Claim(f"both .5 at depth 6, {init}", "shape", high, PAPER["both"][5], "above .1", high > 0.1))
    for column, numbers in PAPER.items():
        for level, number in enumerate(numbers[:depth], start=1):
            claims.append(within(f"{column}, depth {level}, {main}", mean[main, column][level - 1].item(), number, 0.1))
    paper = PAPER["standard"][-1]
    claims.append(
        Claim("floor: equal tokens, mean summed one token after the other in float32", "digits", floor, paper,
              "a factor 2", paper / 2 < floor < 2 * paper)
    )  # fmt: skip
    table = [
        {"init": name, "column": column, "depth": level + 1, "mean": mean[name, column][level].item(),
         "spread": measured[name, column][level].std().item(),
         "paper": PAPER.get(column, [None] * depth)[level] if level < 12 else None}
        for name, column in measured
        for level in range(depth)
    ]  # fmt: skip
    notes = [
        _which(measured, main, depth, seeds),
        *_reasons(mean, measured, setting, floor),
    ]

    return Result(
        claims,
        {"residual": table},
        lambda: _plot(measured, setting["inits"], depth),
        notes,
        _as_printed(measured, main, depth),
    )


def _plot(measured: Measured, inits: Sequence[str], depth: int) -> Any:
    figure, axes = panels(len(inits), width=3.8, height=3.4)
    x = range(1, depth + 1)
    for axis, init in zip(axes, inits, strict=True):
        for column, style in zip(COLUMNS, styles(), strict=False):
            values = measured[init, column]
            wide = {"linewidth": 3.5, "markersize": 6} if column == "alpha only" else {}  # 'both' lies upon it
            axis.plot(x, values.mean(-1), label=column, **{**style, **wide})
            axis.fill_between(x, values.amin(-1), values.amax(-1), color=style["color"], alpha=0.15)
        for column, marker in (("standard", "+"), ("both", "x")):
            axis.plot(x, PAPER[column][:depth], linestyle="", marker=marker, color="black", label=f"paper, {column}")
        axis.set(xlabel="depth", yscale="log", title=init, ylim=(1e-9, 3))
    axes[0].set_ylabel(r"$\|res(Y)\|_{1,\infty}\,/\,\|Y\|_{1,\infty}$")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _which(measured: Measured, init: str, depth: int, seeds: int) -> str:
    """Describe the columns at the last depth, and whether alpha' adds anything to alpha."""
    last = {column: measured[init, column][-1] for column in COLUMNS}
    columns = ", ".join(f"{column} {values.mean():.2g} ± {values.std():.1g}" for column, values in last.items())
    apart = (last["both"] - last["alpha only"]).mean().item()
    error = 2 * (last["both"] - last["alpha only"]).std().item() / seeds**0.5
    verdict = (
        f"alpha' on top of alpha changes it by {apart:+.3f}, "
        + ("within" if abs(apart) <= error else "beyond")
        + f" two standard errors ({error:.3f})"
    )
    return f"At depth {depth} ({init}, mean and spread over {seeds} seeds): {columns}; {verdict}."


def _reasons(mean: Measured, measured: Measured, setting: Mapping[str, Any], floor: float) -> list[str]:
    """Describe why the digits differ from the paper's: the choices that it leaves open, changed one at a time."""
    main, depth = setting["inits"][0], setting["depth"]
    names = [*setting["inits"], *VARIANTS]
    base = {column: mean[main, column] for column in PAPER}
    idle = [name for name in VARIANTS if VARIANTS[name].init == main and _change(mean, name, main) < 0.25]
    choices = []
    for name in names:
        standard, both = mean[name, "standard"], mean[name, "both"]
        deep = first_above((-standard).tolist(), -LOW)
        below = f"below 1e-4 at depth {deep}" if deep else f"not below 1e-4 within {depth} layers"
        digits = ", ".join(f"{value:.2g}" for value in standard[:3].tolist())
        if name not in idle:
            choices.append(f"{name}: {digits}, {below}; 'both' {both[-1]:.2f}")
    first = {init: measured[init, "standard"][0] for init in setting["inits"]}
    where = [
        f"{column} at depth {level} ({PAPER[column][level - 1]:.2g}) lies "
        + bracket({name: mean[name, column][level - 1].item() for name in names}, PAPER[column][level - 1])
        for column, level in (("standard", 1), ("standard", 2), ("standard", 3), ("both", depth))
    ]
    return [
        "The paper states neither its initialisation nor how it draws the patch embedding, and the digits depend on "
        f"both. The digits here are of {main}: q, k and v are one Xavier-uniform matrix of 3d x d, and output "
        "projections are Xavier-uniform. Patches, positions and class token are normal with standard deviation .02, "
        f"biases are 0. The input is {setting['count']} test images, enlarged bilinearly and normalised as ImageNet's.",
        f"This and other choices (standard attention at depths 1, 2, 3; 'both' at depth {depth}): "
        + "; ".join(choices)
        + "; all else as above."
        + (f" Without much effect, less than a quarter on depth 1 and on 'both': {', '.join(idle)}." if idle else ""),
        "The scale of the patches decides the standard column, since scores grow with its square. Larger patches delay "
        "the collapse by a layer or more. The scale of values and output projections decides the 'both' column. The "
        "paper's own digits: " + "; ".join(where) + ".",
        "The spread over seeds is wide too: standard attention at depth 1 is "
        + ", ".join(f"{at.min():.2f} to {at.max():.2f} ({init})" for init, at in first.items())
        + f" against {PAPER['standard'][0]:.2f}.",
        "From depth 4 on, the paper's 1.8e-6 is float32's rounding of the token mean. Tokens that are all equal, added "
        f"one by one, give {floor:.2g}. Our metric takes the mean twice, which leaves {base['standard'][-1]:.1g} at "
        "the last depth.",
    ]


def _change(mean: Measured, name: str, base: str) -> float:
    """Return the largest relative change by a variant, of standard attention at depth 1 and of 'both' at the end."""
    pairs = [(mean[name, column][at], mean[base, column][at]) for column, at in (("standard", 0), ("both", -1))]
    return max(abs(a.item() / b.item() - 1) for a, b in pairs)


def _as_printed(measured: Measured, init: str, depth: int) -> list[dict[str, str]]:
    """Return the table as the paper prints it, a row per depth: mean and spread over seeds, beside its digits."""
    rows = []
    for level in range(depth):
        row = {"depth": str(level + 1)}
        for column in COLUMNS:
            values = measured[init, column][level]
            row[column] = f"{values.mean():.3g} ± {values.std():.1g}"
            if column in PAPER and level < len(PAPER[column]):
                row[f"{column}, paper"] = f"{PAPER[column][level]:.3g}"
        rows.append(row)
    return rows


ENTRY = Entry(
    "hop-table1",
    "HOP table 1: normalised residual of attention-only nets by depth, at initialisation",
    run,
    {**WIDTHS, "depth": 12, "count": 64, "seeds": 4, "inits": ["xavier_fused", "xavier", "trunc_normal"]},
    images=True,
)
