"""Cures by make of model: a file or a folder for each make."""
