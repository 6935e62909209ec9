"""Parameters from short codes: layouts of flat parameter vectors, and hypernetworks. Methods and attacks call it."""

from netweight.generate.hypernetwork import Hypernetwork
from netweight.generate.layout import ParameterLayout

__all__ = ["Hypernetwork", "ParameterLayout"]
