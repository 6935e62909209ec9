"""Federated algorithms, each a file: `direct` trains a network, `hyperfl` and `pfedhn` one that generates it."""
