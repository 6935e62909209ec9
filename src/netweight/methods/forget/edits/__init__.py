"""The edits that make a model forget, one file each, with its settings and its algorithm.

To add an edit, write a file with a class like those here and name it in `EDITS`.
"""

from __future__ import annotations

from netweight.methods.forget.edits.closed_form import ClosedForm
from netweight.methods.forget.edits.distil import Distil
from netweight.methods.forget.edits.edit import Edit
from netweight.methods.forget.edits.esd import Esd
from netweight.methods.forget.edits.neurons import Neurons
from netweight.methods.forget.edits.siss import Siss

EDITS: dict[str, type[Edit]] = {edit.name: edit for edit in (ClosedForm, Siss, Neurons, Distil, Esd)}

__all__ = ["EDITS", "ClosedForm", "Distil", "Edit", "Esd", "Neurons", "Siss"]
