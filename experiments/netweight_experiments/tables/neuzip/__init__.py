"""NeuZip (arXiv 2410.20650): lossless and lossy compression of weights in memory."""
