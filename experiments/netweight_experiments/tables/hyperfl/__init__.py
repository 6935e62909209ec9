"""HyperFL (arXiv 2412.07187): hypernetworks in federated learning, and the attacks on them."""
