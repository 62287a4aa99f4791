"""The learning rate by step: linear warm-up, a cosine, multi-step or constant body, cool-down."""

from __future__ import annotations

import math

from leadline.errors import LeadlineError
from leadline.training.recipe import Schedule


class LearningRate:
    """The learning rate of a run: ``rate(step)``.

    The warm-up rises linearly from ``start * lr`` at step 0 to ``lr`` at its end. The body follows, which is one of

        cosine       lr (final + (1 - final) (1 + cos(pi t)) / 2), t from 0 to 1 over the body
        multi_step   lr times ``factor`` for every milestone passed; milestones count from step 0
        constant     lr

    The cool-down is linear from the rate at the end of the body to ``final * lr``. After a cosine it is constant at the
    final rate, as timm's cool-down epochs are. Without a body the cool-down starts from ``lr``. A multi-step or
    constant schedule without a cool-down does not use ``final``.

    Args:
        schedule: The section ``schedule`` of a recipe.
        lr: The full learning rate.
        total: The length of the run in steps.
        steps_per_epoch: The length of an epoch in steps.

    Raises:
        LeadlineError: Warm-up and cool-down are longer than the run, or a milestone comes too late.
    """

    def __init__(self, schedule: Schedule, lr: float, total: int, steps_per_epoch: int) -> None:
        self.schedule, self.lr, self.total = schedule, lr, total
        self.warmup = schedule.warmup.steps(steps_per_epoch, total)
        self.cooldown = schedule.cooldown.steps(steps_per_epoch, total)
        self.milestones = [span.steps(steps_per_epoch, total) for span in schedule.milestones]
        if self.warmup + self.cooldown > total:
            raise LeadlineError(
                f"schedule.warmup and schedule.cooldown take {self.warmup} + {self.cooldown} steps; "
                f"the run has {total}: make them shorter, or length longer"
            )
        body = total - self.cooldown
        for span, at in zip(schedule.milestones, self.milestones, strict=True):
            if at >= body:
                end = f"in the cool-down, from step {body} on" if at < total else f"after the last of {total} steps"
                raise LeadlineError(f"schedule.milestones has {span.text!r}, which lies {end}; make it earlier")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        s = self.schedule
        if step < self.warmup:
            return self.lr * (s.start + (1 - s.start) * step / self.warmup)
        into_cooldown = step - (self.total - self.cooldown)
        if into_cooldown < 0:
            return self._body(step)
        first = self._body(self.total - self.cooldown)
        return first + (self.lr * s.final - first) * into_cooldown / max(self.cooldown, 1)

    def _body(self, step: int) -> float:
        s = self.schedule
        if s.name == "cosine":
            length = self.total - self.warmup - self.cooldown
            share = (step - self.warmup) / length if length else 0.0
            return self.lr * (s.final + (1 - s.final) * (1 + math.cos(math.pi * share)) / 2)
        return self.lr * s.factor ** sum(step >= at for at in self.milestones)
