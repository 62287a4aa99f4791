"""The page of a depth report: one HTML file that works offline."""
