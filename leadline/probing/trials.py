"""Tries candidate cures, one after the other, on the same batch and measures what they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import find_blocks
from leadline.anatomy.calling import Batch, call_model
from leadline.anatomy.survey import Layouts
from leadline.curing import cure as apply_cure
from leadline.curing import uncure
from leadline.errors import LeadlineError
from leadline.models import Model
from leadline.probing.basic_recorder import BasicRecorder
from leadline.probing.depth_use import change_of
from leadline.probing.outputs import make_yardstick
from leadline.report.layers import Trial

# the mildest first: of those about equally good, the first is recommended
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
    labels: Tensor | None = None,
    on_block: Callable[[], None] = lambda: None,
    layouts: Layouts | None = None,
) -> tuple[Trial, list[Trial]]:
    """Run one batch without a cure and with each candidate; the model is restored after each.

    Args:
        model: The model, in evaluation mode.
        names: Names of its blocks.
        batch: The batch.
        mask: Its padding mask (B, n), True = a real token.
        entropy: Measure attention entropy too.
        candidates: Arguments of ``leadline.cure`` by the name of the trial.
        labels: The batch's labels; the change of the output is then that of the loss.
        on_block: Called after every block.
        layouts: The layouts of the blocks, by name; the usual ones by default.

    Returns:
        The trial without a cure and those of the candidates. Their ``helps`` is still False; the verdict sets it.
    """
    before, whole = _run(model, "as it is", {}, names, batch, mask, entropy, on_block, layouts)
    yardstick, _ = make_yardstick(model, whole, labels, mask)
    trials = []
    own = _strengths(model)
    for name, cure in candidates.items():
        try:
            with cured(model, **cure) as patient:
                if own is not None and _strengths(patient) == own:
                    raise LeadlineError("the model has it already")
                trial, output = _run(patient, name, dict(cure), names, batch, mask, entropy, on_block, layouts)
            if yardstick is not None and trial.error is None:
                trial.change, trial.change_error = change_of(yardstick.changes(output))
                trial.unit = yardstick.unit
            trials.append(trial)
        except LeadlineError as error:
            trials.append(Trial(name, dict(cure), [], False, error=str(error)))
    return before, trials


def _strengths(model: nn.Module) -> Any:
    """Return the settings that a cure changes in one of our models; None for a model of another make."""
    if not isinstance(model, Model):
        return None
    config = model.config
    return config.strengths, config.start, config.de_escalation


@contextmanager
def cured(model: nn.Module, **strengths: float) -> Iterator[nn.Module]:
    """Cure a model in place, and undo it on exit."""
    apply_cure(model, **cast(Any, strengths))
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
    on_block: Callable[[], None],
    layouts: Layouts | None,
) -> tuple[Trial, Any]:
    """Run the batch once and return its metrics as a trial, and the model's output."""
    recorder = BasicRecorder(find_blocks(model, names), entropy, on_block, robust=True, layouts=layouts)
    with torch.no_grad(), recorder.attached():
        recorder.start(mask)
        output = call_model(model, batch)
    similarity = recorder.metrics()["similarity"]
    if any(value != value for value in similarity):
        return Trial(name, cure, [], False, error="it makes NaN"), output
    by_layer = recorder.entropy_by_layer() if entropy else None
    return Trial(name, cure, similarity, False, entropy=by_layer, robust=recorder.robust), output
