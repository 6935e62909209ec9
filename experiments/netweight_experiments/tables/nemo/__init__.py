"""NeMo (arXiv 2406.02366): neurons that memorize, found and switched off."""
