"""The tour: everything that works, at work on a small real model, in a few minutes and without a network.

`run.py` goes from stop to stop and writes the report; every method has a module with its stop.
"""

from __future__ import annotations

from netweight.tour.run import Tour as Tour
from netweight.tour.run import run_tour as run_tour
