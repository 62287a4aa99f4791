"""Cures for models of transformers."""
