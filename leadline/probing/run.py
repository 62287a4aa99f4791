"""One call measures a model of any make, layer by layer, and says what follows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import leadline
from leadline.anatomy.blocks import find_blocks, prefix_tokens, unwrap
from leadline.anatomy.inputs import Batch, Mask, call_model, check_batch, count_batches, each_batch, padding_mask
from leadline.errors import LeadlineError
from leadline.probing.guard import GradientNorms, left_as_it_was
from leadline.probing.progress import Count, Progress
from leadline.probing.recorder import Recorder
from leadline.probing.trials import CANDIDATES, try_cures
from leadline.report.depth_report import DepthReport
from leadline.report.layers import Heatmap
from leadline.report.verdict import judge, with_trials

Loss = Callable[[Any], Tensor] | str | None


def probe(
    model: nn.Module,
    inputs: Batch | Iterable[Batch],
    *,
    blocks: str | Sequence[str] | None = None,
    loss: Loss = None,
    mask: Mask = None,
    attention: bool = True,
    heatmaps: bool | Sequence[int] = False,
    trials: bool = True,
    prefix: int | None = None,
    progress: Progress | None = None,
) -> DepthReport:
    """Measure what every block of ``model`` does to its tokens, and say whether depth hurts.

    The model runs in evaluation mode and uncompiled, and is left exactly as it was: weights, gradients, modes, hooks
    and random state.

    inputs     a tensor, a mapping of arguments, or an iterable of those, gone through once: figures are taken per
               sample, then averaged, in memory that does not grow with the number of batches.
    blocks     names of the blocks, or a pattern such as "encoder.layer.*"; found by themselves in models of
               transformers, timm, ``nn.TransformerEncoder`` and ours.
    loss       a function of the model's output, or "output.loss" where the model computes it from its inputs:
               then the gradient norm of every block is measured too. Layers that share weights share one gradient.
    mask       (B, n), True = a real token, or a function of the batch that gives it, for inputs that do not carry
               one as ``attention_mask``, ``mask`` or ``src_key_padding_mask``. Padding stays out of every figure.
    attention  also entropy, delta, omega and lambda_2 of the attention matrices, per head.
    heatmaps   True (first, middle and last layer) or layers, counted from 1: keep their attention on one sample.
    trials     where something collapses, try cures on the first batch and recommend what moved the number.
    prefix     how many class and register tokens stand before the patches; found by itself.
    progress   a function called as progress(what, done, total) after every block of every batch and trial.
    """
    if not isinstance(model, nn.Module):
        raise LeadlineError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    module = unwrap(model)
    found = find_blocks(module, blocks)
    prefix = prefix_tokens(module) if prefix is None else prefix
    batches = count_batches(inputs)
    count = Count(progress, "measuring", None if batches is None else batches * len(found))
    recorder = Recorder(found, attention=attention, prefix=prefix, maps=heatmaps is not False, passed=count)
    gradients = None if loss is None else _gradients(module, [block.module for block in found])
    first: tuple[Batch, Tensor | None] | None = None
    with left_as_it_was(module):
        for batch in each_batch(inputs):
            check_batch(module, batch)
            real = padding_mask(batch, mask)
            first = first or (batch, real)
            recorder.start(real)
            with recorder.attached(), torch.set_grad_enabled(loss is not None):
                output = call_model(module, batch)
            recorder.finish()
            if gradients is not None:
                norms = gradients.measure(_loss_of(output, loss))
                for tally, block in zip(recorder.layers[1:], recorder.modules, strict=True):
                    if block in norms:
                        tally.gradient.add(norms[block])
            del output
        layers = [tally.figures() for tally in recorder.layers]
        verdict = judge(layers)
        if trials and verdict.kind != "no collapse" and first is not None:
            names = [block.name for block in found]
            about_entropy = verdict.kind == "entropy collapse"
            count = Count(progress, "trying cures", (1 + len(CANDIDATES)) * (len(layers) - 1))
            before, tried = try_cures(module, names, *first, entropy=about_entropy, passed=count)
            verdict = with_trials(verdict, layers, tried, before)
    last = len(layers) - 1
    shown = {1, (last + 1) // 2, last} if isinstance(heatmaps, bool) else set(heatmaps)
    if not shown <= set(range(1, last + 1)):
        raise LeadlineError(f"heatmaps names layers {sorted(shown)}; this model's layers are 1 to {last}")
    maps = [
        Heatmap(layer, head, weights.tolist(), tokens)
        for layer, (heads, tokens) in recorder.maps.items()
        if layer in shown
        for head, weights in enumerate(heads)
    ]
    return DepthReport(type(module).__name__, _settings(module, recorder, first), layers, verdict, maps)


def _gradients(module: nn.Module, blocks: list[nn.Module]) -> GradientNorms:
    gradients = GradientNorms(blocks)
    if not gradients.weights:
        raise LeadlineError(
            "loss is given but no block has a weight that requires a gradient; unfreeze one or drop loss"
        )
    return gradients


def _loss_of(output: Any, loss: Loss) -> Tensor:
    value = loss(output) if callable(loss) else getattr(output, "loss", None)
    if isinstance(loss, str) and loss != "output.loss":
        raise LeadlineError(f"loss is {loss!r}; give a function of the model's output, or 'output.loss'")
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        given = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise LeadlineError(
            f"the loss is {given}; it must be one number that depends on the weights "
            "(with 'output.loss' the inputs must hold labels)"
        )
    return value


def _settings(module: nn.Module, recorder: Recorder, first: tuple[Batch, Tensor | None] | None) -> dict[str, Any]:
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
        "padding": first is not None and first[1] is not None,
        "parameters": sum(p.numel() for p in module.parameters()),
        "dtype": str(parameter.dtype).removeprefix("torch.") if parameter is not None else None,
        "device": str(parameter.device) if parameter is not None else None,
        "attention_seen": sum(tally.attention.entropies is not None for tally in recorder.layers),
        "versions": versions,
    }
