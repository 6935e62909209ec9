"""Names, seeds, digests, progress, environment and resumable runs: what every layer above shares. Imports no torch."""
