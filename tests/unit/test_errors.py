import importlib
import pkgutil
from pathlib import Path

import pytest

import netweight
from netweight import errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_cure_is_part_of_the_message_and_apart():
    error = errors.UsageError("The thing is broken.", cure="Mend it.")
    assert str(error) == "The thing is broken. Mend it."
    assert (error.reason, error.cure) == ("The thing is broken.", "Mend it.")
    assert str(errors.UsageError("Broken.")) == "Broken."


def all_errors():
    """Every subclass of NetweightError anywhere in the package."""
    for module in pkgutil.walk_packages(netweight.__path__, "netweight."):
        if not module.name.endswith(("_native", "__main__")):
            importlib.import_module(module.name)
    found, waiting = [], [errors.NetweightError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return found


@pytest.mark.skipif(not PAGE.is_file(), reason="docs/ is not here: the tests run outside a source tree")
def test_every_error_has_its_place_in_the_documentation():
    headings = {line[3:].strip() for line in PAGE.read_text().splitlines() if line.startswith("## ")}
    assert {kind.__name__ for kind in all_errors()} == headings


@pytest.mark.skipif(not PAGE.is_file(), reason="docs/ is not here: the tests run outside a source tree")
def test_the_page_says_of_each_error_what_kind_it_is_and_what_to_do():
    sections = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])
    kinds = sections["UsageError"].partition("- **Kinds of it**: ")[2]
    for kind in set(all_errors()) - {errors.NetweightError}:
        text = sections[kind.__name__]
        assert (f"`{kind.__name__}`" in kinds) == (errors.UsageError in kind.__bases__), kind
        told = [line[4:].split("**")[0] for line in text.splitlines() if line.startswith("- **")]
        assert told[:3] == ["Symptom", "Cause", "Fix"], kind
        assert kind.exit_code == (
            3 if issubclass(kind, (errors.Unsupported, errors.CorruptBlob, errors.UnsafeInput)) else 2
        )
