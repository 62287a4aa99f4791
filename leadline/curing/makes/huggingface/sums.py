"""Causal de-escalation while decoding: the sums of the past tokens live in the cache of keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leadline.errors import LeadlineError

_PLACE = "leadline_sums"
_KINDS: dict[type, type] = {}  # cache classes, and their subclasses that carry the sums along


class Sums:
    """Sum (B, 1, d) and number (B, 1, 1) of the real past tokens at one layer's de-escalation."""

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0
        self.count: Tensor | float = 0.0

    def select(self, rows: Tensor) -> None:
        if isinstance(self.sum, Tensor) and isinstance(self.count, Tensor):
            self.sum = self.sum.index_select(0, rows.to(self.sum.device))
            self.count = self.count.index_select(0, rows.to(self.count.device))

    def repeat(self, times: int) -> None:
        if isinstance(self.sum, Tensor) and isinstance(self.count, Tensor):
            self.sum, self.count = self.sum.repeat_interleave(times, 0), self.count.repeat_interleave(times, 0)


def sums_of(cache: Any, index: int) -> Sums:
    """The sums of layer ``index`` in a transformers cache; they follow what happens to it.

    The cache becomes one of a subclass that reorders and repeats the sums with the keys. Cropping would need
    the sums of every earlier token, and is refused.
    """
    if not hasattr(cache, _PLACE):
        kind = type(cache)
        if kind not in _KINDS:
            _KINDS[kind] = _with_sums(kind)
        cache.__class__ = _KINDS[kind]
        setattr(cache, _PLACE, {})
    sums: dict[int, Sums] = getattr(cache, _PLACE)
    if index not in sums:
        sums[index] = Sums()
    return sums[index]


def check_cache(cache: Any, causal: bool) -> None:
    """Tokens that a cache already holds must have been seen by the same cure."""
    if cache is None or hasattr(cache, _PLACE) or not int(cache.get_seq_length()):
        return
    if causal:
        raise LeadlineError(
            "past_key_values was filled without this de-escalation, whose sums it lacks; start with an empty cache"
        )
    raise LeadlineError("past_key_values holds tokens, but de-escalation of a model that is not causal has no cache")


def _with_sums(kind: type) -> type:
    """A subclass of a cache class that carries the sums along."""

    def reorder_cache(self: Any, beam_idx: Tensor) -> Any:
        for sums in getattr(self, _PLACE).values():
            sums.select(beam_idx)
        return kind.reorder_cache(self, beam_idx)  # type: ignore[attr-defined]

    def batch_select_indices(self: Any, indices: Tensor) -> Any:
        for sums in getattr(self, _PLACE).values():
            sums.select(indices)
        return kind.batch_select_indices(self, indices)  # type: ignore[attr-defined]

    def batch_repeat_interleave(self: Any, repeats: int) -> Any:
        for sums in getattr(self, _PLACE).values():
            sums.repeat(repeats)
        return kind.batch_repeat_interleave(self, repeats)  # type: ignore[attr-defined]

    def reset(self: Any) -> Any:
        getattr(self, _PLACE).clear()
        return kind.reset(self)  # type: ignore[attr-defined]

    def crop(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise LeadlineError(
            "the cache of a causally de-escalated model cannot be cropped; generate without an assistant model"
        )

    methods = (reorder_cache, batch_select_indices, batch_repeat_interleave, reset, crop)
    return type(kind.__name__, (kind,), {method.__name__: method for method in methods})
