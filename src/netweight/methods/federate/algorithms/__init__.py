"""What federations train: one network for all, HyperFL and pFedHN, and methods that keep a part at each client."""
