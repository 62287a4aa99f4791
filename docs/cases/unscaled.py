"""A GPT-2 whose attention does not divide its scores by the root of the head width.

    leadline probe docs/cases/unscaled.py:make_model

Weights of variance 1 / width make queries and keys of unit variance. Without the division their products have a
standard deviation of 16 at a head width of 256, and a softmax of such scores picks one token.
"""

from __future__ import annotations

from transformers import GPT2Config, GPT2Model


def make_model(depth: int = 12) -> GPT2Model:
    """Return the model at initialisation."""
    return GPT2Model(GPT2Config(n_layer=depth, n_head=3, initializer_range=768**-0.5, scale_attn_weights=False))
