"""A deep decoder on text: pre-norm, post-norm, de-escalation, alpha and alpha' alone and together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.language import (
    TEXT_SETTING,
    Runs,
    budget_note,
    curves_figure,
    describe_loss_difference,
    loss_difference,
    own_numbers,
    run_tables,
    runs_table,
    table_of,
    text_recipe,
    train_all,
    values_of,
    watch_first,
)
from leadline.papers.shared.trained import seeds_of
from leadline.training.runs import Record

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
_SIZES = ("depth", "dim", "heads", "embedding_scale")


@dataclass(frozen=True)
class Trained:
    """All runs of the entry.

    Args:
        tried: One run for each arm and learning rate, by "arm, lr rate"; the best rate of an arm follows from them.
        rates: The best learning rate of each arm.
        runs: The runs at the best rates, by arm, a record per seed.
        elsewhere: By place, which is a change of the setting, the runs of some arms.
    """

    tried: Runs
    rates: dict[str, float]
    runs: Runs
    elsewhere: dict[str, Runs]


def train(context: Context) -> Trained:
    """Choose a learning rate for each arm with one seed, then train every seed, and some arms in other places."""
    setting, seeds = context.setting, seeds_of(context)
    lrs = rates_to_try(setting)

    def recipe(arm: str, seed: int, rate: float, **changes: Any) -> dict[str, Any]:
        changed = {**setting, **changes}
        sizes = {name: changed[name] for name in _SIZES if name in changed}
        return text_recipe(changed, {"name": "gpt2_small", **sizes, **ARMS[arm]}, seed, changed.get("lr", rate))

    tried = train_all(
        context,
        {(_at_rate(arm, lr), context.seed): recipe(arm, context.seed, lr) for arm in lrs for lr in lrs[arm]},
        "text depth",
    )
    rates = {arm: min(lrs[arm], key=lambda lr: _first_loss(tried[_at_rate(arm, lr)])) for arm in lrs}
    recipes = {
        (_at_rate(arm, rates[arm]), seed): watch_first(context, recipe(arm, seed, rates[arm]), seed)
        for arm in lrs
        for seed in seeds
    }
    recipes |= {
        (_in_place(arm, place), seed): recipe(arm, seed, rates[arm], **change)
        for place, change in setting["places"].items()
        for arm in change["arms"]
        for seed in seeds
    }
    by_name = train_all(context, recipes, "text depth")
    return Trained(
        tried,
        rates,
        {arm: by_name[_at_rate(arm, rate)] for arm, rate in rates.items()},
        {
            place: {arm: by_name[_in_place(arm, place)] for arm in change["arms"]}
            for place, change in setting["places"].items()
        },
    )


def rates_to_try(setting: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the learning rates to try for each arm."""
    return {arm: setting["lrs"][ARMS[arm]["norm"]] for arm in setting["arms"]}


def _at_rate(arm: str, lr: float) -> str:
    return f"{arm}, lr {lr:g}"


def _in_place(arm: str, place: str) -> str:
    return f"{arm} with {place}"


def _first_loss(records: Sequence[Record]) -> float:
    values = values_of(records, "valid_loss")
    return values[0] if values else float("inf")


def run(context: Context) -> Result:
    """Run the entry."""
    trained = train(context)
    runs, seeds = trained.runs, seeds_of(context)
    own = run_tables(context, runs)
    tables = {
        "runs": own.pop("runs"),
        "rates": runs_table(trained.tried, [context.seed]),
        "elsewhere": [
            {"place": place, **row} for place, some in trained.elsewhere.items() for row in runs_table(some, seeds)
        ],
        **own,
    }
    claims = [*_claims(runs), *own_numbers(runs)]
    table = table_of(context, runs, "pre-norm")
    return Result(claims, tables, lambda: curves_figure(runs), _notes(context, trained), shown=table)


def _notes(context: Context, trained: Trained) -> list[str]:
    setting, runs, rates = context.setting, trained.runs, trained.rates
    lrs = rates_to_try(setting)
    by_norm = "; ".join(f"{norm}-norm {' or '.join(f'{lr:g}' for lr in some)}" for norm, some in setting["lrs"].items())
    return [
        f"Validation loss, of other arms as the difference from pre-norm: {_gaps(runs)}.",
        *(
            f"With {place}{_rates_there(setting['places'][place])}: {_gaps(some)}."
            for place, some in trained.elsewhere.items()
        ),
        f"Best learning rates ({by_norm}), by the validation loss of the first seed: "
        + ", ".join(f"{arm} {lr:g}" for arm, lr in rates.items())
        + _at_the_edge(rates, lrs),
        *_repeated(runs, {arm: trained.tried[_at_rate(arm, lr)] for arm, lr in rates.items()}),
        *_by_rate(trained.tried, lrs),
        "De-escalation (tau 1, post-norm) subtracts the mean of the tokens before each one from the FFN's input. TSE's "
        "figure 7 subtracts the mean of all tokens, future ones too. Alpha and alpha' are .5 where they are on.",
        budget_note(context, runs),
    ]


def _rates_there(change: Mapping[str, Any]) -> str:
    return f", at {change['lr']:g}" if "lr" in change else ", each at the rate given below"


def _gaps(runs: Runs) -> str:
    """Describe the validation loss of pre-norm, and the difference of every other arm to it."""
    base = runs["pre-norm"]
    values = values_of(base, "valid_loss")
    level = f"{statistics.fmean(values):.3f}" if values else "diverged"
    gaps = (describe_loss_difference(arm, records, base) for arm, records in runs.items() if arm != "pre-norm")
    return f"pre-norm {level}; {'; '.join(gaps)}"


def _at_the_edge(rates: Mapping[str, float], lrs: Mapping[str, Sequence[float]]) -> str:
    """Name the arms whose best rate is the highest that was tried."""
    highest = [arm for arm, lr in rates.items() if lr == max(lrs[arm])]
    return f". A higher rate than those tried may be better for {', '.join(highest)}." if highest else "."


def _repeated(runs: Runs, tried: Runs) -> list[str]:
    """Describe how far apart two runs of one recipe and seed end: the one that chose the rate, and the watched one."""
    gaps = {arm: loss_difference(records[:1], tried[arm]) for arm, records in runs.items()}
    ended = {arm: abs(gap[0]) for arm, gap in gaps.items() if gap is not None}
    if not ended:
        return []
    arm = max(ended, key=lambda name: ended[name])
    return [
        "The first seed was then trained again, with token similarity watched. This second run counts; it ended within "
        f"{ended[arm]:.4f} nats of the first ({arm})."
    ]


def _by_rate(tried: Runs, lrs: Mapping[str, Sequence[float]]) -> list[str]:
    """Describe how the arms compare with pre-norm at each of its rates."""
    lines = []
    for lr in lrs["pre-norm"]:
        base = tried[_at_rate("pre-norm", lr)]
        others = [arm for arm in lrs if arm != "pre-norm" and lr in lrs[arm]]
        gaps = [describe_loss_difference(arm, tried[_at_rate(arm, lr)], base) for arm in others]
        lines.append(f"Against pre-norm at {lr:g}, first seed: {'; '.join(gaps)}.")
    return lines


def _claims(runs: Runs) -> list[Claim]:
    """Return claims on what the papers conclude for other models; they are reported and cannot fail the command."""
    pairs = (
        ("de-escalated against post-norm, validation loss (TSE: lower)", "de-escalated", "post-norm"),
        ("both against pre-norm, validation loss (HOP: lower)", "both", "pre-norm"),
    )
    claims = []
    for name, ours, other in pairs:
        if ours in runs and other in runs:
            gap = loss_difference(runs[ours], runs[other])
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
    "ours-text-depth",
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
