"""The page of a space: what it shows, how it is rendered, and how its images are generated."""
