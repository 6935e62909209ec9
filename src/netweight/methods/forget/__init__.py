"""Forgetting: which prompts a diffusion model has memorized, in which neurons, and edits against it.

detect.py → localize.py (search.py, masking.py) → edit.py; `netweight.detect`, `localize`, `deactivate` and `harden`.
"""
