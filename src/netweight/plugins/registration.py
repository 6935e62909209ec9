"""The registration of `netweight publish`; it imports nothing heavy."""

from typing import Any

from netweight.registry import Argument, Command, lazy

PUBLISH: Command[Any] = Command(
    "publish",
    lazy("netweight.plugins.publish:PublishSettings"),
    run=lazy("netweight.plugins.publish:publish"),
    summary="Check a model's folder, and upload it to the Hugging Face hub.",
    description="Checks the license, the model card, the verdict of the run that tested the model, digests, files that "
    "do not belong in a published model, and paths of this machine in its files. Without --to, nothing is uploaded, "
    "and the command for it is printed. With --to the folder is uploaded if all checks pass. Exits with 1 if a check "
    "fails.",
    example="netweight publish my-model-release --to me/my-model-release",
    arguments=(Argument("folder", "folder"),),
)
