"""The flag `--card` of commands that write a model's folder: its README.md says what was done."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from netweight.cli.output import Output

F = TypeVar("F", bound=Callable[..., Any])


def card_option(command: F) -> F:
    """Give a command the flag `--card`."""
    return click.option(
        "--card", is_flag=True, help="Say in the folder's README.md what was done; see docs/ecosystem.md."
    )(command)


def write_card(folder: Path, output: Output) -> None:
    """Write or update the card of a folder that a command has just written."""
    from netweight.plugins.model_card import update_card

    card = update_card(folder, command=shlex.join(["netweight", *sys.argv[1:]]))
    output.line(f"Card: {card}")
