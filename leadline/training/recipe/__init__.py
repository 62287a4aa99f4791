"""Recipes: what is trained on what, and how. Schemas only; nothing here imports torch."""
