"""Fits of a bank of adapters: inner products, streaming over rows, bases, and how good a fit is."""
