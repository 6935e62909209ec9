"""The five methods' pages: what it is, when to use it, when not, the options; last what an attacker can still do."""

import re
from pathlib import Path

import click
import pytest

from netweight import cli

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="docs are not here: outside a source tree")

PAGES = {
    "compress": ("compress",),
    "federate": ("federate run",),
    "immunize": ("immunize",),
    "forget": ("forget detect", "forget localize", "forget apply", "forget statistics"),
    "weight-space": ("space fit",),
}


def command(words):
    found = cli.netweight
    for word in words.split():
        found = found.get_command(click.Context(found), word)
    return {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_opens_like_the_others(page):
    text = (DOCS / f"{page}.md").read_text()
    opening = ["**When to use it.**", "**When not.**", "\n## The options that matter\n"]
    places = [text.index(part) for part in opening]
    shown = re.findall(r"^!\[[^]]+\]\((.*?)\)$", text[: text.index("\n## ")], re.M)
    assert shown, "a picture of what it comes to"
    assert all((DOCS / picture).is_file() for picture in shown)
    assert places == sorted(places)
    parts = re.findall(r"^## (.*)$", text, re.M)
    assert (parts[0], parts[-1]) == ("The options that matter", "What an attacker can still do")
    assert len(text[: places[0]].split()) > 20  # what it is


@pytest.mark.parametrize(("page", "commands"), PAGES.items())
def test_the_options_named_are_options_of_its_commands(page, commands):
    text = (DOCS / f"{page}.md").read_text().split("\n## The options that matter\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(--[a-z-]+)`", text))
    known = set().union(*(command(words) for words in commands))
    assert named
    assert named <= known
