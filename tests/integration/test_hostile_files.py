"""Files made to do harm: every command refuses each by a named error, in little memory and processor time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_files import FILES

PROGRAM = Path(__file__).parents[1] / "support" / "hostile_files.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each command made of each file: the error, seconds of the processor, bytes of memory."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, make in FILES.items():
        (folder / f"{name}.safetensors").write_bytes(make())
    done = subprocess.run([sys.executable, PROGRAM, folder], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    sizes = {name: (folder / f"{name}.safetensors").stat().st_size for name in FILES}
    for path in folder.iterdir():
        path.unlink()
    return {(name, verb): (error, spent, memory, sizes[name]) for name, verb, error, spent, memory in rows}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_by_name(outcomes, name):
    errors = {verb: outcome[0] for (file, verb), outcome in outcomes.items() if file == name}
    assert not [error for error in errors.values() if error.startswith("BUG")], errors
    assert errors["verify"], errors
    assert errors["decompress"], errors


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_takes_little_memory(outcomes, name):
    for (file, verb), (_, _, memory, size) in outcomes.items():
        if file == name:
            assert memory <= size + (64 << 20), (verb, memory / 1e6)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_takes_little_work(outcomes, name):
    """Two seconds of the processor; most files take a hundredth of it."""
    for (file, verb), (_, spent, _, _) in outcomes.items():
        if file == name:
            assert spent <= 2, verb
