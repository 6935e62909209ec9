"""NeuZip's tables 3(a), 3(b) and 4 and figure 3 through `netweight reproduce`, on tiny models and few windows."""

import dataclasses
import json
import math
import random

import pytest
import torch
from click.testing import CliRunner

from netweight.cli import netweight
from netweight.errors import MissingExtra
from netweight.hf.llama2c_tokenizer import llama2c_tokenizer
from netweight_experiments.tables import run_table
from netweight_experiments.tables.neuzip import inference as neuzip_inference
from netweight_experiments.tables.neuzip import inference_runs as inference_subjects
from netweight_experiments.tables.neuzip.inference import front
from netweight_experiments.tables.neuzip.inference_runs import BITS, BLOCKS, weight_formats
from netweight_experiments.toys import decoder, encoder_decoder
from netweight_experiments.toys.fitting import Schedule

pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
transformers = pytest.importorskip("transformers", reason="transformers is in the llm extra")

WORDS = "the cat sat on a mat and saw two red birds that flew over his old house in spring".split()
SMALL = Schedule(steps=30, learning_rate=0.01, warmup=3, check_every=15)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    extent = inference_subjects.Extent(window=16, windows=6, beside=5, batch=3, rounds=5, extras=False)
    monkeypatch.setattr(
        inference_subjects, "EXTENTS", {"small": extent, "paper": dataclasses.replace(extent, beside=0)}
    )


@pytest.fixture
def only_some_ways(monkeypatch):
    kept = [way for way in weight_formats(extras=False) if way.block in (None, 512) and "no blocks" not in way.name]
    monkeypatch.setattr(neuzip_inference, "weight_formats", lambda *, extras: kept)


@pytest.fixture
def own_texts(tmp_path, monkeypatch):
    """A folder of texts made up here, so that the stand-ins can be trained in a moment and without any data."""
    draw = random.Random(0)
    folder = tmp_path / "data" / "text"
    folder.mkdir(parents=True)
    for name in ("wikitext2-valid", "wikitext2-test", "tinyshakespeare"):
        lines = [" ".join(draw.choices(WORDS, k=9)) for _ in range(120)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is in the llm extra")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is in the llm extra")
    rows = []
    for number in range(90):
        column = draw.choice(WORDS)
        fields = {"question": f"which {column} ?", "context": f"CREATE TABLE t ({column} TEXT)"}
        rows.append({**fields, "answer": f"SELECT {column} FROM t", "split": ("train", "dev", "test")[number % 3]})
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "wikisql_12k.parquet")
    monkeypatch.setenv("NETWEIGHT_DATA", str(folder.parent))
    tiny = {"vocabulary": 300, "width": 64, "inner": 128, "layers": 1, "heads": 2, "batch": 4, "schedule": SMALL}
    monkeypatch.setattr(decoder, "SMALL", decoder.DecoderRecipe(window=16, **tiny))
    monkeypatch.setattr(encoder_decoder, "SMALL", encoder_decoder.EncoderDecoderRecipe(**tiny))
    return folder


def call(*arguments):
    return CliRunner().invoke(netweight, ["reproduce", *(str(part) for part in arguments)])


def measured(result):
    return {(row["row"], row["column"]): row["measured"] for row in json.loads(result.stdout)["rows"]}


def test_perplexity_of_a_named_model_is_that_of_a_plain_loop(tmp_path, data_folder, only_some_ways):
    folder = data_folder / "weights" / "stories260K_hf"
    result = call("neuzip-table3-decoder", "--model", folder, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    cells = measured(result)

    text = (data_folder / "text" / "wikitext2-test.txt").read_text(encoding="utf-8")
    ids = llama2c_tokenizer(folder / "tok512.bin")(text, verbose=False)["input_ids"]
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    count = len(ids) // 16
    losses = []
    for place in range(6):
        start = 16 * (place * count // 6)
        window = ids[start : start + 16]
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            logits = model(torch.tensor([window])).logits[0].double()
        for at in range(15):
            losses.append(float(logits[at].logsumexp(0) - logits[at, window[at + 1]]))
    expected = math.exp(sum(losses) / len(losses) * len(ids) / len(text.split()))
    assert cells["Vanilla", "stories260K_hf perplexity"] == pytest.approx(expected, rel=0.02)  # other batches, in bf16
    lossless = cells["NeuZip 7-bit (lossless)", "stories260K_hf perplexity"]
    assert lossless == cells["Vanilla", "stories260K_hf perplexity"]
    size = "stories260K_hf bits per converted weight"
    assert cells["Vanilla", size] == 16
    assert cells["NeuZip 0-bit", size] < cells["NeuZip 1-bit", size] < cells["NeuZip 3-bit", size] < 11.5
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["NeuZip 7-bit (lossless): every loss equals vanilla's to the last bit"]["passed"] is True
    assert findings["NeuZip 0-bit: perplexity over vanilla's"]["n"] == 6
    provenance = json.loads((tmp_path / "neuzip-table3-decoder-small" / "report.json").read_text())["provenance"]
    assert "model.safetensors" in provenance["inputs"]


@pytest.mark.study  # make study makes these tables
def test_the_stand_in_is_trained_once_and_named_as_such(tmp_path, own_texts):
    out = tmp_path / "out"
    table3 = run_table("neuzip-table3-decoder", out=out)
    names = {row.name for row in table3.measured.rows}
    assert {"Vanilla", "NeuZip 0-bit", "NeuZip 0-bit, as the reference code, blocks of 32"} <= names
    assert "stand-in" in " ".join(table3.measured.differs)
    assert not any("earlier run" in note for note in table3.measured.notes)
    assert "token frequencies" in " ".join(table3.measured.differs)
    assert all(column.name.startswith("stand-in ") for column in table3.measured.columns)
    published = {c.row: c.published for c in table3.comparisons if c.column == "Llama-3 8B perplexity"}
    assert published["NeuZip 0-bit"] == 13.64
    shown = table3.measured.tables[0]
    row = next(row for row in shown.rows if row[0] == "NeuZip 0-bit")
    assert row[1] == pytest.approx(13.64 / 9.89)
    by_column = dict(zip(("perplexity", "memory"), table3.measured.rows[0].values, strict=False))
    assert by_column["perplexity"] > 1

    ledger = out / "neuzip-inference" / "decoder-small.jsonl"
    trained = out / "neuzip-inference" / "decoder" / "model.safetensors"
    before = ledger.read_bytes(), trained.stat().st_mtime_ns
    table4 = run_table("neuzip-table4", out=out)
    figure = run_table("neuzip-fig3", out=out)
    assert (ledger.read_bytes(), trained.stat().st_mtime_ns) == before
    assert f"{len(table3.measured.rows)} of" in table4.measured.notes[-2]
    three = {row.name: row.values for row in table3.measured.rows}
    four = {row.name: row.values for row in table4.measured.rows}
    for bits in BITS:
        for place, block in enumerate(BLOCKS):
            name = f"NeuZip {bits}-bit" + ("" if block == 512 else f", blocks of {block}")
            assert four[f"NeuZip {bits}-bit"][2 * place : 2 * place + 2] == three[name][:2]
    points = {row.name: row.values for row in figure.measured.rows}
    assert points["Vanilla"][:2] == (three["Vanilla"][1], three["Vanilla"][0])
    assert "<svg" in figure.measured.figures[0].data
    again = run_table("neuzip-table3-decoder", out=out)
    assert again.reused
    assert again.measured == table3.measured


def test_a_run_that_was_killed_goes_on_with_the_next_way(tmp_path, own_texts, only_some_ways, monkeypatch):
    from netweight_experiments.tables.neuzip import inference_runs as inference_rows

    applied = []
    true_apply = inference_rows.apply

    def counted(way, model):
        applied.append(way.name)
        if len(applied) == 4:
            raise KeyboardInterrupt
        return true_apply(way, model)

    monkeypatch.setattr(inference_rows, "apply", counted)
    with pytest.raises(KeyboardInterrupt):
        run_table("neuzip-table3-encdec", out=tmp_path / "out")
    stopped_at = applied[-1]
    result = run_table("neuzip-table3-encdec", out=tmp_path / "out")
    assert applied.count(stopped_at) == 2
    assert applied.count("Vanilla") == 1
    assert result.measured.columns[0].unit == "per token"
    assert "WMT14" in " ".join(result.measured.differs)
    found = {row.name: row.values[0] for row in result.measured.rows}
    for name, value in found.items():
        if "0-bit" not in name:  # T5 casts activations by the dtype of weights, which quantizers change
            assert value < 1.3 * found["Vanilla"], name
    run_table("neuzip-table3-encdec", out=tmp_path / "out", overwrite=True)
    assert applied.count("Vanilla") == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["neuzip-table3-decoder", "--scale", "paper"], "meta-llama/Meta-Llama-3-8B"),
        (["neuzip-table3-encdec", "--scale", "paper"], "google-t5/t5-large"),
        (["neuzip-table4", "--scale", "paper"], "--model FOLDER"),
        (["neuzip-fig3", "--scale", "paper"], "--model FOLDER"),
        (["neuzip-table3-decoder", "--model", "nowhere"], "nowhere is not a model folder"),
        (["neuzip-table3-encdec", "--scale", "paper", "--model", "x"], "sacrebleu -t wmt14"),
    ],
)
def test_what_is_missing_is_named(tmp_path, own_texts, arguments, says):
    result = call(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert says in result.output


def test_without_data_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.delenv("NETWEIGHT_DATA", raising=False)
    for table in ("neuzip-table3-decoder", "neuzip-table3-encdec", "neuzip-table4", "neuzip-fig3"):
        with pytest.raises(MissingExtra, match="folder that holds text/"):
            run_table(table, out=tmp_path)


def test_the_paper_s_models_are_laid_beside_themselves(tmp_path, own_texts, only_some_ways, monkeypatch):
    out = tmp_path / "out"
    run_table("neuzip-table3-decoder", out=out)
    folder = out / "neuzip-inference" / "decoder"
    config = json.loads((folder / "config.json").read_text())
    shape = (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"])
    monkeypatch.setattr(inference_subjects, "_DECODERS", {"Llama-3 8B": shape})
    result = run_table("neuzip-table3-decoder", out=tmp_path / "own", scale="paper", options={"model": str(folder)})
    cells = {(c.row, c.column): c for c in result.comparisons}
    beside = cells["Vanilla", "Llama-3 8B perplexity"]
    assert (beside.published, beside.difference) == (9.89, beside.measured - 9.89)
    assert cells["Vanilla", "Llama-3 8B memory"].unit == "GiB"
    assert not any("stand-in" in sentence for sentence in result.measured.differs)


def test_the_front_is_what_nothing_else_beats():
    points = [(1.0, 5.0), (2.0, 4.0), (2.0, 4.5), (3.0, 4.0), (4.0, 1.0), (1.0, 5.0)]
    beaten = {1: False, 2: True, 3: True, 4: False, 0: False, 5: False}
    assert front(points) == {number for number, lost in beaten.items() if not lost}
