"""Loaders of transformers and diffusers models, below the methods that work on them."""
