"""Digest of the weights of a model's folder: the same for the same numbers, compressed without loss or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from netweight.core.digests import digest_bytes, digest_config
from netweight.core.progress import QUIET, Progress
from netweight.store.reader import StoredFile


def weights_digest(path: str | Path, progress: Progress = QUIET) -> str | None:
    """Return a digest of the tensors of a model: their names, types, shapes and bytes.

    Neither the distribution over files nor lossless compression enters, nor any file without weights, such as the card.
    Of a pipeline, the weights of its parts enter. Records of an edit, which hold the weights from before it, do not.

    Args:
        path: The folder of a model, a pipeline or an adapter, or a safetensors file.
        progress: Receives the bytes that are read.

    Returns:
        The digest with the name of its algorithm; None if there is no safetensors file.

    Raises:
        CorruptBlob: A file is damaged, or holds differences from a base that cannot be found.
    """
    path = Path(path)
    files = list(_weight_files(path))
    if not files:
        return None
    tensors = []
    with progress.task(f"digest of {path.name}", sum(file.stat().st_size for file in files)) as task:
        for file in files:
            part = "" if file.parent == path or file == path else file.parent.name
            stored = StoredFile(file)
            try:
                for name in stored.names():
                    info = stored.info(name)
                    digest = digest_bytes(memoryview(stored.content(name)))
                    tensors.append([part, name, info.dtype, list(info.shape), digest])
            finally:
                stored.close()
            task.update(file.stat().st_size)
    return digest_config(sorted(tensors))


def _weight_files(path: Path) -> Iterator[Path]:
    """Yield the safetensors files of a model and of the parts of a pipeline, which have a config each."""
    if path.is_file():
        yield from [path] if path.suffix == ".safetensors" else []
        return
    yield from sorted(path.glob("*.safetensors"))
    for folder in sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else ():
        if (folder / "config.json").is_file():
            yield from sorted(folder.glob("*.safetensors"))
