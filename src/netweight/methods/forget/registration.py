"""The registrations of `netweight forget statistics|detect|localize|apply|undo|audit`; they import nothing heavy."""

from netweight.registry import OVERWRITE, PLAN, RESULTS, SEED, Argument, Command, Entry, Group, Method, lazy

_COMMANDS, _FOLDER = "netweight.methods.forget.commands", "netweight.methods.forget.forget_folder"
_REPORT, _SETTINGS = "netweight.methods.forget.report", "netweight.methods.forget.settings"
_FOLDERS = "netweight.methods.forget.folder_settings"
_PIPELINE = Argument("pipeline")
_CONTINUED = RESULTS.named("out", help="Folder for results; a second call continues from there.")

COMMANDS: tuple[Entry, ...] = (
    Group(
        "forget",
        "Find what a text-to-image model memorized, and remove it.",
        "PIPELINE is a folder of a diffusers pipeline, or its id on the hub, and is not changed. Prompts come from "
        ".txt (one per line), .csv, .tsv or .jsonl.",
    ),
    Command(
        "forget statistics",
        lazy(f"{_SETTINGS}:FolderStatistics"),
        run=lazy(f"{_COMMANDS}:statistics"),
        summary="Record typical activations of value neurons on ordinary prompts.",
        description="No image is generated. `netweight forget localize` takes the file.",
        example="netweight forget statistics my-pipeline --prompts ordinary.txt --out statistics.safetensors",
        arguments=(
            _PIPELINE,
            OVERWRITE,
            PLAN,
            Argument("out", "new", "The safetensors file to write.", "--out", metavar="FILE"),
        ),
    ),
    Command(
        "forget detect",
        lazy(f"{_SETTINGS}:FolderDetection"),
        run=lazy(f"{_COMMANDS}:detect"),
        summary="Score prompts by the similarity of first predictions, and flag memorized ones.",
        description="The score of a prompt is the similarity of the model's first noise predictions over seeds. OUT "
        "receives scores.jsonl, threshold.json, which `netweight forget localize` takes, and detection.json.",
        example="netweight forget detect my-pipeline --prompts prompts.txt --ordinary ordinary.txt --out detection",
        arguments=(_PIPELINE, _CONTINUED, PLAN),
    ),
    Command(
        "forget localize",
        lazy(f"{_SETTINGS}:FolderLocalization"),
        run=lazy(f"{_COMMANDS}:localize"),
        summary="Find the neurons in which prompts are memorized.",
        description="OUT receives neurons.jsonl, from which a second call continues, neurons.json for `netweight "
        "forget apply`, and neurons.csv in the format of the paper's code. Exits with 1 if the threshold was not "
        "reached for some prompt.",
        example="netweight forget localize my-pipeline --prompts memorized.txt --statistics statistics.safetensors "
        "--threshold detection/threshold.json --out neurons",
        arguments=(_PIPELINE, _CONTINUED, PLAN),
    ),
    Method(
        "forget apply",
        lazy(f"{_FOLDERS}:FolderForgetting"),
        lazy(f"{_FOLDER}:apply"),
        {
            "detection": lazy(f"{_REPORT}:detection"),
            "membership": lazy(f"{_REPORT}:membership"),
            "neurons": lazy(f"{_REPORT}:neurons"),
            "images": lazy(f"{_REPORT}:images"),
            "embedding search": None,
        },
        verb="forget",
        run=lazy(f"{_COMMANDS}:apply"),
        summary="Edit a pipeline so that it forgets memorized prompts.",
        description="All prompts are edited together. DESTINATION is an ordinary pipeline folder; DESTINATION/forget "
        "records what was done. Only tensors that the edit changed are written; every other byte is copied. The same "
        "command continues where an earlier one was stopped. Exits with 1 if images of a prompt still copy a memorized "
        "picture.",
        example="netweight forget apply my-pipeline edited --targets targets.csv --ordinary ordinary.txt",
        arguments=(_PIPELINE, Argument("destination", "new"), PLAN),
        audited=False,
        skip=("look_seeds",),
        examine=lazy(f"{_FOLDER}:examine"),
        by_attack={"embedding search": "embedding"},
        check=lazy(f"{_FOLDER}:check"),
        reads=lazy(f"{_FOLDER}:read_files"),
        tested=lazy(f"{_FOLDER}:tested"),
        preview=lazy(f"{_FOLDER}:preview"),
        card=lazy(f"{_FOLDER}:card"),
        before_publishing=lazy("netweight.methods.forget.records:before_publishing"),
    ),
    Command(
        "forget undo",
        run=lazy(f"{_COMMANDS}:undo"),
        summary="Undo the last edit of a pipeline, byte for byte, in a new folder.",
        example="netweight forget undo edited restored",
        arguments=(_PIPELINE, Argument("destination", "new"), PLAN),
    ),
    Command(
        "forget audit",
        lazy(f"{_FOLDERS}:FolderAudit"),
        run=lazy(f"{_COMMANDS}:audit"),
        summary="Compare an edited pipeline with the one before its edit.",
        description="Five audits: how well detection separates memorized prompts from others; whether the model's "
        "errors show which pictures it was trained on or made to forget; which neurons were found; images of the same "
        "seeds before and after the edit, and with as many random neurons switched off; and whether a search for "
        "embeddings "
        "brings images back. OUT receives the report, and scores, images and searches, from which a second call "
        "continues. Exits with 1 if a target is missed or could not be measured.",
        example="netweight forget audit edited --base my-pipeline --targets targets.csv --ordinary ordinary.txt "
        "--out audit",
        arguments=(
            Argument("edited"),
            _CONTINUED,
            SEED.named("seed", help="First seed of images and searches, and of intervals."),
            PLAN,
        ),
    ),
)
