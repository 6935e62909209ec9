"""The search for text embeddings that bring training images back: search, comparison with controls, report."""
