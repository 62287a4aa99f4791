"""HOP figure 15: violins of attention entropy by layer and head of a trained ViT-S, standard."""

from __future__ import annotations

from leadline.papers.shared.vits import entropy_entry

ENTRY = entropy_entry("hop-fig15", "S", "standard")
