"""What other programs load from netweight: quantizers, trainers, the Flower app, model cards."""
