"""A deep decoder on text: norms, de-escalation, and the weighted skip and carried scores one by one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.language import (
    TEXT_SETTING,
    WATCH,
    Found,
    budget_note,
    curves_figure,
    difference,
    figure_of,
    layers_table,
    own_numbers,
    runs_table,
    said,
    seeds_of,
    table_of,
    text_recipe,
    train_all,
    watched_table,
)
from leadline.papers.shared.trained import curves_table

ALPHA = {"attention": "hopfield", "alpha": 0.5, "alpha_prime": 0.0}
PRIME = {"attention": "hopfield", "alpha": 0.0, "alpha_prime": 0.5}
BOTH = {"attention": "hopfield", "alpha": 0.5, "alpha_prime": 0.5}
ARMS: dict[str, dict[str, Any]] = {
    "pre-norm": {"norm": "pre"},
    "post-norm": {"norm": "post"},
    "de-escalated": {"norm": "post", "de_escalation": 1.0, "de_escalation_at": "ffn-input"},  # causal form
    "alpha": {"norm": "pre", **ALPHA},
    "alpha'": {"norm": "pre", **PRIME},
    "both": {"norm": "pre", **BOTH},
    "post-norm, alpha": {"norm": "post", **ALPHA},
}
_SIZES: tuple[str, ...] = ("depth", "dim", "heads", "embedding_scale")


def run(context: Context) -> Result:
    setting, seeds = context.setting, seeds_of(context)
    arms = {arm: ARMS[arm] for arm in setting["arms"]}

    def recipe(arm: str, seed: int, rate: float, **changes: Any) -> dict[str, Any]:
        changed = {**setting, **changes}
        sizes = {name: changed[name] for name in _SIZES if name in changed}
        return text_recipe(changed, {"name": "gpt2_small", **sizes, **arms[arm]}, seed, changed.get("lr", rate))

    lrs = {arm: setting["lrs"][model["norm"]] for arm, model in arms.items()}
    tried = train_all(
        context,
        {(f"{arm}, lr {lr:g}", context.seed): recipe(arm, context.seed, lr) for arm in arms for lr in lrs[arm]},
        "text depth",
    )
    rates = {arm: min(lrs[arm], key=lambda lr: _loss(tried, f"{arm}, lr {lr:g}")) for arm in arms}
    names = {arm: f"{arm}, lr {rates[arm]:g}" for arm in arms}
    places = {
        place: {arm: f"{arm} with {place}" for arm in change["arms"]} for place, change in setting["places"].items()
    }
    wanted = {
        (names[arm], seed): {**recipe(arm, seed, rates[arm]), **(WATCH if seed == context.seed else {})}
        for arm in arms
        for seed in seeds
    }
    wanted |= {
        (name, seed): recipe(arm, seed, rates[arm], **setting["places"][place])
        for place, there in places.items()
        for arm, name in there.items()
        for seed in seeds
    }
    made = train_all(context, wanted, "text depth")
    found: Found = {arm: made[name] for arm, name in names.items()}
    elsewhere = {place: {arm: made[name] for arm, name in there.items()} for place, there in places.items()}
    by_norm = "; ".join(f"{norm}-norm {' or '.join(f'{lr:g}' for lr in some)}" for norm, some in setting["lrs"].items())
    notes = [
        f"Validation loss, and against pre-norm: {_gaps(found)}.",
        *(f"With {place}{_rates_there(setting['places'][place])}: {_gaps(some)}." for place, some in elsewhere.items()),
        f"Learning rates, the best ({by_norm}) by the validation loss of the first seed: "
        + ", ".join(f"{arm} {lr:g}" for arm, lr in rates.items())
        + _at_the_edge(rates, lrs),
        *_again(found, {arm: tried[name] for arm, name in names.items()}),
        *_by_rate(tried, lrs),
        "De-escalation takes the mean of the tokens before each one out of the FFN's input (tau 1), of a post-norm "
        "decoder, as TSE's figure 7 does without regard to the future. Alpha and alpha' are .5 where they are on.",
        budget_note(context, found, setting["tokens"] * setting["batch"]),
    ]
    there = [{"place": place, **row} for place, some in elsewhere.items() for row in runs_table(some, seeds)]
    tables = {
        "runs": runs_table(found, seeds),
        "rates": runs_table(tried, [context.seed]),
        **({"elsewhere": there} if there else {}),
        "curves": curves_table(found, seeds),
        "watched": watched_table(found),
        "layers": layers_table(found),
    }
    claims = [*_claims(found), *own_numbers(found)]
    return Result(claims, tables, lambda: curves_figure(found), notes, shown=table_of(context, found, "pre-norm"))


def _rates_there(change: Mapping[str, Any]) -> str:
    return f", at {change['lr']:g}" if "lr" in change else ", each at its rate of below"


def _gaps(found: Found) -> str:
    base = found["pre-norm"]
    values = figure_of(base, "valid_loss")
    level = f"{statistics.fmean(values):.3f}" if values else "diverged"
    gaps = (said(arm, kept, base) for arm, kept in found.items() if arm != "pre-norm")
    return f"pre-norm {level}; {'; '.join(gaps)}"


def _at_the_edge(rates: Mapping[str, float], lrs: Mapping[str, Sequence[float]]) -> str:
    highest = [arm for arm, lr in rates.items() if lr == max(lrs[arm])]
    return f"; a higher one than was tried may be better for {', '.join(highest)}." if highest else "."


def _again(found: Found, tried: Found) -> list[str]:
    """How far apart two runs of one recipe and one seed end: the one that was chosen, and the watched one."""
    gaps = {arm: difference(kept[:1], tried[arm]) for arm, kept in found.items()}
    ended = {arm: abs(gap[0]) for arm, gap in gaps.items() if gap is not None}
    if not ended:
        return []
    arm = max(ended, key=lambda name: ended[name])
    return [
        "The first seed was then trained once more, with its tokens watched, and counts as it ended this time: within "
        f"{ended[arm]:.4f} nats of the first ({arm})."
    ]


def _by_rate(tried: Found, lrs: Mapping[str, Sequence[float]]) -> list[str]:
    """How the arms compare with pre-norm at each of its rates."""
    found = []
    for lr in lrs["pre-norm"]:
        base = tried[f"pre-norm, lr {lr:g}"]
        gaps = [said(arm, tried[f"{arm}, lr {lr:g}"], base) for arm in lrs if arm != "pre-norm" and lr in lrs[arm]]
        found.append(f"Against pre-norm at {lr:g}, first seed: {'; '.join(gaps)}.")
    return found


def _loss(found: Found, arm: str) -> float:
    values = figure_of(found[arm], "valid_loss")
    return values[0] if values else float("inf")


def _claims(found: Found) -> list[Claim]:
    """What the papers conclude elsewhere, tried here: reported either way."""
    wanted = (
        ("de-escalated against post-norm, validation loss (TSE: lower)", "de-escalated", "post-norm"),
        ("both against pre-norm, validation loss (HOP: lower)", "both", "pre-norm"),
    )
    claims = []
    for name, ours, other in wanted:
        if ours in found and other in found:
            gap = difference(found[ours], found[other])
            holds = gap is not None and gap[0] < 0
            claims.append(Claim(name, "digits", None if gap is None else gap[0], None, "below 0", holds))
    return claims


_BYTES = {"arms": ["pre-norm", "both"], "tokenizer": "byte", "vocab_size": None, "depth": 24, "dim": 384, "heads": 6,
          "tokens": 512, "batch": 32, "length": "1200 steps", "lr": 1e-3}  # fmt: skip
_PLACES: dict[str, dict[str, Any]] = {
    "12 layers": {"arms": ["pre-norm", "alpha", "alpha'", "both"], "depth": 12},
    "12 layers, all at one rate": {"arms": ["pre-norm", "alpha", "alpha'", "both"], "depth": 12, "lr": 1e-3},
    "embeddings times 16": {"arms": ["pre-norm", "alpha", "alpha'", "both"], "embedding_scale": 16.0},
    "bytes": _BYTES,
    "bytes, embeddings times 50": {**_BYTES, "embedding_scale": 50.0},  # of deviation 1, as torch's own
}
ENTRY = Entry(
    "text-depth",
    "A deep decoder on text: post-norm, pre-norm, de-escalated, alpha, alpha' and both, and what changes the answer",
    run,
    {**TEXT_SETTING, "depth": 48, "dim": 256, "heads": 4, "tokens": 512, "batch": 16, "seeds": 2, "arms": list(ARMS),
     "lrs": {"pre": [3e-4, 1e-3, 3e-3, 1e-2], "post": [1e-4, 3e-4, 1e-3]}, "compile": "blocks"},
    group="language",
    text=True,
    budgets={
        "short": {"length": "2000 steps", "evaluate": "400 steps", "places": {
            "4000 steps": {"arms": ["pre-norm", "alpha", "alpha'"], "length": "4000 steps"}, **_PLACES}},
        "full": {"length": "20000 steps", "evaluate": "1000 steps", "places": _PLACES},
    },
)  # fmt: skip
