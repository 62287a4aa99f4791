"""The learning rate of a step: linear warm-up, a body, linear cool-down."""

from __future__ import annotations

import math

from leadline.errors import LeadlineError
from leadline.training.recipe import Schedule


class LearningRate:
    """``rate(step)`` for a run of ``total`` steps.

    Warm-up goes from ``start * lr`` at step 0 towards ``lr`` at its end. Then, over what lies between warm-up and
    cool-down,

        cosine       lr (final + (1 - final) (1 + cos(pi t)) / 2), t from 0 to 1
        multi_step   lr times ``factor`` for every milestone passed; milestones count from step 0
        constant     lr

    and the cool-down goes in a straight line from the rate it finds to ``final * lr``: after a cosine that is a
    stretch at the final rate, as timm's cool-down epochs are, unless nothing lies between: then it starts from ``lr``.
    A multi-step or constant schedule without a cool-down never uses ``final``.
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
        s = self.schedule
        if step < self.warmup:
            return self.lr * (s.start + (1 - s.start) * step / self.warmup)
        into_cooldown = step - (self.total - self.cooldown)
        if into_cooldown < 0:
            return self._body(step)
        found = self._body(self.total - self.cooldown)
        return found + (self.lr * s.final - found) * into_cooldown / max(self.cooldown, 1)

    def _body(self, step: int) -> float:
        s = self.schedule
        if s.name == "cosine":
            length = self.total - self.warmup - self.cooldown
            share = (step - self.warmup) / length if length else 0.0
            return self.lr * (s.final + (1 - s.final) * (1 + math.cos(math.pi * share)) / 2)
        return self.lr * s.factor ** sum(step >= at for at in self.milestones)
