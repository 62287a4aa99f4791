"""Writing text token by token, greedy or sampled: a decoder with its cache, a Transformer-XL with its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.nn import LayerCache

if TYPE_CHECKING:
    from leadline.models.decoder import Decoder
    from leadline.models.transformer_xl import TransformerXL

COLDEST = 1e-6  # logits divided by less may be more than a float holds


def collect(
    model: Decoder | TransformerXL, ids: Tensor, max_new_tokens: int, cache: bool = True, **options: Any
) -> Tensor:
    """ids and what follows, (B, M + new); options as ``stream_tokens`` has them."""
    return torch.cat((ids, *stream_tokens(model, ids, max_new_tokens, cache, **options)), dim=1)


def stream_tokens(
    model: Decoder | TransformerXL,
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
    vocabulary: int | None = None,
    slide: bool = True,
) -> Iterator[Tensor]:
    """Yield the tokens after ids (B, M) one by one, (B, 1) each; options as ``Decoder.generate`` has them.

    vocabulary  the number of tokens that there are, where a model's vocabulary is filled up.
    slide       a decoder whose positions are used up goes on with the later half of what it has seen; without, that
                is an error.
    """
    if max_new_tokens < 1:
        raise LeadlineError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    check_sampling(temperature, top_k, top_p)
    if getattr(model.config, "de_escalation_form", "causal") == "leaky":
        raise LeadlineError("this model de-escalates in the leaky form, which knows the future; it cannot write text")
    built: Any = model
    step: _Recurrent | _Cached
    if hasattr(model, "token_loss"):
        if mask is not None:
            raise LeadlineError("mask is given; a Transformer-XL takes prompts of one length, without padding")
        step = _Recurrent(built, cache)
    else:
        if mask is not None and not mask[:, -1].all():
            raise LeadlineError("mask ends with padding; pad prompts on the left to continue them")
        step = _Cached(built, cache, max_new_tokens, mask, slide)
    return _stream(step, ids, max_new_tokens, (temperature, top_k, top_p), stop, generator, vocabulary)


def _stream(
    step: _Recurrent | _Cached,
    ids: Tensor,
    max_new_tokens: int,
    choice: tuple[float, int | None, float | None],
    stop: int | None,
    generator: torch.Generator | None,
    vocabulary: int | None,
) -> Iterator[Tensor]:
    was_training = step.model.training
    step.model.eval()
    finished = torch.zeros(len(ids), 1, dtype=torch.bool, device=ids.device)
    fresh = ids
    try:
        for _ in range(max_new_tokens):
            with torch.no_grad():
                new = _choose(step(fresh)[:, :vocabulary], *choice, generator)
            if stop is not None:
                new = new.masked_fill(finished, stop)
                finished = finished | (new == stop)
            yield new
            if stop is not None and finished.all():
                return
            fresh = new
    finally:
        step.model.train(was_training)


class _Cached:
    """Logits of the next token of a decoder, (B, V), given the tokens since the last call."""

    def __init__(self, model: Decoder, cache: bool, room: int, mask: Tensor | None, slide: bool) -> None:
        self.model, self.cache, self.room = model, cache, room
        self.limit = model.positions.limit if slide else None
        self.mask = mask  # of all that is seen
        self.seen: Tensor | None = None
        self.layers: list[LayerCache] | None = None

    def __call__(self, fresh: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = fresh
        else:
            self.seen = torch.cat((self.seen, fresh), 1)
            self.mask = None if self.mask is None else torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), 1)
        if self.limit is not None and self.seen.shape[1] > self.limit:
            half = max(self.limit // 2, 1)
            self.seen = fresh = self.seen[:, -half:]
            self.mask = None if self.mask is None else self.mask[:, -half:]
            self.layers = None
        if not self.cache:
            fresh = self.seen
        elif self.layers is None:
            most = self.seen.shape[1] + self.room
            capacity = most if self.limit is None else min(most, self.limit)
            self.layers = [LayerCache(capacity) for _ in range(self.model.config.depth)]
        positions = None
        if self.mask is not None:  # padding is not counted
            positions = (self.mask.long().cumsum(1) - 1).clamp(min=0)[:, -fresh.shape[1] :]
        return self.model(fresh, self.mask, positions=positions, cache=self.layers)[:, -1]


class _Recurrent:
    """The same for a Transformer-XL: its memory is the cache."""

    def __init__(self, model: TransformerXL, cache: bool) -> None:
        self.model, self.cache = model, cache
        self.seen: Tensor | None = None
        self.memory: tuple[Tensor, ...] | None = None

    def __call__(self, fresh: Tensor) -> Tensor:
        if not self.cache:
            self.seen = fresh if self.seen is None else torch.cat((self.seen, fresh), 1)
            fresh, self.memory = self.seen, None
        x, self.memory = self.model.encode(fresh, self.memory)
        return self.model.softmax.log_probs(x[:, -1], self.model.token.weight)


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
        likeliest = logits.topk(min(top_k, logits.shape[-1]))  # by index: in half types many are alike
        logits = torch.full_like(logits, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # probability of the likelier tokens
        logits = logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
