"""Names, seeds, files and digests, progress, environment and engines, which every layer above shares; no torch."""
