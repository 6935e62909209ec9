"""The source distribution: it is complete, builds with a compiler, and says what is missing without one."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from installed_wheel import run

ROOT = Path(__file__).parents[2]
NEEDED = ("pip", "scikit_build_core", "nanobind")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.study,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (ROOT / "CMakeLists.txt").is_file(), reason="outside a source tree"),
    pytest.mark.skipif(bool(MISSING), reason=f"building needs {', '.join(MISSING)}"),
]  # fmt: skip


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    program = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(folder)!r}))"
    run(sys.executable, "-c", program, cwd=ROOT)
    (file,) = folder.glob("*.tar.gz")
    return file


def wheel_of(archive, folder, **options):
    """Build the archive's wheel as pip does, and return what was said and the names in the wheel."""
    how = ("--no-deps", "--no-build-isolation", "--no-index", "--verbose", "--wheel-dir", folder)
    command = [*map(str, (sys.executable, "-m", "pip", "wheel", *how, archive))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000, **options)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    (file,) = folder.glob("*.whl")
    return done.stdout + done.stderr, zipfile.ZipFile(file).namelist()


def test_it_has_what_a_build_needs_and_no_results(archive):
    names = {name.partition("/")[2] for name in tarfile.open(archive).getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "scripts/index_readme.py", "PKG-INFO"} <= names
    assert "native/bind.cpp" in names
    assert not [name for name in names if name.startswith(("toys/", "benchmarks/results", "build/", ".venv"))]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_it_builds_with_a_compiler(archive, tmp_path):
    said, names = wheel_of(archive, tmp_path)
    assert "No C++ compiler found" not in said
    assert any("/_native." in name and not name.endswith(".pyi") for name in names)


def test_without_a_compiler_it_installs_and_says_what_is_missing(archive, tmp_path):
    """Only the programs that any build needs are on the path; a compiler is none of them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("cmake", "ninja", "sh", "env", "uname"):
        (programs / name).symlink_to(shutil.which(name))
    variables = {name: value for name, value in os.environ.items() if name in ("HOME", "TMPDIR", "LANG")}
    said, names = wheel_of(archive, tmp_path / "wheel", env={**variables, "PATH": str(programs)})
    assert "No C++ compiler found: installing netweight without its native codec" in said
    assert not any("/_native." in name and not name.endswith(".pyi") for name in names)
    assert "netweight/codec/backend.py" in names
