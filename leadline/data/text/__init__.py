"""Text: files, tokenizers, tokens that are computed once, and batches of them."""
