"""Figures that neither paper has, a file for each."""
