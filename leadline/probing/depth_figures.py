"""Depth in use as data of a report: removal, angles between layers and the logit lens, on one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import Block
from leadline.anatomy.calling import Batch, call_model, full_precision
from leadline.anatomy.survey import BlockLayouts, Layouts, usual_layouts
from leadline.errors import LeadlineError
from leadline.metrics import angular_distance
from leadline.probing.depth_use import THRESHOLDS, Change, change_of, measure_depth_use
from leadline.probing.outputs import Yardstick, find_logits, make_yardstick
from leadline.probing.reruns import Reruns
from leadline.probing.scores import largest_scores
from leadline.probing.sublayers import add_sublayers
from leadline.report.layers import DepthUse, LayerData, Removal
from leadline.report.verdict import tail_layers

Choice = bool | int | str


class FirstBatch(NamedTuple):
    """The first batch of a probe."""

    inputs: Batch
    mask: Tensor | None  # (B, n), True = a real token
    labels: Tensor | None  # (B,) or (B, n)


def check_choice(depth_use: Choice) -> None:
    """Check the option ``depth_use`` of a probe.

    Raises:
        LeadlineError: If it is none of False, True, a number of blocks and "sublayers".
    """
    number = isinstance(depth_use, int) and depth_use >= 0
    if not number and depth_use != "sublayers":
        raise LeadlineError(f"depth_use is {depth_use!r}; give True, a number of blocks to try, or 'sublayers'")


def add_depth_use(
    model: nn.Module,
    blocks: Sequence[Block],
    first: FirstBatch,
    layers: list[LayerData],
    depth_use: Choice,
    progress: Callable[[], None] = lambda: None,
    layouts: Layouts | None = None,
) -> DepthUse:
    """Measure how much of its depth a model uses, on one batch, and write the figures of each layer into ``layers``.

    Args:
        model: The model, in evaluation mode.
        blocks: Its blocks.
        first: The batch.
        layers: Data by layer, the input first.
        depth_use: True, a number of blocks to leave out, or "sublayers".
        progress: Called after each pass of the model.
        layouts: The layouts of the blocks, by name; the usual ones by default.

    Raises:
        LeadlineError: If a block hands on several streams, or the output cannot be compared.
    """
    layouts = usual_layouts(blocks) if layouts is None else layouts
    if any(layout.stream for pair in layouts.values() for layout in pair):
        raise LeadlineError(
            "the blocks hand on several streams, and leaving out one of them is not leaving out a block; "
            "probe with depth_use=False"
        )
    reruns = Reruns([block.module for block in blocks], lambda: call_model(model, first.inputs))
    if len(reruns.visits) != len(layers) - 1:
        raise LeadlineError(
            f"the blocks ran {len(layers) - 1} times, then {len(reruns.visits)} times; probe it with depth_use=False"
        )
    yardstick, reason = make_yardstick(model, reruns.output, first.labels, first.mask)
    if yardstick is None:
        raise LeadlineError(f"depth_use needs an output that can be compared: {reason}")
    sample = depth_use if isinstance(depth_use, int) and not isinstance(depth_use, bool) else None
    measured = measure_depth_use(reruns, yardstick, sample, progress)
    for layer, change in zip(layers[1:], measured.singles, strict=True):
        if change is not None:
            layer.removal, layer.removal_error = change
    use = DepthUse(
        unit=measured.unit,
        threshold=THRESHOLDS[measured.unit],
        in_use=measured.in_use,
        unused=None if measured.unused is None else [call + 1 for call in measured.unused],
        together=[_removal([call + 1 for call in calls], change) for calls, change in measured.together],
        loss=None if yardstick.reference is None else yardstick.reference.mean().item(),
        samples=len(yardstick.changes(reruns.output)),
        notes=[] if reason is None else [f"The change of the output is not the loss: {reason}."],
    )
    tail = tail_layers(layers)
    if tail and all(reruns.visits[at - 1].removable for at in tail):
        use.tail = _removal(tail, change_of(yardstick.changes(reruns.without([at - 1 for at in tail]))))
        progress()
    _add_lens(model, reruns, yardstick, layers, use)
    if depth_use == "sublayers":
        reason = add_sublayers(reruns, yardstick, layers, progress)
        use.notes += [] if reason is None else [reason]
    scores = largest_scores(reruns.blocks, reruns.forward, first.mask)
    for layer, heads in zip(layers[1:], scores, strict=True):
        layer.largest_score = heads
    by_block = {block.module: layouts[block.name] for block in blocks}
    use.angles = _angles(reruns, by_block, first.mask)
    use.rank_correlation = _rank_correlation(layers)
    use.forwards = reruns.cost
    return use


def _removal(layers: list[int], change: Change) -> Removal:
    return Removal(layers, change.mean, change.error)


def _add_lens(model: nn.Module, reruns: Reruns, yardstick: Yardstick, layers: list[LayerData], use: DepthUse) -> None:
    """Let the end of the model (its final norm and head) read the stream after each layer.

    The end is whatever the model does after its last block call, so no norm or head has to be recognised. It is
    checked on the last stream, which must give the model's own output.
    """
    if yardstick.logits is None:
        return
    reason = _no_lens(model, reruns, yardstick)
    if reason is not None:
        use.notes.append(f"No logit lens: {reason}.")
        return
    streams = reruns.streams()
    leading: Tensor | None = None
    for layer, stream in zip(layers, streams, strict=True):
        if stream is None or streams[-1] is None or stream.shape != streams[-1].shape:
            continue
        divergence, agrees = yardstick.lens(reruns.ended_by(stream))
        layer.lens, layer.lens_agrees = divergence.mean().item(), agrees.double().mean().item()
        before = torch.zeros_like(agrees) if leading is None else leading
        layer.lens_first = (agrees & ~before).double().mean().item()
        leading = before | agrees


def _no_lens(model: nn.Module, reruns: Reruns, yardstick: Yardstick) -> str | None:
    """Say why the end of the model cannot read an earlier stream; None if it can."""
    for blank, reason in (
        (False, "the last block's stream does not give the model's output again"),
        (True, "the output depends on more than the stream after the last block"),
    ):
        try:
            again = find_logits(model, reruns.ended_by(None, blank), yardstick.labels)
        except Exception:  # whatever the model raises when its blocks do not run
            again = None
        if again is None or yardstick.logits is None or not torch.equal(again, yardstick.logits):
            return reason
    return None


def _angles(reruns: Reruns, layouts: Mapping[nn.Module, BlockLayouts], mask: Tensor | None) -> list[list[float]] | None:
    """Return the angular distance between the streams after any two layers; NaN where their shapes differ."""
    ways = [layouts[reruns.visits[0].block].entering, *(layouts[visit.block].leaving for visit in reruns.visits)]
    pairs = zip(ways, reruns.streams(), strict=True)
    streams = [None if stream is None else way.tokens(stream) for way, stream in pairs]
    size = len(streams)
    table = [[0.0 if i == j else math.nan for j in range(size)] for i in range(size)]
    for i, x in enumerate(streams):
        for j, y in enumerate(streams[:i]):
            if x is None or y is None or x.shape != y.shape:
                continue
            real = mask.to(x.device) if mask is not None and mask.shape == x.shape[:2] else None
            with full_precision(x.device):
                table[i][j] = table[j][i] = angular_distance(x, y.to(x), real).mean().item()
    return table


def _rank_correlation(layers: Sequence[LayerData]) -> float | None:
    """Return Spearman's correlation of block influence with measured removal; None with fewer than three layers."""
    pairs = [(x.influence, x.removal) for x in layers if x.influence is not None and x.removal is not None]
    if len(pairs) < 3:
        return None
    one, other = (torch.tensor(_ranks(values)) for values in zip(*pairs, strict=True))
    value = torch.corrcoef(torch.stack((one, other)))[0, 1].item()
    return value if math.isfinite(value) else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]
