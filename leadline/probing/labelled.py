"""Batches with their labels: what a loader yields, split into what the model is called with and what it predicts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from leadline.anatomy.calling import Batch, each_batch

Inputs = Batch | tuple[Batch, Tensor] | Iterable[Any]


def each_labelled(model: nn.Module, inputs: Inputs) -> Iterator[tuple[Batch, Tensor | None]]:
    """Yield each batch as the model is called with it, and its labels, None where it has none.

    Labels are the second of a pair, or "labels" of a mapping. A model of transformers that takes labels gets them, so
    that it computes its own loss; another model does not.

    Args:
        model: The model.
        inputs: One batch, one (inputs, labels) tuple, or an iterable of batches or pairs.
    """
    labels: list[Tensor | None] = []

    def first_parts(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            pair = isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], (Tensor, Mapping))
            labels.append(_classes(item[1]) if pair else None)
            yield item[0] if pair else item

    if is_pair(inputs):
        inputs = [inputs]
    single = isinstance(inputs, (Tensor, Mapping, str, bytes)) or not isinstance(inputs, Iterable)
    for batch in each_batch(inputs if single else first_parts(inputs)):
        yield _attach(model, batch, labels.pop() if labels else None)


def is_pair(inputs: object) -> bool:
    """Return whether ``inputs`` is one (inputs, labels) tuple and not two batches."""
    if not isinstance(inputs, tuple) or len(inputs) != 2 or not isinstance(inputs[0], (Tensor, Mapping)):
        return False
    return _classes(inputs[1]) is not None


def _classes(labels: object) -> Tensor | None:
    """Return labels that are classes or tokens; None for others, such as the targets of a regression."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        return None
    return labels


def _attach(model: nn.Module, batch: Batch, labels: Tensor | None) -> tuple[Batch, Tensor | None]:
    """Give the model the labels, or take them from it, as its signature asks."""
    parameters = inspect.signature(model.forward).parameters
    takes = "labels" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if isinstance(batch, Mapping) and "labels" in batch:
        own = _classes(batch["labels"])
        return (batch if takes else {name: value for name, value in batch.items() if name != "labels"}), own
    main = getattr(model, "main_input_name", None)  # transformers
    if labels is not None and isinstance(main, str) and "labels" in parameters:
        return {**(batch if isinstance(batch, Mapping) else {main: batch}), "labels": labels}, labels
    return batch, labels
