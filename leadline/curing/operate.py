"""One call cures a model, another takes the cure out again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from leadline.curing.makes import ours
from leadline.curing.makes.huggingface import install as huggingface
from leadline.curing.plan import Plan, check_strengths
from leadline.errors import LeadlineError

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
    """Put Hopfield attention or de-escalation into a model, in place, and return it; ``uncure`` takes it out.

    model             one of ours; timm's VisionTransformer; transformers' GPT-2, LLaMA, Mistral, Mixtral, Qwen2, Qwen3,
                      Gemma, BERT, RoBERTa, XLM-RoBERTa, ELECTRA, ALBERT, ViT, DeiT, bare or with a head.
    alpha             y = alpha x + (1 - alpha) attention(x), x being the layer's own input; in [0, 1).
    alpha_prime       weight of the scores carried from the layers before; in [0, 1).
    de_escalation     tau, the share of the token mean that is taken out, in [0, 1]; causal where the model is.
    layers            the layers to cure; all unless given. Scores are carried within each run of cured layers.
    de_escalation_at  "block-end", "ffn-input" or "attention-input"; unless given, where our own model has its place
                      for it, and the end of the block in others.
    start             what the first layer does without carried scores, "zero" or "scores"; unless given, what our own
                      model does, and "zero" in others.

    At least one strength must be given. In others' models 0 does nothing and keeps the original attention function;
    in ours, what is given replaces what the model has, and 0 takes it out. A model that is refused is left untouched.
    ``save_pretrained`` writes the cure into the configuration, ``leadline.load`` reads it.

    >>> cure(AutoModelForCausalLM.from_pretrained("gpt2"), alpha=0.5, alpha_prime=0.5)
    """
    check_strengths(alpha, alpha_prime, de_escalation, de_escalation_at, start)
    _check_model(model)
    if _cured_part(model) is not None:
        raise LeadlineError(f"this {type(model).__name__} is cured already; call leadline.uncure(model) first")
    own = next((module for module in model.modules() if isinstance(module, ours.Model)), None)
    if own is not None:
        ours.install(own, alpha, alpha_prime, de_escalation, de_escalation_at, start, layers)
        return model
    plan = Plan(
        float(alpha or 0),
        float(alpha_prime or 0),
        float(de_escalation or 0),
        de_escalation_at or "block-end",
        start or "zero",
        layers=(),
        depth=0,
    )
    vit = _timm_model(model)
    if vit is not None:
        from leadline.curing.makes import timm

        timm.install(vit, plan, layers)
    else:
        huggingface.install(model, plan, layers)
    return model


def uncure(model: Module) -> Module:
    """Take a cure out, in place: the model is what it was before, bit for bit."""
    _check_model(model)
    part = _cured_part(model)
    if part is None:
        raise LeadlineError(f"this {type(model).__name__} is not cured; there is nothing to undo")
    if isinstance(part, ours.Model):
        ours.remove(part)
    elif isinstance(part.__dict__[huggingface.PLACE], huggingface.Cure):
        huggingface.remove(part)
    else:
        from leadline.curing.makes import timm

        timm.remove(part)
    return model


def strengths(model: nn.Module) -> tuple[float, float]:
    """alpha and alpha' in force in a cured model."""
    part = _cured_part(model)
    if part is None:
        raise LeadlineError(f"this {type(model).__name__} is not cured; call leadline.cure(model, ...) first")
    if isinstance(part, ours.Model):
        return part.config.strengths
    plan = _plan(part)
    return plan.alpha, plan.alpha_prime


def set_strengths(model: nn.Module, alpha: float, alpha_prime: float) -> None:
    """Change alpha and alpha' of a cured model; one that was 0 at the cure has no place in it and stays 0."""
    part: Any = _cured_part(model)
    if isinstance(part, ours.Model):
        ours.set_strengths(part, alpha, alpha_prime)
        return
    plan = _plan(part)
    plan.alpha, plan.alpha_prime = alpha, alpha_prime
    if isinstance(part.__dict__[huggingface.PLACE], huggingface.Cure):
        part.__dict__[huggingface.PLACE].record()


def _plan(part: Any) -> Plan:
    kept = part.__dict__[huggingface.PLACE]
    return kept.plan if isinstance(kept, huggingface.Cure) else kept[0]


def _cured_part(model: nn.Module) -> Any | None:
    return huggingface.cured_base(model)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise LeadlineError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()):
        raise LeadlineError(
            "the model is compiled, and its compiled code would not notice; cure it first, then compile"
        )


def _timm_model(model: nn.Module) -> Any | None:
    """The timm Vision Transformer in ``model``, unless transformers wraps it and would save it uncured."""
    homes = {type(module).__module__.partition(".")[0] for module in model.modules()}
    if "timm" not in homes or "transformers" in homes:
        return None
    from leadline.curing.makes import timm

    return timm.find_model(model)
