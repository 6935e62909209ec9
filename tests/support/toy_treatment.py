"""A treatment small enough to see through: it repeats a file's text."""

import multiprocessing
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field

from netweight.data.text_options import RowSource
from netweight.errors import UsageError
from netweight.registry import Method, register, unregister
from netweight.report.finding import Column, Finding, Section, Table
from netweight.settings import Settings

CALLS: list[str] = []
ALL_MOMENTS = ["repeat", "length", "start"] * 2
"""What two steps call, in order."""


class Inner(Settings):
    """Settings within others."""

    file: Path | None = Field(None, description="A file.")


class RepeatConfig(Settings):
    """How often the text is repeated."""

    times: int = Field(2, description="How often.")
    letters: str = Field("", description="What comes after.")
    more: Path | None = Field(None, description="A file beside it.")
    rows: tuple[RowSource, ...] = Field((), description="Rows.")
    inner: Inner = Field(Inner(), description="Further settings.")


def check(source, settings):
    if settings.times == 13:
        raise UsageError("Nothing is repeated 13 times.")
    if source is not None and not source.read_bytes():
        raise UsageError(f"There is nothing in {source}.")


def reads(settings):
    return [] if settings.more is None else [settings.more.with_name("beside")]


def repeat(source, destination, settings, progress):
    CALLS.append("repeat")
    destination.write_text(source.read_text() * settings.times + settings.letters)


def examine(audit, result, source, settings, progress):
    return (result, source), settings


def length(subject, config, *, seed, progress):
    CALLS.append("length")
    result, source = (len(path.read_text()) for path in subject)
    found = Finding("length", result, unit="letters", target=source * config.times)
    table = Table("Lengths", [Column("before"), Column("after")], [[source, result]])
    return Section("Length", [found], tables=[table], conclusion=f"It has {result} letters.")


def start(subject, config, *, seed, progress):
    CALLS.append("start")
    result, source = (path.read_text() for path in subject)
    return Section("Start", [Finding("starts with the source", result.startswith(source), target=True, seeds=(seed,))])


REPEAT = Method(
    "repeat", RepeatConfig, repeat, {"length": length, "start": start}, examine=examine, check=check, reads=reads
)


@contextmanager
def registered(*entries):
    """Register the treatment and further entries as a user would, within a block: other tests do not see them."""
    for entry in (REPEAT, *entries):
        register(entry)
    try:
        yield
    finally:
        for entry in (REPEAT, *entries):
            unregister(entry.name)


# A process that runs a chapter of a recipe imports the module, which registers the treatment as a user's module would.
if multiprocessing.parent_process() is not None:
    register(REPEAT)
