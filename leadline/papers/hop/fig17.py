"""HOP figure 17: violins of attention entropy by layer and head of a trained ViT-B, standard."""

from __future__ import annotations

from leadline.papers.shared.vits import entropy_entry

ENTRY = entropy_entry("hop-fig17", "B", "standard")
