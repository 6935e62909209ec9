"""Benchmarks of spaces of adapters."""
