"""Benchmarks of federated training and of what updates give away."""
