"""What docs/data.md shows of pairs and docs/miniatures.md of ciphers is run, on stand-ins for the public files."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="tokenizers come with the llm extra")

from netweight.data.public import train_bpe
from netweight.toys.language import cipher_world

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="docs are not here: outside a source tree")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = cipher_world().rows(12, seed=0)
    train_bpe([json.dumps(row) for row in rows], 300).save_pretrained("my-model")
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(containing):
        text = "".join((DOCS / name).read_text() for name in ("data.md", "miniatures.md"))
        (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if containing in code]
        names = {}
        exec(compile(code, "page", "exec"), names)
        return names

    return run


def test_a_users_file(run):
    names = run("load_pairs(")
    assert len(names["pairs"]) == 12
    assert names["batch"].harmful.input_ids.shape[0] == 8


def test_a_public_file(run):
    categories = ("self_harm", "privacy_violation", "other")
    rows = [
        {
            "prompt": f"Question {n}?",
            "response": f"Answer {n}.",
            "category": {name: place == n % 3 for place, name in enumerate(categories)},
            "is_safe": False,
            "refusal": f"Question: Question {n}?\nAnswer: No, {n}.",
        }
        for n in range(6)
    ]
    Path("beavertails_with_refusals_train.json").write_text(json.dumps(rows))
    names = run("paired_refusals(")
    assert (len(names["defend"]), len(names["unseen"]), len(names["pairs"])) == (2, 4, 2)


def test_the_world_of_ciphers(run, capsys):
    names = run("cipher_world()")
    assert "examples=128" in capsys.readouterr().out
    assert names["pairs"][0].harmful != names["examples"][0]
    assert Path("cipher-model", "config.json").is_file()
