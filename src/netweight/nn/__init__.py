"""Building blocks of live models: hooks, low-rank adapters, principal components, hypernetworks."""

from netweight.nn.apply_lora import applied, linear_layers, merge_
from netweight.nn.flat import ParameterLayout
from netweight.nn.hooks import Captured, capture, edit_outputs, intervene, scale
from netweight.nn.hypernetwork import Hypernetwork
from netweight.nn.lora import Adapter, AdapterStack, LowRank, combined

__all__ = [
    "Adapter", "AdapterStack", "Captured", "Hypernetwork", "LowRank", "ParameterLayout", "applied", "capture",
    "combined", "edit_outputs", "intervene", "linear_layers", "merge_", "scale",
]  # fmt: skip
