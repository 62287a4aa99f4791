"""What a model of any make consists of (blocks, their parts, the tokens that pass), and how it is called."""
