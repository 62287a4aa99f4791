"""Modules built from ops."""

from leadline.nn.attention import HopfieldAttention
from leadline.nn.block import BlockConfig, TransformerBlock, TransformerStack
from leadline.nn.cache import LayerCache
from leadline.nn.de_escalation import DeEscalation
from leadline.nn.positions import Positions
from leadline.nn.strength import Strength

__all__ = [
    "BlockConfig",
    "DeEscalation",
    "HopfieldAttention",
    "LayerCache",
    "Positions",
    "Strength",
    "TransformerBlock",
    "TransformerStack",
]
