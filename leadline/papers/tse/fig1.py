"""TSE figure 1: similarity, cosine and gradient norm by block of BERT and ALBERT, depth 100."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.errors import need
from leadline.metrics import token_cosine, token_similarity
from leadline.models import Bert, convert
from leadline.papers.shared.attention_nets import seeded
from leadline.papers.shared.entry import Claim, Context, Entry, Result, above, first_above, reported
from leadline.papers.shared.plots import panels, styles


def build(context: Context, family: str) -> Bert:
    """Build transformers' model with its default random weights, and convert it to ours."""
    transformers = need("transformers", "hub")
    setting = context.setting
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=setting["depth"],
        hidden_size=setting["dim"],
        num_attention_heads=setting["heads"],
        intermediate_size=setting["ffn"],
        vocab_size=setting["vocab"],
    )
    with seeded(context.seed):
        model = getattr(transformers, f"{family}Model")(config, add_pooling_layer=False).eval()
    return cast(Bert, convert(model).to(context.device))


def measure(context: Context, family: str, ids: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    """Measure similarity, cosine and, where labels are given, the norm of the gradient of each block's weights.

    The paper does not name its loss. Here it is the cross-entropy of random words through the tied embedding.

    Args:
        context: The context of the entry.
        family: ``"Bert"`` or ``"Albert"``.
        ids: Input words (samples, tokens).
        labels: Words to predict (samples, tokens), or None for no gradient.

    Returns:
        Values by block, (depth,), by name.
    """
    model = build(context, family)
    similarity, cosine = [], []
    with torch.set_grad_enabled(labels is not None):
        x, rope = model.embed(ids)
        state = None
        for block in model.blocks.layers():
            x, state = block(x, state, rope=rope)
            similarity.append(token_similarity(x.detach()).mean())
            cosine.append(token_cosine(x.detach()).mean())
        values = {"similarity": torch.stack(similarity).cpu(), "cosine": torch.stack(cosine).cpu()}
        if labels is not None:
            squares = [torch.zeros((), device=context.device) for _ in model.blocks]
            for i, owner in enumerate(model.blocks):
                for weight in owner.parameters():
                    weight.register_post_accumulate_grad_hook(lambda w, i=i: _add(squares, i, w))
            F.cross_entropy((x @ model.token.weight.detach().T).flatten(0, 1), labels.flatten()).backward()
            values["gradient"] = torch.stack(squares).sqrt().cpu()
    return values


def _add(squares: list[Tensor], i: int, weight: Tensor) -> None:
    """Add the squares of a gradient and free it: the gradients of 100 layers would take 2.8 GB."""
    squares[i] += cast(Tensor, weight.grad).square().sum()
    weight.grad = None


def run(context: Context) -> Result:
    """Run the entry."""
    setting = context.setting
    depth = setting["depth"]
    generator = context.generator()
    shape = (setting["samples"], setting["tokens"])
    ids, labels = (torch.randint(setting["vocab"], shape, generator=generator, device=context.device) for _ in range(2))
    families = {"BERT": ("Bert", labels), "ALBERT": ("Albert", None)}
    by_family = context.map(lambda family: measure(context, family[0], ids, family[1]), list(families.values()))
    measured = dict(zip(families, by_family, strict=True))
    gradient = measured["BERT"]["gradient"]
    factor = (gradient.max() / gradient.min()).item()
    claims: list[Claim] = []
    for name, values in measured.items():
        passed = first_above(values["similarity"], 0.95)
        claims.append(above(f"largest t_sim by layer {depth}, {name}", values["similarity"].max().item(), 0.95, 1.0))
        ours = None if passed is None else float(passed)
        claims.append(reported(f"block at which t_sim passes .95, {name}", ours))
    claims.append(
        Claim("largest over smallest gradient norm of BERT's blocks", "shape", factor, None, "below 10", factor < 10)
    )
    apart = max((values["similarity"] - values["cosine"]).abs().max().item() for values in measured.values())
    claims.append(Claim("largest difference of t_sim and t_cos", "digits", apart, 0.0, "0.05", apart < 0.05))
    notes = [
        f"{shape[0]} sequences of {shape[1]} random words, dropout off. The paper names neither its input nor its "
        "loss. The gradient here is that of the cross-entropy of random words through the tied embedding.",
        f"BERT's gradient norms go from {gradient[0]:.3g} at block 1 to {gradient[-1]:.3g} at block {depth}, and lie "
        f"between {gradient.min():.3g} and {gradient.max():.3g}.",
    ]
    table = [
        {
            "block": b + 1,
            **{f"{name} {key}": values[key][b].item() for name, values in measured.items() for key in values},
        }
        for b in range(depth)
    ]

    def plot() -> Any:
        figure, axes = panels(3)
        blocks = range(1, depth + 1)
        titles = {"similarity": "token similarity", "cosine": "cosine similarity", "gradient": "gradient norm, BERT"}
        for axis, (key, title) in zip(axes, titles.items(), strict=True):
            for (name, values), style in zip(measured.items(), styles(), strict=False):
                if key in values:
                    axis.plot(blocks, values[key], label=name, **{**style, "markevery": max(depth // 10, 1)})
            axis.set(xlabel="block", title=title, ylim=(0, 1.03 if key != "gradient" else None))
        axes[0].legend(frameon=False)
        return figure

    return Result(claims, {"blocks": table}, plot, notes)


ENTRY = Entry(
    "tse-fig1",
    "TSE figure 1: token similarity, cosine similarity and gradient norm by block of BERT and ALBERT, depth 100",
    run,
    {"depth": 100, "dim": 768, "heads": 12, "ffn": 3072, "vocab": 30000, "samples": 2, "tokens": 128},
)
