"""HOP figure 6: violins of token cosine by layer of a trained ViT-S, standard, .5 and .7."""

from __future__ import annotations

from leadline.papers.shared.vits import cosine_entry

ENTRY = cosine_entry("hop-fig6", "S")
