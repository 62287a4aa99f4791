"""The page of a report: one HTML file that works offline."""
