"""Identification of a path by its content, not its name: a model, a pipeline, adapters, a federation.

A path that holds something else is refused with what it was recognized as, why there is no label, and what to do.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from netweight.core.bounded_json import MOST_CONFIG, read_object
from netweight.core.weight_endings import PICKLES
from netweight.errors import CorruptBlob, NetweightError, Unsupported, UsageError
from netweight.store.reader import INDEX_SUFFIX, weight_map
from netweight.store.safetensors import is_pickle, read_header
from netweight.store.shards import refuse_missing_shards

Kind = Literal["language model", "model", "pipeline", "weights", "adapter", "adapters", "federation"]

# The first bytes of files that hold weights in a form that is not read here → what they are, and the cure.
_FOREIGN_STARTS = {
    b"GGUF": (
        "a GGUF file, whose weights are quantized in blocks",
        "Give the safetensors files from which it was made.",
    ),
    b"\x89HDF": ("an HDF5 file (Keras or TensorFlow)", "Save the model as safetensors, and give that file."),
    b"\x93NUM": ("a numpy array", "Save the arrays as safetensors, and give that file."),
}
# Bytes of the history of a Flower server.
_MOST_HISTORY = 1 << 28
_FOREIGN_NAMES = {
    ".onnx": "an ONNX graph",
    ".msgpack": "a Flax checkpoint",
    ".tflite": "a TensorFlow Lite model",
    ".pb": "a TensorFlow graph",
    ".mlmodel": "a Core ML model",
    ".engine": "a TensorRT engine",
    ".npz": "an archive of numpy arrays",
    ".keras": "a Keras model",
}


@final
@dataclass(frozen=True)
class LabelSubject:
    """Subject of a label."""

    path: Path
    """The file or folder."""
    kind: Kind
    """Kind of the subject."""
    weights: tuple[Path, ...] = ()
    """The safetensors files that are measured, in the order of their names."""
    pickles: tuple[Path, ...] = ()
    """The PyTorch pickles that are measured, where there are no safetensors files."""
    copies: tuple[Path, ...] = ()
    """Further files of the same weights, such as `.fp16` variants or `.bin` files, which are counted but not read."""
    config: dict[str, Any] = field(default_factory=dict)
    """The folder's `config.json`, `model_index.json`, or plan or history of a federation; empty for a file."""
    adapters: tuple[Path, ...] = ()
    """The adapters of a folder of adapters."""

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def name(self) -> str:
        """The name that people know it by."""
        resolved = self.path.resolve()
        place = resolved.parents[1].name if resolved.parent.name == "snapshots" else ""
        # This is the hub's cache, in which folders are named by digests.
        if self.path.is_dir() and place.startswith("models--"):
            return place.removeprefix("models--").replace("--", "/")
        name = resolved.name if self.path.is_dir() else resolved.stem
        return "".join(letter if letter.isprintable() else "�" for letter in name)


def identify(path: str | Path) -> LabelSubject:
    """Return what a path holds.

    Args:
        path: A file or folder.

    Returns:
        The subject, with the files that are measured.

    Raises:
        UsageError: There is no such path, or it holds nothing that a label can describe.
        Unsupported: It holds weights in a form that is not read here.
        CorruptBlob: A file that should hold weights is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"There is no file or folder {path}.", cure="Check the path.")
    if not path.is_file() and not path.is_dir():
        raise UsageError(f"{path} is neither a file nor a folder.", cure="Give a file or a folder of weights.")
    subject = _identify_file(path) if path.is_file() else _identify_folder(path)
    for file in (*subject.weights, *subject.pickles):
        if not file.exists():
            raise UsageError(f"{file} is a link to a file that does not exist.", cure="Fetch the file again.")
    if not subject.weights and not subject.pickles and not subject.adapters and subject.kind != "federation":
        raise _no_weights(path, subject.config)
    return subject


def read_config(file: Path, *, limit: int = MOST_CONFIG, most_values: int | None = 0) -> dict[str, Any]:
    """Return the JSON object of a configuration file.

    Args:
        file: The file.
        limit: The most bytes that it may have.
        most_values: As in `parse_json`.

    Returns:
        Its content; empty if there is no such file.

    Raises:
        CorruptBlob: It is not a JSON object, or has more bytes or values than a configuration.
    """
    if not file.is_file():
        return {}
    try:
        return read_object(file, limit=limit, most_values=most_values)
    except ValueError as error:
        raise CorruptBlob(f"{file} cannot be read: {error}.", cure="Fetch the file again.") from None


def is_adapter_file(file: Path) -> bool:
    """Return whether a safetensors file holds a LoRA or one of its relatives, by the names of its tensors.

    Args:
        file: A safetensors file.
    """
    try:
        names = [span.name for span in read_header(file).spans]
    except NetweightError:
        return False
    marks = ("lora_", ".lora.", "_lora.", "hada_w", "lokr_w", ".oft_", "lora_A", "lora_down")
    of_adapter = sum(any(mark in name for mark in marks) for name in names)
    return bool(names) and 2 * of_adapter > len(names)


def _identify_file(file: Path) -> LabelSubject:
    if file.suffix == ".safetensors":
        kind: Kind = "adapter" if is_adapter_file(file) else "weights"
        return LabelSubject(file, kind, weights=(file,), adapters=(file,) if kind == "adapter" else ())
    with file.open("rb") as opened:
        start = opened.read(64)
    for mark, (what, cure) in _FOREIGN_STARTS.items():
        if start.startswith(mark):
            raise Unsupported(f"{file} is {what}. netweight label does not read such files.", cure=cure)
    if is_pickle(start) or _is_torch_archive(file):
        return LabelSubject(file, "weights", pickles=(file,))
    if file.suffix in _FOREIGN_NAMES:
        raise Unsupported(
            f"{file} is {_FOREIGN_NAMES[file.suffix]}. netweight label does not read such files.",
            cure="Save the weights as safetensors, and give that file.",
        )
    if file.suffix == ".json" and file.name.endswith(".index.json"):
        raise UsageError(f"{file} is the index of a sharded model.", cure=f"Give its folder, {file.parent}.")
    try:
        read_header(file)
    except NetweightError:
        raise UsageError(
            f"{file} contains no weights: it is neither a safetensors file nor a PyTorch checkpoint.",
            cure="Give a .safetensors file, a .bin, .pt, .pth or .ckpt file, or a model's folder.",
        ) from None
    return LabelSubject(file, "adapter" if is_adapter_file(file) else "weights", weights=(file,))


def _is_torch_archive(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith("data.pkl") for name in archive.namelist())


def _identify_folder(folder: Path) -> LabelSubject:
    if (folder / "federation.json").is_file():
        return LabelSubject(folder, "federation", config=read_config(folder / "federation.json"))
    # The server of a Flower run writes this file.
    history = folder / "history.json"
    if history.is_file():
        rounds = read_config(history, limit=_MOST_HISTORY, most_values=None)
        if isinstance(rounds.get("rounds"), list):
            return LabelSubject(folder, "federation", config=rounds)
    if (folder / "model_index.json").is_file():
        files, pickles, copies = _weights_of(folder, deep=True)
        config = read_config(folder / "model_index.json")
        return LabelSubject(folder, "pipeline", tuple(files), tuple(pickles), tuple(copies), config)
    if (folder / "adapter_config.json").is_file():
        files, pickles, copies = _weights_of(folder)
        config = read_config(folder / "adapter_config.json")
        if not files and not pickles:
            raise UsageError(
                f"{folder} contains an adapter_config.json but no weights.", cure="Fetch the adapter's weights as well."
            )
        return LabelSubject(folder, "adapter", tuple(files), tuple(pickles), tuple(copies), config, (folder,))
    config = read_config(folder / "config.json")
    files, pickles, copies = _weights_of(folder)
    if config and (files or pickles):
        heads = config.get("architectures") or []
        heads = heads if isinstance(heads, list) else [heads]
        causal = any("CausalLM" in str(head) or "ConditionalGeneration" in str(head) for head in heads)
        kind: Kind = "language model" if causal else "model"
        return LabelSubject(folder, kind, tuple(files), tuple(pickles), tuple(copies), config)
    adapters = _adapters_of(folder)
    if len(adapters) == 1 and len(files) == 1 and not pickles:
        return LabelSubject(folder, "adapter", tuple(files), adapters=tuple(adapters))
    if adapters:
        return LabelSubject(folder, "adapters", adapters=tuple(adapters))
    if files or pickles:
        return LabelSubject(folder, "weights", tuple(files), tuple(pickles), tuple(copies), config)
    raise _no_weights(folder, config)


def _no_weights(folder: Path, config: dict[str, Any]) -> NetweightError:
    names = sorted(entry.name for entry in folder.iterdir())
    for name in names:
        if name.endswith(".gguf"):
            return Unsupported(
                f"{folder} contains GGUF files ({name}), whose weights are quantized in blocks. "
                "netweight label does not read such files.",
                cure="Give the safetensors files from which they were made.",
            )
        suffix = Path(name).suffix
        if suffix in _FOREIGN_NAMES or suffix == ".h5":
            what = _FOREIGN_NAMES.get(suffix, "a Keras or TensorFlow checkpoint")
            return Unsupported(
                f"{folder} contains {what} ({name}), but no safetensors files and no PyTorch checkpoints.",
                cure="Save the weights as safetensors, and give that file.",
            )
    damaged = [name for name in names if Path(name).suffix.lower() in PICKLES and (folder / name).is_file()]
    if damaged:
        return CorruptBlob(
            f"{folder / damaged[0]} has the name of a PyTorch checkpoint but is not one.", cure="Fetch the file again."
        )
    if not names:
        return UsageError(f"The folder {folder} is empty.", cure="Check the path.")
    if config:
        return UsageError(
            f"{folder} contains a {'model_index' if 'model_index.json' in names else 'config'}.json but no weights.",
            cure="Fetch the model's .safetensors files as well.",
        )
    models = [name for name in names if (folder / name / "config.json").is_file()]
    models += [name for name in names if (folder / name / "model_index.json").is_file()]
    cure = "Check the path."
    if models:
        cure = f"It contains models in subfolders, such as {models[0]}: give one of them, or --all."
    return UsageError(f"{folder} contains no weights: no safetensors files and no PyTorch checkpoints.", cure=cure)


def _weights_of(folder: Path, *, deep: bool = False) -> tuple[list[Path], list[Path], list[Path]]:
    """The safetensors files to measure, the pickles if there are none, and further files of the same weights."""
    files: list[Path] = []
    pickles: list[Path] = []
    copies: list[Path] = []
    folders = [folder]
    if deep:
        folders += sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for place in folders:
        entries = sorted(entry for entry in place.iterdir() if entry.is_file() or entry.is_symlink())
        entries = [entry for entry in entries if not entry.is_dir()]
        plain = [entry for entry in entries if entry.suffix == ".safetensors"]
        indexed = {name for index in place.glob(f"*{INDEX_SUFFIX}") for name in weight_map(index).values()}
        measured = ".safetensors" if plain else ".bin"
        refuse_missing_shards(
            place, [entry.name for entry in entries if entry.suffix == measured], indexed=sorted(indexed)
        )
        chosen = [entry for entry in plain if entry.name in indexed] if indexed else plain
        variants = [entry for entry in chosen if _variant_of(entry.name) is not None]
        own = [entry for entry in chosen if entry not in variants] or variants[:1]
        shards = [entry for entry in own if not entry.name.startswith("consolidated")]
        # A folder of transformers may contain the same weights in the layout of its author as well.
        own = shards or own
        # The folder contains the files of one model, and a variant is a second copy of the weights.
        if deep or len(own) < len(chosen):
            files += own
            copies += [entry for entry in plain if entry not in own]
        else:
            files += chosen
            copies += [entry for entry in plain if entry not in chosen]
        pickled = [entry for entry in entries if entry.suffix.lower() in PICKLES and _looks_pickled(entry)]
        if own:
            copies += [entry for entry in pickled if entry.name.startswith(("pytorch_model", "diffusion_pytorch"))]
        else:
            pickles += pickled
    return files, pickles, copies


def _looks_pickled(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        start = opened.read(64)
    return is_pickle(start) or start.startswith(b"PK")


def _variant_of(name: str) -> str | None:
    """The variant that a file's name states, such as "fp16" in `model.fp16.safetensors`; None without one."""
    parts = name.removesuffix(".safetensors").split(".")
    last = parts[-1].split("-0")[0] if len(parts) > 1 else ""
    return last if last in ("fp16", "bf16", "fp32", "non_ema", "ema", "8bit") else None


def _adapters_of(folder: Path, above: frozenset[Path] = frozenset()) -> list[Path]:
    """The adapters in a folder and its subfolders: files, and folders of peft; a link to a folder above is left out."""
    folders: list[Path] = []
    above |= {folder.resolve()}
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or (entry.is_dir() and entry.resolve() in above):
            continue
        if entry.is_dir():
            if (entry / "adapter_config.json").is_file():
                folders.append(entry)
            elif not (entry / "config.json").is_file() and not (entry / "model_index.json").is_file():
                folders += _adapters_of(entry, above)
        elif entry.suffix == ".safetensors" and is_adapter_file(entry):
            folders.append(entry)
    return folders


def title_of(subject: LabelSubject) -> str:
    """Return the kind in words, with the class that the configuration names.

    Args:
        subject: What the label is about.
    """
    config = subject.config
    named = config.get("architectures") or config.get("_class_name") or config.get("peft_type") or ""
    named = named[0] if isinstance(named, list) and named else named
    words = {"adapter": "adapter (LoRA)", "adapters": "folder of adapters (LoRA)", "federation": "federation run"}
    title = words.get(subject.kind, subject.kind)
    peft = config.get("peft_type")
    if subject.kind == "adapter" and isinstance(peft, str) and peft != "LORA":
        return f"adapter: {peft}"
    return f"{title}: {named}" if isinstance(named, str) and named and named != "LORA" else title


def canonical(value: Any) -> str:
    """Return a configuration value as short text for a row.

    Args:
        value: Any JSON value.
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def labelled_below(folder: Path) -> list[Path]:
    """Return what lies directly in a folder and may get a label: folders, and files of weights.

    Args:
        folder: A folder of models or adapters.
    """
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    suffixes = (".safetensors", *PICKLES, *_FOREIGN_NAMES, ".gguf", ".h5")
    return [entry for entry in entries if entry.is_dir() or entry.suffix in suffixes]
