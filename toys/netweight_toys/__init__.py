"""Checkpoints of the small models that `netweight.toys` opens, each with the record of its training."""
