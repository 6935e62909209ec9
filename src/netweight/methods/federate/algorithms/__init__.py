"""What federations train: `direct` one network, whole or in part, `hyperfl` and `pfedhn` a network that makes it."""
