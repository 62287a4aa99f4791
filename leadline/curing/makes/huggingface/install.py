"""Putting a cure into a transformers model, and taking it out."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

import leadline
from leadline.curing.makes.huggingface import attention, hooks
from leadline.curing.makes.huggingface.families import (
    Family,
    block_modules,
    check_support,
    count_layers,
    find_base,
    position_of,
)
from leadline.curing.plan import KEY, Plan, choose_layers

PLACE = "_leadline_cure"  # attribute of a cured base model

# A fusion that transformers does not know: its from_pretrained stops there, whatever else it is told, with this text.
# Nothing else would: a class only warns of a foreign model_type, passes over auto_map, drops transformers_weights.
UNKNOWN_FUSION = "cured by Leadline, load this folder with leadline.load"


@dataclass
class Cure:
    """What was done, kept with the base model so that it can be undone."""

    plan: Plan
    handles: list[RemovableHandle]
    swapped: list[tuple[nn.Module, type]]
    config: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A cured model that was pickled may wake up in a process where transformers does not know our attention."""
        self.__dict__.update(state)
        if self.plan.carries:
            attention.register()

    def record(self) -> None:
        """Write the strengths into the configuration.

        The saved configuration stops plain transformers twice, instead of loading the model without its cure: it
        asks for a fusion that does not exist, and for an attention function that only this package brings.
        """
        plan = self.plan
        self.config.leadline = {
            "version": leadline.__version__,
            **plan.describe(),
            "attn_implementation": plan.implementation,
        }
        self.config.attn_implementation = KEY
        self.config.fusion_config = {**(getattr(self.config, "fusion_config", None) or {}), UNKNOWN_FUSION: True}


def cured_base(model: nn.Module) -> Any | None:
    """The base model in ``model`` that carries a cure, if any."""
    return next((module for module in model.modules() if PLACE in module.__dict__), None)


def install(model: nn.Module, plan: Plan, layers: Any) -> None:
    """Cure ``model`` in place. Everything that can be refused is refused before the first change."""
    base, family = find_base(model)
    depth = count_layers(base, family)
    chosen = choose_layers(layers, depth)
    blocks = block_modules(base, family)
    at_ffn = plan.de_escalation > 0 and plan.de_escalation_at == "ffn-input"
    check_support(base, family, chosen, plan.carries, at_ffn)
    kernel = blocks[0].get_submodule(family.kernel)
    plan = replace(
        plan,
        layers=chosen,
        depth=depth,
        causal=bool(getattr(kernel, "is_causal", False)) and getattr(base.config, "is_causal", None) is not False,
        implementation=base.config._attn_implementation,
    )
    config = _own_config(model, base)
    handles: list[RemovableHandle] = []
    swapped: list[tuple[nn.Module, type]] = []
    if plan.mixes or plan.carries or plan.de_escalation:
        handles += _hang(base, family, blocks, plan)
    if plan.mixes and family.shared:
        from leadline.curing.makes.huggingface.albert import CuredAlbertAttention

        for block in blocks:
            module = block.get_submodule(family.attention)
            swapped.append((module, type(module)))
            module.__class__ = CuredAlbertAttention
    if plan.carries:
        attention.register()
        config._attn_implementation_internal = KEY
    cure = Cure(plan, handles, swapped, config)
    base.__dict__[PLACE] = cure
    if handles:
        cure.record()


def remove(base: Any) -> None:
    """Take the cure out again."""
    cure: Cure = base.__dict__.pop(PLACE)
    for handle in cure.handles:
        handle.remove()
    for module, kind in cure.swapped:
        module.__class__ = kind
    cure.config._attn_implementation_internal = cure.plan.implementation
    forget(cure.config.__dict__)


def forget(config: dict[str, Any]) -> None:
    """Take the entries of a cure out of a configuration."""
    if KEY not in config:
        return
    for name in (KEY, "attn_implementation"):
        config.pop(name, None)
    fusions = {name: value for name, value in config.pop("fusion_config", {}).items() if name != UNKNOWN_FUSION}
    if fusions:
        config["fusion_config"] = fusions


def _hang(base: Any, family: Family, blocks: list[Any], plan: Plan) -> list[RemovableHandle]:
    """All the hooks. Those after a module come before others, which then see the cured output."""
    places = {name: position_of(base, name) for name in ("attention_mask", "past_key_values", "position_ids")}
    cache_at = position_of(blocks[0], "past_key_values")
    start = partial(hooks.begin, plan, places, family.blocks)
    handles = [base.register_forward_pre_hook(start, with_kwargs=True)]
    for i, block in enumerate(blocks):
        index = None if family.shared else i
        enter = partial(hooks.enter_block, plan, index, cache_at, family.norm)
        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        if index is not None and index not in plan.layers:
            continue
        module = block.get_submodule(family.attention)
        attention_cache_at = position_of(module, "past_key_values")
        at = plan.de_escalation_at if plan.de_escalation else None
        if at == "ffn-input" or (plan.mixes and family.norm == "pre"):
            after = partial(hooks.leave_attention, plan, attention_cache_at, family.norm)
            handles.append(module.register_forward_hook(after, with_kwargs=True, prepend=True))
        if plan.mixes and family.norm == "post" and not family.shared:
            handles.append(module.output.register_forward_pre_hook(partial(hooks.scale_skip, plan)))
            branch = partial(hooks.scale_branch, plan)
            handles.append(module.output.dropout.register_forward_hook(branch, prepend=True))
        if at == "block-end":
            leave = partial(hooks.leave_block, plan, cache_at)
            handles.append(block.register_forward_hook(leave, with_kwargs=True, prepend=True))
    return handles


def _own_config(model: nn.Module, base: Any) -> Any:
    """A configuration of the model's own: one object may serve several models, and the others stay as they are."""
    old = base.config
    new = copy.deepcopy(old)
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new
    return new
