import json
import os
import subprocess
import sys
from pathlib import Path

from netweight.core import environment


def test_the_description_is_plain_json_and_carries_the_callers_facts():
    described = environment.describe({"codec_path": "portable"})
    assert json.loads(json.dumps(described)) == described
    assert described["codec_path"] == "portable"
    assert described["packages"]["torch"] == environment.installed_version("torch")
    assert 1 <= described["cores"] <= os.cpu_count()
    assert described["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_package_that_is_not_installed_has_no_version():
    assert environment.installed_version("no-such-distribution-anywhere") is None


def test_an_installed_copy_inside_another_repository_claims_no_revision(tmp_path):
    """A virtual environment often lies in somebody's repository; its commit is not netweight's."""
    package = tmp_path / "venv" / "netweight"
    (package / "core").mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("environment.py", "__init__.py"):
        (package / "core" / name).write_text(Path(environment.__file__).with_name(name).read_text())
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    program = "from netweight.core import environment; print(environment.__file__, environment.source_revision())"
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "venv", capture_output=True, text=True, check=True
    )
    where, revision = answer.stdout.split()
    assert where.startswith(str(tmp_path))
    assert revision == "None"
