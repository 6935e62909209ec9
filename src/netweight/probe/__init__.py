"""Watching and changing a live model's outputs. No hook outlives the block that asked for it."""

from netweight.probe.capture import Captured, capture
from netweight.probe.edit import edit_outputs

__all__ = ["Captured", "capture", "edit_outputs"]
