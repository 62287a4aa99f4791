"""``cure`` and ``uncure``: put a cure into a model, take it out, change its strengths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from leadline.curing.makes.registry import Cure, find_make
from leadline.curing.strengths import Strengths
from leadline.errors import LeadlineError

PLACE = "_leadline_cure"  # attribute that holds the ``Cure``, of the module that ``find_make`` returns

Module = TypeVar("Module", bound=nn.Module)


def cure(
    model: Module,
    *,
    alpha: float | None = None,
    alpha_prime: float | None = None,
    de_escalation: float | None = None,
    layers: Iterable[int] | None = None,
    de_escalation_at: str | None = None,
    start: str | None = None,
) -> Module:
    """Put Hopfield attention, de-escalation or both into a model, in place.

    At least one strength must be given: alpha, alpha_prime or de_escalation. In models of other libraries, 0 does
    nothing and keeps the original attention function. In ours, an argument that is given replaces what the model has,
    and 0 takes it out. A model that cannot be cured is left untouched.

    ``uncure`` takes the cure out. ``save_pretrained`` of transformers writes it into the configuration, and
    ``leadline.load`` reads it back.

    Args:
        model: One of ours; timm's VisionTransformer; transformers' GPT-2, LLaMA, Mistral, Mixtral, Qwen2, Qwen3, Gemma,
            BERT, RoBERTa, XLM-RoBERTa, ELECTRA, ALBERT, ViT or DeiT, with or without a head.
        alpha: Weight of the layer's own input x, in [0, 1): y = alpha x + (1 - alpha) attention(x).
        alpha_prime: Weight of the scores carried from the layers before, in [0, 1).
        de_escalation: tau, the part of the token mean that is subtracted, in [0, 1]. In a causal model the mean is that
            of the tokens before.
        layers: The layers to cure, from 0; negative numbers count from the end. All unless given. Scores are carried
            within each run of consecutive cured layers. Not for our own models.
        de_escalation_at: "block-end", "ffn-input" or "attention-input". Unless given, our own models use the place in
            their configuration, and others the end of the block.
        start: What the first layer does without carried scores, "zero" or "scores". Unless given, our own models use
            their configuration, and others "zero".

    Returns:
        The same model.

    Raises:
        LeadlineError: If an argument is wrong, or the model cannot be cured, is cured already or is compiled.

    Example:
        >>> cure(AutoModelForCausalLM.from_pretrained("gpt2"), alpha=0.5, alpha_prime=0.5)
    """
    strengths = Strengths(
        alpha=alpha,
        alpha_prime=alpha_prime,
        de_escalation=de_escalation,
        de_escalation_at=de_escalation_at,
        start=start,
        layers=layers,
    )
    return install_cure(model, strengths)


def install_cure(model: Module, strengths: Strengths) -> Module:
    """Cure a model in place with arguments that are checked already; see ``cure``."""
    _check_model(model)
    if _cured_part(model) is not None:
        raise LeadlineError(f"this {type(model).__name__} is cured already; call leadline.uncure(model) first")
    make, part = find_make(model)
    part.__dict__[PLACE] = make.install(model, part, strengths)
    return model


def uncure(model: Module) -> Module:
    """Take the cure out of a model, in place: the model is what it was before, bit for bit.

    Returns:
        The same model.

    Raises:
        LeadlineError: If the model is not cured or is compiled.
    """
    _check_model(model)
    part = _cured_part(model)
    if part is None:
        raise LeadlineError(f"this {type(model).__name__} is not cured; there is nothing to undo")
    part.__dict__.pop(PLACE).remove()
    return model


def strengths(model: nn.Module) -> Strengths:
    """Return the strengths in force in a cured model."""
    return _cure_of(model).strengths


def set_strengths(model: nn.Module, alpha: float, alpha_prime: float) -> None:
    """Change alpha and alpha' of a cured model.

    A strength that was 0 when a model of another library was cured has no place in it, and stays without effect.
    """
    _cure_of(model).set_strengths(alpha, alpha_prime)


def _cure_of(model: nn.Module) -> Cure:
    part = _cured_part(model)
    if part is None:
        raise LeadlineError(f"this {type(model).__name__} is not cured; call leadline.cure(model, ...) first")
    return part.__dict__[PLACE]


def _cured_part(model: nn.Module) -> Any | None:
    """The module in ``model`` that carries a cure, if any."""
    return next((module for module in model.modules() if PLACE in module.__dict__), None)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise LeadlineError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()):
        raise LeadlineError(
            "the model is compiled, and its compiled code would not notice; cure it first, then compile"
        )
