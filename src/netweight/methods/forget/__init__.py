"""Forgetting: which prompts a diffusion model answers with training images, and how to stop it."""
