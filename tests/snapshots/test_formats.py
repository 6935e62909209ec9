"""Files that an earlier version wrote are read, continued and remembered."""

import json
from pathlib import Path

import pytest
import snapshot_reading as reading
from snapshot_golden import differences

for extra in ("transformers", "diffusers", "peft", "sklearn", "scipy", "matplotlib", "PIL"):
    pytest.importorskip(extra, reason="files of all methods are read: the extras llm, diffusion and evidence")

HERE = Path(__file__).parent
KEPT = json.loads((HERE / "formats.json").read_text())


@pytest.mark.parametrize("name", reading.READERS)
def test_a_format_is_read(name, tmp_path, monkeypatch):
    monkeypatch.delenv("NETWEIGHT_DATA", raising=False)
    reading.lay_out(tmp_path)
    found = json.loads(json.dumps(reading.read(name, tmp_path)).replace(str(tmp_path), "@"))
    assert not list(differences(KEPT[name], found))


def test_every_file_that_is_kept_is_small():
    sizes = {path: path.stat().st_size for path in HERE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert sum(sizes.values()) < 1_500_000
