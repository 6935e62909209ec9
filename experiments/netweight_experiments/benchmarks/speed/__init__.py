"""Speed of two checkouts side by side."""
