"""Recipes: a YAML file says what is done to a model and how it is proved; here it is checked, planned, run and resumed.

    subject: my-model                # a folder or .safetensors file
    treatments:
      - compress: {level: max}       # in this order; settings as on the command line
    attacks:                         # on what the last treatment made, beside the subject
      - finetune: {harmful: rows.jsonl}
    audits: all                      # or a list of names; what is left out is shown in red
    output: runs/my-model            # the results, the ledger and the report

A recipe without treatments attacks the subject itself. Paths are taken from the current folder. Every step is
remembered in the output's ledger by a digest of its input, its settings and the files that these name, so that a second
run continues where the first one stopped, and a changed step leaves those before it alone. Treatments follow each other
where one makes what the next one takes: models (compress, immunize, forget), banks and spaces of adapters (space-fit,
space-sample, space-edit, space-export), images (federate). Called by `netweight run`.
"""

from netweight.recipes.attacks import Attack, register_attack
from netweight.recipes.compress import COMPRESS
from netweight.recipes.federate import FEDERATE
from netweight.recipes.forget import EMBEDDING, FORGET
from netweight.recipes.immunize import FINETUNE, IMMUNIZE
from netweight.recipes.planning import Known, Plan, Step
from netweight.recipes.reading import Recipe, read_recipe
from netweight.recipes.running import Done, run
from netweight.recipes.schema import recipe_schema
from netweight.recipes.space import SPACE_EDIT, SPACE_EXPORT, SPACE_FIT, SPACE_SAMPLE
from netweight.recipes.treatments import Treatment, register

__all__ = [
    "COMPRESS",
    "EMBEDDING",
    "FEDERATE",
    "FINETUNE",
    "FORGET",
    "IMMUNIZE",
    "SPACE_EDIT",
    "SPACE_EXPORT",
    "SPACE_FIT",
    "SPACE_SAMPLE",
    "Attack",
    "Done",
    "Known",
    "Plan",
    "Recipe",
    "Step",
    "Treatment",
    "read_recipe",
    "recipe_schema",
    "register",
    "register_attack",
    "run",
]
