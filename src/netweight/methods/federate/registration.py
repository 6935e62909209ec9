"""The registrations of `netweight federate run|audit` and `netweight attack server`; they import nothing heavy."""

from typing import Any

from netweight.registry import Argument, Attack, Command, Entry, Group, Method, lazy

_COMMANDS, _RECIPE = "netweight.methods.federate.commands", "netweight.methods.federate.recipe"
_REPORT, _EXPOSURE = "netweight.methods.federate.report", "netweight.methods.federate.exposure_report"

SERVER: Attack[Any] = Attack(
    "server",
    lazy(f"{_RECIPE}:ServerAttack"),
    attack=lazy(f"{_RECIPE}:attack"),
    title="Exposure to the server",
    summary="Reconstruct clients' images from what a federation's server sees.",
    description="MODEL is the folder of a finished federation. The attack reads gradients and images from what "
    "clients send, also through noise and secure sums, and with a server that deviates from the protocol.",
    example="netweight attack server federation --out attacks",
    check=lazy(f"{_RECIPE}:check_server"),
    tested=lazy("netweight.methods.federate.recipe:tested_by_server"),
    takes=("federation",),
)

COMMANDS: tuple[Entry, ...] = (
    Group("federate", "Train a model across clients, and audit what a server could see of their data."),
    Method(
        "federate run",
        lazy("netweight.methods.federate.plan:FolderFederation"),
        lazy(f"{_RECIPE}:apply"),
        {"accuracy": lazy(f"{_REPORT}:accuracy"), "server attack": lazy(f"{_EXPOSURE}:gradient_inversion")},
        verb="federate",
        run=lazy(f"{_COMMANDS}:run"),
        summary="Train a federation in this process and audit it.",
        description="The audit at the end attacks updates of this run, and updates of one step on one image; "
        "`netweight federate audit` attacks more. Nothing is downloaded for the default data, scikit-learn's "
        "handwritten digits. The same command resumes a run that was stopped. The same methods run under Flower, with "
        "clients on other machines.",
        example="netweight federate run --method fedavg --clients 20 --rounds 20 --out federation",
        arguments=(
            Argument(
                "source", "text", "A data set by name, or a folder with a subfolder of images for each class.",
                "--data", required=False, default="digits",
            ),
            Argument(
                "destination", "new", "Folder of the checkpoint and the report; a run that was stopped continues from "
                "there.", "--out", required=False, default="federation",
            ),
        ),
        audits_itself=True,
        examine=lazy(f"{_RECIPE}:examine"),
        by_attack={"server attack": "server"},
        check=lazy(f"{_RECIPE}:check"),
        tested=lazy(f"{_RECIPE}:tested"),
        takes=("images",),
        makes="federation",
        named=lazy("netweight.data.images:NAMES"),
    ),
    Command(
        "federate audit",
        lazy("netweight.methods.federate.plan:FederationAudit"),
        run=lazy(f"{_COMMANDS}:audit"),
        summary="Attack the updates that the server of a federation received.",
        description="Attacks updates of the run, and updates of shorter local training: how much of a client's "
        "gradient an update reveals, and which images can be reconstructed from it. Exits with 1 if the updates of the "
        "run reveal more than their published average does.",
        example="netweight federate audit federation --threat 1x1+first",
        arguments=(Argument("folder", "folder", required=False, default="federation"),),
    ),
    Command(
        "federate report",
        lazy("netweight.methods.federate.plan:FederationReport"),
        run=lazy(f"{_COMMANDS}:report"),
        summary="Write the report of a finished federation.",
        description="For a federation of one process, and for the folder of a Flower server: accuracy by round, and "
        "which clients were left out or are suspicious. Nothing is attacked; `netweight federate audit` does that.",
        example="netweight federate report /var/lib/federation",
        arguments=(Argument("folder", "folder", required=False, default="federation"),),
    ),
    Command(
        "federate export",
        lazy("netweight.methods.federate.plan:FederationExport"),
        run=lazy(f"{_COMMANDS}:export"),
        summary="Write a client's model as state dicts of body and head.",
        description="Writes body.safetensors and head.safetensors, which your own modules load with load_state_dict.",
        example="netweight federate export federation weights --client 3",
        arguments=(Argument("folder", "folder"), Argument("target", "new")),
    ),
)  # fmt: skip
