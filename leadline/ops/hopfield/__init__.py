"""Hopfield attention: ``reference`` defines it, kernels make it fast, ``dispatch`` chooses."""

from leadline.ops.backends import BACKENDS, use_backend
from leadline.ops.hopfield.dispatch import hopfield_attention
from leadline.ops.hopfield.reference import standard_attention

__all__ = ["BACKENDS", "hopfield_attention", "standard_attention", "use_backend"]
