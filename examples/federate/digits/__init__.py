"""An app for Flower: personal models of handwritten digits."""
