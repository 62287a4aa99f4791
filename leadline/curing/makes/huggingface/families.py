"""The architectures of transformers that can be cured: their parts, and what a cure refuses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from leadline.curing.carrier import Plan
from leadline.errors import LeadlineError


@dataclass(frozen=True)
class Family:
    """The structure of a base model.

    Attributes:
        blocks: Path from the base model to the list of blocks.
        attention: Path from a block to the module whose output joins the stream.
        kernel: Path from a block to the module that calls the attention function.
        norm: "pre": attention returns its branch; "post": it adds the skip and applies the norm itself.
        shared: Whether a block serves as several layers.
        branch_dropout: The option of the configuration for dropout between attention and the skip, if it has one.
    """

    blocks: str
    attention: str
    kernel: str
    norm: str
    shared: bool = False
    branch_dropout: str | None = None


_GPT2 = Family("h", "attn", "attn", "pre")
_LLAMA = Family("layers", "self_attn", "self_attn", "pre")
_BERT = Family("encoder.layer", "attention", "attention.self", "post")
_ALBERT = Family("encoder.albert_layer_groups", "attention", "attention", "post", shared=True)
_VIT = Family("layers", "attention", "attention", "pre", branch_dropout="hidden_dropout_prob")

FAMILIES: dict[str, Family] = {
    "GPT2Model": _GPT2,
    "LlamaModel": _LLAMA,
    "MistralModel": _LLAMA,
    "MixtralModel": _LLAMA,
    "Qwen2Model": _LLAMA,
    "Qwen3Model": _LLAMA,
    "GemmaModel": _LLAMA,
    "BertModel": _BERT,
    "RobertaModel": _BERT,
    "XLMRobertaModel": _BERT,
    "ElectraModel": _BERT,
    "AlbertModel": _ALBERT,
    "ViTModel": _VIT,
    "DeiTModel": _VIT,
}


def block_modules(base: nn.Module, family: Family) -> list[Any]:
    """List the block modules in order; if they are shared, there are fewer of them than layers."""
    blocks: Any = base.get_submodule(family.blocks)
    return [layer for group in blocks for layer in group.albert_layers] if family.shared else list(blocks)


def count_layers(base: Any, family: Family) -> int:
    """Count the layers, each use of a shared block as one."""
    if family.shared:
        return base.config.num_hidden_layers * base.config.inner_group_num
    return len(block_modules(base, family))


def check_support(base: Any, family: Family, plan: Plan) -> None:
    """Refuse, by name, each feature of the model that this cure would compute wrongly."""
    config, name = base.config, _name(base)
    if getattr(config, "add_cross_attention", False):
        raise LeadlineError(f"{name} has cross-attention (add_cross_attention); a cure has no place for it")
    for kernel in (block.get_submodule(family.kernel) for block in block_modules(base, family)):
        if kernel.config is not config:
            raise LeadlineError(f"{name} has layers with configurations of their own; a cure needs one for all")
    kinds = getattr(config, "layer_types", None)
    different = sorted({kinds[layer] for layer in plan.layers}) if kinds else []
    if plan.carries and len(different) > 1:
        raise LeadlineError(
            f"{name} mixes {' and '.join(different)}, whose numbers of keys differ with a cache; choose layers of one "
            "kind, or cure with alpha_prime=0"
        )
    if plan.carries and (config._attn_implementation or "").startswith("paged|"):
        raise LeadlineError(f"{name} runs {config._attn_implementation}; carried scores have no paged form")
    if plan.carries and config.output_attentions:
        raise LeadlineError(
            f"the configuration of {name} has output_attentions=True; set it to False and give it in the call instead"
        )
    at_ffn = plan.de_escalation > 0 and plan.de_escalation_at == "ffn-input"
    if at_ffn and family.branch_dropout and getattr(config, family.branch_dropout):
        raise LeadlineError(
            f"{name} has {family.branch_dropout}={getattr(config, family.branch_dropout)}, which would drop parts of "
            "a de-escalation at 'ffn-input'; set it to 0 or choose 'block-end'"
        )


def refuse_features(model: nn.Module) -> None:
    """Raise an error for a feature that cannot be cured, which says more than that the architecture is unknown."""
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None) is not None:
            raise LeadlineError(f"{_name(model)} soft-caps its scores (attn_logit_softcapping); it cannot be cured")
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            raise LeadlineError(f"{_name(model)} has attention sinks; it cannot be cured")
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            raise LeadlineError(f"{_name(model)} has cross-attention (is_encoder_decoder); it cannot be cured")


def position_of(module: nn.Module, argument: str) -> int | None:
    """Return the position of an argument in a call of the module; None if it has no such argument."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return names.index(argument) if argument in names else None


def _name(module: nn.Module) -> str:
    return type(module).__name__
