"""weights2weights (arXiv 2406.09413): spaces of customized models."""
