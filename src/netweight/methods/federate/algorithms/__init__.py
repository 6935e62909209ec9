"""Federated algorithms: `direct` trains a network, whole or in part; `hyperfl` and `pfedhn` one that generates it."""
