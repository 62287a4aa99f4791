"""Putting a cure into timm's Vision Transformers.

Their forward passes hand nothing but x from block to block, so the list of blocks is given a class that binds a
carrier to the blocks each time a forward pass goes through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from leadline.curing.plan import Carrier, Plan, Slot, choose_layers
from leadline.errors import LeadlineError

PLACE = "_leadline_cure"  # attribute of a cured model


class BoundBlock:
    """A block with its slot in one forward pass: called as the block is, and with the block's attributes."""

    def __init__(self, block: Any, slot: Slot) -> None:
        self.block, self.slot = block, slot

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        return self.block(x, leadline=self.slot, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class CuredBlocks(nn.ModuleList):
    """A list of blocks that starts a new carrier whenever it is gone through or called.

    What it yields closes over its carrier, so that activation checkpointing recomputes with the right state.
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
        for block in self:
            x = block(x)
        return x


class CuredBlock(Block):
    """timm's Block with alpha around its attention and de-escalation on its stream."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, leadline: Slot | None = None
    ) -> Tensor:
        slot = _given(leadline)
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
    """timm's Block in a cured model whose cure leaves it out."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, leadline: Slot | None = None
    ) -> Tensor:
        return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)


class CuredAttention(Attention):
    """timm's Attention with carried scores."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, leadline: Slot | None = None
    ) -> Tensor:
        slot = _given(leadline)
        gate = None if self.gate is None else self.gate(x).sigmoid()
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        dropout = self.attn_drop.p if self.training else 0.0
        out, _ = slot.attend(
            self.q_norm(q), self.k_norm(k), v, mask=attn_mask, causal=is_causal, dropout=dropout, scale=self.scale
        )
        out = self.norm(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.proj(out if gate is None else out * gate))


def find_model(model: nn.Module) -> Any | None:
    """The one Vision Transformer of timm in ``model``, if any."""
    found = [module for module in model.modules() if isinstance(module, VisionTransformer)]
    if len(found) > 1:
        raise LeadlineError(f"{type(model).__name__} holds {len(found)} Vision Transformers; cure one at a time")
    return found[0] if found else None


def install(model: Any, plan: Plan, layers: Any) -> None:
    """Cure a timm Vision Transformer in place. What can be refused is refused before the first change."""
    blocks = list(model.blocks)
    chosen = choose_layers(layers, len(blocks))
    for block in blocks:
        for module, kind in ((block, Block), (getattr(block, "attn", None), Attention)):
            if type(module) is not kind:
                raise LeadlineError(
                    f"{type(model).__name__} is built of {type(module).__name__}; timm's {kind.__name__} can be cured"
                )
    if type(model.blocks) is not nn.Sequential:
        raise LeadlineError(f"the blocks are a {type(model.blocks).__name__}; timm's nn.Sequential can be cured")
    if plan.de_escalation == 1 and plan.de_escalation_at == "block-end" and model.global_pool.startswith("avg"):
        raise LeadlineError(
            "the model pools by the mean and de_escalation is 1: the token mean is then exactly 0 and the head sees "
            "nothing; choose a de_escalation below 1 or another de_escalation_at"
        )
    plan = replace(plan, layers=chosen, depth=len(blocks))
    swapped: list[tuple[nn.Module, type]] = []
    if plan.mixes or plan.carries or plan.de_escalation:
        for i, block in enumerate(blocks):
            _swap(block, CuredBlock if i in chosen else PassingBlock, swapped)
            if plan.carries and i in chosen:
                _swap(block.attn, CuredAttention, swapped)
        _swap(model.blocks, CuredBlocks, swapped)
        model.blocks.__dict__["plan"] = plan
    model.__dict__[PLACE] = (plan, swapped)


def remove(model: Any) -> None:
    """Take the cure out again."""
    _, swapped = model.__dict__.pop(PLACE)
    model.blocks.__dict__.pop("plan", None)
    for module, kind in swapped:
        module.__class__ = kind


def _swap(module: nn.Module, kind: type, swapped: list[tuple[nn.Module, type]]) -> None:
    swapped.append((module, type(module)))
    module.__class__ = kind


def _given(slot: Slot | None) -> Slot:
    if slot is None:
        raise LeadlineError("a block of a cured model ran by itself; call the model as a whole, or uncure it")
    return slot


def _de_escalated(site: str, x: Tensor, slot: Slot, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    plan = slot.plan
    if not plan.acts_at(site, slot.index):
        return x
    assert plan.de_escalate is not None
    if attn_mask is not None or is_causal:
        given = "is_causal" if is_causal else "attn_mask"
        raise LeadlineError(f"{given} is given; de-escalation of an image model takes the mean of all its tokens")
    return plan.de_escalate(x)
