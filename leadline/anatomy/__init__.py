"""What a model of any make consists of (blocks, parts, token streams), and how it is called."""
