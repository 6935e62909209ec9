"""Benchmarks of compression: the codec, weights at work, formats, pages of results."""
