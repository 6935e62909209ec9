"""RepNoise (arXiv 2405.14577): models that resist harmful fine-tuning."""
