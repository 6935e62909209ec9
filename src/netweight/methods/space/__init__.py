"""Thousands of customized models as one space: weights2weights, arXiv 2406.09413."""
