"""Functions on tensors: no state, no modules."""

from leadline.ops.hopfield import hopfield_attention, standard_attention
from leadline.ops.positions import rotary_table, rotate, sinusoid

__all__ = ["hopfield_attention", "rotary_table", "rotate", "sinusoid", "standard_attention"]
