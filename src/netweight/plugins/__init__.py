"""Plug-ins that other programs load: quantizers, trainers, the Flower app, model cards."""
