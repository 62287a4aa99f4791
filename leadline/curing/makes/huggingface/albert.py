"""The attention of ALBERT with a cure: alpha acts before the skip and the norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.albert.modeling_albert import AlbertAttention, eager_attention_forward

from leadline.curing.carrier import Slot
from leadline.curing.makes.huggingface.attention import KEY


class CuredAlbertAttention(AlbertAttention):
    """transformers' AlbertAttention with LN(x + (alpha x + (1 - alpha) branch)) instead of LN(x + branch)."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
        """hidden_states (B, N, d) -> (B, N, d) and the weights, if asked for; the slot comes in ``kwargs``."""
        slot: Slot = kwargs[KEY]
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout.p if self.training else 0.0
        out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        branch = self.output_dropout(self.dense(out.reshape(*hidden_states.shape[:-1], -1)))
        if slot.cured:
            branch = slot.plan.alpha * hidden_states + (1 - slot.plan.alpha) * branch  # HOP 53
        return self.LayerNorm(hidden_states + branch), weights
