"""Put a cure into a transformers model by hooks, and take it out."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

import leadline
from leadline.curing.carrier import Plan
from leadline.curing.makes.huggingface import attention, hooks
from leadline.curing.makes.huggingface.attention import KEY
from leadline.curing.makes.huggingface.families import (
    FAMILIES,
    Family,
    block_modules,
    check_support,
    count_layers,
    position_of,
)
from leadline.curing.strengths import Strengths
from leadline.errors import LeadlineError

# The name of a fusion that transformers does not know. It makes from_pretrained stop with this text, whatever its other
# arguments are. Nothing else does: a class only warns of another model_type, and ignores auto_map and
# transformers_weights.
UNKNOWN_FUSION = "cured by Leadline, load this folder with leadline.load"


@dataclass
class HuggingFaceCure:
    """The cure of a transformers model, with what is needed to undo it.

    Attributes:
        plan: What the cure does.
        config: The model's configuration, a copy of its own.
        implementation: The attention function before the cure.
        handles: The hooks.
        swapped: Modules whose class was replaced, and the class before.
    """

    plan: Plan
    config: Any
    implementation: str | None
    handles: list[RemovableHandle] = field(default_factory=list)
    swapped: list[tuple[nn.Module, type]] = field(default_factory=list)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled cure, perhaps in a process where transformers does not know our attention yet."""
        self.__dict__.update(state)
        if self.plan.carries:
            attention.register()

    @property
    def strengths(self) -> Strengths:
        """The strengths in force."""
        return self.plan.strengths

    def set_strengths(self, alpha: float, alpha_prime: float) -> None:
        """Change alpha and alpha', in the configuration too."""
        self.plan.alpha, self.plan.alpha_prime = alpha, alpha_prime
        self.write_config()

    def remove(self) -> None:
        """Take out the hooks, and restore the classes and the configuration."""
        for handle in self.handles:
            handle.remove()
        for module, kind in self.swapped:
            module.__class__ = kind
        self.config._attn_implementation_internal = self.implementation
        forget(self.config.__dict__)

    def write_config(self) -> None:
        """Write the strengths into the configuration, unless all of them were 0 at the cure.

        The saved configuration stops plain transformers twice, which would otherwise load the model without its cure.
        It asks for a fusion that does not exist, and for an attention function that only Leadline has.
        """
        if self.plan.idle:
            return
        self.config.leadline = {
            "version": leadline.__version__,
            **asdict(self.plan.strengths),
            "attn_implementation": self.implementation,
        }
        self.config.attn_implementation = KEY
        self.config.fusion_config = {**(getattr(self.config, "fusion_config", None) or {}), UNKNOWN_FUSION: True}


def find_part(model: nn.Module) -> Any | None:
    """Return the one base model in ``model``: itself, or inside a head, an adapter or a parallel wrapper.

    Returns:
        None if there is no base model that can be cured.

    Raises:
        LeadlineError: If there are several.
    """
    modules = [module for module in model.modules() if type(module).__module__.startswith("transformers.")]
    bases = [module for module in modules if type(module).__name__ in FAMILIES]
    if len(bases) > 1:
        names = ", ".join(type(base).__name__ for base in bases)
        raise LeadlineError(
            f"{type(model).__name__} holds {len(bases)} stacks of layers ({names}) and cross-attention cannot be "
            "cured; cure one that stands alone"
        )
    return bases[0] if bases else None


def install(model: nn.Module, part: Any, strengths: Strengths) -> HuggingFaceCure:
    """Cure ``model``, whose base model is ``part``; what cannot be cured is refused before the first change."""
    family = FAMILIES[type(part).__name__]
    blocks = block_modules(part, family)
    kernel = blocks[0].get_submodule(family.kernel)
    causal = bool(getattr(kernel, "is_causal", False)) and getattr(part.config, "is_causal", None) is not False
    plan = Plan.of(strengths, count_layers(part, family), causal)
    check_support(part, family, plan)
    config = _own_config(model, part)
    cure = HuggingFaceCure(plan, config, config._attn_implementation)
    if plan.idle:
        return cure
    cure.handles += _add_hooks(part, family, blocks, plan)
    if plan.mixes and family.shared:
        from leadline.curing.makes.huggingface.albert import CuredAlbertAttention

        for block in blocks:
            module = block.get_submodule(family.attention)
            cure.swapped.append((module, type(module)))
            module.__class__ = CuredAlbertAttention
    if plan.carries:
        attention.register()
        config._attn_implementation_internal = KEY
    cure.write_config()
    return cure


def forget(config: dict[str, Any]) -> None:
    """Take the entries of a cure out of a configuration."""
    if KEY not in config:
        return
    for name in (KEY, "attn_implementation"):
        config.pop(name, None)
    fusions = {name: value for name, value in config.pop("fusion_config", {}).items() if name != UNKNOWN_FUSION}
    if fusions:
        config["fusion_config"] = fusions


def _add_hooks(base: Any, family: Family, blocks: list[Any], plan: Plan) -> list[RemovableHandle]:
    """Register all hooks. Those after a module run before the hooks of others, which then see the cured output."""
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
    """Give the model a copy of its configuration, since one object may serve several models; return the copy."""
    old = base.config
    new = copy.deepcopy(old)
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new
    return new
