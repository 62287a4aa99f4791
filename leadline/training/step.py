"""One optimizer step: forward and backward passes, clipping, the update, averaged weights.

Nothing here waits for the device. Losses are summed on the device, and the first failed step is stored there. A step
fails if its loss or gradient is not finite, or if its gradient norm exceeds the limit. A failed step changes nothing,
and neither does any step after it. So when the loop reads of the failure, the weights are still those before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from leadline.data.base import mix_seed
from leadline.training.copies import Copies
from leadline.training.distributed import Processes, Weights
from leadline.training.optimizer import LearningRate, make_optimizer, undecayed
from leadline.training.recipe import Recipe
from leadline.training.tasks.base import Carry, Task

FIRST_SCALE, GROW, SHRINK, GROW_AFTER = 2.0**16, 2.0, 0.5, 2000  # torch's GradScaler's
SKIPPED = "skipped"  # the share of steps skipped because the loss scale was too large
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Part = Callable[[int], dict[str, Tensor]]


class Step:
    """Trains one step: ``step(number)`` on the batch of that number.

    Args:
        recipe: How to train.
        task: Batches and loss.
        model: The model that is saved, evaluated and probed.
        called: The model that is called in training: the same, or DDP's wrapper of it.
        weights: The model's weights on this process.
        processes: The processes that train together.
        rate: The learning rate by step.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        model: nn.Module,
        called: nn.Module,
        weights: Weights,
        processes: Processes,
        rate: LearningRate,
    ) -> None:
        self.recipe, self.task, self.model, self.called = recipe, task, model, called
        self.weights, self.processes, self.rate = weights, processes, rate
        device = self.device = processes.device
        self.lr = torch.zeros((), device=device)
        self.optimizer = make_optimizer(recipe.optimizer, weights, undecayed(model), self.lr)
        self.optimizer.found_inf = self.skip = torch.zeros((), device=device)  # type: ignore[attr-defined]
        self.at = torch.zeros((), dtype=torch.int64, device=device)  # the number of the current step
        self.failed_at = torch.full((), -1, dtype=torch.int64, device=device)  # the first failed step; -1: none
        self.scale = torch.full((), FIRST_SCALE if recipe.precision == "fp16" else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)  # since the scale last changed
        self.names = ["loss", "gradient_norm"]  # of the sums; the first step adds the task's metrics
        self.sums: Tensor | None = None  # (len(names),), of the steps since the last reading
        self.carry: list[Carry] = [None] * recipe.batch.accumulate
        half = DTYPES.get(recipe.precision)
        # DDP and FSDP hold on to the weights themselves, so copies cannot take their place
        self.copies = Copies(model, half) if half is not None and processes.mode == "one" else None
        decay = recipe.regularise.ema
        self.ema = None if decay is None else [local.detach().clone() for local in weights.local]

    def __call__(self, number: int) -> None:
        """Train step ``number``."""
        self.begin(number)
        self.compute(lambda micro: self.part(number, micro))

    def begin(self, number: int) -> None:
        """Set the learning rate and the random seed of a step; they depend on its number alone."""
        self.lr.fill_(self.rate(number))
        self.at.fill_(number)
        torch.manual_seed(mix_seed(self.recipe.seed, number, self.processes.rank))

    def part(self, number: int, micro: int) -> dict[str, Tensor]:
        """Return this process's share of part ``micro`` of an accumulated batch."""
        return self.task.batches(number, micro, rank=self.processes.rank, world=self.processes.world)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run inside in the recipe's precision."""
        dtype = DTYPES.get(self.recipe.precision)
        if dtype is None:
            yield
            return
        with torch.autocast(self.device.type, dtype, cache_enabled=not self.recipe.graph):
            yield

    def compute(self, part: Part) -> None:
        """Run the whole step, from batches to new weights.

        Args:
            part: Returns a part of the accumulated batch by its index.
        """
        parts = self.recipe.batch.accumulate
        self.weights.clear_gradients()
        metrics_by_part: list[dict[str, Tensor]] = []
        carries: list[Carry] = []
        for micro in range(parts):
            last = micro == parts - 1
            wait = nullcontext() if last or self.processes.mode != "ddp" else self.called.no_sync()  # type: ignore[operator]
            copies = nullcontext() if self.copies is None else self.copies.in_place()
            with wait, copies:
                with self.autocast():
                    loss, metrics, carry = self.task.loss(self.called, part(micro), self.carry[micro])
                (loss * (self.scale / parts)).backward()
            if self.copies is not None:
                self.copies.add_gradients()
            metrics_by_part.append({"loss": loss.detach(), **metrics})
            carries.append(carry)
        self._update(metrics_by_part)
        self.carry = [self._next_carry(old, new) for old, new in zip(self.carry, carries, strict=True)]

    @torch.no_grad()
    def _update(self, metrics_by_part: list[dict[str, Tensor]]) -> None:
        """Update the weights from the gradients; add loss and metrics to the sums."""
        gradients = self.weights.collect_gradients()
        norm = self.weights.norm(gradients) / self.scale
        names = list(metrics_by_part[0])
        means = {name: torch.stack([metrics[name].float() for metrics in metrics_by_part]).mean() for name in names}
        self._note_failure(means["loss"], norm)
        clip = self.recipe.regularise.clip
        if clip is not None:
            torch._foreach_mul_(gradients, (clip / (norm + 1e-6)).clamp(max=1) / self.scale)
        elif self.recipe.precision == "fp16":
            torch._foreach_mul_(gradients, 1 / self.scale)
        self.optimizer.step()  # does nothing where ``skip`` is 1
        if self.recipe.precision == "fp16":
            torch._amp_update_scale_(self.scale, self.good_steps, self.skip, GROW, SHRINK, GROW_AFTER)
        if self.ema is not None and self.recipe.regularise.ema is not None:
            torch._foreach_lerp_(self.ema, [p.detach() for p in self.weights.local], 1 - self.recipe.regularise.ema)
        figures = {"loss": means["loss"], "gradient_norm": norm}
        if self.recipe.precision == "fp16":
            figures |= {"gradient_norm": norm.nan_to_num(nan=0.0, posinf=0.0), SKIPPED: (~norm.isfinite()).float()}
        self._add({**figures, **means})

    def _note_failure(self, loss: Tensor, norm: Tensor) -> None:
        """Set ``failed_at`` if this step failed, and ``skip`` if it must not change the weights.

        With fp16, a gradient that overflows only lowers the loss scale; the step fails when the scale falls below 1.
        """
        if self.recipe.precision == "fp16":  # no gradient shows a failed loss to the other processes
            loss = self.processes.mean(loss)
        failed = ~loss.isfinite() | (norm.isfinite() & (norm > self.recipe.norm_limit))
        overflow = ~norm.isfinite()
        failed = failed | (self.scale < 1) if self.recipe.precision == "fp16" else failed | overflow
        self.failed_at.copy_(torch.where(failed & (self.failed_at < 0), self.at, self.failed_at))
        self.skip.copy_(((self.failed_at >= 0) | overflow).float())

    def _add(self, values: dict[str, Tensor]) -> None:
        """Add the figures of this step to the sums."""
        if self.sums is None or self.names != list(values):  # the first step, or a checkpoint with fewer figures
            before = {} if self.sums is None else dict(zip(self.names, self.sums.tolist(), strict=True))
            self.names = list(values)
            sums = [before.get(name, 0.0) for name in self.names]
            self.sums = torch.tensor(sums, dtype=torch.float64, device=self.device)
        self.sums += torch.stack(list(values.values()))

    def _next_carry(self, old: Carry, new: Carry) -> Carry:
        """Return what is carried to the next step, updated in place where shapes allow.

        A failed step leaves it unchanged. A step skipped because of the loss scale does not: its batch has been read.
        """
        if old is None or new is None or [t.shape for t in old] != [t.shape for t in new]:
            return new
        for before, after in zip(old, new, strict=True):
            before.copy_(torch.where(self.failed_at >= 0, before, after))
        return old

    def read(self, steps: int) -> dict[str, float]:
        """Return means over the ``steps`` since the last reading, over all processes. Waits for the device."""
        assert self.sums is not None
        means = dict(zip(self.names, (self.processes.mean(self.sums) / steps).tolist(), strict=True))
        self.sums.zero_()
        if skipped := means.get(SKIPPED):  # their gradients overflowed: take the mean norm of the other steps
            means["gradient_norm"] = means["gradient_norm"] / (1 - skipped) if skipped < 1 else math.inf
        return means

    def failed(self) -> int | None:
        """Return the first step that failed on any process, if any. Waits for the device."""
        steps = [step for step in self.processes.gather(int(self.failed_at)) if step >= 0]
        return min(steps, default=None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights, if there are any, into the model; put its own back at the end."""
        if self.ema is None:
            yield
            return
        local = [p.detach() for p in self.weights.local]
        own = [p.clone() for p in local]
        torch._foreach_copy_(local, self.ema)
        try:
            yield
        finally:
            torch._foreach_copy_(local, own)
