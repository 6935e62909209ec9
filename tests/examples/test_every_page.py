"""Whatever a page shows is possible: its Python compiles, its imports are there, its commands know their options."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from netweight import cli

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="docs are not here: outside a source tree")
# Page → test files that run its Python, and the number of blocks that each runs. A new block needs a test.
RUN_BY = {
    "README": {"examples/test_readme.py": 1},
    "adapter-bank": {"examples/test_adapter_bank_page.py": 1},
    "adapter-files": {"examples/test_adapter_bank_page.py": 2},
    "add-a-method": {"examples/test_add_a_method_page.py": 3},
    "attack-search": {"examples/test_blocks_that_continue_a_program.py": 2},
    "compress": {"examples/test_compress_page.py": 1},
    "compress-python": {"examples/test_compress_page.py": 6},
    "data": {"examples/test_federated_data.py": 4, "examples/test_immunization_data.py": 2},
    "ecosystem": {"examples/test_ecosystem_page.py": 1},
    "federate-networks": {"examples/test_blocks_that_continue_a_program.py": 1},
    "flower": {"examples/test_blocks_that_continue_a_program.py": 2, "study/test_pages_from_a_wheel.py": 1},
    "flower-deployment": {"examples/test_blocks_that_continue_a_program.py": 1},
    "forget-edits": {"examples/test_forget_page.py": 1},
    "gpus": {"examples/test_gpus_page.py": 1},
    "gradient-inversion-results": {"examples/test_blocks_that_continue_a_program.py": 2},
    "immunize-python": {"examples/test_immunize_python_page.py": 1},
    "label": {"examples/test_blocks_that_continue_a_program.py": 1},
    "memorization-attacks": {"examples/test_blocks_that_continue_a_program.py": 2},
    "miniatures": {
        "examples/test_immunization_data.py": 1, "examples/test_space_data.py": 2,
        "examples/test_blocks_that_continue_a_program.py": 1,
    },
    "scale": {"examples/test_scale_page.py": 1},
    "sharding": {"examples/test_sharding_page.py": 1},
    "start-here": {"examples/test_start_here_page.py": 1},
    "weight-space-edits": {"examples/test_blocks_that_continue_a_program.py": 1},
    "weight-space-python": {"examples/test_weight_space_page.py": 2},
    "weight-space-view": {"examples/test_blocks_that_continue_a_program.py": 1},
}  # fmt: skip


def imports(code):
    """Pairs of a module of netweight and a name that is imported from it, None for the module itself."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def commands(text):
    """Command lines of netweight in shell blocks, continued lines joined."""
    fenced = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.S | re.M)
    shell = [block for language, block in fenced if language in ("", "sh", "console", "bash")]
    for block in shell + re.findall(r"(?:^    .*\n)+", text, re.M):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            words = line.strip().removeprefix("$ ")
            if words.startswith("netweight "):
                yield shlex.split(words, comments=True)[1:]


def resolved(words):
    """The click command that words call, and what is left of them."""
    found = cli.netweight
    while isinstance(found, click.Group) and words:
        known = found.get_command(click.Context(found), words[0])
        assert known is not None, f"there is no command {words[0]!r}"
        found, words = known, words[1:]
    return found, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_can_be_imported(page):
    for code in re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.S):
        for module, name in imports(code):
            if module.split(".")[0] == "netweight":
                try:
                    found = importlib.import_module(module)
                except ModuleNotFoundError as error:
                    pytest.importorskip(error.name, reason=f"{error.name} is in an extra")
                    raise
                assert name is None or hasattr(found, name) or importlib.import_module(f"{module}.{name}"), name


def test_every_block_of_python_is_run_by_a_test():
    blocks = {page.stem: len(re.findall(r"^ *```python", page.read_text(), re.M)) for page in PAGES}
    assert {page: count for page, count in blocks.items() if count} == {
        page: sum(files.values()) for page, files in RUN_BY.items()
    }
    for page, files in RUN_BY.items():
        for file in files:
            assert page in (ROOT / "tests" / file).read_text(), (page, file)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_know_their_options(page):
    for words in commands(page.read_text()):
        if page.stem == "add-a-method" and words[0] == "prune":  # the command that the page adds; tested with it
            continue
        command, rest = resolved(words)
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        asked = {word.split("=")[0] for word in rest if word.startswith("--")}
        assert asked <= known | {"--help"}, (words, asked - known)


def test_commands_are_found_on_pages():
    assert sum(len(list(commands(page.read_text()))) for page in PAGES) > 60
