"""Modules built from ops. Their configuration loads without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leadline.lazy import lazy

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

if TYPE_CHECKING:
    from leadline.nn.attention import HopfieldAttention
    from leadline.nn.block import TransformerBlock, TransformerStack
    from leadline.nn.cache import LayerCache
    from leadline.nn.config import BlockConfig
    from leadline.nn.de_escalation import DeEscalation
    from leadline.nn.positions import Positions
    from leadline.nn.strength import Strength

__getattr__, __dir__ = lazy(
    __name__,
    {
        "BlockConfig": "leadline.nn.config",
        "DeEscalation": "leadline.nn.de_escalation",
        "HopfieldAttention": "leadline.nn.attention",
        "LayerCache": "leadline.nn.cache",
        "Positions": "leadline.nn.positions",
        "Strength": "leadline.nn.strength",
        "TransformerBlock": "leadline.nn.block",
        "TransformerStack": "leadline.nn.block",
    },
)
