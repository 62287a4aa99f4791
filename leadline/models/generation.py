"""Writing text with a decoder: greedy or sampled, with or without the cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.nn import LayerCache

if TYPE_CHECKING:
    from leadline.models.decoder import Decoder


COLDEST = 1e-6  # logits divided by less may be more than a float holds


@torch.no_grad()
def generate(
    model: Decoder,
    ids: Tensor,
    max_new_tokens: int,
    cache: bool = True,
    *,
    mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """See ``Decoder.generate``."""
    if max_new_tokens < 1:
        raise LeadlineError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    check_sampling(temperature, top_k, top_p)
    if mask is not None and not mask[:, -1].all():
        raise LeadlineError("mask ends with padding; pad prompts on the left to continue them")
    was_training = model.training
    model.eval()
    try:
        layers = [LayerCache(ids.shape[1] + max_new_tokens) for _ in range(model.config.depth)] if cache else None
        fresh, finished = ids, torch.zeros(len(ids), 1, dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            positions = None
            if mask is not None:
                positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -fresh.shape[1] :]
            logits = model(fresh, mask, positions=positions, cache=layers)[:, -1]
            new = _choose(logits, temperature, top_k, top_p, generator)  # (B, 1)
            if stop is not None:
                new = new.masked_fill(finished, stop)
                finished = finished | (new == stop)
            ids = torch.cat((ids, new), dim=1)
            if mask is not None:
                mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
            if stop is not None and finished.all():
                break
            fresh = new if cache else ids
        return ids
    finally:
        model.train(was_training)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if temperature != 0 and not COLDEST <= temperature < math.inf:
        raise LeadlineError(f"temperature is {temperature}; it must be 0 (greedy), or a number from {COLDEST} on")
    if top_k is not None and top_k < 1:
        raise LeadlineError(f"top_k is {top_k}; it must be at least 1, the likeliest token alone")
    if top_p is not None and not 0 < top_p <= 1:
        raise LeadlineError(f"top_p is {top_p}; it must lie in (0, 1]")
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and temperature == 0:
            raise LeadlineError(
                f"{name} is {value} and temperature 0, which always takes the likeliest; give one above 0"
            )


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """The next token (B, 1) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # probability of the likelier tokens
        logits = logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
