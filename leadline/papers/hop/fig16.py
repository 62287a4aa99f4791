"""HOP figure 16: violins of attention entropy by layer and head of a trained ViT-S, .5."""

from __future__ import annotations

from leadline.papers.shared.vits import entropy_entry

ENTRY = entropy_entry("hop-fig16", "S", "both")
