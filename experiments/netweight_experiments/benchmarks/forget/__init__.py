"""Benchmarks of finding and switching off memorizing neurons."""
