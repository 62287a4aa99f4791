"""The distance between two outputs of a model: by the loss, the predicted distribution, or the direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.errors import LeadlineError
from leadline.metrics import block_influence
from leadline.models import Model
from leadline.models.decoder import Decoder
from leadline.models.vit import ViT

IGNORED = -100  # the label of a token that has none, as in torch and transformers
_CHUNK = 2**26  # logits in float32 at a time
_AGREE = 1e-2  # relative: how near a loss computed here must come to the model's own


@dataclass
class Yardstick:
    """Compares outputs with the output of the whole model, sample by sample.

    The first of these that is there: the cross-entropy with the labels; the KL divergence from the whole model's
    distribution over classes or tokens, mean over real tokens, in nats; one minus the cosine of the last hidden state.

    Args:
        model: The model, which says what a plain tensor means.
        whole: Its output on the batch.
        labels: Classes (B,), tokens (B, n) with -100 where there is none, or None.
        mask: (B, n), True = a real token; None: all are.
    """

    model: nn.Module
    whole: Any
    labels: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        self.logits = find_logits(self.model, self.whole, self.labels)
        self.shift = False
        self.unit = "cosine" if self.logits is None else "kl"
        if self.labels is not None:
            if self.logits is None:
                raise LeadlineError(
                    f"labels are given and the output of {type(self.model).__name__} has no logits; leave them out"
                )
            self.unit, self.shift = "loss", self._shifted(self.logits, self.labels)
        if self.unit == "cosine" and find_hidden(self.whole) is None:
            raise LeadlineError(
                f"the output of {type(self.model).__name__} has neither logits nor a hidden state to compare"
            )
        self.reference = self._losses(self.whole) if self.unit == "loss" else None  # (B,)

    def changes(self, output: Any) -> Tensor:
        """By how much an output is worse than, or away from, the whole model's: (B,), float64 on the CPU."""
        if self.unit == "loss":
            assert self.reference is not None
            return self._losses(output) - self.reference
        if self.unit == "kl":
            assert self.logits is not None
            other = find_logits(self.model, output, self.labels)
            assert other is not None
            values = _chunked(_divergence, self.logits, other)
            return _mean(values, self._real(values))
        ours, theirs = find_hidden(self.whole), find_hidden(output)
        assert ours is not None
        assert theirs is not None
        ours, theirs = (
            x.double().to(ours.device).reshape(len(x), -1, x.shape[-1]) for x in (ours, theirs)
        )  # (B, n, d)
        return block_influence(ours, theirs, self._real(ours[..., 0])).cpu()

    def lens(self, output: Any) -> tuple[Tensor, Tensor]:
        """Compare predictions with the whole model's: KL(whole || output) and whether the first choices agree.

        Returns:
            The divergence of each sample (B,), and the agreement of all real predictions (k,), both on the CPU.
        """
        assert self.logits is not None
        other = find_logits(self.model, output, self.labels)
        assert other is not None
        values = _chunked(_divergence, self.logits, other)
        agrees = (other.argmax(-1).to(self.logits.device) == self.logits.argmax(-1)).cpu().reshape(values.shape)
        real = self._real(values)
        return _mean(values, real), agrees.flatten() if real is None else agrees[real.cpu()]

    def _real(self, values: Tensor) -> Tensor | None:
        """Which of the values (B, n) are of real tokens."""
        if self.mask is None or self.mask.shape != values.shape:
            return None
        return self.mask.to(values.device)

    def _losses(self, output: Any) -> Tensor:
        """Cross-entropy of each sample, (B,)."""
        logits = find_logits(self.model, output, self.labels)
        assert logits is not None
        assert self.labels is not None
        return _cross_entropy(logits, self.labels, self.shift)

    def _shifted(self, logits: Tensor, labels: Tensor) -> bool:
        """Return whether the label of a token stands one place further on, as in the decoders of transformers.

        Where the model computes a loss itself, the form that agrees with it is taken; else labels belong to the token
        at their own place.
        """
        if labels.shape != logits.shape[:-1] or labels.is_floating_point():
            raise LeadlineError(
                f"the labels are {labels.dtype} {tuple(labels.shape)} and the logits {tuple(logits.shape)}; "
                f"they must be whole numbers of shape {tuple(logits.shape[:-1])}"
            )
        own = self.whole.get("loss") if isinstance(self.whole, Mapping) else None
        if not isinstance(own, Tensor):
            return False
        forms = [False, True] if logits.ndim == 3 else [False]
        sums = {shift: _cross_entropy(logits, labels, shift, pooled=True) for shift in forms}
        for shift, value in sums.items():
            if abs(value.item() - own.item()) <= _AGREE * max(abs(own.item()), 1e-6):
                return shift
        values = ", ".join(f"{value.item():.4g}" for value in sums.values())
        raise LeadlineError(
            f"the model's own loss is {own.item():.4g} and the cross-entropy of its logits {values}; "
            "leave the labels out to compare output distributions instead"
        )


def make_yardstick(
    model: nn.Module, whole: Any, labels: Tensor | None, mask: Tensor | None
) -> tuple[Yardstick | None, str | None]:
    """Return the best yardstick that the output allows, and why it is not a better one, if it is not.

    Args:
        model: The model.
        whole: Its output on the batch.
        labels: Classes (B,), tokens (B, n), or None.
        mask: (B, n), True = a real token, or None.
    """
    try:
        return Yardstick(model, whole, labels, mask), None
    except LeadlineError as error:
        reason = str(error)
    if labels is None:
        return None, reason
    yardstick, other = make_yardstick(model, whole, None, mask)
    return yardstick, reason if other is None else other


def as_initialised(model: nn.Module) -> bool | None:
    """Return whether the weights look as initialised: the weights and biases of all norms are constant.

    Any training moves them. None for a model without such weights.
    """
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    weights = [weight for norm in norms for weight in norm.parameters(recurse=False)]
    if not weights:
        return None
    return all(bool((weight == weight.flatten()[0]).all()) for weight in weights)


def find_logits(model: nn.Module, output: Any, labels: Tensor | None = None) -> Tensor | None:
    """Return the predictions, (B, classes) or (B, n, tokens); None where the output is a hidden state or unknown.

    A plain tensor is taken for logits where the model is known to give them, or where labels fit its shape.
    """
    if isinstance(output, Mapping):
        return next((output[name] for name in ("logits", "prediction_logits") if _is_tensor(output.get(name))), None)
    if not isinstance(output, Tensor):
        return None
    if isinstance(model, Model):
        return output if isinstance(model, (Decoder, ViT)) else None
    if labels is not None and labels.shape == output.shape[:-1] and int(labels.max()) < output.shape[-1]:
        return output
    classes = getattr(model, "num_classes", None)  # timm
    return output if isinstance(classes, int) and classes > 0 and output.shape[-1] == classes else None


def find_hidden(output: Any) -> Tensor | None:
    """The last hidden state, (B, ..., d): by its name, else the first floating tensor of the output."""
    if isinstance(output, Mapping):
        named = output.get("last_hidden_state")
        return named if isinstance(named, Tensor) else find_hidden(tuple(output.values()))
    values = output if isinstance(output, (tuple, list)) else (output,)
    return next((value for value in values if _is_tensor(value)), None)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2


def _cross_entropy(logits: Tensor, labels: Tensor, shift: bool, pooled: bool = False) -> Tensor:
    """Mean over the tokens of each sample that have a label, (B,), or over all of them, (), in float64 on the CPU."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.to(logits.device)
    if logits.ndim == 2:
        logits, labels = logits[:, None], labels[:, None]
    values = _chunked(_negative_log_likelihood, logits, labels)
    counted = labels.cpu() != IGNORED
    return values[counted].mean() if pooled else _mean(values, counted)


def _negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")


def _divergence(whole: Tensor, other: Tensor) -> Tensor:
    """KL(whole || other) of rows of logits (rows, classes), in nats."""
    log_p, log_q = (F.log_softmax(part.float(), dim=-1) for part in (whole, other.to(whole.device)))
    return (log_p.exp() * (log_p - log_q)).nan_to_num(nan=torch.nan, posinf=torch.inf).sum(-1)


def _chunked(function: Any, first: Tensor, second: Tensor) -> Tensor:
    """``function`` over rows of logits (B, ..., classes) and their partner, a bounded number of rows at a time: (B, n),
    float64 on the CPU."""
    samples = len(first)
    first = first.flatten(0, -2)  # (rows, classes)
    second = second.flatten(0, -2) if second.ndim > 1 and second.shape[-1] == first.shape[-1] else second.flatten()
    rows = max(1, _CHUNK // first.shape[-1])
    parts = [function(*pair) for pair in zip(first.split(rows), second.split(rows), strict=True)]
    return torch.cat(parts).double().cpu().view(samples, -1)


def _mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Mean over the real ones of values (B, n): (B,)."""
    values = values.double().cpu()
    if real is None:
        return values.mean(-1)
    real = real.cpu()
    return values.where(real, torch.zeros(())).sum(-1) / real.sum(-1)
