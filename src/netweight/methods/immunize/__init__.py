"""Language models whose weights resist harmful fine-tuning: RepNoise and the defenses it is compared with."""
