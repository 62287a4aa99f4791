"""HOP figure 9: violins of token cosine by layer of a ViT-T trained on CIFAR-100, standard, .5 and .7."""

from __future__ import annotations

from leadline.papers.shared.vits import cosine_entry

ENTRY = cosine_entry("hop-fig9", "T", "cifar100")
