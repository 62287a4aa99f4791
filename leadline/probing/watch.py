"""Watches a training run: every k steps, four metrics of each block from its forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import find_blocks, unwrap
from leadline.anatomy.calling import padding_mask, uncompiled
from leadline.errors import LeadlineError
from leadline.ops.backends import use_backend
from leadline.probing.basic_recorder import BasicRecorder
from leadline.probing.sinks import Row, Target, open_sinks


class CollapseError(LeadlineError):
    """Raised when similarity after the last layer reaches ``stop_at``."""


class Watcher:
    """Measures the first forward pass of every k-th step; see ``watch`` for its options.

    Attributes:
        at: The step that is running.
        stop: Whether similarity has reached ``stop_at``.
        last: The rows measured last, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        to: Target | Iterable[Target] | None = None,
        blocks: str | Sequence[str] | None = None,
        entropy: bool = False,
        stop_at: float | None = None,
        raises: bool = False,
    ) -> None:
        if every < 1:
            raise LeadlineError(f"every is {every}; it must be at least 1")
        if stop_at is not None and not 0 < stop_at <= 1:
            raise LeadlineError(f"stop_at is {stop_at}; it is a similarity, above 0 and at most 1")
        self.every, self.stop_at, self.raises = every, stop_at, raises
        self.model = unwrap(model)
        self.recorder = BasicRecorder(find_blocks(self.model, blocks), entropy)
        self.sinks = open_sinks(to) if _is_main_process() else []
        self.at = 0
        self.stop = False
        self.last: list[Row] | None = None
        names = [block.name for block in self.recorder.blocks]
        self._ancestors = [m for name, m in self.model.named_modules() if not name or _contains_block(name, names)]
        self._step_hooks: ExitStack | None = None  # removes the hooks of the ancestors of blocks
        self._block_hooks: ExitStack | None = None  # removes the hooks of the blocks
        self._open_calls = 0  # calls of ancestors that have not ended
        self._measured = False

    def __enter__(self) -> Watcher:
        self.begin(0)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def step(self) -> list[Row] | None:
        """End a training step and begin the next.

        Returns:
            The rows of the step, one per layer, if it was measured.

        Raises:
            CollapseError: If similarity has reached ``stop_at`` and ``raises`` is set.
        """
        rows = self.end()
        self.begin(self.at + 1)
        return rows

    def begin(self, step: int) -> None:
        """Begin the step numbered ``step``, and attach the hooks if it is to be measured."""
        self.at = step
        measured = self.last is not None and self.last[0]["step"] == step  # an earlier part of an accumulated batch
        if step % self.every or self._step_hooks is not None or self.stop or measured:
            return
        self._step_hooks, self._measured, self._open_calls = ExitStack(), False, 0
        self._step_hooks.enter_context(uncompiled())
        if self.recorder.entropy:  # until the step ends, so that the backward pass uses the same kernels
            self._step_hooks.enter_context(use_backend("reference"))
        for module in self._ancestors:  # training code may call any of these: the model, or its encoder
            before = module.register_forward_pre_hook(self._start, with_kwargs=True, prepend=True)
            after = module.register_forward_hook(self._finish, always_call=True)
            self._step_hooks.callback(before.remove)
            self._step_hooks.callback(after.remove)

    def end(self) -> list[Row] | None:
        """End the step: remove the hooks and write their metrics; the return value is that of ``step``."""
        hooks, self._step_hooks = self._step_hooks, None
        if hooks is None:
            return None
        hooks.close()
        if not self._measured:
            return None
        metrics = self.recorder.metrics()
        entropy = self.recorder.entropy_by_layer() if self.recorder.entropy else None
        rows: list[Row] = []
        for layer, name in enumerate(self.recorder.layer_names):
            row: Row = {"step": self.at, "layer": layer, "name": name}
            row.update((metric, values[layer]) for metric, values in metrics.items())
            if self.recorder.entropy:
                row["entropy"] = entropy[layer - 1] if entropy is not None and layer else None
            rows.append(row)
        for sink in self.sinks:
            sink.write(rows)
        self.last = rows
        similarity = rows[-1]["similarity"]
        if self.stop_at is not None and similarity >= self.stop_at:
            self.stop = True
            if self.raises:
                raise CollapseError(
                    f"similarity is {similarity:.4f} after the last layer at step {self.at}, stop_at {self.stop_at}: "
                    "the tokens have become alike, probe the model for a cure"
                )
        return rows

    def close(self) -> None:
        """Remove the hooks that are left and close the sinks."""
        hooks, self._step_hooks = self._step_hooks, None
        if hooks is not None:
            hooks.close()
        for sink in self.sinks:
            sink.close()
        self.sinks = []

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open_calls += 1
        if self._open_calls == 1 and not self._measured:
            self.recorder.start(_mask_of(kwargs))
            self._block_hooks = ExitStack()
            self._block_hooks.enter_context(self.recorder.attached())

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward pass, also one that failed. What activation checkpointing runs again later is not measured."""
        self._open_calls -= 1
        if self._open_calls == 0 and self._block_hooks is not None:
            self._block_hooks.close()
            self._block_hooks = None
            self._measured = bool(self.recorder.rows)


def watch(model: nn.Module, **options: Any) -> Watcher:
    """Watch a training loop.

        with leadline.probing.watch(model, every=50, to="depth.csv", stop_at=.99) as watcher:
            for batch in loader:
                ...  # forward, backward, optimizer step
                watcher.step()
                if watcher.stop:
                    break

    The first forward pass of steps 0, k, 2k, ... is measured while it runs, with the batch, the mode and the dropout
    of training. Metrics are token similarity, diversity, cosine and norm after every block. At the other steps there
    are no hooks. Compiled code runs uncompiled at measured steps. With several processes each measures and the first
    writes.

    Args:
        model: Any ``torch.nn.Module``.
        every: Steps between two measurements.
        to: A file .csv or .jsonl, "tensorboard:FOLDER", "wandb" (the active run), a function that takes the rows of a
            step, or a list of these. There is a row per layer: step, layer, name and the metrics.
        blocks: Names of the blocks, as for ``probe``.
        entropy: Measure attention entropy in nats too. It costs about as much as the attention itself, and attention
            then runs without a fused kernel.
        stop_at: Similarity after the last layer at which ``watcher.stop`` becomes True.
        raises: Raise ``CollapseError`` instead.

    Returns:
        The watcher, a context manager.

    Raises:
        LeadlineError: If an option does not fit, or the blocks are not found.
    """
    return Watcher(model, **options)


def _contains_block(name: str, blocks: Sequence[str]) -> bool:
    return any(block.startswith(f"{name}.") for block in blocks)


def _mask_of(kwargs: dict[str, Any]) -> Tensor | None:
    if kwargs.get("attention_mask") is None and kwargs.get("mask") is None and "src_key_padding_mask" not in kwargs:
        return None
    try:
        return padding_mask(kwargs)
    except LeadlineError:  # a mask of another shape is not about padding; training goes on
        return None


def _is_main_process() -> bool:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not ready or torch.distributed.get_rank() == 0
