"""What a treatment carries over from a model folder."""

import json

from netweight.hf.carry_over import carry_over


def test_all_but_weights_and_reports_is_carried_over_and_no_path_of_a_disk(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "assets").mkdir(parents=True)
    (source / "immunize-report").mkdir()
    (source / ".cache").mkdir()
    target.mkdir()
    texts = {
        "LICENSE": "Apache", "README.md": "# Mine", "NOTICE": "n", "assets/logo.svg": "<svg/>", "modeling_mine.py": "x",
        "tokenizer.json": '{"theirs": 1}', "immunize-report/report.html": "old", ".cache/x": "x",
        "model.safetensors": "old", "weights.pkl": "old", "rust_model.ot": "old", "PYTORCH_MODEL.BIN": "old",
        "pytorch_model.bin.index.json": "{}", "chat_template.jinja": "{{ x }}",
        "config.json": "{}",
    }  # fmt: skip
    for name, text in texts.items():
        (source / name).write_text(text)
    (target / "config.json").write_text(json.dumps({"_name_or_path": str(source), "hidden_size": 8}))
    (target / "tokenizer.json").write_text('{"ours": 1}')
    (target / "tokenizer_config.json").write_text(json.dumps({"name_or_path": "author/model"}))
    copied = carry_over(source, target)
    assert copied == sorted(["LICENSE", "NOTICE", "README.md", "assets/logo.svg", "chat_template.jinja",
                             "modeling_mine.py", "tokenizer.json"])  # fmt: skip
    assert json.loads((target / "config.json").read_text()) == {"hidden_size": 8}
    assert json.loads((target / "tokenizer_config.json").read_text()) == {"name_or_path": "author/model"}
    assert (target / "tokenizer.json").read_text() == '{"theirs": 1}'
    for name in ("model.safetensors", "weights.pkl", "rust_model.ot", "PYTORCH_MODEL.BIN"):
        assert not (target / name).exists()
