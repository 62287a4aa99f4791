"""HOP figure 20: violins of attention entropy by layer and head of a trained ViT-L, .5."""

from __future__ import annotations

from leadline.papers.shared.vits import entropy_entry

ENTRY = entropy_entry("hop-fig20", "L", "both")
