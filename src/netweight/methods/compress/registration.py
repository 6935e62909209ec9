"""The registrations of `netweight compress`, `decompress`, `inspect` and `verify`; they import nothing heavy."""

from typing import Any

from netweight.registry import DESTINATION, MODEL, OVERWRITE, SOURCE, Command, Method, lazy

_COMMANDS, _RECIPE = "netweight.methods.compress.commands", "netweight.methods.compress.recipe"
_SETTINGS = "netweight.methods.compress.settings"

COMPRESS: Method[Any] = Method(
    "compress",
    lazy(f"{_SETTINGS}:CompressSettings"),
    lazy(f"{_RECIPE}:apply"),
    {
        "identity": lazy("netweight.methods.compress.verify:_identity"),
        "size": lazy(f"{_RECIPE}:size"),
        "outputs": lazy(f"{_RECIPE}:outputs"),
    },
    run=lazy(f"{_COMMANDS}:compress"),
    summary="Compress a model's files, without changing a bit or with rounded weights.",
    description="SRC is a .safetensors file, the folder of a transformers or diffusers model, pipeline or adapter, or "
    "the id of a model on the Hugging Face hub (owner/name). Files without weights are "
    "copied. No bit of a weight changes "
    "unless --mantissa-bits is given. To continue an interrupted run, give the same command again.",
    example="netweight compress my-model my-model-compressed",
    arguments=(
        SOURCE.named("source", metavar="SRC"),
        DESTINATION.named("destination", metavar="DST"),
        OVERWRITE.named("overwrite", help="Replace DST if it exists."),
    ),
    audited=False,
    examine=lazy(f"{_RECIPE}:examine"),
    check=lazy(f"{_RECIPE}:check"),
    tested=lazy(f"{_RECIPE}:tested"),
    takes=("model", "adapters"),
    card=lazy(f"{_RECIPE}:card"),
)

DECOMPRESS: Command[Any] = Command(
    "decompress",
    lazy(f"{_SETTINGS}:DecompressSettings"),
    run=lazy(f"{_COMMANDS}:decompress"),
    summary="Restore the original files of a compressed model.",
    description="SRC is a compressed .safetensors file or folder, or its id on the Hugging Face hub. Files are "
    "restored byte for byte, and all digests are checked. Weights that were rounded when the model was compressed stay "
    "rounded, and the command prints a warning. To continue an interrupted run, give the same command again.",
    example="netweight decompress my-model-compressed my-model",
    arguments=COMPRESS.arguments,
)

INSPECT: Command[Any] = Command(
    "inspect",
    lazy(f"{_SETTINGS}:InspectSettings"),
    run=lazy(f"{_COMMANDS}:inspect"),
    summary="List the tensors in weight files, with their size and entropy.",
    description="PATH is a .safetensors file or a folder, compressed or not, or the id of "
    "a model on the hub. The column "
    '"stored bits" gives the bits per weight in the file, "entropy" the bits per weight '
    "that an ideal code needs, and the "
    "columns for sign, exponent and mantissa give their parts of the entropy. The "
    "entropy of a tensor with few values is "
    "an underestimate, because it cannot exceed log2(values) bits.",
    example="netweight inspect my-model --tensor '**.attention.**'",
    arguments=(MODEL.named("path"),),
)

VERIFY: Command[Any] = Command(
    "verify",
    lazy(f"{_SETTINGS}:VerifySettings"),
    run=lazy(f"{_COMMANDS}:verify"),
    summary="Check that a compressed model is intact and identical to its original.",
    description="Without --against, all digests are checked. With --against, every tensor and every file is also "
    "compared with the original; for rounded tensors, the command checks that every "
    "weight is within its bound. Exits with "
    "1 if anything is damaged or differs.",
    example="netweight verify my-model-compressed --against my-model",
    arguments=(MODEL.named("path"),),
)
