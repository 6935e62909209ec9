"""Parameters from short codes: flat layouts, hypernetworks, low-rank adapters. Methods, attacks and store call it."""

from netweight.generate.adapter import Adapter, LowRank, combined
from netweight.generate.hypernetwork import Hypernetwork
from netweight.generate.layout import ParameterLayout
from netweight.generate.lowrank import applied, linear_layers, merge_
from netweight.generate.stack import AdapterStack

__all__ = [
    "Adapter",
    "AdapterStack",
    "Hypernetwork",
    "LowRank",
    "ParameterLayout",
    "applied",
    "combined",
    "linear_layers",
    "merge_",
]
