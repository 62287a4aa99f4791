"""One optimizer step: forward and backward passes, clipping, the update, averaged weights.

Nothing here waits for the device. Losses add up on it, and so does the answer to "did this step go wrong": a step
whose loss or gradient is not finite, or whose gradient norm is beyond the limit, changes nothing, and neither does any
step after it, until the loop reads the answer. The weights are then still those before the bad step.
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
from leadline.training.optimizer import make_optimizer, undecayed
from leadline.training.recipe import Recipe
from leadline.training.schedule import LearningRate
from leadline.training.tasks.base import Carry, Task

FIRST_SCALE, GROW, SHRINK, GROW_AFTER = 2.0**16, 2.0, 0.5, 2000  # torch's GradScaler's
SKIPPED = "skipped"  # the part of the steps that the loss scale was too large for
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Part = Callable[[int], dict[str, Tensor]]


class Step:
    """``step(number)`` trains on the batch of that number.

    model   as it is: saved, evaluated, probed.
    called  as it is called in training, DDP's wrapping of it for example.
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
        self.at = torch.zeros((), dtype=torch.int64, device=device)  # the step that runs
        self.failed_at = torch.full((), -1, dtype=torch.int64, device=device)  # the first that went wrong; -1: none
        self.scale = torch.full((), FIRST_SCALE if recipe.precision == "fp16" else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)  # since the scale last changed
        self.names = ["loss", "gradient_norm"]  # of the sums; metrics follow at the first step
        self.sums: Tensor | None = None  # (len(names),), since they were last read
        self.carry: list[Carry] = [None] * recipe.batch.accumulate
        half = DTYPES.get(recipe.precision)  # DDP and FSDP know the weights by themselves
        self.copies = Copies(model, half) if half is not None and processes.mode == "one" else None
        decay = recipe.regularise.ema
        self.ema = None if decay is None else [local.detach().clone() for local in weights.local]

    def __call__(self, number: int) -> None:
        self.begin(number)
        self.compute(lambda micro: self.part(number, micro))

    def begin(self, number: int) -> None:
        """Set the rate and the random numbers of this step: they depend on its number, not on what ran before."""
        self.lr.fill_(self.rate(number))
        self.at.fill_(number)
        torch.manual_seed(mix_seed(self.recipe.seed, number, self.processes.rank))

    def part(self, number: int, micro: int) -> dict[str, Tensor]:
        return self.task.batches(number, micro, rank=self.processes.rank, world=self.processes.world)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        dtype = DTYPES.get(self.recipe.precision)
        if dtype is None:
            yield
            return
        with torch.autocast(self.device.type, dtype, cache_enabled=not self.recipe.graph):
            yield

    def compute(self, part: Part) -> None:
        """The whole step, from batches to new weights."""
        parts = self.recipe.batch.accumulate
        self.weights.clear_gradients()
        found, carried = [], []
        for micro in range(parts):
            last = micro == parts - 1
            wait = nullcontext() if last or self.processes.mode != "ddp" else self.called.no_sync()  # type: ignore[operator]
            copies = nullcontext() if self.copies is None else self.copies.in_place()
            with wait, copies:
                with self.autocast():
                    loss, metrics, carry = self.task.loss(self.called, part(micro), self.carry[micro])
                (loss * (self.scale / parts)).backward()
            if self.copies is not None:
                self.copies.hand_over()
            found.append({"loss": loss.detach(), **metrics})
            carried.append(carry)
        self.update(found)
        self.carry = [self._keep(old, new) for old, new in zip(self.carry, carried, strict=True)]

    @torch.no_grad()
    def update(self, found: list[dict[str, Tensor]]) -> None:
        """From gradients to new weights. ``found``: loss and metrics of each part."""
        gradients = self.weights.collect_gradients()
        norm = self.weights.norm(gradients) / self.scale
        means = {name: torch.stack([one[name].float() for one in found]).mean() for name in found[0]}
        self._judge(means["loss"], norm)
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
        told = {"loss": means["loss"], "gradient_norm": norm}
        if self.recipe.precision == "fp16":
            told |= {"gradient_norm": norm.nan_to_num(nan=0.0, posinf=0.0), SKIPPED: (~norm.isfinite()).float()}
        self._add({**told, **means})

    def _judge(self, loss: Tensor, norm: Tensor) -> None:
        """Did this step go wrong? With fp16 an overflowing gradient only lowers the scale, until there is none left."""
        if self.recipe.precision == "fp16":  # where no gradient tells the others
            loss = self.processes.mean(loss)
        wrong = ~loss.isfinite() | (norm.isfinite() & (norm > self.recipe.norm_limit))
        overflow = ~norm.isfinite()
        wrong = wrong | (self.scale < 1) if self.recipe.precision == "fp16" else wrong | overflow
        self.failed_at.copy_(torch.where(wrong & (self.failed_at < 0), self.at, self.failed_at))
        self.skip.copy_(((self.failed_at >= 0) | overflow).float())

    def _add(self, values: dict[str, Tensor]) -> None:
        if self.sums is None or self.names != list(values):  # the first step, or a checkpoint that knew fewer figures
            before = {} if self.sums is None else dict(zip(self.names, self.sums.tolist(), strict=True))
            self.names = list(values)
            kept = [before.get(name, 0.0) for name in self.names]
            self.sums = torch.tensor(kept, dtype=torch.float64, device=self.device)
        self.sums += torch.stack(list(values.values()))

    def _keep(self, old: Carry, new: Carry) -> Carry:
        """What is carried to the next step; in place where it can be, unchanged after a step that went wrong. A step
        that only the loss scale was too large for has been read all the same."""
        if old is None or new is None or [t.shape for t in old] != [t.shape for t in new]:
            return new
        for before, after in zip(old, new, strict=True):
            before.copy_(torch.where(self.failed_at >= 0, before, after))
        return old

    def read(self, steps: int) -> dict[str, float]:
        """Means over the ``steps`` since the last reading, over all processes. Waits for the device."""
        assert self.sums is not None
        means = dict(zip(self.names, (self.processes.mean(self.sums) / steps).tolist(), strict=True))
        self.sums.zero_()
        if skipped := means.get(SKIPPED):  # their gradients overflowed: the norm is that of the other steps
            means["gradient_norm"] = means["gradient_norm"] / (1 - skipped) if skipped < 1 else math.inf
        return means

    def failed(self) -> int | None:
        """The first step that went wrong on any process. Waits for the device."""
        steps = [step for step in self.processes.gather(int(self.failed_at)) if step >= 0]
        return min(steps, default=None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has the averaged weights, where there are any."""
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
