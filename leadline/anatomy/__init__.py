"""The parts of a model of any make (blocks, token streams), and the ways to call it."""
