"""Strengths that grow over the first steps of training, so that a pretrained model can adapt."""

from __future__ import annotations

from typing import Any

from torch import nn

from leadline.curing.operate import set_strengths, strengths
from leadline.errors import LeadlineError, need


class Ramp:
    """alpha and alpha' of a cured model from 0 to what the cure gave it, linearly over ``steps`` steps.

    >>> ramp = Ramp(cure(model, alpha=0.5, alpha_prime=0.5), steps=1000)
    >>> for batch in data:
    ...     ramp.step()  # before the forward pass; after the last step it changes nothing more
    ...     train_on(batch)

    ``Trainer(..., callbacks=[ramp.callback()])`` does the same.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise LeadlineError(f"steps is {steps!r}; it must be an integer of at least 1")
        self.model, self.steps = model, steps
        self.targets = strengths(model)
        if not any(self.targets):
            raise LeadlineError("alpha and alpha_prime of this cure are 0; there is nothing to ramp up to")
        self.done = 0
        self._set()

    @property
    def strengths(self) -> tuple[float, float]:
        """alpha and alpha' now."""
        share = self.done / self.steps
        return self.targets[0] * share, self.targets[1] * share

    def step(self) -> tuple[float, float]:
        """One step on; returns alpha and alpha'."""
        if self.done < self.steps:
            self.done += 1
            self._set()
        return self.strengths

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "steps": self.steps, "targets": list(self.targets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.done, self.steps = state["done"], state["steps"]
        self.targets = (float(state["targets"][0]), float(state["targets"][1]))
        self._set()

    def callback(self) -> Any:
        """A ``transformers.TrainerCallback`` that steps the ramp before every training step."""
        base = need("transformers", "hub").TrainerCallback
        ramp = self

        class RampCallback(base):  # type: ignore[misc, valid-type]
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                ramp.done = min(state.global_step, ramp.steps)  # a resumed run goes on where it stopped
                ramp.step()

        return RampCallback()

    def _set(self) -> None:
        set_strengths(self.model, *self.strengths)
