"""What is fed to a model: batches, their padding, the device they lie on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import single_device
from leadline.errors import LeadlineError

Batch = Tensor | Mapping[str, Any]
Mask = Tensor | Callable[[Batch], Tensor | None] | None


def each_batch(inputs: Batch | Iterable[Batch]) -> Iterator[Batch]:
    """A tensor or a mapping is one batch; anything else is gone through, one batch in memory at a time."""
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
    """How many batches there are, where that can be told without going through them."""
    if isinstance(inputs, (Tensor, Mapping)):
        return 1
    try:
        return len(inputs) if isinstance(inputs, Sized) else None
    except TypeError:  # a loader of a data set without a length
        return None


def call_model(model: nn.Module, batch: Batch) -> Any:
    """What the model makes of the batch. A model that fails on it does so in one line; its own error is the cause."""
    try:
        return model(**batch) if isinstance(batch, Mapping) else model(batch)
    except LeadlineError:
        raise
    except Exception as error:
        raise LeadlineError(f"the model fails on {_told(batch)}: {first_line(error)}") from error


def _told(batch: Batch) -> str:
    if isinstance(batch, Tensor):
        return f"this batch, {tuple(batch.shape)} of {str(batch.dtype).removeprefix('torch.')}"
    parts = [f"{name} {tuple(value.shape)}" if isinstance(value, Tensor) else name for name, value in batch.items()]
    return f"this batch, {', '.join(parts) or 'which is empty'}"


def first_line(error: Exception) -> str:
    """What an error says, in one line, with its name where the text alone says little."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if len(text.split()) > 2 else f"{type(error).__name__} {text}".strip()


def check_batch(model: nn.Module, batch: Batch) -> None:
    """The batch must hold something and lie where the weights are; a model spread over devices moves it itself."""
    device = single_device(model)
    if device is not None and device.type == "meta":
        raise LeadlineError("the model is on the meta device and has no weights; load it or move it to a real device")
    tensors = {"the batch": batch} if isinstance(batch, Tensor) else batch
    for name, value in tensors.items():
        if isinstance(value, Tensor) and device is not None and value.device != device:
            raise LeadlineError(f"{name} is on {value.device} and the model on {device}; move it with .to('{device}')")
        if isinstance(value, Tensor) and not value.numel():
            raise LeadlineError(f"{name} has shape {tuple(value.shape)}: nothing is in it; give at least one sample")


def padding_mask(batch: Batch, mask: Mask = None) -> Tensor | None:
    """(B, n), True = a real token, or None when all are.

    From ``mask`` where given, a tensor or a function of the batch; else from the batch: ``attention_mask`` or
    ``mask`` (1 or True = real), or ``src_key_padding_mask`` of ``nn.TransformerEncoder`` (True = padding).
    """
    found: Any = mask(batch) if callable(mask) else mask
    if found is None and isinstance(batch, Mapping):
        hidden = batch.get("src_key_padding_mask")
        if isinstance(hidden, Tensor):
            found = ~hidden if hidden.dtype == torch.bool else hidden == 0
        elif "src" not in batch:  # there, ``mask`` is for attention
            found = batch.get("attention_mask")
            found = batch.get("mask") if found is None else found
    if found is None:
        return None
    if not isinstance(found, Tensor) or found.ndim != 2:
        given = f"has shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"is {type(found).__name__}"
        raise LeadlineError(f"the mask {given}; padding is told by (samples, tokens), pass that by mask=")
    real = found.bool()
    if not real.any(-1).all():
        raise LeadlineError("the mask leaves a sample without a real token; drop such samples first")
    return None if real.all() else real
