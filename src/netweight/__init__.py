"""netweight: model weights with nothing in them that should not be there."""

__version__ = "0.1.0"
