"""Training steps of whole models with carried scores, beside the same models without them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from leadline.bench.measure import median_ms
from leadline.models import create_model

MODELS = {"gpt2_small": (12, 1024), "vit_base": (128, 224)}  # batch; tokens or pixels a side


def bench_model(name: str, attention: str, repeats: int) -> dict[str, Any]:
    """A step of AdamW in bfloat16, compiled: milliseconds and tokens or images a second."""
    batch, size = MODELS[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    cures = {"alpha": 0.0, "alpha_prime": 0.5} if attention == "hopfield" else {}
    overrides: dict[str, Any] = {"max_tokens": size} if name == "gpt2_small" else {"image_size": size}
    model = create_model(name, attention=attention, **cures, **overrides).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if name == "gpt2_small":
        ids = torch.randint(50257, (batch, size + 1), device="cuda")
        inputs, targets, things = ids[:, :-1].contiguous(), ids[:, 1:].flatten(), batch * size
    else:
        inputs = torch.randn(batch, 3, size, size, device="cuda")
        targets, things = torch.randint(1000, (batch,), device="cuda"), batch

    @torch.compile
    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(inputs).flatten(0, -2), targets)

    def step() -> None:
        loss_of(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    ms = median_ms(step, cuda=True, repeats=repeats)
    unit = "tokens_per_s" if name == "gpt2_small" else "images_per_s"
    return {"model": name, "attention": attention, "step_ms": ms, unit: 1000 * things / ms}
