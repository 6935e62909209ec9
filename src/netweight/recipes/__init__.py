"""Recipes: YAML files that list treatments of a model and the tests of the result, checked, planned, run and resumed.

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

from netweight.recipes.recipe import Recipe as Recipe
from netweight.recipes.recipe import read_recipe as read_recipe
from netweight.recipes.recipe import recipe_schema as recipe_schema
from netweight.recipes.run import AttackStep as AttackStep
from netweight.recipes.run import Estimate as Estimate
from netweight.recipes.run import Plan as Plan
from netweight.recipes.run import Step as Step
from netweight.recipes.run import StepResult as StepResult
from netweight.recipes.run import StepState as StepState
from netweight.recipes.run import describe_continued as describe_continued
from netweight.recipes.run import estimates as estimates
from netweight.recipes.run import run as run
