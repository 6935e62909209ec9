"""Golden blobs decode by a program that follows docs/format.md alone (decoder_by_the_document.py)."""

import hashlib
import json
from pathlib import Path

import pytest
from decoder_by_the_document import decode

GOLDEN = Path(__file__).parents[1] / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())["accept"]


@pytest.mark.parametrize("name", [name for name, entry in MANIFEST.items() if "source" not in entry])
def test_golden_blobs_are_decoded_by_the_page(name):
    entry = MANIFEST[name]
    base = (GOLDEN / "bases" / entry["base"]).read_bytes() if "base" in entry else b""
    data = decode((GOLDEN / "accept" / f"{name}.nwt").read_bytes(), base)
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]
