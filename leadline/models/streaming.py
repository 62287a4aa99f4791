"""Writing text token by token, for whoever reads along: a decoder with its cache, a Transformer-XL with its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.models.generation import _choose, check_sampling
from leadline.nn import LayerCache

if TYPE_CHECKING:
    from leadline.models.decoder import Decoder
    from leadline.models.transformer_xl import TransformerXL


def stream_tokens(
    model: Decoder | TransformerXL,
    ids: Tensor,
    max_new_tokens: int,
    cache: bool = True,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    generator: torch.Generator | None = None,
    vocabulary: int | None = None,
) -> Iterator[Tensor]:
    """Yield the tokens after ids (B, M) one by one, (B, 1) each; options as ``Decoder.generate`` has them, and
    ``vocabulary``, the number of tokens that there are where a model's vocabulary is filled up.

    A decoder whose positions are used up goes on with the later half of what it has seen.
    """
    if max_new_tokens < 1:
        raise LeadlineError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    check_sampling(temperature, top_k, top_p)
    if getattr(model.config, "de_escalation_form", "causal") == "leaky":
        raise LeadlineError("this model de-escalates in the leaky form, which knows the future; it cannot write text")
    choice = (temperature, top_k, top_p)
    return _stream(model, ids, max_new_tokens, cache, choice, stop, generator, vocabulary)


def _stream(
    model: Any,
    ids: Tensor,
    max_new_tokens: int,
    cache: bool,
    choice: tuple[float, int | None, float | None],
    stop: int | None,
    generator: torch.Generator | None,
    vocabulary: int | None,
) -> Iterator[Tensor]:
    was_training = model.training
    model.eval()
    step = _Recurrent(model, cache) if hasattr(model, "token_loss") else _Cached(model, cache, max_new_tokens)
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
        model.train(was_training)


def collect(
    model: Decoder | TransformerXL, ids: Tensor, max_new_tokens: int, cache: bool = True, **options: Any
) -> Tensor:
    """ids and what follows, (B, M + new)."""
    return torch.cat((ids, *stream_tokens(model, ids, max_new_tokens, cache, **options)), dim=1)


class _Cached:
    """Logits of the next token of a decoder, (B, V), given the tokens since the last call."""

    def __init__(self, model: Decoder, cache: bool, room: int) -> None:
        self.model, self.cache, self.room = model, cache, room
        self.limit = model.positions.limit
        self.seen: Tensor | None = None
        self.layers: list[LayerCache] | None = None

    def __call__(self, fresh: Tensor) -> Tensor:
        self.seen = fresh if self.seen is None else torch.cat((self.seen, fresh), 1)
        if self.limit is not None and self.seen.shape[1] > self.limit:
            self.seen = fresh = self.seen[:, -max(self.limit // 2, 1) :]
            self.layers = None
        if not self.cache:
            return self.model(self.seen)[:, -1]
        if self.layers is None:
            most = self.seen.shape[1] + self.room
            capacity = most if self.limit is None else min(most, self.limit)
            self.layers = [LayerCache(capacity) for _ in range(self.model.config.depth)]
        return self.model(fresh, cache=self.layers)[:, -1]


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
