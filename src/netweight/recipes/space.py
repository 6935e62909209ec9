"""Spaces in recipes: `space-fit` a bank, `space-sample` or `space-edit` points of it, `space-export` them as adapters."""

from __future__ import annotations

from netweight.methods.space import folder
from netweight.methods.space.report import EDIT, EXPORT, FIT, SAMPLE
from netweight.methods.space.settings import EditSettings, FolderExport, FolderFit, SampleSettings
from netweight.recipes.treatments import Treatment, register

_HOME = "netweight.methods.space.report"

SPACE_FIT = Treatment(
    FIT, FolderFit, home=_HOME, apply=folder.fit_step, examine=folder.examine_fit, check=folder.check_fit,
    takes=("bank",), makes="space",
)  # fmt: skip
SPACE_SAMPLE = Treatment(
    SAMPLE, SampleSettings, home=_HOME, apply=folder.sample_step, examine=folder.examine_sample,
    check=folder.check_sample, takes=("space",), makes="points",
)  # fmt: skip
SPACE_EDIT = Treatment(
    EDIT, EditSettings, home=_HOME, apply=folder.edit_step, examine=folder.examine_edit, check=folder.check_edit,
    takes=("space", "points"), makes="points",
)  # fmt: skip
SPACE_EXPORT = Treatment(
    EXPORT, FolderExport, home=_HOME, apply=folder.export_step, examine=folder.examine_export,
    check=folder.check_export, takes=("space", "points"), makes="adapters",
)  # fmt: skip
for each in (SPACE_FIT, SPACE_SAMPLE, SPACE_EDIT, SPACE_EXPORT):
    register(each)
