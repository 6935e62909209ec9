"""Fine-tuning as an attack: how many steps until a language model does again what was taken out of it."""
