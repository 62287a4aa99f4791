"""How well a language model knows a text: nats per token, perplexity per token and per word, bits per byte."""

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

AT_ONCE, LOGITS = 16384, 1 << 29  # tokens and logits of one forward pass, unless a batch size is given
LEAKY = (
    "this model de-escalates in the leaky form (de_escalation_form=leaky), which sees the tokens that it predicts: "
    "its figures are no perplexity and compare with none"
)


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood, in nats, of ``tokens`` tokens: all but the first, which nothing precedes."""

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

    length  tokens of context that a decoder sees, its ``max_tokens`` unless given; for Transformer-XL tokens of a
            segment, before which it has its memory (``model.memory_length``, which may be set).
    stride  by how much the window moves: a smaller one gives every token more context, and takes longer. ``length``
            unless given: windows side by side. A Transformer-XL has none.
    batch   windows at once; for Transformer-XL in how many stretches, each with an empty memory, the text is read: 1
            unless given, which is exact.

    A model that sees the future (``sees_future``) gets its loss, but it is no perplexity.
    See ``figures`` for what comes back.
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
    """Whether it is called as Transformer-XL is: ``model(ids, memory, targets)``."""
    return hasattr(model, "memory_length")


def sees_future(model: nn.Module) -> bool:
    """Whether the token to be predicted is part of what predicts it: a Transformer-XL de-escalated as printed."""
    return getattr(getattr(model, "config", None), "de_escalation_form", "causal") == "leaky"


def at_least(least: int, **given: int | None) -> None:
    """Raise unless every number that is given is ``least`` or more."""
    for name, value in given.items():
        if value is not None and value < least:
            raise LeadlineError(f"{name} is {value}; it must be at least {least}")


def figures(score: Score, text: TokenText, tokenizer: Tokenizer) -> dict[str, float]:
    """loss (nats per token), perplexity per token, word_perplexity, bits_per_byte.

    Words are counted as WikiText's are, every line's end included; bytes are those of the text without its first
    token. Word perplexity and bits per byte do not depend on how the text is cut into tokens, so they compare
    tokenizers, but words are told without their blanks: where blanks are not all alike, a word model tells less. Where
    a vocabulary lacks words of the text, bits per byte are left out and ``unknown_words`` says how many were not known,
    as a share: each counts as ``<unk>``, which is easy to guess, so word perplexity flatters such a model.
    """
    sizes = text.sizes
    words = sizes.words - (tokenizer.kind == "word")
    size = sizes.bytes - tokenizer.size(int(text.ids[0]))
    found = {
        "loss": score.nats / score.tokens,
        "perplexity": _exp(score.nats / score.tokens),
        "word_perplexity": _exp(score.nats / max(words, 1)),
    }
    if sizes.unknown:
        return {**found, "unknown_words": sizes.unknown / sizes.words}
    return {**found, "bits_per_byte": score.nats / math.log(2) / max(size, 1)}


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
    """Windows of ``length`` tokens that begin ``stride`` apart; each scores what the one before has not.

    Every process takes its share and makes as many forward passes as the others; all get the same result.
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
        places = number * stride + np.arange(length + 1)  # (batch, length + 1); behind the end of the text: nothing
        window = torch.from_numpy(ids[places.clip(max=predicted)].astype(np.int64)).to(device)
        logits = model(window[:, :-1])
        nats = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten(), reduction="none")
        targets = places[:, 1:]
        known = np.where(number > 0, (number - 1) * stride + length, 0)  # the last target of the window before
        counted = torch.from_numpy((targets > known) & (targets <= predicted)).to(device)
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
    """Segments of ``length`` tokens with the memory of those before.

    The text is read in ``lanes`` stretches side by side, each of which begins with an empty memory; what does not
    divide evenly follows the last one, fewer than ``lanes`` tokens. Processes share the lanes where they can.
    """
    at_least(1, length=length, lanes=lanes)
    predicted = _check(ids)
    lanes = min(lanes, predicted)
    each = predicted // lanes
    shared = lanes % world == 0
    share = lanes // world if shared else lanes
    starts = ((rank * share if shared else 0) + np.arange(share)) * each

    def read(starts: np.ndarray, count: int, memory: Any) -> tuple[Tensor, Any]:
        """Nats of ``count`` tokens after each start, and the memory then."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for at, end in _segments(count, length):
            window = torch.from_numpy(ids[starts[:, None] + np.arange(at, end + 1)].astype(np.int64)).to(device)
            loss, memory = model(window[:, :-1], memory, window[:, 1:])
            total += loss.double() * (len(starts) * (end - at))
        return total, memory

    total, memory = read(starts, each, None)
    rest, _ = read(np.array([lanes * each]), predicted - lanes * each, tuple(part[-1:] for part in memory))
    if not shared or rank == world - 1:  # all made the same forward passes
        total += rest
    return Score(_summed(total, world if shared else 1), predicted)


def _segments(total: int, length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, length):
        yield start, min(start + length, total)


def _check(ids: np.ndarray) -> int:
    """How many tokens can be predicted."""
    if len(ids) < 2:
        raise LeadlineError(f"the text has {len(ids)} token(s); perplexity needs at least 2")
    return len(ids) - 1


def _summed(total: Tensor, world: int) -> float:
    if world > 1:
        dist.all_reduce(total)
    return float(total)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # beyond it a float has no number
