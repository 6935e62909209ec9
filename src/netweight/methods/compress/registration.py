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
    "the id of a model on the Hugging Face hub (owner/name). All other files are carried over. A run that was "
    "interrupted continues where it stopped when it is started again. Weights are kept bit for bit unless "
    "--mantissa-bits is given.",
    example="netweight compress my-model my-model-compressed",
    arguments=(
        SOURCE.named("source", metavar="SRC"),
        DESTINATION.named("destination", metavar="DST"),
        OVERWRITE.named("overwrite", help="Replace DST if it exists."),
    ),
    audited=False,
    examine=lazy(f"{_RECIPE}:examine"),
    check=lazy(f"{_RECIPE}:check"),
    takes=("model", "adapters"),
    card=lazy(f"{_RECIPE}:card"),
)

DECOMPRESS: Command[Any] = Command(
    "decompress",
    lazy(f"{_SETTINGS}:DecompressSettings"),
    run=lazy(f"{_COMMANDS}:decompress"),
    summary="Restore the original files of a compressed model.",
    description="SRC is a compressed .safetensors file or folder, or its id on the Hugging Face hub. Files are "
    "restored byte for byte and all digests are checked. Weights that were rounded when the model was compressed stay "
    "rounded; the command then says so. A run that was interrupted continues where it "
    "stopped when it is started again.",
    example="netweight decompress my-model-compressed my-model",
    arguments=COMPRESS.arguments,
)

INSPECT: Command[Any] = Command(
    "inspect",
    lazy(f"{_SETTINGS}:InspectSettings"),
    run=lazy(f"{_COMMANDS}:inspect"),
    summary="List the tensors in weight files, with their size and entropy.",
    description='PATH is a .safetensors file, a folder, compressed or not, or the id of a model on the hub. "stored '
    'bits" are the bits that the file spends on each weight. Entropies are in bits per weight, too; the shares of '
    "sign, exponent and mantissa are those of the total entropy. A tensor of few values shows less entropy than its "
    "kind has: no part can show more than log2(values) bits.",
    example="netweight inspect my-model --tensor '**.attention.**'",
    arguments=(MODEL.named("path"),),
)

VERIFY: Command[Any] = Command(
    "verify",
    lazy(f"{_SETTINGS}:VerifySettings"),
    run=lazy(f"{_COMMANDS}:verify"),
    summary="Check that a compressed model is intact and identical to its original.",
    description="The original is compared where --against names it. Of rounded tensors the command proves that they "
    "are intact, and that every weight is within its bound of the original. Exits with 1 if anything is damaged or "
    "differs.",
    example="netweight verify my-model-compressed --against my-model",
    arguments=(MODEL.named("path"),),
)
