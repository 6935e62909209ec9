"""The search for text embeddings that bring training images back: settings, search, comparison with controls, report."""
