"""HOP figure 13: violins of attention entropy by layer and head of a trained ViT-T, standard."""

from __future__ import annotations

from leadline.papers.shared.vits import entropy_entry

ENTRY = entropy_entry("hop-fig13", "T", "standard")
