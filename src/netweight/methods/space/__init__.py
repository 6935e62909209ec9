"""weights2weights: a collection of low-rank adapters as one space, after arXiv 2406.09413. Layers above call it."""
