"""Lossless compression of model files and folders, and of models in memory (`runtime/`), and the audit that proves it.

`compress_folder.py` compresses and restores, file by file; `verify.py` proves bit identity, `inspect.py` shows
how the bits of weights are spread. After NeuZip (arXiv 2410.20650).
"""
