"""Depth in use: what the output of a model loses when blocks are left out, alone and together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.probing.outputs import Yardstick
from leadline.probing.reruns import Reruns
from leadline.report.verdict import COSTS

THRESHOLDS = COSTS  # the largest change at which blocks count as not used


class Change(NamedTuple):
    """The change of the output over a batch, and its standard error, paired over samples."""

    mean: float
    error: float | None  # None with one sample


class Removal(NamedTuple):
    """The change of the output when block calls are left out together."""

    calls: tuple[int, ...]  # from 0, in the order of the pass
    change: Change


class DepthUse(NamedTuple):
    """Depth in use: the number of blocks minus the most that can be left out together at next to no cost."""

    unit: str  # "loss", "kl" or "cosine"
    singles: list[Change | None]  # by block call; None: not tried, or it cannot be left out
    together: list[Removal]  # the sets that were tried, cheapest single removals first
    unused: tuple[int, ...] | None  # the largest set found within the threshold; None where only some were tried
    forwards: float  # passes that it took

    @property
    def in_use(self) -> int | None:
        """Blocks in use; None where only some blocks were tried."""
        return None if self.unused is None else len(self.singles) - len(self.unused)


def measure_depth_use(
    reruns: Reruns,
    yardstick: Yardstick,
    sample: int | None = None,
    passed: Callable[[], None] = lambda: None,
) -> DepthUse:
    """Leave out each block call, then as many as possible together.

    The calls are ordered by what leaving out each alone costs. Bisection over that order gives the longest head of it
    whose removal changes the output by at most the threshold of its unit.

    Args:
        sample: Try so many calls, evenly spread; None: all.
        passed: Called after each pass of the model.
    """
    calls = [i for i, visit in enumerate(reruns.visits) if visit.removable]
    if sample is not None and sample < 1:
        raise LeadlineError(f"depth_use is {sample}; give True, or at least one block to try")
    tried = calls if sample is None else evenly(calls, sample)
    singles: list[Change | None] = [None] * len(reruns.visits)
    for call in tried:
        singles[call] = change_of(yardstick.changes(reruns.without([call])))
        passed()
    together: list[Removal] = []
    unused: tuple[int, ...] | None = None
    if tried == calls:
        unused = _largest_unused(singles, reruns, yardstick, together, passed)
    return DepthUse(yardstick.unit, singles, together, unused, reruns.cost)


def _largest_unused(
    singles: Sequence[Change | None],
    reruns: Reruns,
    yardstick: Yardstick,
    together: list[Removal],
    passed: Callable[[], None],
) -> tuple[int, ...]:
    """The longest head of the order by cost that can be left out within the threshold; notes what it tried."""
    limit = THRESHOLDS[yardstick.unit]
    cost = {i: change.mean for i, change in enumerate(singles) if change is not None and not math.isnan(change.mean)}
    order = sorted(cost, key=lambda call: (cost[call], call))
    low, high = 0, len(order)  # the answer lies between these counts, both included
    while low < high:
        middle = (low + high + 1) // 2
        chosen = tuple(sorted(order[:middle]))
        change = change_of(yardstick.changes(reruns.without(chosen)))
        together.append(Removal(chosen, change))
        passed()
        low, high = (middle, high) if change.mean <= limit else (low, middle - 1)
    return tuple(sorted(order[:low]))


def change_of(values: Tensor) -> Change:
    """The mean over samples of changes (B,), and the standard error of that mean."""
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else None
    return Change(values.mean().item(), error)


def evenly(items: Sequence[int], count: int) -> list[int]:
    """``count`` of the items, evenly spread, the first and the last among them; all where there are no more."""
    if count >= len(items):
        return list(items)
    places = torch.linspace(0, len(items) - 1, count).round().long().tolist()
    return [items[place] for place in places]
