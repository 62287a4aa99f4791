"""Where the parts of transformers' models are."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from leadline.errors import LeadlineError


@dataclass(frozen=True)
class Family:
    """How a base model is built. ``attention`` is the module whose output joins the stream."""

    blocks: str  # path from the base model
    attention: str  # path from a block
    kernel: str  # path from a block to the module that calls the attention function
    norm: str  # "pre": attention returns its branch; "post": it adds the skip and applies the norm itself
    shared: bool = False  # a block serves as several layers
    branch_dropout: str | None = None  # option: dropout between attention and the skip


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


def find_base(model: nn.Module) -> tuple[Any, Family]:
    """The one base model in ``model`` (itself, or inside a head, an adapter or a parallel wrapper), and its family."""
    found = [m for m in model.modules() if type(m).__module__.startswith("transformers.") and _name(m) in FAMILIES]
    if not found:
        _refuse_features(model)
        raise LeadlineError(
            f"{_name(model)} cannot be cured; known are our own models, timm's VisionTransformer with its usual "
            f"blocks, and transformers' {', '.join(sorted(name.removesuffix('Model') for name in FAMILIES))}"
        )
    if len(found) > 1:
        raise LeadlineError(
            f"{_name(model)} holds {len(found)} stacks of layers ({', '.join(_name(m) for m in found)}) and "
            "cross-attention cannot be cured; cure one that stands alone"
        )
    return found[0], FAMILIES[_name(found[0])]


def block_modules(base: nn.Module, family: Family) -> list[Any]:
    """The block modules in order; where they are shared there are fewer of them than layers."""
    blocks: Any = base.get_submodule(family.blocks)
    return [layer for group in blocks for layer in group.albert_layers] if family.shared else list(blocks)


def count_layers(base: Any, family: Family) -> int:
    if family.shared:
        return base.config.num_hidden_layers * base.config.inner_group_num
    return len(block_modules(base, family))


def check_support(base: Any, family: Family, layers: tuple[int, ...], carries: bool, ffn_site: bool) -> None:
    """Refuse by name what a cure would get wrong."""
    config, name = base.config, _name(base)
    if getattr(config, "add_cross_attention", False):
        raise LeadlineError(f"{name} has cross-attention (add_cross_attention); a cure has no place for it")
    for kernel in (block.get_submodule(family.kernel) for block in block_modules(base, family)):
        if kernel.config is not config:
            raise LeadlineError(f"{name} has layers with configurations of their own; a cure needs one for all")
    kinds = getattr(config, "layer_types", None)
    different = sorted({kinds[layer] for layer in layers}) if kinds else []
    if carries and len(different) > 1:
        raise LeadlineError(
            f"{name} mixes {' and '.join(different)}, whose numbers of keys differ with a cache; choose layers of one "
            "kind, or cure with alpha_prime=0"
        )
    if carries and (config._attn_implementation or "").startswith("paged|"):
        raise LeadlineError(f"{name} runs {config._attn_implementation}; carried scores have no paged form")
    if carries and config.output_attentions:
        raise LeadlineError(
            f"the configuration of {name} has output_attentions=True; set it to False and give it in the call instead"
        )
    if ffn_site and family.branch_dropout and getattr(config, family.branch_dropout):
        raise LeadlineError(
            f"{name} has {family.branch_dropout}={getattr(config, family.branch_dropout)}, which would drop parts of "
            "a de-escalation at 'ffn-input'; set it to 0 or choose 'block-end'"
        )


def _refuse_features(model: nn.Module) -> None:
    """Name what stands in the way, where it is a feature and not only an unknown architecture."""
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None) is not None:
            raise LeadlineError(f"{_name(model)} soft-caps its scores (attn_logit_softcapping); it cannot be cured")
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            raise LeadlineError(f"{_name(model)} has attention sinks; it cannot be cured")
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            raise LeadlineError(f"{_name(model)} has cross-attention (is_encoder_decoder); it cannot be cured")


def position_of(module: nn.Module, argument: str) -> int | None:
    """The place of an argument in a module's call, None if it has no such argument."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return names.index(argument) if argument in names else None


def _name(module: nn.Module) -> str:
    return type(module).__name__
