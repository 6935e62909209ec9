"""The page on labels explains every line that a label can print, and no other line."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from odd_models import LABELLED, W, language, lora, weights, write

import netweight
from netweight.labels import audit_commands
from netweight.labels.audit_commands import AUDITS
from netweight.labels.audit_process import AuditEnd
from netweight.labels.measure import label
from netweight.report.finding import Finding, Section, Table
from netweight.report.report import Report

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "label-rows.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="outside a source tree")
_TYPE = re.compile(r"\b(BF16|F16|F32|F64|F8_\w+|F4|I8|I16|I32|I64|U8|BOOL|C64)\b")


def line_of(row):
    """The name of a row as the page has it: types of numbers alike, and one name for the parts of pipelines."""
    return "Parts" if row.key.startswith("part_") else _TYPE.sub("TYPE", row.title)


def redundant(folder):
    """A language model with everything that deserves attention, and a copy beside it."""
    language(folder, vocab_size=8, eos_token_id=1, max_position_embeddings=64, auto_map={"AutoModel": "modeling.X"})
    write(folder, "modeling.py", "")
    write(folder, "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 9}}})
    write(folder, "tokenizer_config.json", {"chat_template": "{{ x.__class__ }}"})
    torch.save({"a": 1}, folder / "training_args.bin")
    torch.save(W, folder / "pytorch_model.bin")
    embedding = torch.randn(8, 512)
    embedding[0], embedding[1], embedding[2, 0] = 0, 1, float("nan")
    same = torch.arange(4096.0).reshape(64, 64)
    tensors = {"model.embed_tokens.weight": embedding, "one": same, "other": same.clone()}
    return weights(folder, tensors={**tensors, "complex": torch.ones(512, dtype=torch.complex64)}).parent


def federation(folder, plan, sections):
    write(folder, *plan)
    if sections:
        report = Report("Federation")
        for section in sections:
            report.add(section)
        report.write(folder)
    return folder


def seen_by_a_server():
    named = Table("Clients left out or suspicious", ("client", "reason", "rounds", "first round"), [("2", "x", 1, "1")])
    findings = [
        Finding("accuracy of the personal model", 50, unit="%"),
        Finding("gradient recovered, 5 steps", 0.4, unit="cosine", better="lower", target=0.3, baseline=0.2),
        Finding("PSNR, 5 steps (this run)", 11.5, unit="dB", better="lower", target=16.0, baseline=13.0),
        Finding("PSNR, 1 step of batch 1", 31.25, unit="dB", better="lower", baseline=13.0),
        Finding("tokens recovered, 1 step", 0.5, better="lower"),
        Finding("ε of one client, replaced", 8.0, better="lower", detail={"delta": 1e-5}),
    ]
    return [Section("Exposure to the server", findings, tables=[named])]


def ends():
    """How audits end: with results, late, and the results of each audit that makes rows."""
    refusals = [
        Finding("refusals before", 100, n=5, unit="%"),
        Finding("share of the refusals left by the best edit", 0.1, better="higher", target=0.9, control="broken"),
    ]
    steps = [
        Finding("steps to recover, best attack, defended", 40, baseline=10, detail={"attack": "adam"}),
        Finding("resistance, defended", 4.0, better="higher", target=3.0, control="broken"),
    ]
    scores = {"prompts": [{"memorized": True}], "threshold": {"prompts_below": 0.9}}
    yield "refusals", AuditEnd("ended", sections=(Section("Refusals", refusals),))
    yield "retraining", AuditEnd("ended", sections=(Section("Resistance", steps),))
    yield "memorized", AuditEnd("ended", payload=scores)
    for audit in AUDITS:
        yield audit.key, AuditEnd("late")


def audited(monkeypatch, folder, name, end):
    """The label of an input of the audit's kind, whose audit ended in that way."""
    monkeypatch.setattr(audit_commands, "run_apart", lambda *arguments, **options: end)
    audit = next(each for each in AUDITS if each.key == name)
    made = {"language model": "language model", "pipeline": "pipeline", "federation": "federation"}[audit.kinds[0]]
    path, _ = LABELLED[made](folder)
    given = {option: write(folder, f"{option}.txt", "a\n") for option in audit.needs if option != "base"}
    given |= {"base": path} if "base" in audit.needs else {}
    return label(path, minutes=1, threads=1, out=folder / "audits", **given)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of the labels of many inputs, of which every line of the code is one."""
    made = []
    for number, make in enumerate(LABELLED.values()):
        path, _ = make(tmp_path_factory.mktemp(f"odd-{number}"))
        made.append(label(path, threads=1))
    new = tmp_path_factory.mktemp
    made.append(label(redundant(new("redundant")), threads=1))
    netweight.compress_folder(weights(new("plain"), tensors=W).parent, new("net") / "net")
    made.append(label(next(tmp_path_factory.getbasetemp().glob("net*/net")), threads=1))
    mixed = new("adapters")
    lora(mixed, "a.safetensors")
    weights(mixed, "odd.safetensors", {"who.knows.lora_X": torch.ones(2), "who.lora_Y": torch.ones(2)})
    made.append(label(mixed, threads=1))
    unet = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    factors = {f"{unet}.lora_A.weight": torch.ones(4, 16), f"{unet}.lora_B.weight": torch.ones(16, 4)}
    made.append(label(weights(new("diffusers"), "pytorch_lora_weights.safetensors", factors), threads=1))
    base = weights(new("base"), tensors={**W, "gone": torch.ones(3), "wide": torch.ones(4)})
    own = weights(new("own"), tensors={**{name: each + 1 for name, each in W.items()}, "new": torch.ones(3),
                                       "wide": torch.ones(5)})  # fmt: skip
    made.append(label(own, base=base, threads=1))
    made.append(label(weights(new("other"), tensors={"x": torch.ones(3)}), base=base, threads=1))
    plan = ("federation.json", {"method": "hyperfl", "clients": 3, "rounds": 2})
    history = ("history.json", {"method": "fedavg", "config": {}, "rounds": [{"round": 1, "after": {"0": 0.5}}]})
    made += [label(federation(new("run"), plan, seen_by_a_server())), label(federation(new("flower"), history, []))]
    with pytest.MonkeyPatch.context() as patch:
        made += [audited(patch, new("audited"), *each) for each in ends()]
    return [row for each in made for row in each.rows]


def test_the_inputs_show_every_line_of_the_code(rows):
    """Otherwise a line that the page lacks could be missed."""
    keys = set()
    for file in (ROOT / "src" / "netweight" / "labels").glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Row":
                keys |= {each.value.value for each in call.keywords if each.arg == "key" and _text(each.value)}
    assert len(keys) > 40
    assert keys - {row.key for row in rows} == set()


def _text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_the_page_explains_every_line_and_no_other(rows):
    explained = {_TYPE.sub("TYPE", each) for each in re.findall(r"\*\*(.+?)\*\*", PAGE.read_text())}
    shown = {line_of(row) for row in rows}
    assert sorted(shown - explained) == []
    assert sorted(explained - shown) == []


def test_every_group_of_rows_has_a_heading_on_the_page(tmp_path):
    anchors = set(re.findall(r"\{ #([\w-]+) \}", PAGE.read_text())) | {"weight"}
    path, _ = LABELLED["language model"](tmp_path)
    groups = label(path, base=path, threads=1).groups
    assert {group.anchor for group in groups} <= anchors
    assert len({json.dumps(group.anchor) for group in groups}) == len(groups)
