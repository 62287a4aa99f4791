"""The tables and figures of HOP, a file for each."""
