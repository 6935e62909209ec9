"""The registration of `netweight immunize`; it imports nothing heavy."""

from typing import Any

from netweight.registry import MODEL, Argument, Method, lazy

_FOLDER = "netweight.methods.immunize.immunize_folder"

IMMUNIZE: Method[Any] = Method(
    "immunize",
    lazy("netweight.methods.immunize.settings:ImmunizeSettings"),
    lazy(f"{_FOLDER}:apply"),
    {"depth": lazy("netweight.methods.immunize.report:depth_audit"), "fine-tuning attack": None},
    run=lazy("netweight.methods.immunize.commands:immunize"),
    summary="Train a language model to resist harmful fine-tuning.",
    description="MODEL is a folder of a transformers model, or its id on the hub, and is not changed. DESTINATION is a "
    "new folder with the defended model, the record of its training (immunize.json) and a report of what the training "
    "changed inside the model (immunize-report). With `--checkpoint-every`, the same command continues a run that was "
    "stopped. License, README, tokenizer and other files of MODEL are copied. `netweight attack "
    "finetune` then measures how long the defense delays an attack.",
    example="netweight immunize my-model defended --pairs pairs.jsonl --defense rmu --set rmu.alpha=800",
    arguments=(MODEL, Argument("destination", "new")),
    audited=False,
    by_attack={"fine-tuning attack": "finetune"},
    check=lazy(f"{_FOLDER}:check"),
    preview=lazy(f"{_FOLDER}:preview"),
    trains_on=lazy(f"{_FOLDER}:trains_on"),
    card=lazy("netweight.methods.immunize.report:card"),
)
