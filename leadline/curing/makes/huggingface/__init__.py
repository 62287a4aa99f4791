"""The cure of transformers models: what it hangs onto them, and the folders they are saved in."""
