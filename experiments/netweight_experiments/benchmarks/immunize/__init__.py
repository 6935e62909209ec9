"""Benchmarks of defenses of language models."""
