"""Text generation token by token, greedy or sampled, with a cache or Transformer-XL's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.nn import LayerCache

if TYPE_CHECKING:
    from leadline.models.decoder import Decoder
    from leadline.models.transformer_xl import TransformerXL

MIN_TEMPERATURE = 1e-6  # logits divided by less may overflow


class Sampling(NamedTuple):
    """The choice of the next token."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None


def collect(
    model: Decoder | TransformerXL, ids: Tensor, max_new_tokens: int, cache: bool = True, **options: Any
) -> Tensor:
    """Return ids (B, M) and their continuations, (B, M + new); arguments as in ``stream_tokens``."""
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
    """Yield the tokens that follow ids (B, M) one by one, (B, 1) each.

    Args:
        model: A decoder or a Transformer-XL.
        ids: Token ids of the prompts (B, M).
        max_new_tokens: The largest number of tokens to yield.
        cache: Store the past instead of computing it again.
        mask: (B, M), True for a real token. Prompts of different lengths are padded on the left.
        temperature: 0 takes the likeliest token; above 0 tokens are sampled.
        top_k: Sample from the ``top_k`` likeliest tokens.
        top_p: Sample from the smallest set of tokens with this probability.
        stop: A token id. A sequence that has reached it is filled with it; when all have, generation ends.
        generator: The random generator to sample with. None: torch's own.
        vocabulary: Number of tokens of the tokenizer, where the model's vocabulary is padded to a larger one.
        slide: Whether a decoder without positions left goes on from the later half of its tokens. If not, that is
            an error.

    Raises:
        LeadlineError: An option is out of range or does not fit the model.
    """
    if max_new_tokens < 1:
        raise LeadlineError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    sampling = Sampling(temperature, top_k, top_p, generator)
    check_sampling(sampling)
    if getattr(model.config, "de_escalation_form", "causal") == "leaky":
        raise LeadlineError("this model de-escalates in the leaky form, which sees the future; it cannot write text")
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
    return _stream(step, ids, max_new_tokens, sampling, stop, vocabulary)


def _stream(
    step: _Recurrent | _Cached,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    stop: int | None,
    vocabulary: int | None,
) -> Iterator[Tensor]:
    was_training = step.model.training
    step.model.eval()
    finished = torch.zeros(len(ids), 1, dtype=torch.bool, device=ids.device)
    fresh = ids
    try:
        for _ in range(max_new_tokens):
            with torch.no_grad():
                new = _choose(step(fresh)[:, :vocabulary], sampling)
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
    """The next step of a decoder: called with the tokens since the last call, it returns logits (B, V)."""

    def __init__(self, model: Decoder, cache: bool, room: int, mask: Tensor | None, slide: bool) -> None:
        self.model, self.cache, self.room = model, cache, room
        self.limit = model.positions.limit if slide else None
        self.mask = mask  # of all tokens in ``seen``
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
        if self.mask is not None:  # positions do not count padding
            positions = (self.mask.long().cumsum(1) - 1).clamp(min=0)[:, -fresh.shape[1] :]
        return self.model(fresh, self.mask, positions=positions, cache=self.layers)[:, -1]


class _Recurrent:
    """The next step of a Transformer-XL, whose memory is the cache; called as ``_Cached``."""

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


def check_sampling(sampling: Sampling) -> None:
    """Raise an error where an option is out of range, or would have no effect."""
    temperature, top_k, top_p, _ = sampling
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf:
        raise LeadlineError(
            f"temperature is {temperature}; it must be 0 (greedy), or a number from {MIN_TEMPERATURE} on"
        )
    if top_k is not None and top_k < 1:
        raise LeadlineError(f"top_k is {top_k}; it must be at least 1, the likeliest token alone")
    if top_p is not None and not 0 < top_p <= 1:
        raise LeadlineError(f"top_p is {top_p}; it must lie in (0, 1]")
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and temperature == 0:
            raise LeadlineError(
                f"{name} is {value} and temperature 0, which always takes the likeliest; give one above 0"
            )


def _choose(logits: Tensor, sampling: Sampling) -> Tensor:
    """Choose the next token (B, 1) from logits (B, V)."""
    temperature, top_k, top_p, generator = sampling
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        likeliest = logits.topk(min(top_k, logits.shape[-1]))  # by index: in half precision many logits are equal
        logits = torch.full_like(logits, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # probability of the likelier tokens
        logits = logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
