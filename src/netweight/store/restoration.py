"""Restoring the plain safetensors file that a compressed one was made from, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from netweight.core.atomic_writes import mode_of, whole_file
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store.file_totals import FileTotals, Tally
from netweight.store.reader import StoredFile
from netweight.store.safetensors import ONLY_COMPRESSED, build_header, file_head


def restore_file(
    source: Path,
    target: Path,
    *,
    threads: int,
    overwrite: bool = False,
    base: Path | None = None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> FileTotals:
    """Restore the safetensors file that a compressed one was made from; every chunk is checked."""
    with closing(StoredFile(source, base=base)) as file:
        if file.description is None:
            raise UsageError(f"{source} is not compressed.", cure="Check the path.")
        head = plain_head(file)
        tally = Tally(head)
        with whole_file(target, overwrite=overwrite, mode=mode_of(source)) as output:
            output.write(head)
            advance(len(head))
            for name, start, content in file.blocks(threads=threads):
                if isinstance(content, CorruptBlob):
                    raise content
                output.write(content.data)
                tally.update(content)
                if not start:
                    tally.add(file.info(name).stored_nbytes, file.rounding(name))
                advance(len(content))
    return tally.result(plain=target.stat().st_size, stored=source.stat().st_size)


def plain_size(source: Path) -> int:
    """Bytes of the plain file that a weights file holds or is."""
    with closing(StoredFile(source)) as file:
        return file.nbytes + len(plain_head(file))


def check_digest(path: Path, digest: str, recorded: str) -> None:
    """Compare a restored file with what was recorded of the original."""
    if digest != recorded:
        raise CorruptBlob(
            f"{path}: the restored content has digest {digest}, but {recorded} was recorded.",
            cure="The compressed folder is damaged: fetch or make it again.",
        )


def plain_head(file: StoredFile) -> bytes:
    """The bytes before the data of the plain file: the original's if there was one, else new ones."""
    if file.description is not None:
        file.nbytes  # noqa: B018  a file that declares more than it can hold is refused before any work
    if file.original_header is not None:
        return file_head(file.original_header.raw)
    infos = [file.info(name) for name in file.names()]
    if lacking := [info for info in infos if info.dtype in ONLY_COMPRESSED]:
        raise Unsupported(
            f"{file.path}: safetensors has no dtype {lacking[0].dtype}, which tensor {lacking[0].name!r} has.",
            cure="Read it with netweight.open_store.",
        )
    return file_head(build_header([(i.name, i.dtype, i.shape, i.nbytes) for i in infos], {"format": "pt"}))
