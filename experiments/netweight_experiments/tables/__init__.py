"""The tables and figures of the five papers, measured again: `netweight reproduce`.

`registry.py` holds what can be measured and the papers' numbers, `compare.py` lists everything the papers show and lays
measured beside published, `grid.py` makes tables of runs. Every paper has a folder.
"""

from __future__ import annotations

from netweight_experiments.tables.compare import Reproduction, run_table
from netweight_experiments.tables.registry import Column, MeasuredTable, Row, table

__all__ = ["Column", "MeasuredTable", "Reproduction", "Row", "run_table", "table"]
