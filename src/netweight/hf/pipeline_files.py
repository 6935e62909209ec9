"""The weight files of a pipeline's folder: variants, dtypes, places of tensors, and the replacement of some tensors.

A snapshot of the Hugging Face hub often holds the same weights several times: in fp32 and in fp16 (`.fp16` in the
file's name), as safetensors and as `.bin`, whole and in shards, or before and after averaging (`.non_ema`).
`PipelineFiles` says which of them are read, in which dtype each part is stored, and where in a file a tensor lies.
`replace_tensors` writes tensors into a copy of a file and leaves every other byte as it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, final

import torch
from torch import Tensor

from netweight.core.bounded_json import read_json
from netweight.core.linked_folders import files_below
from netweight.core.tensor_bytes import row_major_bytes
from netweight.core.weight_endings import FOREIGN, PICKLES
from netweight.errors import CorruptBlob, NameNotFound, Unsupported, UsageError
from netweight.store.safetensors import KEY, read_header
from netweight.store.torch_archive import refuse_inflated

INDEX = "model_index.json"
# The denoiser's folder is one of these, in pipelines with one denoiser, as all that are loaded here.
DENOISERS = ("unet", "transformer")
_STEMS = ("diffusion_pytorch_model", "pytorch_model", "model")
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# Files in which other programs keep weights; nothing in them is edited here. Parts of pipelines may be .bin files.
_OTHER_PROGRAMS = tuple(ending for ending in (*PICKLES, *FOREIGN) if ending != ".bin")
_SINGLE = (".safetensors", *PICKLES, ".gguf")
# Folders of tools, which hold copies of files; they are not part of a pipeline.
TOOL_FOLDERS = (".git", ".cache", "__pycache__")
_BLOCK = 1 << 22


@final
@dataclass(frozen=True)
class TensorPlace:
    """Position of a tensor in a file."""

    dtype: torch.dtype
    """The dtype that it is stored in."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    begin: int
    """Position of its first byte in the file; it is contiguous, in row-major order."""

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        count = self.dtype.itemsize
        for side in self.shape:
            count *= side
        return count


@final
@dataclass(frozen=True)
class WeightFile:
    """A file of weights of one part of a pipeline."""

    path: Path
    """Relative to the pipeline's folder."""
    variant: str
    """Part of its name beside the usual one, such as `fp16` or `non_ema`; empty for the usual name."""
    safe: bool
    """True if it is a safetensors file; otherwise it is a `.bin` file of PyTorch."""


@final
class PipelineFiles:
    """The files of a pipeline's folder, and which of its weights are read.

    Args:
        folder: A folder with `model_index.json`.
        variant: Which weights are read where a part has several, such as `fp16`. A part that lacks it is read in its
            usual files. None reads the usual files, or the only variant that a part has.

    Raises:
        UsageError: The folder is none of a pipeline, or `model_index.json` is damaged.
        NameNotFound: No part has the variant.
    """

    def __init__(self, folder: str | Path, variant: str | None = None) -> None:
        self.folder = Path(folder)
        check_pipeline(self.folder)
        self.variant = variant
        self.parts = {name: self._weights(name) for name in self._part_names()}
        variants = sorted({file.variant for files in self.parts.values() for file in files} - {""})
        if variant is not None and variant not in variants:
            raise NameNotFound(
                f"{self.folder} contains no weights of the variant {variant!r}.",
                cure=f"Its variants are {', '.join(variants)}."
                if variants
                else "Leave --variant out: the pipeline has only one variant.",
            )

    @cached_property
    def denoiser(self) -> str:
        """The part that is the denoiser: `unet` or `transformer`."""
        part = next((name for name in DENOISERS if name in self.parts), None)
        if part is None:
            raise Unsupported(
                f"{self.folder} contains neither a unet nor a transformer.",
                cure="Name the folder of a text-to-image latent diffusion model.",
            )
        return part

    def chosen(self, part: str) -> tuple[WeightFile, ...]:
        """Return the files that a part is read from; none for a part without weights.

        Raises:
            UsageError: The part has several variants, no usual file, and no variant was named.
        """
        files = self.parts.get(part, ())
        variants = list(dict.fromkeys(file.variant for file in files))
        variant = self.variant if self.variant in variants else ""
        if variant not in variants:
            if len(variants) > 1:
                raise UsageError(
                    f"The {part} of {self.folder} is stored only in the variants {', '.join(variants)}, not in a file "
                    "without a variant.",
                    cure=f"Choose one, such as --variant {variants[0]}.",
                )
            variant = variants[0] if variants else ""
        own = [file for file in files if file.variant == variant]
        safe = [file for file in own if file.safe]
        return _one_set(safe or own, self.folder / part)

    @property
    def read_variants(self) -> dict[str, str]:
        """The variant that each part with weights is read in; empty for the usual files."""
        return {part: files[0].variant for part in self.parts if (files := self.chosen(part))}

    def places(self, part: str) -> dict[str, tuple[Path, TensorPlace]]:
        """Return every tensor of a part, by name: its file, relative to the folder, and its place in that file."""
        places: dict[str, tuple[Path, TensorPlace]] = {}
        for file in self.chosen(part):
            places |= {name: (file.path, place) for name, place in tensor_places(self.folder / file.path).items()}
        return places

    def dtype(self, part: str) -> torch.dtype:
        """Return the narrowest dtype that holds every stored floating-point number of a part exactly."""
        # Tables of integers, such as positions, do not count.
        stored = {place.dtype for _, place in self.places(part).values() if place.dtype.is_floating_point}
        if not stored:
            return torch.float32
        widest = torch.float32 if stored == {torch.float16, torch.bfloat16} else max(stored, key=lambda d: d.itemsize)
        return widest

    @property
    def compressed(self) -> list[str]:
        """Parts with a file that netweight has compressed."""
        return [
            part
            for part in self.parts
            if any(file.safe and KEY in read_header(self.folder / file.path).metadata for file in self.chosen(part))
        ]

    @contextmanager
    def as_diffusers_expects(self) -> Iterator[Path]:
        """Yield a folder in which every part has its chosen weights under their usual names, and nothing else.

        diffusers looks for one variant in all parts, and fails where a file of another kind lies beside weights. Where
        the usual files are read anyway it is the folder itself; otherwise a temporary one with links to the files.
        """
        # diffusers finds no shards of `.bin` files unless it is told to read no safetensors files in any part.
        split = any(len(self.chosen(part)) > 1 and not self.chosen(part)[0].safe for part in self.parts)
        plain = all(not variant for variant in self.read_variants.values())
        if plain and not split:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="netweight-pipeline-") as name:
            view = Path(name) / self.folder.resolve().name
            view.mkdir()
            for file in self.folder.iterdir():
                if file.is_file():
                    _link(file, view / file.name)
            for entry in self.folder.iterdir():
                if entry.is_dir() and entry.name in self._index:
                    self._show(entry, view / entry.name)
            yield view

    def _show(self, part: Path, target: Path) -> None:
        target.mkdir()
        weights = {file.path.name for file in self.parts.get(part.name, ())}
        for file in part.iterdir():
            if file.is_file() and file.name not in weights and ".index" not in file.name:
                _link(file, target / file.name)
        names: dict[str, str] = {}
        for chosen in self.chosen(part.name):
            usual = _usual_name(chosen)
            names[chosen.path.name] = usual
            _link(self.folder / chosen.path, target / usual)
        if len(names) > 1 and not self.chosen(part.name)[0].safe:
            for name in names.values():
                (target / name).unlink()
            self._convert(part.name, target)
        elif len(names) > 1:
            stem = next(stem for stem in _STEMS if next(iter(names)).startswith(stem))
            table = {name: names[path.name] for name, (path, _) in self.places(part.name).items()}
            index = {"metadata": {"total_size": 0}, "weight_map": table}
            (target / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    def _convert(self, part: str, target: Path) -> None:
        """Write the shards of a part that is stored as `.bin` files as safetensors files, the same numbers."""
        from safetensors.torch import save_file

        table: dict[str, str] = {}
        files = self.chosen(part)
        for number, chosen in enumerate(files, start=1):
            stem = next(stem for stem in _STEMS if chosen.path.name.startswith(stem))
            name = f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
            path = self.folder / chosen.path
            tensors = {key: read_tensor(path, place) for key, place in tensor_places(path).items()}
            save_file(tensors, target / name, {"format": "pt"})
            table |= dict.fromkeys(tensors, name)
        index = {"metadata": {"total_size": 0}, "weight_map": table}
        (target / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    @cached_property
    def _index(self) -> dict[str, Any]:
        path = self.folder / INDEX
        try:
            index = read_json(path)
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}.", cure="Fetch the pipeline again.") from error
        if not isinstance(index, dict):
            raise UsageError(f"{path} is not a JSON object.", cure="Fetch the pipeline again.")
        return index

    def _part_names(self) -> list[str]:
        return [
            name for name, value in self._index.items()
            if isinstance(value, list) and value[:1] != [None] and (self.folder / name).is_dir()
        ]  # fmt: skip

    def _weights(self, part: str) -> tuple[WeightFile, ...]:
        return tuple(
            WeightFile(path.relative_to(self.folder), variant, path.suffix == ".safetensors")
            for path in sorted((self.folder / part).iterdir())
            if path.is_file() and (variant := _variant(path.name)) is not None
        )


def check_pipeline(folder: Path) -> None:
    """Refuse what is not the folder of a pipeline; a single file with a whole pipeline is named as such."""
    if folder.is_file() and folder.suffix.lower() in _SINGLE:
        raise UsageError(
            f"{folder} is a single file; a pipeline is a folder with {INDEX} here.",
            cure="Convert it once with diffusers: StableDiffusionPipeline.from_single_file(FILE).save_pretrained("
            "FOLDER), or StableDiffusionXLPipeline for SDXL.",
        )
    if (folder / INDEX).is_file():
        return
    single = (
        [file.name for file in sorted(folder.glob("*")) if file.suffix.lower() in _SINGLE] if folder.is_dir() else []
    )
    if single:
        raise UsageError(
            f"{folder} is not a pipeline's folder: it contains the single file {single[0]} and no {INDEX}.",
            cure="Convert the file once with diffusers: StableDiffusionPipeline.from_single_file(FILE)."
            "save_pretrained(FOLDER), or StableDiffusionXLPipeline for SDXL.",
        )
    raise UsageError(
        f"{folder} is not a pipeline's folder: it contains no {INDEX}.",
        cure="Name a folder that a diffusers pipeline was saved in.",
    )


def _variant(name: str) -> str | None:
    """The variant in the name of a weight file, compressed or not; None for another file."""
    stem, dot, ending = name.rpartition(".")
    if not dot or ending not in ("safetensors", "bin"):
        return None
    base, _, variant = _SHARD.sub("", stem).removesuffix(".net").partition(".")
    return variant if base in _STEMS else None


def _usual_name(file: WeightFile) -> str:
    name = file.path.name
    return name.replace(f".{file.variant}", "", 1) if file.variant else name


def _one_set(files: Sequence[WeightFile], part: Path) -> tuple[WeightFile, ...]:
    """The shards of a part, or its one file; several sets, or a part of one, are refused.

    Where a whole file and shards lie side by side, diffusers reads the shards and transformers the whole file: one of
    them is older, and nothing says which.
    """
    sets: dict[int, list[WeightFile]] = {}
    for file in files:
        shard = _SHARD.search(file.path.name)
        sets.setdefault(int(shard[0][-5:]) if shard else 1, []).append(file)
    if len(sets) > 1 or len({file.path.name.partition(".")[0] for file in sets.get(1, ())}) > 1:
        names = " and ".join(own[0].path.name for own in sets.values())
        raise UsageError(
            f"{part} contains weights twice, as {names}: one of them is older, and programs differ in which they read.",
            cure="Remove the files that are out of date, with their .index.json.",
        )
    for count, own in sets.items():
        if len(own) < count:
            raise UsageError(
                f"{part} contains {len(own)} of {count} shards, such as {own[0].path.name}.", cure="Fetch the others."
            )
    return tuple(files)


def _link(source: Path, target: Path) -> None:
    try:
        os.symlink(source.resolve(), target)
    except OSError:
        # On Windows, the user may not be allowed to make links.
        shutil.copyfile(source, target)


def tensor_places(path: Path) -> dict[str, TensorPlace]:
    """Return where the tensors of a safetensors or `.bin` file lie.

    Args:
        path: A file; a `.bin` file is opened without running code in it.

    Raises:
        Unsupported: A dtype is none that PyTorch computes in, or the `.bin` file is of a kind from before PyTorch 1.6.
        CorruptBlob: The file is damaged.
    """
    return _safe_places(path) if path.suffix == ".safetensors" else _bin_places(path)


def _safe_places(path: Path) -> dict[str, TensorPlace]:
    header = read_header(path)
    if KEY in header.metadata:
        raise Unsupported(
            f"{path} is compressed, so that its tensors cannot be replaced in place.",
            cure=f"Run netweight decompress {path.parent.parent} NEW first.",
        )
    places = {}
    for span in header.spans:
        if span.dtype not in _DTYPES:
            raise Unsupported(
                f"The tensor {span.name!r} of {path} is stored as {span.dtype}, in which no network computes.",
                cure="Give a pipeline in fp32, bf16 or fp16, such as another variant of it: --variant.",
            )
        places[span.name] = TensorPlace(_DTYPES[span.dtype], tuple(span.shape), header.data_start + span.start)
    return places


def _bin_places(path: Path) -> dict[str, TensorPlace]:
    import pickle

    from torch._subclasses.fake_tensor import FakeTensorMode

    if not zipfile.is_zipfile(path):
        raise Unsupported(
            f"{path} has the format of PyTorch before version 1.6.",
            cure="Save it again with a recent PyTorch, or leave it out: --other-weights leave-out.",
        )
    refuse_inflated(path)
    try:
        # This reads the table of tensors, and none of their numbers.
        with FakeTensorMode():
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        raise CorruptBlob(f"{path} cannot be read as a file of tensors: {error}.") from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    places = {}
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Tensor) and value.is_contiguous():
            storage: Any = value.untyped_storage()
            begin = int(storage._checkpoint_offset) + int(value.storage_offset()) * value.dtype.itemsize
            places[str(name)] = TensorPlace(value.dtype, tuple(value.shape), begin)
    return places


def read_tensor(path: Path, place: TensorPlace) -> Tensor:
    """Read one tensor, bit for bit."""
    with path.open("rb") as file:
        return _read(file, place)


def _read(file: IO[bytes], place: TensorPlace) -> Tensor:
    if not place.nbytes:
        return torch.empty(place.shape, dtype=place.dtype)
    file.seek(place.begin)
    data = bytearray(file.read(place.nbytes))
    if len(data) != place.nbytes:
        raise CorruptBlob(f"{file.name} is truncated.", cure="Fetch the file again.")
    return torch.frombuffer(data, dtype=torch.uint8).view(place.dtype).reshape(place.shape)


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's bytes in row-major order."""
    return row_major_bytes(tensor.detach().cpu()).numpy().tobytes()


def replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors over those of the same name in a file; all other bytes stay, but for checksums of a `.bin` file.

    Args:
        path: The file; changed in place.
        tensors: By name, of the stored dtype and shape.

    Raises:
        UsageError: A name, dtype or shape is not in the file.
    """
    places = tensor_places(path)
    for name, tensor in tensors.items():
        place = places.get(name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise UsageError(f"{path} has no tensor {name!r} of {tensor.dtype} and shape {tuple(tensor.shape)}.")
    with ExitStack() as stack:
        if path.suffix != ".safetensors":
            stack.callback(_mend_checksums, path, _valid_entries(path))
        file = stack.enter_context(path.open("r+b"))
        for name, tensor in tensors.items():
            file.seek(places[name].begin)
            file.write(tensor_bytes(tensor))
    # The written file is read back.
    with path.open("rb") as again:
        wrong = [
            name for name, value in tensors.items() if tensor_bytes(_read(again, places[name])) != tensor_bytes(value)
        ]
    if wrong:
        raise CorruptBlob(f"{path} does not contain {wrong[0]!r} as it was written.", cure="Check the disk.")


def _crc(file: IO[bytes], begin: int, count: int) -> int:
    file.seek(begin)
    value = 0
    while count > 0:
        data = file.read(min(_BLOCK, count))
        if not data:
            break
        value, count = zlib.crc32(data, value), count - len(data)
    return value


def _data_begin(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    file.seek(entry.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return int(entry.header_offset + 30 + name + extra)


def _valid_entries(path: Path) -> list[zipfile.ZipInfo]:
    """The entries of a `.bin` file whose checksum fits; files may be written without checksums."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        return [each for each in archive.infolist() if _crc(file, _data_begin(file, each), each.file_size) == each.CRC]


def _mend_checksums(path: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Bring the checksums of a zip file's entries up to date where they stand: before, behind, and in the directory."""
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    with path.open("r+b") as file:
        for entry in entries:
            begin = _data_begin(file, entry)
            value = _crc(file, begin, entry.file_size)
            if value == entry.CRC:
                continue
            old, new = struct.pack("<I", entry.CRC), struct.pack("<I", value)
            places = [entry.header_offset + 14, begin + entry.compress_size, begin + entry.compress_size + 4]
            places.append(_directory_place(file, directory, entry))
            for place in places:
                file.seek(place)
                if file.read(4) == old:
                    file.seek(place)
                    file.write(new)


def _directory_place(file: IO[bytes], directory: int, entry: zipfile.ZipInfo) -> int:
    """The position of an entry's checksum in the directory at the end of a zip file."""
    place = directory
    while True:
        file.seek(place)
        head = file.read(46)
        if head[:4] != b"PK\x01\x02":
            raise CorruptBlob(f"{file.name} has a damaged table of contents.", cure="Fetch the file again.")
        name, extra, comment = struct.unpack("<HHH", head[28:34])
        if file.read(name).decode("utf-8", "replace") == entry.orig_filename:
            return place + 16
        place += 46 + name + extra + comment


def other_weights(folder: Path) -> list[Path]:
    """Return files, relative to a pipeline's folder, that may hold its weights in a form that is not edited here.

    These are files of other programs, such as `.ckpt`, `.onnx` or `.msgpack`, and weights outside of the parts'
    folders, such as the single file with a whole pipeline that many snapshots hold at the top.
    """
    others = []
    for path in pipeline_files(folder):
        foreign = path.suffix.lower() in _OTHER_PROGRAMS or path.name.startswith(
            ("openvino_model", "flax_model", "tf_model")
        )
        at_the_top = len(path.parts) == 1 and path.suffix in (".safetensors", ".bin")
        if foreign or (at_the_top and path.name != "pytorch_lora_weights.safetensors"):
            others.append(path)
    return others


def pipeline_files(folder: Path) -> list[Path]:
    """Return every file of a pipeline's folder, relative to it, without the folders of tools such as `.git`."""
    return sorted(path.relative_to(folder) for path in files_below(folder, without=TOOL_FOLDERS))
