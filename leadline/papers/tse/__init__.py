"""The figures of TSE, a file for each."""
