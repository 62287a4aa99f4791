"""Calls a model: its batches, their padding and device, and the mode in which it is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError
from leadline.ops.backends import use_backend

Batch = Tensor | Mapping[str, Any]
Mask = Tensor | Callable[[Batch], Tensor | None] | None


def each_batch(inputs: Batch | Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches of ``inputs``, of which one at a time is in memory.

    Args:
        inputs: A tensor or a mapping, which is one batch, or an iterable of batches.

    Raises:
        LeadlineError: If a batch is neither a tensor nor a mapping, or there is none.
    """
    if isinstance(inputs, (Tensor, Mapping)):
        yield inputs
        return
    if not isinstance(inputs, Iterable) or isinstance(inputs, (str, bytes)):
        raise LeadlineError(
            f"inputs are {type(inputs).__name__}; give a tensor, a mapping of arguments, or an iterable of those"
        )
    empty = True
    for batch in inputs:
        if not isinstance(batch, (Tensor, Mapping)):
            raise LeadlineError(
                f"a batch is {type(batch).__name__}; it must be a tensor or a mapping of arguments, "
                "such as (images for images, labels in loader)"
            )
        empty = False
        yield batch
    if empty:
        raise LeadlineError("inputs hold no batch; give at least one")


def count_batches(inputs: object) -> int | None:
    """Return how many batches there are, or None if only iterating would show it."""
    if isinstance(inputs, (Tensor, Mapping)):
        return 1
    try:
        return len(inputs) if isinstance(inputs, Sized) else None
    except TypeError:  # a loader of a data set without a length
        return None


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Return the model's output for a batch.

    Args:
        model: The model to call.
        batch: Its only positional argument, or a mapping of its arguments by name.

    Raises:
        LeadlineError: If the model fails, in one line; the model's own error is the cause.
    """
    try:
        return model(**batch) if isinstance(batch, Mapping) else model(batch)
    except LeadlineError:
        raise
    except Exception as error:
        raise LeadlineError(f"the model fails on {_describe(batch)}: {first_line(error)}") from error


def _describe(batch: Batch) -> str:
    """Return the shapes of a batch in words."""
    if isinstance(batch, Tensor):
        return f"this batch, {tuple(batch.shape)} of {str(batch.dtype).removeprefix('torch.')}"
    parts = [f"{name} {tuple(value.shape)}" if isinstance(value, Tensor) else name for name, value in batch.items()]
    return f"this batch, {', '.join(parts) or 'which is empty'}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, with the name of its class if the text is very short."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if len(text.split()) > 2 else f"{type(error).__name__} {text}".strip()


def check_batch(model: nn.Module, batch: Batch) -> None:
    """Check that a batch is not empty and lies where the weights are.

    A model whose weights lie on several devices is expected to move its inputs itself.

    Raises:
        LeadlineError: If the batch is empty or on another device, or the model has no weights.
    """
    device = _single_device(model)
    if device is not None and device.type == "meta":
        raise LeadlineError("the model is on the meta device and has no weights; load it or move it to a real device")
    tensors = {"the batch": batch} if isinstance(batch, Tensor) else batch
    for name, value in tensors.items():
        if isinstance(value, Tensor) and device is not None and value.device != device:
            raise LeadlineError(f"{name} is on {value.device} and the model on {device}; move it with .to('{device}')")
        if isinstance(value, Tensor) and not value.numel():
            raise LeadlineError(f"{name} has shape {tuple(value.shape)}: nothing is in it; give at least one sample")


def padding_mask(batch: Batch, mask: Mask = None) -> Tensor | None:
    """Return which tokens of a batch are real.

    Args:
        batch: A batch. If ``mask`` is None, its ``attention_mask`` or ``mask`` (1 or True = real) is taken, or its
            ``src_key_padding_mask`` (True = padding), as ``nn.TransformerEncoder`` has it.
        mask: A mask, or a function that returns the mask of a batch.

    Returns:
        (B, n), True = a real token; None if all are real.

    Raises:
        LeadlineError: If the mask has another shape, or a sample has no real token.
    """
    given: Any = mask(batch) if callable(mask) else mask
    if given is None and isinstance(batch, Mapping):
        hidden = batch.get("src_key_padding_mask")
        if isinstance(hidden, Tensor):
            given = ~hidden if hidden.dtype == torch.bool else hidden == 0
        elif "src" not in batch:  # with "src", ``mask`` is a mask of attention
            given = batch.get("attention_mask")
            given = batch.get("mask") if given is None else given
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.ndim != 2:
        problem = f"has shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"is {type(given).__name__}"
        raise LeadlineError(f"the mask {problem}; padding is given as (samples, tokens), pass that by mask=")
    real = given.bool()
    if not real.any(-1).all():
        raise LeadlineError("the mask leaves a sample without a real token; drop such samples first")
    return None if real.all() else real


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode on code paths that hooks can observe, and restore its state on exit.

    Inside, nothing is compiled, and neither the fast path of ``nn.MultiheadAttention`` nor the fused kernels of
    Hopfield attention run. On exit, also after an error, the mode of every module, the random state and the switches
    of torch are what they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices=devices), uncompiled(), use_backend("reference"):
        try:
            model.eval()
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, mode in modes:
                module.training = mode


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code as it was written: hooks inside compiled modules never fire."""
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _single_device(model: nn.Module) -> torch.device | None:
    """Return the device of the weights; None if they lie on several or there are none."""
    devices = {parameter.device for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else None


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute metrics without gradients, and without the autocast that the model may run under."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
