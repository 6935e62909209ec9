"""The registrations of `netweight space …` and `netweight attack images`; they import nothing heavy."""

from typing import Any

from netweight.registry import (
    DESTINATION,
    OVERWRITE,
    PLAN,
    SOURCE,
    Argument,
    Attack,
    Command,
    Entry,
    Group,
    Method,
    lazy,
)

_AUDITS, _STEPS = "netweight.methods.space.audits", "netweight.methods.space.steps"
_COMMANDS, _SETTINGS = "netweight.methods.space.commands", "netweight.methods.space.settings"

_SPACE = Argument("space", "folder")
_BANK = Argument("bank", "folder")
_MOVED_BANK = Argument(
    "bank", "folder", "The bank that SPACE was fitted to, if it has moved.", "--bank", required=False
)
_POINT = Argument("point", "text")
_POINTS = Argument("out", "new", "The .json file of points to write.", "--out", metavar="FILE")
_DST = DESTINATION.named("destination", metavar="DST")
_A_POINT = (
    "POINT is a model of the space, a file of points (FILE.json, or FILE.json:NAME for one of them), an adapter's file "
    "or folder, which is projected into the space, or mean."
)

IMAGES: Attack[Any] = Attack(
    "images",
    lazy("netweight.methods.space.images:PointImages"),
    attack=lazy("netweight.methods.space.images:attack"),
    title="Images of points",
    summary="Generate images of a space's points, and measure what edits change in them.",
    description="MODEL is the folder of a space, or of points that a recipe made. Attributes are measured by a reader "
    "of yours, a function of images.",
    example="netweight attack images space --pipeline my-pipeline --out images",
    check=lazy("netweight.methods.space.images:check"),
    tested=lazy("netweight.methods.space.images:tested"),
    takes=("space", "points"),
)

COMMANDS: tuple[Entry, ...] = (
    Group(
        "space",
        "Treat many adapters as points of one space: fit, edit, sample, invert.",
        "Adapters (LoRAs) of one base model are collected into a bank. A space is fitted to a bank: its principal "
        "components, and every adapter as a point. Points are moved, drawn, found for images, and written as adapters.",
    ),
    Command(
        "space ingest",
        lazy(f"{_SETTINGS}:IngestSettings"),
        run=lazy(f"{_COMMANDS}:ingest"),
        summary="Collect adapters into a bank, or add them to one.",
        description="SRC is a folder with LoRAs in the layouts of peft, diffusers and kohya, at any depth, or the "
        "published files of weights2weights. They may change different modules of one base: a module that an adapter "
        "lacks counts as unchanged. Headers are checked first, and all problems are reported at once. A run that was "
        "interrupted continues where it stopped when it is started again.",
        example="netweight space ingest my-loras bank",
        arguments=(Argument("source", "path", metavar="SRC"), _DST),
    ),
    Method(
        "space fit",
        lazy(f"{_SETTINGS}:FolderFit"),
        lazy(f"{_STEPS}:fit"),
        {"fit": lazy(f"{_AUDITS}:fitted_space")},
        run=lazy(f"{_COMMANDS}:fit"),
        summary="Find the principal components of the adapters in a bank.",
        description="The space is written to SPACE, a new folder. By default (--representation delta) the changes of "
        "weights are analyzed, however their factors are written. SPACE contains every adapter's scores. The "
        "quality of the fit on these adapters and on held-out adapters is printed and kept in SPACE/space.json.",
        example="netweight space fit bank space --components 100",
        arguments=(_BANK, Argument("space", "new")),
        audited=None,
        examine=lazy(f"{_STEPS}:examine_fit"),
        check=lazy(f"{_STEPS}:check_fit"),
        takes=("bank",),
        makes="space",
    ),
    Command(
        "space direction",
        lazy(f"{_SETTINGS}:DirectionSettings"),
        run=lazy(f"{_COMMANDS}:direction"),
        summary="Find the direction of an attribute, and measure how well it separates held-out models.",
        example="netweight space direction space --labels labels.csv --column beard --out beard.json",
        arguments=(
            _SPACE, _MOVED_BANK, OVERWRITE, Argument("out", "new", "The .json file to write.", "--out", metavar="FILE")
        ),
    ),
    Method(
        "space edit",
        lazy(f"{_SETTINGS}:EditSettings"),
        lazy(f"{_STEPS}:edit"),
        {"directions": lazy(f"{_AUDITS}:moved_points"), "images": None},
        run=lazy(f"{_COMMANDS}:edit"),
        summary="Move points along directions.",
        description=f"{_A_POINT} `netweight space export` writes the result as an adapter.",
        example="netweight space edit space mean --move beard.json=2 --out points.json",
        arguments=(_SPACE, _POINT, _MOVED_BANK, OVERWRITE, _POINTS),
        skip=("point",),
        audited=None,
        by_attack={"images": "images"},
        examine=lazy(f"{_STEPS}:examine_edit"),
        check=lazy(f"{_STEPS}:check_edit"),
        checked_arguments=("bank",),
        takes=("space", "points"),
        makes="points",
    ),
    Method(
        "space sample",
        lazy(f"{_SETTINGS}:SampleSettings"),
        lazy(f"{_STEPS}:sample"),
        {"neighbors": lazy(f"{_AUDITS}:drawn_points"), "images": None},
        run=lazy(f"{_COMMANDS}:sample"),
        summary="Draw points from a space.",
        description="With five points or more, the command measures whether they lie in the region of the models "
        "without copying one.",
        example="netweight space sample space --count 8 --out points.json",
        arguments=(_SPACE, _MOVED_BANK, OVERWRITE, _POINTS),
        audited=None,
        by_attack={"images": "images"},
        examine=lazy(f"{_STEPS}:examine_sample"),
        check=lazy(f"{_STEPS}:check_sample"),
        checked_arguments=("bank",),
        takes=("space",),
        makes="points",
    ),
    Command(
        "space neighbors",
        lazy(f"{_SETTINGS}:NeighborSettings"),
        run=lazy(f"{_COMMANDS}:neighbors"),
        summary="List the models nearest to a point.",
        description=f"Nearness is measured by the changes of weights between them. {_A_POINT}",
        example="netweight space neighbors space points.json",
        arguments=(_SPACE, _POINT, _MOVED_BANK),
    ),
    Command(
        "space invert",
        lazy(f"{_SETTINGS}:FolderInversion"),
        run=lazy(f"{_COMMANDS}:invert"),
        summary="Find the points whose models generate given images.",
        description="IMAGE is a picture, or a folder with pictures of the same thing. A call that was interrupted "
        "continues where it stopped when it is made again.",
        example="netweight space invert space photo.png --pipeline my-pipeline --prompt 'sks person' --out points.json",
        arguments=(
            _SPACE, Argument("images", "path", metavar="IMAGE...", many=True), _MOVED_BANK, OVERWRITE, PLAN,
            _POINTS.named("out", help="The .json file of points to write; a .jsonl beside it keeps finished steps."),
        ),
    ),
    Method(
        "space export",
        lazy(f"{_SETTINGS}:FolderExport"),
        lazy(f"{_STEPS}:export"),
        {"files": lazy(f"{_AUDITS}:written_adapters")},
        run=lazy(f"{_COMMANDS}:export"),
        summary="Write points as adapters for diffusers, peft or kohya.",
        description=f"{_A_POINT} DST is a folder, or a .safetensors file; of several points each goes into a folder of "
        "its name under DST. The error of a lower rank is printed.",
        example="netweight space export space points.json adapters --layout diffusers",
        arguments=(_SPACE, _POINT, _DST, _MOVED_BANK, OVERWRITE),
        skip=("point",),
        audited=None,
        examine=lazy(f"{_STEPS}:examine_export"),
        check=lazy(f"{_STEPS}:check_export"),
        checked_arguments=("bank",),
        takes=("space", "points"),
        makes="adapters",
        card=lazy(f"{_STEPS}:card"),
    ),
    Command(
        "space merge",
        lazy(f"{_SETTINGS}:MergeSettings"),
        run=lazy(f"{_COMMANDS}:merge"),
        summary="Merge adapters of one base model into one.",
        description="The adapters may have any rank, layout, naming and modules, and need not come from a space. A "
        "weighted sum is exact without --rank; ties and dare take the highest rank of ADAPTER where "
        "none is given. Trigger words and tags of all files are kept.",
        example="netweight space merge one.safetensors two.safetensors merged --weight 0.5 --weight 0.5",
        arguments=(Argument("adapters", "path", metavar="ADAPTER...", many=True), _DST, OVERWRITE),
    ),
    Command(
        "space convert",
        lazy(f"{_SETTINGS}:ConvertSettings"),
        run=lazy(f"{_COMMANDS}:convert"),
        summary="Convert an adapter to another layout, rank or kind.",
        description="LoHa, LoKr, DoRA and full differences become a LoRA of --rank by singular values; DoRA needs the "
        "base model (--weights). The error is printed.",
        example="netweight space convert lora.safetensors smaller --rank 8",
        arguments=(Argument("adapter", "path"), _DST, OVERWRITE),
    ),
    Command(
        "space resize",
        lazy(f"{_SETTINGS}:ResizeSettings"),
        run=lazy(f"{_COMMANDS}:convert"),
        summary="Make an adapter smaller: convert it to a lower rank in its own layout.",
        description="Each module gets the leading components of its change, at most --rank of them or as many as keep "
        "--energy of its square. The error is printed. `space convert` also changes layout and kind.",
        example="netweight space resize lora.safetensors smaller.safetensors --rank 8",
        arguments=(Argument("adapter", "path"), _DST, OVERWRITE),
    ),
    Command(
        "space extract",
        lazy(f"{_SETTINGS}:ExtractSettings"),
        run=lazy(f"{_COMMANDS}:extract"),
        summary="Write what training changed as a LoRA.",
        description="BASE and TUNED are folders of one model (of transformers or diffusers, or a whole pipeline), or "
        "single files in the names of diffusers or of the model's authors. The LoRA is the best approximation of "
        "this --rank. Norms, "
        "embeddings and added tokens are left out and listed; the error is over everything that changed.",
        example="netweight space extract base tuned lora --rank 16",
        arguments=(SOURCE.named("source", metavar="BASE"), SOURCE.named("tuned", metavar="TUNED"), _DST, OVERWRITE),
    ),
    Command(
        "space bake",
        lazy(f"{_SETTINGS}:BakeSettings"),
        run=lazy(f"{_COMMANDS}:bake"),
        summary="Add LoRAs to the weights of a model.",
        description="MODEL is a safetensors file, a model's folder or a pipeline's, compressed or not. A LoRA may be "
        "in any known naming and of any kind (also DoRA, LoHa and LoKr). A weight may follow its name: "
        "style.safetensors=0.8. Only some rows of a tensor are in memory at a time. Everything else of MODEL is "
        "copied byte for byte, and the written files are read back.",
        example="netweight space bake my-pipeline style.safetensors=0.8 person.safetensors baked",
        arguments=(
            SOURCE.named("model", metavar="MODEL"), Argument("adapters", "text", metavar="LORA[=WEIGHT]...", many=True),
            DESTINATION.named("destination", metavar="OUT"), OVERWRITE,
        ),
    ),
    Command(
        "space predict",
        lazy(f"{_SETTINGS}:PredictSettings"),
        run=lazy(f"{_COMMANDS}:predict"),
        summary="Predict attributes of adapters from their weights alone.",
        description="Predicts attributes of the adapters in BANK that have no label, and for each FILE. A network that "
        "is invariant to the basis of the factors and a linear probe of the changes are fitted to the labels. Both "
        "held-out scores are reported; the better one of an attribute predicts it.",
        example="netweight space predict bank --labels labels.csv --column beard",
        arguments=(_BANK, Argument("adapters", "path", metavar="[FILE...]", many=True, required=False)),
    ),
    Command(
        "space similar",
        lazy(f"{_SETTINGS}:SimilarSettings"),
        run=lazy(f"{_COMMANDS}:similar"),
        summary="List the adapters of a bank that are most similar to one.",
        description="A module that only one of the two adapters changes counts as unchanged in the other. The second "
        "cosine leaves such modules out.",
        example="netweight space similar lora.safetensors bank",
        arguments=(Argument("adapter", "path", metavar="FILE"), _BANK),
    ),
    Command(
        "space dedupe",
        lazy(f"{_SETTINGS}:DuplicateSettings"),
        run=lazy(f"{_COMMANDS}:dedupe"),
        summary="Find adapters in a folder that are copies of each other.",
        description="Copies are recognized also in another naming, layout, rank or strength. Nothing is removed. Files "
        "that cannot be read are listed with the reason.",
        example="netweight space dedupe my-loras",
        arguments=(Argument("folder", "folder", metavar="DIR"),),
    ),
    Command(
        "space view",
        lazy(f"{_SETTINGS}:FolderView"),
        run=lazy(f"{_COMMANDS}:view"),
        summary="Write a page about a space, with sliders and a map.",
        description="The page opens without a network. Sliders move along directions and principal components, a map "
        "shows the models, and models are drawn from the space. Every picture is generated by the pipeline with the "
        "weights of its point, which takes long for a large pipeline. Without SPACE the page is about the miniature in "
        "the package netweight-toys: some hundred models of drawn faces.",
        example="netweight space view space --pipeline my-pipeline --out space.html",
        arguments=(
            _SPACE.named("space", metavar="[SPACE]", required=False), _MOVED_BANK, OVERWRITE,
            Argument("out", "new", "The .html file to write.", "--out", metavar="FILE"),
        ),
    ),
    Command(
        "space import",
        lazy(f"{_SETTINGS}:ImportSettings"),
        run=lazy(f"{_COMMANDS}:import_space"),
        summary="Convert the space that weights2weights published.",
        description="SRC contains V.pt, mean.pt, std.pt, proj_1000pc.pt and adapter_config.json; no code in them is "
        "executed. The result samples, edits, inverts and exports as any other space.",
        example="netweight space import published space",
        arguments=(Argument("source", "folder", metavar="SRC"), Argument("space", "new")),
    ),
    Command(
        "space info",
        lazy(f"{_SETTINGS}:InfoSettings"),
        run=lazy(f"{_COMMANDS}:info"),
        summary="Show the contents of a bank of adapters, or the quality of a space's fit.",
        description="With --verify it exits with 3 if a bank's shard is damaged.",
        example="netweight space info bank --verify",
        arguments=(Argument("folder", "folder", metavar="PATH"),),
    ),
)  # fmt: skip
