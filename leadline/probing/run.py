"""The probe: one call measures a model of any make, layer by layer, and returns a report."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import leadline
from leadline.anatomy.blocks import Tower, find_towers, unwrap
from leadline.anatomy.calling import (
    Batch,
    Mask,
    call_model,
    check_batch,
    count_batches,
    evaluation_mode,
    padding_mask,
)
from leadline.anatomy.layouts import Layout, LayoutError, read_layout
from leadline.anatomy.streams import count_prefix_tokens
from leadline.anatomy.survey import Layouts, survey
from leadline.errors import LeadlineError
from leadline.probing.depth_figures import Choice, FirstBatch, add_depth_use, check_choice
from leadline.probing.gradients import GradientNorms, Loss, loss_of
from leadline.probing.labelled import Inputs, each_labelled, is_pair
from leadline.probing.outputs import as_initialised
from leadline.probing.recorder import Recorder
from leadline.probing.trials import CANDIDATES, try_cures
from leadline.report.depth_report import DepthReport
from leadline.report.layers import DepthUse, Heatmap, LayerData, Measured, Verdict
from leadline.report.verdict import judge, severity, with_trials

Progress = Callable[[str, int, int | None], None]  # stage, blocks done, blocks in total if that is known

_DECODER = re.compile(r"(^|[._])decoder")
_VISION = re.compile(r"vision|visual|image|pixel")


def probe(
    model: nn.Module,
    inputs: Inputs,
    *,
    blocks: str | Sequence[str] | None = None,
    parts: str | Sequence[str] | None = None,
    layout: str | None = None,
    loss: Loss | None = None,
    mask: Mask = None,
    attention: bool = True,
    depth_use: Choice = False,
    heatmaps: bool | Sequence[int] = False,
    trials: bool = True,
    prefix: int | None = None,
    progress: Progress | None = None,
) -> DepthReport:
    """Measure what every block of a model does to its tokens, and judge whether depth hurts.

    The model runs in evaluation mode and uncompiled. Its weights, gradients, modes, hooks and the random state are
    left as they were. Metrics are taken per sample, then averaged, in memory that does not grow with the number of
    batches.

    Args:
        model: Any ``torch.nn.Module``.
        inputs: A tensor, a mapping of arguments, an (inputs, labels) tuple, or an iterable of those, which is iterated
            over once. With labels, also as "labels" of a mapping, changes of the output are changes of the loss.
        blocks: Names of the blocks, or a pattern such as "encoder.layer.*". By default they are looked for, which
            works for models of transformers and timm, ``nn.TransformerEncoder`` and Leadline.
        parts: Names of the parts to measure, such as "encoder": the lists of blocks whose names begin with them. By
            default every list of blocks that the model runs, each of which gets its own report in ``report.parts``.
        layout: The axes of the blocks' streams, for models whose own weights do not show them: b samples, n, h and w
            tokens, d channels, as in "bnd", "nbd" or "bdhw"; "1:bnd" is the second of parallel streams.
        loss: A function of the model's output, or "output.loss" if the model computes it from its inputs. The
            gradient norm of every block is then measured too. Layers that share weights share one gradient.
        mask: (B, n), True = a real token, or a function of the batch that returns it. It is needed for inputs that do
            not carry an ``attention_mask``, ``mask`` or ``src_key_padding_mask``. Padding is left out of all metrics.
        attention: Measure entropy, delta, omega and lambda_2 of the attention matrices, per head.
        depth_use: Leave out each block on the first batch and measure what that does to the output; also the angles
            between layers and the logit lens. A number tries so many blocks; "sublayers" also leaves out attention
            and MLP alone. All blocks take about half as many forward passes as there are blocks, and some more.
        heatmaps: Keep the attention on one sample: True for the first, middle and last layer, or layers counted from 1.
        trials: If something collapses, try cures on the first batch and recommend one that helps.
        prefix: How many class and register tokens come before the patches; by default taken from the model.
        progress: Called as ``progress(stage, done, total)`` after every block of every batch and trial.

    Returns:
        The report: of the whole model, or of its worst part, with those of all parts in ``report.parts``.

    Raises:
        LeadlineError: If the blocks are not found, the tokens cannot be told for certain, an argument or a batch
            does not fit, or the model fails.
    """
    if not isinstance(model, nn.Module):
        raise LeadlineError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    check_choice(depth_use)
    module = unwrap(model)
    towers = find_towers(module, blocks)
    axes = None if layout is None else read_layout(layout)
    prefix = count_prefix_tokens(module) if prefix is None else prefix
    batches = 1 if is_pair(inputs) else count_batches(inputs)
    options: dict[str, Any] = {"attention": attention, "prefix": prefix, "heatmaps": heatmaps is not False}
    measured: list[Part] = []
    left_out: dict[str, str] = {}
    first: FirstBatch | None = None
    gradients: GradientNorms | None = None
    with evaluation_mode(module):
        for batch, labels in each_labelled(module, inputs):
            check_batch(module, batch)
            real = padding_mask(batch, mask)
            if first is None:
                first = FirstBatch(batch, real, labels)
                layouts, left_out = _layouts(module, batch, towers, parts, axes)
                running = [tower for tower in towers if tower.name in layouts]
                total = None if batches is None else batches * sum(len(tower.blocks) for tower in running)
                count = ProgressCount(progress, "measuring", total)
                measured = [
                    Part(
                        tower,
                        layouts[tower.name],
                        Recorder(tower.blocks, on_block=count, layouts=layouts[tower.name], **options),
                    )
                    for tower in running
                ]
                if loss is not None:
                    gradients = GradientNorms([block.module for part in measured for block in part.tower.blocks])
            with ExitStack() as stack, torch.set_grad_enabled(loss is not None):
                for part in measured:
                    part.recorder.start(_mask_of(part.tower.name, batch, real, mask), strict=len(towers) == 1)
                    stack.enter_context(part.recorder.attached())
                output = call_model(module, batch)
            for part in measured:
                part.recorder.finish()
            if loss is not None and gradients is not None:
                norms = gradients.measure(loss_of(output, loss))
                for part in measured:
                    _add_gradients(part.recorder, norms)
            del output
        assert first is not None  # or there was no batch, and no layer to return
        uses: dict[str, DepthUse | None] = dict.fromkeys(part.tower.name for part in measured)
        reports = {}
        for part in measured:
            layers = [statistics.layer_data() for statistics in part.recorder.layers]
            name = part.tower.name
            if depth_use is not False:
                passes = ProgressCount(progress, "leaving out blocks", None)
                uses[name] = add_depth_use(module, part.tower.blocks, first, layers, depth_use, passes, part.layouts)
            reports[name] = _report(module, part, layers, uses[name], heatmaps, left_out)
        worst = max(reports, key=lambda name: severity(reports[name].verdict, reports[name].layers))
        report = reports[worst]
        if trials and report.verdict.kind in ("collapse", "entropy collapse"):
            part = next(part for part in measured if part.tower.name == worst)
            own = first._replace(mask=_mask_of(worst, first.inputs, first.mask, mask))
            report.verdict = _try_cures(module, part, own, report.layers, report.verdict, uses[worst], progress)
    return _whole(report, worst, reports)


class Part(NamedTuple):
    """A tower of the model, the layouts of its blocks by name, and what records it."""

    tower: Tower
    layouts: Layouts
    recorder: Recorder


def _layouts(
    module: nn.Module, batch: Batch, towers: list[Tower], parts: str | Sequence[str] | None, axes: Layout | None
) -> tuple[dict[str, Layouts], dict[str, str]]:
    """Return the layouts of the towers to measure, by name, and why the others are left out.

    Raises:
        LeadlineError: If no tower can be measured, or ``parts`` names none.
    """
    names = None if parts is None else [parts] if isinstance(parts, str) else list(parts)
    for name in names or []:
        if not any(_is_part(tower.name, name) for tower in towers):
            known = ", ".join(tower.name for tower in towers)
            raise LeadlineError(f"parts names {name!r}, and the parts of {type(module).__name__} are {known}")
    surveyed = survey(module, batch, towers, axes)
    layouts: dict[str, Layouts] = {}
    left_out: dict[str, str] = {}
    for tower in towers:
        if names is not None and not any(_is_part(tower.name, name) for name in names):
            left_out[tower.name] = "not among parts="
            continue
        try:
            layouts[tower.name] = surveyed.layouts(tower)
            left_out |= surveyed.other_streams(tower)
        except LayoutError as error:
            left_out[tower.name] = str(error)
    if not layouts:
        chosen = [tower.name for tower in towers if left_out[tower.name] != "not among parts="]
        raise LeadlineError(left_out[chosen[0]])
    return layouts, left_out


def _is_part(tower: str, name: str) -> bool:
    return f"{tower}.".startswith(f"{name}.")


def _mask_of(name: str, batch: Batch, real: Tensor | None, mask: Mask) -> Tensor | None:
    """Return the padding mask of a part: decoders have their own, and that of a text is none of an image."""
    if mask is not None or not isinstance(batch, Mapping):
        return real
    if "decoder_input_ids" in batch and _DECODER.search(name):
        own = batch.get("decoder_attention_mask")
        return None if own is None else padding_mask({"attention_mask": own})
    if "input_ids" in batch and _VISION.search(name):
        return None
    return real


def _report(
    module: nn.Module,
    part: Part,
    layers: list[LayerData],
    use: DepthUse | None,
    heatmaps: bool | Sequence[int],
    left_out: dict[str, str],
) -> DepthReport:
    """Return the report of one part, without trials."""
    recorder = part.recorder
    initialised = as_initialised(module)
    settings = _settings(module, recorder, padding=recorder.padded)
    measured = Measured(
        part=part.tower.name,
        blocks=len(layers) - 1,
        layout=", ".join(dict.fromkeys(str(pair.entering) for pair in part.layouts.values())),
        attention_seen=settings["attention_seen"],
        attention_unseen=recorder.unseen,
        left_out=left_out,
    )
    heat = _heatmaps(recorder, heatmaps)
    verdict = judge(layers, use, initialised)
    report = DepthReport(type(module).__name__, settings, layers, verdict, heat, depth_use=use, measured=measured)
    return replace(report, parts=_stages(recorder, layers, report, initialised))


def _stages(
    recorder: Recorder, layers: list[LayerData], whole: DepthReport, initialised: bool | None
) -> dict[str, DepthReport]:
    """Return a report for each stage of a tower, between changes of the number of tokens or of their width."""
    if not recorder.stages or whole.measured is None:
        return {}
    starts = [1, *sorted(recorder.stages), len(layers)]
    inputs = [layers[0], *(recorder.stages[start].layer_data() for start in starts[1:-1])]
    stages: dict[str, DepthReport] = {}
    for first, start, end in zip(inputs, starts, starts[1:], strict=False):
        blocks = [replace(layer, index=i) for i, layer in enumerate(layers[start:end], 1)]
        names = [layer.name for layer in blocks]
        unseen = {name: reason for name, reason in recorder.unseen.items() if name in names}
        measured = replace(
            whole.measured,
            part=names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
            blocks=len(blocks),
            attention_seen=sum(layer.entropy is not None for layer in blocks),
            attention_unseen=unseen,
        )
        verdict = judge([first, *blocks], None, initialised)
        stages[measured.part] = replace(
            whole, layers=[first, *blocks], verdict=verdict, heatmaps=[], depth_use=None, measured=measured
        )
    return stages


def _whole(report: DepthReport, worst: str, reports: dict[str, DepthReport]) -> DepthReport:
    """Return the report of the worst part with those of all parts, if there are several, and say what it covers."""
    words = ""
    if len(reports) > 1:
        bad = severity(report.verdict, report.layers) > (0, 0.0)
        which = f"the worst is {worst}" if bad else f"none collapses; the figures are those of {worst}"
        words = f"Of {len(reports)} parts ({', '.join(reports)}) {which}."
    if report.measured is not None and report.measured.left_out:
        others = "; ".join(f"{name} ({reason})" for name, reason in report.measured.left_out.items())
        words += f"{' ' if words else f'Measured in part, {worst}. '}Left out: {others}."
    if report.parts and report.verdict.kind == "no collapse":
        stage = max(report.parts, key=lambda name: severity(report.parts[name].verdict, report.parts[name].layers))
        if report.parts[stage].verdict.kind != "no collapse":
            words += f"{' ' if words else ''}Of its {len(report.parts)} stages the worst, taken alone, is {stage}."
    whole = replace(report, parts=reports) if len(reports) > 1 else report
    if words:
        whole.verdict = replace(report.verdict, text=f"{words} {report.verdict.text}")
    return whole


class ProgressCount:
    """Counts blocks and reports each to a progress function.

    If there are more blocks than ``total`` (layers that share a block), the total is reported as unknown.

    Args:
        progress: The function to call, or None.
        stage: What is being done.
        total: Expected number of blocks, or None if unknown.
    """

    def __init__(self, progress: Progress | None, stage: str, total: int | None) -> None:
        self.progress, self.stage, self.total = progress, stage, total
        self.done = 0

    def __call__(self) -> None:
        """Count one block."""
        self.done += 1
        if self.total is not None and self.done > self.total:
            self.total = None
        if self.progress is not None:
            self.progress(self.stage, self.done, self.total)


def _add_gradients(recorder: Recorder, norms: dict[nn.Module, Tensor]) -> None:
    """Add the gradient norms of one batch to the layers whose blocks have one."""
    for statistics, block in zip(recorder.layers[1:], recorder.modules, strict=True):
        if block in norms:
            statistics.gradient.add(norms[block])


def _try_cures(
    module: nn.Module,
    part: Part,
    first: FirstBatch,
    layers: list[LayerData],
    verdict: Verdict,
    use: DepthUse | None,
    progress: Progress | None,
) -> Verdict:
    """Try the candidate cures on the first batch and complete the verdict with them."""
    count = ProgressCount(progress, "trying cures", (1 + len(CANDIDATES)) * (len(layers) - 1))
    names = [block.name for block in part.tower.blocks]
    about_entropy = verdict.kind == "entropy collapse"
    before, trials = try_cures(
        module,
        names,
        first.inputs,
        first.mask,
        entropy=about_entropy,
        labels=first.labels,
        on_block=count,
        layouts=part.layouts,
    )
    return with_trials(verdict, layers, trials, before, use)


def _heatmaps(recorder: Recorder, layers: bool | Sequence[int]) -> list[Heatmap]:
    """Return the heat maps of the chosen layers; of the first, middle and last one if ``layers`` is True."""
    last = len(recorder.layers) - 1
    chosen = {1, (last + 1) // 2, last} if isinstance(layers, bool) else set(layers)
    if not chosen <= set(range(1, last + 1)):
        raise LeadlineError(f"heatmaps names layers {sorted(chosen)}; this model's layers are 1 to {last}")
    return [
        Heatmap(layer, head, weights.tolist(), tokens)
        for layer, (heads, tokens) in recorder.heatmaps.items()
        if layer in chosen
        for head, weights in enumerate(heads)
    ]


def _settings(module: nn.Module, recorder: Recorder, padding: bool) -> dict[str, Any]:
    """Return what was measured and how, for the report."""
    parameter = next(module.parameters(), None)
    versions = {"leadline": leadline.__version__, "torch": torch.__version__}
    for library in ("transformers", "timm"):
        if library in sys.modules and type(module).__module__.startswith(library):
            versions[library] = sys.modules[library].__version__
    return {
        "samples": recorder.samples,
        "batches": recorder.batches,
        "tokens": recorder.tokens,
        "prefix_tokens": recorder.prefix,
        "padding": padding,
        "parameters": sum(p.numel() for p in module.parameters()),
        "dtype": str(parameter.dtype).removeprefix("torch.") if parameter is not None else None,
        "device": str(parameter.device) if parameter is not None else None,
        "initialised": as_initialised(module),
        "attention_seen": sum(statistics.attention.entropies is not None for statistics in recorder.layers),
        "versions": versions,
    }
