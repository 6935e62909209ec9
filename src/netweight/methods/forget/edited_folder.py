"""The folder of an edited pipeline: the files of the one before, with edited tensors replaced in place.

Every other byte is copied. The edited weights are written in every file that holds them: in the variant that was read,
in each further variant that is a rounding of it, and in `.bin` files. Weights that differ, such as those from before
averaging (`non_ema`), and files of other programs are not edited: they are copied and named, or left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core.digests import digest_file
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.hf.carry_over import remove_evidence
from netweight.hf.load_pipeline import LORA, PipelineModel
from netweight.hf.pipeline_files import (
    TensorPlace,
    check_pipeline,
    other_weights,
    pipeline_files,
    read_tensor,
    replace_tensors,
    tensor_bytes,
    tensor_places,
)
from netweight.hf.textual_inversion import textual_inversions
from netweight.job import Job, check_destination
from netweight.methods.forget.records import FOLDER, EditedFiles, EditRecord, read_records

OtherWeights = Literal["copy", "leave-out"]
_README = "README.md"


def write_edited(
    job: Job, model: PipelineModel, record: EditRecord, destination: Path, *, other_weights: OtherWeights, undo: bool
) -> EditRecord:
    """Write the folder of a pipeline that was edited in memory.

    Args:
        job: The job that makes the folder.
        model: The edited model, as `load_text_to_image` opened it. Its weights are rounded to what the files hold.
        record: The record of the edit.
        destination: The folder to be made.
        other_weights: Whether files that hold weights from before the edit, and cannot be edited, are copied.
        undo: Whether the record keeps the weights as they were.

    Returns:
        The record with what became of the files, as it was written.

    Raises:
        Unsupported: The weights are compressed, or a tensor that was edited is in none of the files.
    """
    tree = _fresh_tree(job)
    files = model.files
    # The model was loaded from a folder, so that its files are known.
    assert files is not None
    changed = _changed_tensors(model, record)
    # The denoiser's numbers are those of its files from here on, so that its digest is what a reader will find.
    record = replace(record, after=model.digest())
    number = len(read_records(files.folder)) + 1
    unedited = [*map(str, other_weights_of(files.folder))]
    edited: dict[str, str] = {}
    stored: dict[str, Tensor] = {}
    moved = [name for name in ((LORA,) if model.lora else ()) if (files.folder / name).is_file()]
    sources = pipeline_files(files.folder)
    digests = {path.as_posix(): digest_file(files.folder / path) for path in sources}
    for path in sources:
        if path.as_posix() not in moved:
            _copy(files.folder / path, tree / path)
    for part, tensors in changed.items():
        read = files.places(part)
        for path in _holders(tree, sources, set(tensors)):
            own = {name: each for name, each in tensors.items() if name in read and read[name][0] == path}
            if own:
                originals = {name: read_tensor(files.folder / path, read[name][1]) for name in own}
                if model.lora:
                    stored |= {f"{path.as_posix()}|{name}": each for name, each in originals.items()}
                replace_tensors(tree / path, own)
                edited[path.as_posix()] = digest_file(tree / path)
                continue
            rounded, overwritten = _in_another_file(files.folder, path, tensors, read, merged=model.lora)
            if rounded is None:
                unedited.append(path.as_posix())
                continue
            replace_tensors(tree / path, rounded)
            stored |= {f"{path.as_posix()}|{name}": each for name, each in overwritten.items()}
            edited[path.as_posix()] = digest_file(tree / path)
    remove_evidence(tree)
    unedited = sorted(set(unedited) - set(edited))
    left_out = unedited if other_weights == "leave-out" else []
    for name in left_out:
        (tree / name).unlink()
    if undo:
        keep = tree / FOLDER / f"{number:03d}-files"
        for name in (*moved, *([_README] if (files.folder / _README).is_file() else [])):
            _copy(files.folder / name, keep / name)
        moved = sorted(each.name for each in keep.iterdir()) if keep.is_dir() else []
    record = replace(
        record,
        rows=record.rows if undo else {},
        stored=stored if undo else {},
        files=EditedFiles(
            digests, edited, {part: list(tensors) for part, tensors in changed.items()}, files.read_variants,
            [] if left_out else unedited, left_out, moved,
        ),
    )  # fmt: skip
    record.write(tree / FOLDER, number)
    job.publish(destination, overwrite=None)
    return record


@final
@dataclass(frozen=True)
class Undone:
    """Result of undoing an edit."""

    record: EditRecord
    """The record of the edit."""
    equal: int
    """The number of files whose digest is the one from before the edit."""
    absent: tuple[str, ...]
    """Files that the edit left out, which cannot be restored."""
    newer: tuple[str, ...]
    """Files that came into the folder after the edit, or changed since, and were copied as they are."""


def undo_folder(source: str | Path, destination: str | Path) -> Undone:
    """Undo the last edit of a pipeline's folder, and write the pipeline as a folder of its own.

    Args:
        source: The edited folder, which stays as it is.
        destination: The folder to be made.

    Returns:
        What was restored: the digest of every file is compared with the one from before the edit.

    Raises:
        UsageError: The folder has no record of an edit, the record keeps no weights, or an edited file was changed.
        CorruptBlob: A restored file does not have its digest from before the edit.
    """
    source, destination = Path(source), Path(destination)
    check_pipeline(source)
    check_destination(destination, overwrite=None)
    records = read_records(source)
    if not records:
        raise UsageError(
            f"{source} contains no record of an edit in its folder {FOLDER!r}.",
            cure="Give a folder that netweight forget apply wrote without --no-undo.",
        )
    record, files, number = records[-1], records[-1].files, len(records)
    if not record.undoable:
        raise UsageError(
            "The record contains no weights, so the edit cannot be undone.", cure="Keep the pipeline before its edit."
        )
    for name, digest in files.edited.items():
        if not (source / name).is_file() or digest_file(source / name) != digest:
            raise UsageError(
                f"{source / name} is not the file that the edit wrote: its digest differs.",
                cure="Undo edits in reverse order, on the folder as it was written; decompress it first if it was "
                "compressed since.",
            )
    own = f"{FOLDER}/{number:03d}"
    with Job.beside(destination, overwrite=None) as job:
        tree = _fresh_tree(job)
        for path in pipeline_files(source):
            if not path.as_posix().startswith(own):
                _copy(source / path, tree / path)
        for name in files.moved:
            _copy(source / f"{own}-files" / name, tree / name)
        for name in files.edited:
            replace_tensors(tree / name, dict(_originals(source, tree, name, record)))
        newer, equal = [], 0
        for path in pipeline_files(tree):
            name = path.as_posix()
            if files.digests.get(name) == digest_file(tree / path):
                equal += 1
            elif name in files.edited:
                raise CorruptBlob(
                    f"{name} is not as it was before the edit: its digest differs.",
                    cure="The record is damaged; keep the pipeline before its edit.",
                )
            else:
                newer.append(name)
        job.publish(destination, overwrite=None)
    absent = tuple(name for name in files.digests if name in files.left_out)
    return Undone(record, equal, absent, tuple(newer))


def _fresh_tree(job: Job) -> Path:
    # A run that was killed here left this folder.
    shutil.rmtree(job.tree)
    return job.tree


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Only the content is copied, so a link of the hub's cache becomes a file.
    shutil.copyfile(source, target)


def other_weights_of(folder: Path) -> list[Path]:
    """Return files of other programs that may hold a pipeline's weights: not its LoRA, and no embeddings of words."""
    words = {each.file.relative_to(folder) for each in textual_inversions(folder)}
    return [path for path in other_weights(folder) if path not in words]


def _changed_tensors(model: PipelineModel, record: EditRecord) -> dict[str, dict[str, Tensor]]:
    """The tensors that differ from those of the files, by part and name, in the dtype of the files.

    The weights in memory become what the files will hold.
    """
    assert model.files is not None
    if packed := model.files.compressed:
        raise Unsupported(
            f"The {packed[0]} of {model.files.folder} is compressed, so that its tensors cannot be replaced in place.",
            cure=f"Run netweight decompress {model.files.folder} NEW first, and edit that.",
        )
    parts = [model.component]
    if model.lora:
        parts += [part for part in model.files.parts if part.startswith("text_encoder")]
    changes: dict[str, dict[str, Tensor]] = {}
    for part in parts:
        places = model.files.places(part)
        network: torch.nn.Module = getattr(model.pipeline, part)
        names_in_files = _names_in_files(network, places)
        names = names_in_files if model.lora else {name: names_in_files.get(name) for name in _edited_names(record)}
        changed: dict[str, Tensor] = {}
        parameters = dict(network.named_parameters()) | dict(network.named_buffers())
        for name, there in names.items():
            if there is None or there not in places:
                raise Unsupported(
                    f"The files of {model.files.folder} do not contain the weight {name} of the {part} under this "
                    "name.",
                    cure="Save the pipeline once with a recent diffusers: pipeline.save_pretrained(NEW).",
                )
            path, place = places[there]
            value = parameters[name].detach().cpu().to(place.dtype)
            if value.ndim == 2 and value.shape[1:] == place.shape[1:]:
                # Words of textual inversions are rows that the files do not have.
                value = value[: place.shape[0]]
            if tensor_bytes(value) != tensor_bytes(read_tensor(model.files.folder / path, place)):
                changed[there] = value
                with torch.no_grad():
                    target = parameters[name][: len(value)] if value.ndim else parameters[name]
                    target.copy_(value.to(target))
        if changed:
            changes[part] = changed
    return changes


def _edited_names(record: EditRecord) -> list[str]:
    return list(record.rows)


def _names_in_files(network: torch.nn.Module, places: Mapping[str, object]) -> dict[str, str | None]:
    """Return the names of a network's parameters in its files; transformers has several schemes."""
    names: dict[str, str | None] = {}
    for name, _ in network.named_parameters():
        ways = (name, f"text_model.{name}", name.removeprefix("text_model."))
        names[name] = next((way for way in ways if way in places), None)
    return names


def _holders(tree: Path, sources: Sequence[Path], names: set[str]) -> Iterator[Path]:
    """The files that hold tensors of some names: in any folder, whole or in shards, of any variant."""
    for path in sources:
        if path.suffix not in (".safetensors", ".bin") or not (tree / path).is_file() or path.parts[0] == FOLDER:
            continue
        try:
            held = tensor_places(tree / path)
        except (Unsupported, CorruptBlob):
            # The file is from another program. It is reported where it lies beside the weights.
            continue
        if names & held.keys():
            yield path


def _in_another_file(
    folder: Path, path: Path, tensors: Mapping[str, Tensor], read: Mapping[str, tuple[Path, TensorPlace]], *,
    merged: bool,
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:  # fmt: skip
    """Edited tensors for a further file, if it holds roundings of the weights that were edited; and its own, to keep.

    With a LoRA merged, its own are all kept: the record of the edit holds weights from after the merge.

    Returns:
        The tensors in the dtypes of the file, or None if it holds other weights; and those that do not follow from
        the weights that were edited.
    """
    rounded, originals = {}, {}
    for name, place in tensor_places(folder / path).items():
        if name not in tensors:
            continue
        there = read_tensor(folder / path, place)
        before = read_tensor(folder / read[name][0], read[name][1])
        if there.shape != before.shape or not _same_weights(there, before):
            return None, {}
        rounded[name] = tensors[name].to(place.dtype)
        if merged or tensor_bytes(before.to(place.dtype)) != tensor_bytes(there):
            originals[name] = there
    return rounded, originals


def _same_weights(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same numbers but for the rounding of the narrower dtype."""
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    narrow = max((one.dtype, other.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    a, b = one.double(), other.double()
    allowed = 2 * torch.finfo(narrow).eps * torch.maximum(a.abs(), b.abs()) + 2 * torch.finfo(narrow).tiny
    return bool(((a - b).abs() <= allowed).all())


def _originals(source: Path, tree: Path, name: str, record: EditRecord) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a file held before an edit."""
    places = tensor_places(tree / name)
    names = {each for tensors in record.files.tensors.values() for each in tensors}
    for tensor in sorted(names & places.keys()):
        place = places[tensor]
        original = record.stored.get(f"{name}|{tensor}")
        yield (
            tensor,
            original if original is not None else _before(source / name, tensor, place, record).to(place.dtype),
        )


def _before(path: Path, tensor: str, place: TensorPlace, record: EditRecord) -> Tensor:
    """A weight before the edit, from the record; of neurons, the rows among those that stayed."""
    rows = record.rows[tensor]
    if record.method != "neurons":
        return rows
    whole = read_tensor(path, place).to(rows.dtype)
    whole[record.units[tensor.rpartition(".")[0]]] = rows
    return whole
