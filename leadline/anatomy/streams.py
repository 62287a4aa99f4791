"""The tokens that enter and leave a module: their tensor, its layout, and the prefix tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_INPUT_NAMES = ("hidden_states", "x", "src", "query", "hidden_state", "inputs")


def stream_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens that enter a module: the first floating tensor of at least two axes among its arguments.

    Args:
        args: Positional arguments of the call, which come first.
        kwargs: Arguments by name; the usual names of hidden states come before the others.
    """
    named = [kwargs[name] for name in _INPUT_NAMES if name in kwargs]
    return next((x for x in (*args, *named, *kwargs.values()) if _is_stream(x)), None)


def stream_out(output: Any) -> Tensor | None:
    """Return the tokens that leave a module, whether its output is a tensor, a tuple or a mapping."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    values = output if isinstance(output, (tuple, list)) else (output,)
    return next((x for x in values if _is_stream(x)), None)


def as_tokens(x: Tensor, sequence_first: bool) -> Tensor:
    """Bring the tokens of a block into the layout (B, n, d).

    Args:
        x: (B, n, d), (n, d), (B, height, width, d), or (n, B, d) if ``sequence_first``.
        sequence_first: Whether the block puts the sequence before the batch.
    """
    if x.ndim == 2:
        return x.unsqueeze(0)
    if x.ndim > 3:
        return x.flatten(1, -2)
    return x.transpose(0, 1) if sequence_first else x


def count_prefix_tokens(model: nn.Module) -> int:
    """Return how many class, distillation and register tokens an image model puts before the patches."""
    for module in model.modules():
        count = getattr(module, "num_prefix_tokens", None)  # timm
        if isinstance(count, int):
            return count
        prefix = getattr(getattr(module, "config", None), "prefix", None)  # Leadline
        if isinstance(prefix, int) and hasattr(module, "class_token"):
            return prefix
    tokens = 0
    for name, parameter in model.named_parameters():  # transformers
        if name.rpartition(".")[2] in ("cls_token", "distillation_token", "register_tokens"):
            tokens += parameter.shape[-2] if parameter.ndim > 1 else 1
    return tokens


def _is_stream(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2 and not x.is_nested
