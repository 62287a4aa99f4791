"""The probe: one call measures a model of any make, layer by layer, and returns a report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import leadline
from leadline.anatomy.blocks import Block, find_blocks, unwrap
from leadline.anatomy.calling import (
    Mask,
    call_model,
    check_batch,
    count_batches,
    evaluation_mode,
    padding_mask,
)
from leadline.anatomy.streams import count_prefix_tokens
from leadline.errors import LeadlineError
from leadline.probing.depth_figures import Choice, FirstBatch, add_depth_use, check_choice
from leadline.probing.gradients import GradientNorms, Loss, loss_of
from leadline.probing.labelled import Inputs, each_labelled, is_pair
from leadline.probing.outputs import as_initialised
from leadline.probing.recorder import Recorder
from leadline.probing.trials import CANDIDATES, try_cures
from leadline.report.depth_report import DepthReport
from leadline.report.layers import DepthUse, Heatmap, LayerData, Verdict
from leadline.report.verdict import judge, with_trials

Progress = Callable[[str, int, int | None], None]  # stage, blocks done, blocks in total if that is known


def probe(
    model: nn.Module,
    inputs: Inputs,
    *,
    blocks: str | Sequence[str] | None = None,
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
        The report.

    Raises:
        LeadlineError: If the blocks are not found, an argument or a batch does not fit, or the model fails.
    """
    if not isinstance(model, nn.Module):
        raise LeadlineError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    check_choice(depth_use)
    module = unwrap(model)
    block_list = find_blocks(module, blocks)
    prefix = count_prefix_tokens(module) if prefix is None else prefix
    batches = 1 if is_pair(inputs) else count_batches(inputs)
    count = ProgressCount(progress, "measuring", None if batches is None else batches * len(block_list))
    recorder = Recorder(block_list, attention=attention, prefix=prefix, heatmaps=heatmaps is not False, on_block=count)
    gradients = None if loss is None else GradientNorms([block.module for block in block_list])
    first: FirstBatch | None = None
    use: DepthUse | None = None
    with evaluation_mode(module):
        for batch, labels in each_labelled(module, inputs):
            check_batch(module, batch)
            real = padding_mask(batch, mask)
            first = first or FirstBatch(batch, real, labels)
            recorder.start(real)
            with recorder.attached(), torch.set_grad_enabled(loss is not None):
                output = call_model(module, batch)
            recorder.finish()
            if loss is not None and gradients is not None:
                _add_gradients(recorder, gradients.measure(loss_of(output, loss)))
            del output
        layers = [statistics.layer_data() for statistics in recorder.layers]
        assert first is not None  # or there was no batch, and no layer to return
        if depth_use is not False:
            passes = ProgressCount(progress, "leaving out blocks", None)
            use = add_depth_use(module, block_list, first, layers, depth_use, passes)
        verdict = judge(layers, use, as_initialised(module))
        if trials and verdict.kind in ("collapse", "entropy collapse"):
            verdict = _try_cures(module, block_list, first, layers, verdict, use, progress)
    settings = _settings(module, recorder, padding=first.mask is not None)
    return DepthReport(type(module).__name__, settings, layers, verdict, _heatmaps(recorder, heatmaps), use)


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
    blocks: list[Block],
    first: FirstBatch,
    layers: list[LayerData],
    verdict: Verdict,
    use: DepthUse | None,
    progress: Progress | None,
) -> Verdict:
    """Try the candidate cures on the first batch and complete the verdict with them."""
    count = ProgressCount(progress, "trying cures", (1 + len(CANDIDATES)) * (len(layers) - 1))
    names = [block.name for block in blocks]
    about_entropy = verdict.kind == "entropy collapse"
    before, trials = try_cures(
        module, names, first.inputs, first.mask, entropy=about_entropy, labels=first.labels, on_block=count
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
