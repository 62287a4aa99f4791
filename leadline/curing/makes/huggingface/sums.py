"""Sums of the past tokens for causal de-escalation, held in transformers' cache of keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leadline.errors import LeadlineError

_PLACE = "leadline_sums"
_KINDS: dict[type, type] = {}  # cache class: its subclass that holds the sums too


class Sums:
    """The sum (B, 1, d) and the number (B, 1, 1) of the real past tokens where one layer is de-escalated."""

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0
        self.count: Tensor | float = 0.0

    def select(self, rows: Tensor) -> None:
        """Keep the given rows of the batch, in their order."""
        if isinstance(self.sum, Tensor) and isinstance(self.count, Tensor):
            self.sum = self.sum.index_select(0, rows.to(self.sum.device))
            self.count = self.count.index_select(0, rows.to(self.count.device))

    def repeat(self, times: int) -> None:
        """Repeat each row of the batch."""
        if isinstance(self.sum, Tensor) and isinstance(self.count, Tensor):
            self.sum, self.count = self.sum.repeat_interleave(times, 0), self.count.repeat_interleave(times, 0)


def sums_of(cache: Any, index: int) -> Sums:
    """Return the sums of layer ``index`` in a transformers cache.

    At the first call the cache gets a subclass as its class, which reorders and repeats the sums with the keys.
    Cropping would need the sums at every earlier token, and is refused.
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
    """Refuse a cache with tokens that did not pass through this de-escalation."""
    if hasattr(cache, _PLACE) or not int(cache.get_seq_length()):
        return
    if causal:
        raise LeadlineError(
            "past_key_values was filled without this de-escalation, whose sums it lacks; start with an empty cache"
        )
    raise LeadlineError("past_key_values holds tokens, but de-escalation of a model that is not causal has no cache")


def _with_sums(kind: type) -> type:
    """Build a subclass of a cache class that changes the sums with the keys."""

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
