"""Refusal removed without training: by directions, by pruning and with the model before its alignment."""
