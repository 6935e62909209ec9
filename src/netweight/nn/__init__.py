"""Watching, changing and generating parameters and activations of live models: hooks, low-rank adapters, bases."""

from netweight.nn.apply_lora import applied, linear_layers, merge_
from netweight.nn.flat import ParameterLayout
from netweight.nn.hooks import Captured, capture, edit_outputs
from netweight.nn.hypernetwork import Hypernetwork
from netweight.nn.lora import Adapter, LowRank, combined
from netweight.nn.stacked_lora import AdapterStack

__all__ = [
    "Adapter",
    "AdapterStack",
    "Captured",
    "Hypernetwork",
    "LowRank",
    "ParameterLayout",
    "applied",
    "capture",
    "combined",
    "edit_outputs",
    "linear_layers",
    "merge_",
]
