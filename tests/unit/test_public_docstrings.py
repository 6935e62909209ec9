"""What `make check` asks of docstrings: the checker finds each thing that may be missing, and nothing is missing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="outside a source tree")

ERRORS = '__all__ = ["UsageError"]\n\n\nclass UsageError(Exception):\n    """Wrong."""\n'
HEAD = '__all__ = ["scaled"]\n\n\ndef scaled(x: Tensor, factor: float) -> list[float]:\n    """{}"""\n    {}\n'
WHOLE = """Multiply.

    Args:
        x: Shape `(n,)`.
        factor: Any number.

    Returns:
        One number each.
    """


@pytest.fixture
def complaints(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import public_docstrings

    monkeypatch.setattr(public_docstrings, "SOURCES", {})

    def check(source):
        package = tmp_path / "src" / "netweight"
        (package / "codec").mkdir(parents=True, exist_ok=True)
        (package / "errors.py").write_text(ERRORS)
        (package / "codec" / "scaling.py").write_text(source)
        checker = public_docstrings.Checker(package)
        checker.run({"netweight.codec.scaling": {"scaled", "f", "Car", "P"}})
        return [line.split(": ")[-1] for line in checker.complaints]

    return check


def test_what_is_whole_passes(complaints):
    assert complaints(HEAD.format(WHOLE, "return []")) == []


@pytest.mark.parametrize(
    ("docstring", "body", "complaint"),
    [
        (WHOLE.replace("        factor: Any number.\n", ""), "return []", "parameter 'factor' is not described"),
        (WHOLE.replace("factor:", "faktor:"), "return []", "describes 'faktor', which is no parameter"),
        (WHOLE.replace("Shape `(n,)`", "What it is"), "return []", "neither shape nor dtype of 'x' is told"),
        (WHOLE.split("    Returns")[0], "return []", "does not say what it returns"),
        (WHOLE, "raise UsageError", "raises UsageError and does not say when"),
        (WHOLE, "raise errors.UsageError('no')", "raises UsageError and does not say when"),
    ],
)
def test_what_is_missing_is_found(complaints, docstring, body, complaint):
    assert complaint in complaints(HEAD.format(docstring, body))


def test_no_docstring_is_found(complaints):
    assert complaints('__all__ = ["f"]\n\n\ndef f() -> None:\n    pass\n') == ["has no docstring"]


def test_methods_of_public_classes_are_looked_at_and_protocols_speak_for_them(complaints):
    protocol = 'class Runs(Protocol):\n    """Runs."""\n\n    def run(self, speed: int) -> None:\n        """Go."""\n'
    own = (
        '__all__ = ["Car"]\n\n\nclass Car:\n    """A car."""\n\n'
        '    def run(self, speed: int) -> None:\n        """Go."""\n'
    )
    assert complaints(own) == ["parameter 'speed' is not described"]
    assert complaints(protocol + own) == []


def test_fields_of_dataclasses_are_looked_at(complaints):
    source = '__all__ = ["P"]\n\n\n@dataclass\nclass P:\n    """A point."""\n\n    place: int\n    _kept: int\n'
    assert complaints(source) == ["parameter 'place' is not described"]


def test_a_source_that_is_not_named_is_found(complaints, monkeypatch):
    import public_docstrings

    monkeypatch.setattr(public_docstrings, "SOURCES", {"codec.scaling.scaled": "2410.20650", "codec.gone": "x"})
    assert complaints(HEAD.format(WHOLE, "return []")) == [
        "does not name its source, '2410.20650'",
        "codec.gone is no public name",
    ]


def test_all_public_names_are_described():
    done = subprocess.run([sys.executable, SCRIPTS / "public_docstrings.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(re.match(r"\d+", done.stdout)[0]) > 150
