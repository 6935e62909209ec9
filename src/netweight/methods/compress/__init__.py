"""Lossless compression of model files and folders, and the audit that proves it.

`folder.py` compresses and restores, `audit.py` verifies bit identity, `bits.py` and `plots.py` look into the weights.
"""
