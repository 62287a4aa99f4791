"""Watching a training run: every k steps, a few figures of each block from the forward pass that runs anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import find_blocks, unwrap
from leadline.anatomy.inputs import padding_mask
from leadline.errors import LeadlineError
from leadline.ops.backends import use_backend
from leadline.probing.guard import uncompiled
from leadline.probing.light import LightRecorder
from leadline.probing.sinks import Row, Target, open_sinks


class CollapseError(LeadlineError):
    """Similarity after the last layer reached ``stop_at``."""


class Watcher:
    """Measures the first forward pass of every k-th step; see ``watch``."""

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
        self.recorder = LightRecorder(find_blocks(self.model, blocks), entropy)
        self.sinks = open_sinks(to) if _is_main_process() else []
        self.at = 0  # the step that runs
        self.stop = False
        self.last: list[Row] | None = None  # the rows measured last
        names = [block.name for block in self.recorder.blocks]
        self._around = [m for name, m in self.model.named_modules() if not name or _above(name, names)]
        self._armed: ExitStack | None = None  # takes the hooks away
        self._attached: ExitStack | None = None  # takes the hooks of the blocks away
        self._inside = 0  # calls of modules around the blocks that have not ended
        self._measured = False

    def __enter__(self) -> Watcher:
        self.begin(0)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def step(self) -> list[Row] | None:
        """A training step ended; returns its rows if it was measured."""
        rows = self.end()
        self.begin(self.at + 1)
        return rows

    def begin(self, step: int) -> None:
        """The step numbered ``step`` begins; sets the hooks if it is to be measured."""
        self.at = step
        measured = self.last is not None and self.last[0]["step"] == step  # an earlier part of an accumulated batch
        if step % self.every or self._armed is not None or self.stop or measured:
            return
        self._armed, self._measured, self._inside = ExitStack(), False, 0
        self._armed.enter_context(uncompiled())
        if self.recorder.entropy:  # until the step ends: what a forward pass carried, its backward pass must read
            self._armed.enter_context(use_backend("reference"))
        for module in self._around:  # training code may call any of these: the model, or its encoder
            before = module.register_forward_pre_hook(self._start, with_kwargs=True, prepend=True)
            after = module.register_forward_hook(self._finish, always_call=True)
            self._armed.callback(before.remove)
            self._armed.callback(after.remove)

    def end(self) -> list[Row] | None:
        """The step ended: takes the hooks away, writes what they saw."""
        armed, self._armed = self._armed, None
        if armed is None:
            return None
        armed.close()
        if not self._measured:
            return None
        figures = self.recorder.figures()
        entropy = self.recorder.entropy_by_layer() if self.recorder.entropy else None
        rows: list[Row] = []
        for layer, name in enumerate(self.recorder.layer_names):
            row: Row = {"step": self.at, "layer": layer, "name": name}
            row.update((figure, values[layer]) for figure, values in figures.items())
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
        """Take away what is left of the hooks and close the files."""
        armed, self._armed = self._armed, None
        if armed is not None:
            armed.close()
        for sink in self.sinks:
            sink.close()
        self.sinks = []

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if self._inside == 1 and not self._measured:
            self.recorder.start(_mask_of(kwargs))
            self._attached = ExitStack()
            self._attached.enter_context(self.recorder.attached())

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward pass ended, well or not. What activation checkpointing runs again later is not measured."""
        self._inside -= 1
        if self._inside == 0 and self._attached is not None:
            self._attached.close()
            self._attached = None
            self._measured = bool(self.recorder.rows)


def watch(model: nn.Module, **options: Any) -> Watcher:
    """Watch a plain training loop:

        with leadline.probing.watch(model, every=50, to="depth.csv", stop_at=.99) as watcher:
            for batch in loader:
                ...  # forward, backward, optimizer step
                watcher.step()
                if watcher.stop:
                    break

    The first forward pass of steps 0, k, 2k, ... is measured where it runs, with the batch, the mode and the dropout
    of training: token similarity, diversity, cosine and norm after every block, in nats the entropy of attention
    where wanted. At the other steps there are no hooks at all. Compiled code runs uncompiled at measured steps.

    every    steps between two measurements.
    to       a file .csv or .jsonl, "tensorboard:FOLDER", "wandb" (the active run), a function that takes the rows of
             a step, or a list of these. One row a layer: step, layer, name and the figures.
    blocks   names of the blocks, as for ``probe``.
    entropy  also the attention entropy, which costs about as much as the attention itself, without a fused kernel.
    stop_at  similarity after the last layer at which ``watcher.stop`` becomes True, or, with ``raises=True``,
             ``CollapseError`` is raised.

    Several processes: each measures, the first writes.
    """
    return Watcher(model, **options)


def _above(name: str, blocks: Sequence[str]) -> bool:
    return any(block.startswith(f"{name}.") for block in blocks)


def _mask_of(kwargs: dict[str, Any]) -> Tensor | None:
    if kwargs.get("attention_mask") is None and kwargs.get("mask") is None and "src_key_padding_mask" not in kwargs:
        return None
    try:
        return padding_mask(kwargs)
    except LeadlineError:  # a mask of another shape says nothing about padding; training goes on
        return None


def _is_main_process() -> bool:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not ready or torch.distributed.get_rank() == 0
