"""The cure of transformers models: its hooks, and the folders of cured models."""
