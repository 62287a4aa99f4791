"""HOP figure 19: violins of attention entropy by layer and head of a trained ViT-L, standard."""

from __future__ import annotations

from leadline.papers.shared.vits import entropy_entry

ENTRY = entropy_entry("hop-fig19", "L", "standard")
