"""Candidate cures, each tried on the same batch: a recommendation is a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import find_blocks
from leadline.anatomy.inputs import Batch, call_model
from leadline.errors import LeadlineError
from leadline.models import Model
from leadline.probing.light import LightRecorder
from leadline.report.layers import Trial

# the mildest first: of those that help alike, the first is recommended
CANDIDATES: dict[str, dict[str, float]] = {
    "alpha .5": {"alpha": 0.5},
    "alpha' .5": {"alpha_prime": 0.5},
    "tau .1": {"de_escalation": 0.1},
    "tau .5": {"de_escalation": 0.5},
    "alpha and alpha' .5": {"alpha": 0.5, "alpha_prime": 0.5},
}


def try_cures(
    model: nn.Module,
    names: list[str],
    batch: Batch,
    mask: Tensor | None,
    entropy: bool = False,
    candidates: Mapping[str, Mapping[str, float]] = CANDIDATES,
    passed: Callable[[], None] = lambda: None,
) -> tuple[Trial, list[Trial]]:
    """The batch as it is, and with each candidate; the model is as before after each of them.

    ``names`` are the blocks; ``passed`` is called after each of them. Whether a candidate ``helps`` is for the verdict
    to say.
    """
    before = _run(model, "as it is", {}, names, batch, mask, entropy, passed)
    trials = []
    own = _strengths(model)
    for name, cure in candidates.items():
        try:
            with cured(model, **cure) as patient:
                if own is not None and _strengths(patient) == own:
                    raise LeadlineError("the model has it already")
                trials.append(_run(patient, name, dict(cure), names, batch, mask, entropy, passed))
        except LeadlineError as error:
            trials.append(Trial(name, dict(cure), [], False, error=str(error)))
    return before, trials


def _strengths(model: nn.Module) -> Any:
    """What a cure changes in one of our models; None: it is not ours."""
    if not isinstance(model, Model):
        return None
    config = model.config
    return config.strengths, config.start, config.de_escalation


@contextmanager
def cured(model: nn.Module, **strengths: float) -> Iterator[nn.Module]:
    """The model with a cure, in place, for as long as the context lasts."""
    from leadline.curing import cure, uncure

    cure(model, **cast(Any, strengths))
    try:
        yield model
    finally:
        uncure(model)


def _run(
    model: nn.Module,
    name: str,
    cure: dict[str, float],
    names: list[str],
    batch: Batch,
    mask: Tensor | None,
    entropy: bool,
    passed: Callable[[], None],
) -> Trial:
    recorder = LightRecorder(find_blocks(model, names), entropy, passed)
    with torch.no_grad(), recorder.attached():
        recorder.start(mask)
        call_model(model, batch)
    similarity = recorder.similarity()
    if any(value != value for value in similarity):
        return Trial(name, cure, [], False, error="it makes NaN")
    return Trial(name, cure, similarity, False, entropy=recorder.entropy_by_layer() if entropy else None)
