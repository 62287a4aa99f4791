"""Scores of a language model on a text: loss, perplexity per token and word, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.data.text.store import TokenText
from leadline.data.text.tokenizers import Tokenizer
from leadline.errors import LeadlineError

AT_ONCE, LOGITS = 16384, 1 << 29  # most tokens and logits of one forward pass, unless a batch size is given
LEAKY = (
    "this model de-escalates in the leaky form (de_escalation_form=leaky), which sees the tokens that it predicts: "
    "its figures are no perplexity and compare with none"
)


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood of a text.

    Attributes:
        nats: Its sum over the predicted tokens.
        tokens: Number of predicted tokens: all but the first, which nothing precedes.
    """

    nats: float
    tokens: int


def perplexity(
    model: nn.Module,
    text: TokenText,
    tokenizer: Tokenizer,
    *,
    length: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
) -> dict[str, float]:
    """Score a text with a decoder, or with a Transformer-XL and its memory.

    For a model that sees the future (``sees_future``) the result is its loss, but no perplexity.

    Args:
        model: The model.
        text: The tokens of the text.
        tokenizer: The tokenizer that made them.
        length: For a decoder the tokens of a window, for Transformer-XL those of a segment, which follows its memory of
            ``model.memory_length`` tokens. None: the model's ``max_tokens``.
        stride: By how many tokens a decoder's window moves. A smaller stride gives every token more context, and takes
            longer. None: ``length``, windows that do not overlap.
        batch: Windows per forward pass. For Transformer-XL the number of stretches that are read side by side, each
            beginning with an empty memory. None: as many windows as fit; one stretch, which is exact.

    Returns:
        The scores by name, see ``figures``.

    Raises:
        LeadlineError: A number is out of range, the text too short, or a stride is given with a memory.
    """
    config: Any = getattr(model, "config", None)
    length = config.max_tokens if length is None else length
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        if has_memory(model):
            if stride is not None:
                raise LeadlineError(f"stride is {stride}; this model has a memory instead, leave it out")
            score = score_segments(model, text.ids, length, 1 if batch is None else batch, device=device)
        else:
            score = score_windows(model, text.ids, length, stride, batch, device=device)
    finally:
        model.train(was_training)
    return figures(score, text, tokenizer)


def has_memory(model: nn.Module) -> bool:
    """Return whether a model is called as Transformer-XL: ``model(ids, memory, targets)``."""
    return hasattr(model, "memory_length")


def sees_future(model: nn.Module) -> bool:
    """Return whether a model sees the tokens that it predicts: a Transformer-XL de-escalated as the paper prints it."""
    return getattr(getattr(model, "config", None), "de_escalation_form", "causal") == "leaky"


def at_least(least: int, **given: int | None) -> None:
    """Raise an error unless every number is at least ``least``, or None."""
    for name, value in given.items():
        if value is not None and value < least:
            raise LeadlineError(f"{name} is {value}; it must be at least {least}")


def figures(score: Score, text: TokenText, tokenizer: Tokenizer) -> dict[str, float]:
    """Turn a score into the figures that are reported.

    Word perplexity and bits per byte do not depend on how a text is cut into tokens, so they compare tokenizers. There
    are two limits. A word tokenizer does not encode the whitespace between words, which others must predict. And words
    that are not in a vocabulary count as ``<unk>``, which is easy to predict: word perplexity is then too good.

    Args:
        score: The negative log-likelihood of the text.
        text: The tokens of the text.
        tokenizer: The tokenizer that made them.

    Returns:
        ``loss`` (nats per token), ``perplexity`` (per token), ``word_perplexity`` and ``bits_per_byte``. Words are
        counted as in WikiText, with every end of a line; bytes without the first token. Where the vocabulary lacks
        words of the text, ``unknown_words`` is their share, in place of ``bits_per_byte``.
    """
    sizes = text.sizes
    words = sizes.words - (tokenizer.kind == "word")
    size = sizes.bytes - tokenizer.size(int(text.ids[0]))
    values = {
        "loss": score.nats / score.tokens,
        "perplexity": _exp(score.nats / score.tokens),
        "word_perplexity": _exp(score.nats / max(words, 1)),
    }
    if sizes.unknown:
        return {**values, "unknown_words": sizes.unknown / sizes.words}
    return {**values, "bits_per_byte": score.nats / math.log(2) / max(size, 1)}


@torch.no_grad()
def score_windows(
    model: nn.Module,
    ids: np.ndarray,
    length: int,
    stride: int | None = None,
    batch: int | None = None,
    *,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
) -> Score:
    """Score a text in windows; each scores the tokens that the one before has not.

    Args:
        model: A decoder.
        ids: Token ids of the text (N,).
        length: Tokens of a window.
        stride: Tokens between the starts of two windows. None: ``length``.
        batch: Windows per forward pass. None: as many as ``AT_ONCE`` and ``LOGITS`` allow.
        device: Device of the model.
        rank: Number of this process.
        world: Number of processes. Each scores its share, with the same number of forward passes as the others.

    Returns:
        The score of the whole text, on every process.
    """
    at_least(1, length=length, batch=batch)
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise LeadlineError(f"stride is {stride}; it must lie between 1 and {length}, the length of a window")
    predicted = _check(ids)
    length, stride = min(length, predicted), min(stride, predicted)
    if batch is None:
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", 1)
        batch = max(1, min(AT_ONCE, LOGITS // vocabulary) // length)
    windows = 1 + -(-(predicted - length) // stride)
    steps = -(-windows // (batch * world))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for step in range(steps):
        number = (step * world + rank) * batch + np.arange(batch)[:, None]  # (batch, 1)
        places = number * stride + np.arange(length + 1)  # (batch, length + 1); some lie behind the end of the text
        window = torch.from_numpy(ids[places.clip(max=predicted)].astype(np.int64)).to(device)
        logits = model(window[:, :-1])
        nats = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten(), reduction="none")
        targets = places[:, 1:]
        scored = np.where(number > 0, (number - 1) * stride + length, 0)  # the last target of the window before
        counted = torch.from_numpy((targets > scored) & (targets <= predicted)).to(device)
        total += (nats.view(batch, length).double() * counted).sum()
    return Score(_summed(total, world), predicted)


@torch.no_grad()
def score_segments(
    model: nn.Module,
    ids: np.ndarray,
    length: int,
    lanes: int = 1,
    *,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
) -> Score:
    """Score a text in segments, each with the memory of those before.

    Args:
        model: A Transformer-XL.
        ids: Token ids of the text (N,).
        length: Tokens of a segment.
        lanes: Number of stretches that are read side by side, each beginning with an empty memory. The remainder of
            the division, fewer than ``lanes`` tokens, follows the last one.
        device: Device of the model.
        rank: Number of this process.
        world: Number of processes. They share the lanes if these divide evenly; else each scores all of them.

    Returns:
        The score of the whole text, on every process.
    """
    at_least(1, length=length, lanes=lanes)
    predicted = _check(ids)
    lanes = min(lanes, predicted)
    each = predicted // lanes
    shared = lanes % world == 0
    share = lanes // world if shared else lanes
    starts = ((rank * share if shared else 0) + np.arange(share)) * each

    def read(starts: np.ndarray, count: int, memory: Any) -> tuple[Tensor, Any]:
        """Sum the nats of ``count`` tokens after each start; return them and the last memory."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for at, end in _segments(count, length):
            window = torch.from_numpy(ids[starts[:, None] + np.arange(at, end + 1)].astype(np.int64)).to(device)
            loss, memory = model(window[:, :-1], memory, window[:, 1:])
            total += loss.double() * (len(starts) * (end - at))
        return total, memory

    total, memory = read(starts, each, None)
    rest, _ = read(np.array([lanes * each]), predicted - lanes * each, tuple(part[-1:] for part in memory))
    if not shared or rank == world - 1:  # every process has made the forward passes of the rest
        total += rest
    return Score(_summed(total, world if shared else 1), predicted)


def _segments(total: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of every segment of ``total`` tokens."""
    for start in range(0, total, length):
        yield start, min(start + length, total)


def _check(ids: np.ndarray) -> int:
    """Return the number of tokens that can be predicted; none is an error."""
    if len(ids) < 2:
        raise LeadlineError(f"the text has {len(ids)} token(s); perplexity needs at least 2")
    return len(ids) - 1


def _summed(total: Tensor, world: int) -> float:
    if world > 1:
        dist.all_reduce(total)
    return float(total)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # exp overflows above
