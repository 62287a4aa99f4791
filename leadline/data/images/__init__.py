"""Images: which sets there are, how they are decoded and augmented, and the batches of a run."""
