"""The search for embeddings that bring a training image back: how it is set, run, compared with controls, and told."""
