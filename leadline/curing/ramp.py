"""Ramp: the strengths of a cured model grow over the first steps of training."""

from __future__ import annotations

from typing import Any

from torch import nn

from leadline.curing.entry import set_strengths, strengths
from leadline.errors import LeadlineError, need


class Ramp:
    """Raises alpha and alpha' of a cured model from 0 to the values of its cure, linearly over a number of steps.

    A trained model needs time to adapt to its cure. ``Trainer(..., callbacks=[ramp.callback()])`` does the same as the
    loop below.

    Args:
        model: A model that is cured with alpha, alpha_prime or both.
        steps: The number of steps.

    Raises:
        LeadlineError: If the model is not cured, alpha and alpha_prime are 0, or ``steps`` is not at least 1.

    Example:
        >>> ramp = Ramp(cure(model, alpha=0.5, alpha_prime=0.5), steps=1000)
        >>> for batch in data:
        ...     ramp.step()  # before the forward pass; after the last step it changes nothing more
        ...     train_on(batch)
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise LeadlineError(f"steps is {steps!r}; it must be an integer of at least 1")
        self.model, self.steps = model, steps
        cured = strengths(model)
        self.targets = (cured.alpha or 0.0, cured.alpha_prime or 0.0)
        if not any(self.targets):
            raise LeadlineError("alpha and alpha_prime of this cure are 0; there is nothing to ramp up to")
        self.done = 0  # steps
        self._set()

    @property
    def strengths(self) -> tuple[float, float]:
        """alpha and alpha' now."""
        share = self.done / self.steps
        return self.targets[0] * share, self.targets[1] * share

    def step(self) -> tuple[float, float]:
        """Go one step on.

        Returns:
            alpha and alpha' after it.
        """
        if self.done < self.steps:
            self.done += 1
            self._set()
        return self.strengths

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save with a checkpoint."""
        return {"done": self.done, "steps": self.steps, "targets": list(self.targets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` returned."""
        self.done, self.steps = state["done"], state["steps"]
        self.targets = (float(state["targets"][0]), float(state["targets"][1]))
        self._set()

    def callback(self) -> Any:
        """Return a ``transformers.TrainerCallback`` that steps the ramp before every training step."""
        base = need("transformers", "hub").TrainerCallback
        ramp = self

        class RampCallback(base):  # type: ignore[misc, valid-type]
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                ramp.done = min(state.global_step, ramp.steps)  # a resumed run continues where it stopped
                ramp.step()

        return RampCallback()

    def _set(self) -> None:
        set_strengths(self.model, *self.strengths)
