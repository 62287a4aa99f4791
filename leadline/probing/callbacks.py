"""Callbacks that watch a training run of transformers or Lightning."""

from __future__ import annotations

import importlib
from typing import Any

from leadline.errors import LeadlineError, need
from leadline.probing.watch import Watcher


def trainer_callback(**options: Any) -> Any:
    """Return a callback for ``transformers.Trainer``, such as ``trainer_callback(every=50, to="depth.csv")``.

    Steps are those of the optimizer; with gradient accumulation the first of their forward passes is measured.

    Args:
        **options: Options of ``watch``. With ``stop_at`` the training ends when similarity reaches it.

    Raises:
        LeadlineError: If transformers is not installed.
    """
    transformers = need("transformers", "hub")

    class TrainerWatch(transformers.TrainerCallback):  # type: ignore[name-defined]
        watcher: Watcher | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
            self.watcher = Watcher(model, **options)

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            assert self.watcher is not None
            self.watcher.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            assert self.watcher is not None
            self.watcher.end()
            if self.watcher.stop:
                control.should_training_stop = True

        def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if self.watcher is not None:
                self.watcher.close()

    return TrainerWatch()


def _lightning() -> Any:
    """Import Lightning by its present or its former name."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise LeadlineError("this needs lightning, which is not installed; run: pip install lightning")


def lightning_callback(**options: Any) -> Any:
    """Return a callback for a Lightning ``Trainer``.

    The blocks are looked for in the whole LightningModule. Steps are those of the optimizer, ``trainer.global_step``.

    Args:
        **options: Options of ``watch``. With ``stop_at`` the training ends when similarity reaches it.

    Raises:
        LeadlineError: If Lightning is not installed.
    """

    class LightningWatch(_lightning().Callback):  # type: ignore[misc]
        watcher: Watcher | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.watcher = Watcher(pl_module, **options)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            assert self.watcher is not None
            self.watcher.begin(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert self.watcher is not None
            self.watcher.end()
            if self.watcher.stop:
                trainer.should_stop = True

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.watcher is not None:
                self.watcher.close()

    return LightningWatch()
