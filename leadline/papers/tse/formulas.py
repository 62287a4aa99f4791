"""TSE sections 2.1 and 2.2: escalation under five attention formulas, and Corollary 2.7."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leadline.metrics import delta, energy_ratios, escalation_rate, mixing_gains, omega, second_eigenvalue
from leadline.metrics import token_similarity as similarity_of
from leadline.ops import FORMULAS
from leadline.papers.shared.algorithm1 import Sizes, draw_tokens, draw_weights, join_chunks, post_norm
from leadline.papers.shared.entry import Claim, Context, Entry, Result, below, first_above
from leadline.papers.shared.plots import panels, styles
from leadline.theory import expected_rate, rate_estimate, rate_lower_bound

NAMES = ("similarity", "ratio", "rate", "expected", "bound", "estimate", "delta", "omega", "lambda2", "mu1")


def measure(context: Context) -> dict[str, dict[str, Tensor]]:
    """Measure quantities (depth, trials) by formula and name; all formulas get the same tokens and weights."""
    setting = context.setting
    sizes = Sizes.of(setting)
    depth, trials, chunk = setting["depth"], setting["trials"], setting["chunk"]

    def some(job: tuple[str, int]) -> dict[str, Tensor]:
        formula, start = job
        generator = context.generator(start)
        count = min(chunk, trials - start)
        X = draw_tokens(sizes, count, generator)
        row: dict[str, list[Tensor]] = {name: [] for name in NAMES}
        for _ in range(depth):
            steps = post_norm(X, draw_weights(sizes, (count,), generator), sizes.heads, formula=formula)
            first, second = energy_ratios(X, steps.y1)
            P = steps.P
            row["similarity"].append(similarity_of(X))
            row["ratio"].append(first / second)
            row["rate"].append(escalation_rate(X, steps.y1))
            row["expected"].append(expected_rate(X, P))
            row["bound"].append(rate_lower_bound(X, P))
            row["estimate"].append(rate_estimate(X, P))
            row["delta"].append(delta(P).mean(-1))
            row["omega"].append(omega(X, P).mean(-1))
            row["lambda2"].append(second_eigenvalue(P).mean(-1))
            row["mu1"].append(mixing_gains(X, P)[0].mean(-1))
            X = steps.y4
        return {name: torch.stack(values) for name, values in row.items()}

    starts = range(0, trials, chunk)
    parts = iter(context.map(some, [(formula, start) for formula in FORMULAS for start in starts]))
    return {formula: join_chunks([next(parts) for _ in starts]) for formula in FORMULAS}


def run(context: Context) -> Result:
    """Run the entry."""
    depth, trials = context.setting["depth"], context.setting["trials"]
    measured = measure(context)
    mean = {formula: {name: values.mean(-1) for name, values in rows.items()} for formula, rows in measured.items()}
    claims = [
        below(f"block at which t_sim passes .99, {formula}", first_above(mean[formula]["similarity"], 0.99), 15.5,
              kind="digits")
        for formula in mean
    ]  # fmt: skip
    early = {f: {name: values[: context.setting["early"]] for name, values in rows.items()} for f, rows in mean.items()}
    for formula in ("sinkhorn", "symmetric"):
        for name, aim in (("mu1", 1.0), ("omega", 0.0)):
            ours = max(early[formula][name].tolist(), key=lambda value, aim=aim: abs(value - aim))  # type: ignore[misc]
            claims.append(
                Claim(f"Corollary 2.7: {name} of {formula}", "digits", ours, aim, "1e-3", abs(ours - aim) < 1e-3)
            )
    gap = (early["symmetric"]["delta"] - early["symmetric"]["lambda2"]).abs().max().item()
    claims.append(Claim("Corollary 2.7: |delta - |lambda_2|| of symmetric", "digits", gap, 0.0, "1e-3", gap < 1e-3))
    first = {formula: rows["lambda2"][0].item() for formula, rows in mean.items()}
    slowest = min(mean, key=lambda formula: mean[formula]["similarity"][min(7, depth - 1)].item())
    notes = [
        "|lambda_2| at block 1: " + ", ".join(f"{formula} {value:.3f}" for formula, value in first.items()) + ".",
        f"The formulas behave alike, as the paper says; the slowest at block {min(8, depth)} is {slowest} "
        f"(t_sim {mean[slowest]['similarity'][min(7, depth - 1)]:.3f} against softmax's "
        f"{mean['softmax']['similarity'][min(7, depth - 1)]:.3f}).",
        "The step's r is, over blocks and formulas, within "
        f"{max((rows['rate'] - rows['expected']).abs().max().item() for rows in mean.values()):.3f} of (18) "
        f"with {trials} trials; what (18) leaves out is E[eta].",
    ]
    table = [
        {"formula": formula, "block": b + 1, **{name: rows[name][b].item() for name in NAMES}}
        for formula, rows in mean.items()
        for b in range(depth)
    ]

    def plot() -> Any:
        figure, (left, middle, right) = panels(3)
        for (formula, rows), style in zip(mean.items(), styles(), strict=False):
            left.plot(range(1, depth + 1), rows["similarity"], label=formula, **style)
            middle.plot(range(1, depth + 1), rows["ratio"], **style)
            right.plot(range(1, depth + 1), rows["lambda2"], **style)
        left.set(xlabel="block", ylabel="token similarity", ylim=(0, 1.03))
        middle.set(xlabel="block", ylabel=r"$\xi_1/\xi_2$ of step 1", ylim=(1, 2.5))
        right.set(xlabel="block", ylabel=r"$|\lambda_2(P)|$", yscale="log")
        left.legend(frameon=False, fontsize=8)
        figure.suptitle(f"mean of {trials} trials", fontsize=10)
        return figure

    return Result(claims, {"blocks": table}, plot, notes)


ENTRY = Entry(
    "tse-formulas",
    "TSE sections 2.1 and 2.2: escalation under five attention formulas, and Corollary 2.7",
    run,
    {**Sizes()._asdict(), "depth": 20, "trials": 10, "chunk": 5, "early": 5},
)
