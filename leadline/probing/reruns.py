"""Runs a model again with some calls of its blocks left out, from the streams of the whole pass where that is exact."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leadline.anatomy.streams import stream_in, stream_out
from leadline.errors import LeadlineError

Forward = Callable[[], Any]


@dataclass
class Visit:
    """One call of a block in the whole forward pass."""

    block: nn.Module
    output: Any  # what the block returned, its tensors wherever they are stored
    devices: list[torch.device]  # of the tensors of ``output``, in their order
    removable: bool  # the stream leaves in the shape it came in, so that the block can be left out
    alone: bool  # the block returns its stream and no other tensor


@dataclass
class Reruns:
    """Forward passes of ``model`` in which chosen calls of its blocks return the stream that entered them.

    Calls are counted in the order of the pass, so that a block that serves as several layers has several. A call that
    is left out still computes what else the block returns, such as T5's position bias. What comes before the first
    call left out is not computed again where that is exact: it returns what it returned in the whole pass. That is
    tried on the model itself, and models that pass state beside the stream are run whole each time.

    Args:
        blocks: The block modules; each call of one of them is a layer.
        forward: Runs the model on the batch and returns its output.
        budget: Bytes of device memory that stored streams may take; beyond it they go to the memory of the host.
    """

    blocks: Sequence[nn.Module]
    forward: Forward
    budget: float = 2**31
    visits: list[Visit] = field(default_factory=list, init=False)
    output: Any = field(default=None, init=False)  # of the whole pass
    entry: Tensor | None = field(default=None, init=False)  # a copy of the stream that entered the first call
    partial: bool = field(default=False, init=False)  # whether stored streams may take the place of computation
    cost: float = field(default=0.0, init=False)  # forward passes so far, a part of one by its share of the calls

    def __post_init__(self) -> None:
        self.output = self._whole()
        if not self.visits:
            raise LeadlineError("no block was called in the forward pass; give blocks that the model runs")
        self.partial = self._replays()

    def without(self, calls: Collection[int]) -> Any:
        """The model's output when the given calls (from 0) are left out."""
        for call in calls:
            if not self.visits[call].removable:
                raise LeadlineError(f"block call {call} changes the shape of its stream and cannot be left out")
        first = min(calls, default=len(self.visits)) if self.partial else 0
        return self._run(first, frozenset(calls))

    def streams(self) -> list[Tensor | None]:
        """The stream that entered the first call and those that left each, as the whole pass had them."""
        return [self.entry, *(stream_out(visit.output) for visit in self.visits)]

    def ended_by(self, stream: Tensor | None, blank: bool = False) -> Any:
        """The model's output when all calls are replayed and the last one returns another stream.

        Args:
            stream: What the last call returns; None: what it returned in the whole pass.
            blank: Let the other calls return zeros.
        """
        return self._run(len(self.visits), frozenset(), stream, blank)

    def with_call(self, call: int, special: Callable[..., Any]) -> Any:
        """The model's output when ``special(run, args, kwargs)`` runs one block call and returns its output."""
        return self._run(call if self.partial else 0, frozenset(), special={call: special})

    def _whole(self) -> Any:
        stored = 0.0

        def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], original: Callable[..., Any]) -> Any:
            nonlocal stored
            x = stream_in(args, kwargs)
            shape = None if x is None else x.shape
            if self.entry is None and x is not None:
                self.entry = x.detach().clone()
            output = original(*args, **kwargs)
            y = stream_out(output)
            tensors = list(_tensors(output))
            stored += sum(t.numel() * t.element_size() for t in tensors)
            on_host = stored > self.budget
            copy = mapped(output, lambda t: t.detach().to("cpu" if on_host else t.device, copy=True))
            same = y is not None and shape == y.shape
            self.visits.append(Visit(block, copy, [t.device for t in tensors], same, len(tensors) == 1))
            return output

        with self._instead(note), torch.no_grad():
            output = self.forward()
        self.cost += 1
        return output

    def _replays(self) -> bool:
        """Return whether a pass whose first half is replayed gives the output of the whole pass, to the bit."""
        try:
            again = self._run(len(self.visits) // 2, frozenset())
        except Exception:  # state beside the stream: whatever the model raises, it is run whole from now on
            return False
        pairs = zip(_tensors(again), _tensors(self.output), strict=False)
        return all(torch.equal(one, other) or _both_nan(one, other) for one, other in pairs)

    def _run(
        self,
        first: int,
        left_out: frozenset[int],
        end: Tensor | None = None,
        blank: bool = False,
        special: Mapping[int, Callable[..., Any]] | None = None,
    ) -> Any:
        """One pass: calls before ``first`` are replayed, those ``left_out`` return the stream that enters them.

        ``end`` and ``blank`` are those of ``ended_by``, ``special`` that of ``with_call``.
        """
        count = 0

        def decide(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
            nonlocal count
            call, count = count, count + 1
            if call >= len(self.visits) or self.visits[call].block is not block:
                raise _other_order()
            visit = self.visits[call]
            if call < first:
                devices, last = iter(visit.devices), call == len(self.visits) - 1
                stream = stream_out(visit.output)

                def replayed(t: Tensor) -> Tensor:
                    t = end if last and end is not None and t is stream else t
                    t = t.to(next(devices), copy=True)
                    return torch.zeros_like(t) if blank and not last else t

                return mapped(visit.output, replayed)
            if special is not None and call in special:
                return special[call](run, args, kwargs)
            if call not in left_out:
                return run(*args, **kwargs)
            x = stream_in(args, kwargs)
            output = visit.output if visit.alone and self.partial else run(*args, **kwargs)
            stream = stream_out(output)
            return mapped(output, lambda t: x if t is stream else t)

        with self._instead(decide), torch.no_grad():
            output = self.forward()
        if count != len(self.visits):
            raise _other_order()
        self.cost += 1 - first / len(self.visits)
        return output

    @contextmanager
    def _instead(self, decide: Callable[..., Any]) -> Iterator[None]:
        """Inside, ``decide(block, args, kwargs, original)`` stands for the forward function of every block."""
        blocks = list(dict.fromkeys(self.blocks))
        before = {block: block.__dict__.get("forward") for block in blocks}

        def stand_in(block: nn.Module) -> Callable[..., Any]:
            original = block.forward
            return lambda *args, **kwargs: decide(block, args, kwargs, original)

        try:
            for block in blocks:
                block.__dict__["forward"] = stand_in(block)
            yield
        finally:
            for block, forward in before.items():
                if forward is None:
                    block.__dict__.pop("forward", None)
                else:
                    block.__dict__["forward"] = forward


def _other_order() -> LeadlineError:
    return LeadlineError(
        "the model calls its blocks in another order or number when one is left out; probe it with depth_use=False"
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: mapped(item, change) for key, item in value.items()}
        return type(value)(**items) if type(value) is not dict else items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    return value


def _both_nan(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
