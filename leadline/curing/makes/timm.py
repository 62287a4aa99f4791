"""The cure of timm's Vision Transformers: blocks and their list get classes that carry state.

A forward pass of timm passes nothing but x from block to block. The list of blocks therefore gets a class that binds a
new carrier to the blocks each time a forward pass iterates over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from leadline.curing.carrier import Carrier, Plan, Slot
from leadline.curing.strengths import Strengths
from leadline.errors import LeadlineError


class BoundBlock:
    """A block with its slot in one forward pass; it has the call and the attributes of the block."""

    def __init__(self, block: Any, slot: Slot) -> None:
        self.block, self.slot = block, slot

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        """x (B, N, d) -> (B, N, d)."""
        return self.block(x, leadline=self.slot, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class CuredBlocks(nn.ModuleList):
    """A list of blocks that makes a new carrier whenever it is iterated over or called.

    The blocks that it yields hold their carrier, so that activation checkpointing recomputes with the right state.
    """

    plan: Plan

    def __iter__(self) -> Iterator[Any]:
        carrier = Carrier(self.plan)
        return iter([BoundBlock(block, Slot(carrier, i)) for i, block in enumerate(self._modules.values())])

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        part = CuredBlocks(list(self._modules.values())[index])
        part.plan = self.plan
        return part

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, d) -> (B, N, d), through all blocks."""
        for block in self:
            x = block(x)
        return x


class CuredBlock(Block):
    """timm's Block with alpha around its attention and de-escalation on its stream."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, leadline: Slot | None = None
    ) -> Tensor:
        """x (B, N, d) -> (B, N, d); ``leadline`` is the slot of the block."""
        slot = _required(leadline)
        plan = slot.plan
        x = _de_escalated("attention-input", x, slot, attn_mask, is_causal)
        inside = self.norm1(x)
        carried = {"leadline": slot} if isinstance(self.attn, CuredAttention) else {}
        y = self.attn(inside, attn_mask=attn_mask, is_causal=is_causal, **carried)
        if plan.mixes:
            y = plan.alpha * inside + (1 - plan.alpha) * y  # HOP 53
        x = x + self.drop_path1(self.ls1(y))
        x = _de_escalated("ffn-input", x, slot, attn_mask, is_causal)
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return _de_escalated("block-end", x, slot, attn_mask, is_causal)


class PassingBlock(Block):
    """timm's Block in a cured model, where this block is not cured."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, leadline: Slot | None = None
    ) -> Tensor:
        """x (B, N, d) -> (B, N, d); the slot is not used."""
        return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)


class CuredAttention(Attention):
    """timm's Attention with carried scores."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, leadline: Slot | None = None
    ) -> Tensor:
        """x (B, N, d) -> (B, N, d); ``leadline`` is the slot of the block."""
        slot = _required(leadline)
        gate = None if self.gate is None else self.gate(x).sigmoid()
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        dropout = self.attn_drop.p if self.training else 0.0
        out, _ = slot.attend(
            self.q_norm(q), self.k_norm(k), v, mask=attn_mask, causal=is_causal, dropout=dropout, scale=self.scale
        )
        out = self.norm(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.proj(out if gate is None else out * gate))


@dataclass
class TimmCure:
    """The cure of a timm model, with what is needed to undo it.

    Attributes:
        plan: What the cure does.
        blocks: The list of blocks.
        swapped: Modules whose class was replaced, and the class before.
    """

    plan: Plan
    blocks: nn.Module
    swapped: list[tuple[nn.Module, type]] = field(default_factory=list)

    @property
    def strengths(self) -> Strengths:
        """The strengths in force."""
        return self.plan.strengths

    def set_strengths(self, alpha: float, alpha_prime: float) -> None:
        """Change alpha and alpha'."""
        self.plan.alpha, self.plan.alpha_prime = alpha, alpha_prime

    def remove(self) -> None:
        """Restore the classes."""
        self.blocks.__dict__.pop("plan", None)
        for module, kind in self.swapped:
            module.__class__ = kind


def find_part(model: nn.Module) -> VisionTransformer | None:
    """Return the one Vision Transformer of timm in ``model``.

    Returns:
        None if there is none, or a model of transformers wraps it, which would save it without its cure.

    Raises:
        LeadlineError: If there are several.
    """
    if any(type(module).__module__.partition(".")[0] == "transformers" for module in model.modules()):
        return None
    parts = [module for module in model.modules() if isinstance(module, VisionTransformer)]
    if len(parts) > 1:
        raise LeadlineError(f"{type(model).__name__} holds {len(parts)} Vision Transformers; cure one at a time")
    return parts[0] if parts else None


def install(model: nn.Module, part: Any, strengths: Strengths) -> TimmCure:
    """Cure a Vision Transformer in place; what cannot be cured is refused before the first change."""
    blocks = list(part.blocks)
    plan = Plan.of(strengths, len(blocks))
    _check_support(part, plan)
    cure = TimmCure(plan, part.blocks)
    if plan.idle:
        return cure
    for i, block in enumerate(blocks):
        _swap(block, CuredBlock if i in plan.layers else PassingBlock, cure.swapped)
        if plan.carries and i in plan.layers:
            _swap(block.attn, CuredAttention, cure.swapped)
    _swap(part.blocks, CuredBlocks, cure.swapped)
    part.blocks.__dict__["plan"] = plan
    return cure


def _check_support(part: Any, plan: Plan) -> None:
    """Refuse a model that is built of other classes, or whose head would see nothing."""
    name = type(part).__name__
    for block in part.blocks:
        for module, kind in ((block, Block), (getattr(block, "attn", None), Attention)):
            if type(module) is not kind:
                raise LeadlineError(f"{name} is built of {type(module).__name__}; timm's {kind.__name__} can be cured")
    if type(part.blocks) is not nn.Sequential:
        raise LeadlineError(f"the blocks are a {type(part.blocks).__name__}; timm's nn.Sequential can be cured")
    if plan.de_escalation == 1 and plan.de_escalation_at == "block-end" and part.global_pool.startswith("avg"):
        raise LeadlineError(
            "the model pools by the mean and de_escalation is 1: the token mean is then exactly 0 and the head sees "
            "nothing; choose a de_escalation below 1 or another de_escalation_at"
        )


def _swap(module: nn.Module, kind: type, swapped: list[tuple[nn.Module, type]]) -> None:
    """Replace the class of a module, and add the module and its class before to ``swapped``."""
    swapped.append((module, type(module)))
    module.__class__ = kind


def _required(slot: Slot | None) -> Slot:
    """The slot, which is missing if a block runs outside of its model."""
    if slot is None:
        raise LeadlineError("a block of a cured model ran by itself; call the model as a whole, or uncure it")
    return slot


def _de_escalated(site: str, x: Tensor, slot: Slot, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """TSE 21 on the stream x (B, N, d), if this cure acts at ``site``."""
    plan = slot.plan
    if not plan.acts_at(site, slot.index):
        return x
    assert plan.de_escalate is not None
    if attn_mask is not None or is_causal:
        argument = "is_causal" if is_causal else "attn_mask"
        raise LeadlineError(f"{argument} is given; de-escalation of an image model takes the mean of all its tokens")
    return plan.de_escalate(x)
