"""The tokens that enter and leave a module: their tensor, and the prefix tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_INPUT_NAMES = ("hidden_states", "x", "src", "query", "hidden_state", "inputs")


def stream_in(args: tuple[Any, ...], kwargs: Mapping[str, Any], which: int = 0) -> Tensor | None:
    """Return the tokens that enter a module: the first floating tensor of at least two axes among its arguments.

    Args:
        args: Positional arguments of the call, which come first.
        kwargs: Arguments by name; the usual names of hidden states come before the others.
        which: The number of the stream, where the module takes several.
    """
    return next(iter(streams_in(args, kwargs)[which : which + 1]), None)


def stream_out(output: Any, which: int = 0) -> Tensor | None:
    """Return the tokens that leave a module, whether its output is a tensor, a tuple or a mapping."""
    return next(iter(streams_out(output)[which : which + 1]), None)


def streams_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the floating tensors of at least two axes among the arguments of a call, in the order of ``stream_in``."""
    named = [kwargs[name] for name in _INPUT_NAMES if name in kwargs]
    others = [value for name, value in kwargs.items() if name not in _INPUT_NAMES]
    return [x for x in (*args, *named, *others) if _is_stream(x)]


def streams_out(output: Any) -> list[Tensor]:
    """Return the floating tensors of at least two axes in an output."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    values = output if isinstance(output, (tuple, list)) else (output,)
    return [x for x in values if _is_stream(x)]


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
