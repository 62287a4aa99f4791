"""The hooks of a cured transformers model, in the order in which a forward pass runs them.

Every hook is a function of this module with the plan bound to it, so that a cured model can be copied and pickled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leadline.curing.carrier import Carrier, Plan, Slot, reentrant_error
from leadline.curing.makes.huggingface.attention import KEY
from leadline.curing.makes.huggingface.sums import check_cache, sums_of
from leadline.errors import LeadlineError

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def begin(
    plan: Plan, places: dict[str, int | None], blocks: str, base: Any, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Before the base model: put a new carrier for this forward pass into the keyword arguments.

    Args:
        plan: What the cure does.
        places: Positions of the arguments that are read here, in a call of the base model.
        blocks: Path from the base model to its blocks.
        base: The base model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if plan.carries and base.config._attn_implementation != KEY:
        raise LeadlineError(
            f"the attention function of this cured model was changed to {base.config._attn_implementation!r}, which "
            "carries no scores; uncure the model, change it, and cure the model again"
        )
    if plan.carries and base.training:
        _check_checkpointing(base.get_submodule(blocks))
    real = None
    if plan.de_escalate is not None:
        values = {name: _argument(name, place, args, kwargs) for name, place in places.items()}
        if kwargs.get("is_causal") not in (None, plan.causal):
            raise LeadlineError(f"is_causal is {kwargs['is_causal']}; the model was cured with {plan.causal}")
        real = _real_tokens(values["attention_mask"])
        if not torch.compiler.is_compiling():
            if values["past_key_values"] is not None:
                check_cache(values["past_key_values"], plan.causal)
            _check_packing(**values)
    return args, {**kwargs, KEY: Carrier(plan, real, bool(kwargs.get("output_attentions")))}


def enter_block(
    plan: Plan, index: int | None, cache_at: int | None, norm: str, block: Any, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Before a block: replace the carrier by the block's slot, and de-escalate the input of attention.

    Args:
        plan: What the cure does.
        index: Number of the layer; None: a shared block, whose calls are counted.
        cache_at: Position of the cache in a call of the block.
        norm: Whether norms are "pre" or "post", see ``Family``.
        block: The block.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    carrier: Carrier | None = kwargs.get(KEY)
    if carrier is None:
        raise LeadlineError(
            f"{type(block).__name__} of a cured model ran without its base model; call the model as a whole"
        )
    slot = Slot(carrier, carrier.next_call() if index is None else index)
    x = args[0] if args else kwargs["hidden_states"]
    if plan.acts_at("attention-input", slot.index):
        x = _de_escalated(x, slot, cache_at, args, kwargs)
        args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})
    if norm == "pre" and plan.acts_at("ffn-input", slot.index):
        slot.stream = x
    return args, {**kwargs, KEY: slot}


def leave_block(plan: Plan, cache_at: int | None, block: Any, args: Args, kwargs: Kwargs, output: Tensor) -> Tensor:
    """After a block: de-escalate its output (B, N, d)."""
    slot: Slot = kwargs[KEY]
    return _de_escalated(output, slot, cache_at, args, kwargs) if plan.acts_at("block-end", slot.index) else output


def leave_attention(
    plan: Plan, cache_at: int | None, norm: str, attention: nn.Module, args: Args, kwargs: Kwargs, output: Any
) -> Any:
    """After the attention module: y = alpha x + (1 - alpha) W_O softmax(h) V, then de-escalate the input of the MLP.

    With post-norm the module has added the skip already. There alpha acts inside it, see ``scale_skip`` and
    ``CuredAlbertAttention``.
    """
    slot: Slot = kwargs[KEY]
    y, *rest = output
    if norm == "pre" and plan.mixes and slot.cured:
        x = args[0] if args else kwargs["hidden_states"]
        y = plan.alpha * x.to(y.device) + (1 - plan.alpha) * y  # HOP 53
    if plan.acts_at("ffn-input", slot.index):
        if slot.stream is None:
            y = _de_escalated(y, slot, cache_at, args, kwargs)
        else:  # the block adds the stream to y
            joined = slot.stream.to(y.device) + y
            y = y + (_de_escalated(joined, slot, cache_at, args, kwargs) - joined)
    return (y, *rest)


def scale_skip(plan: Plan, output: nn.Module, args: Args) -> Args:
    """Before BERT's LN(branch + x): multiply the skip x by 1 + alpha.

    With ``scale_branch`` the sum is (1 + alpha) x + (1 - alpha) branch = x + (alpha x + (1 - alpha) branch), HOP 53.
    """
    branch, x = args
    return branch, (1 + plan.alpha) * x


def scale_branch(plan: Plan, dropout: nn.Module, args: Args, output: Tensor) -> Tensor:
    """After the dropout of BERT's branch: multiply the branch by 1 - alpha."""
    return (1 - plan.alpha) * output


def _de_escalated(x: Tensor, slot: Slot, cache_at: int | None, args: Args, kwargs: Kwargs) -> Tensor:
    """TSE 21 on the stream x (B, N, d), continued from the sums in the cache where the model decodes."""
    plan, real = slot.plan, slot.carrier.real
    assert plan.de_escalate is not None
    cache = _argument("past_key_values", cache_at, args, kwargs) if plan.causal else None
    sums = None if cache is None else sums_of(cache, slot.index)
    return plan.de_escalate(x, None if real is None else real.to(x.device), sums)


def _argument(name: str, place: int | None, args: Args, kwargs: Kwargs) -> Any:
    """The argument ``name`` of a call, whether by position or by keyword."""
    return args[place] if place is not None and place < len(args) else kwargs.get(name)


def _real_tokens(mask: Any) -> Tensor | None:
    """The attention mask (B, N) as booleans, True = a real token."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise LeadlineError(
            f"attention_mask is {shape}; de-escalation must know the padding, give a mask (batch, tokens) and, when "
            "generating, no static cache"
        )
    return mask.bool()


def _check_packing(attention_mask: Any, past_key_values: Any, position_ids: Any) -> None:
    """Refuse several texts in one row: a mean over tokens would mix them."""
    if position_ids is None or attention_mask is not None or past_key_values is not None:
        return
    from transformers.masking_utils import find_packed_sequence_indices

    if position_ids.ndim == 2 and find_packed_sequence_indices(position_ids) is not None:
        raise LeadlineError("position_ids pack several texts into one row; de-escalation would mix them, unpack them")


def _check_checkpointing(blocks: Any) -> None:
    """Refuse reentrant activation checkpointing before it starts."""
    for block in blocks:
        function = getattr(block, "_gradient_checkpointing_func", None)
        if getattr(block, "gradient_checkpointing", False) and getattr(function, "keywords", {}).get("use_reentrant"):
            raise reentrant_error()
