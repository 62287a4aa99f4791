"""Tiny random models of many makes, with the token similarity of every block computed by hand."""
