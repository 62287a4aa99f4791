"""Operators: functions on tensors, without state or modules."""

from leadline.ops.biased import biased_attention
from leadline.ops.formulas import FORMULAS, attention_weights
from leadline.ops.hopfield import hopfield_attention, standard_attention
from leadline.ops.packed import packed_attention
from leadline.ops.positions import rotary_frequencies, rotary_table, rotate, sinusoid

__all__ = [
    "FORMULAS",
    "attention_weights",
    "biased_attention",
    "hopfield_attention",
    "packed_attention",
    "rotary_frequencies",
    "rotary_table",
    "rotate",
    "sinusoid",
    "standard_attention",
]
