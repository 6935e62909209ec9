"""The tables and figures of the five papers, measured again: `netweight reproduce`.

`registry.py` holds what can be measured, `published.py` the papers' numbers, `catalog.py` the list of everything the
papers show, `run.py` lays measured beside published. The other modules define tables, one module per method.
"""

from __future__ import annotations

from netweight.report.finding import Column
from netweight.reproduce.registry import Measured, Row, table
from netweight.reproduce.run import Reproduction, run_table

__all__ = ["Column", "Measured", "Reproduction", "Row", "run_table", "table"]
