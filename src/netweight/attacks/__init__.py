"""The adversaries, usable on their own: each attack takes a model's own numbers and shows what they give away.

Attacks know torch, `core`, `generate`, `metrics` and `report`; they know no method, no data set and no model library.
"""
