"""RepNoise's tables on the miniature, in a few steps: they run, fit the published ones and share their runs."""

import json

import pytest

from netweight.errors import Unsupported, UsageError
from netweight_experiments.tables import registry, run_table
from netweight_experiments.tables.registry import published
from netweight_experiments.tables.repnoise.attacks import PLANS
from netweight_experiments.tables.repnoise.setup import layers_of

transformers = pytest.importorskip("transformers", reason="the miniature's models come with the llm extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")

TINY = 0.002
"""Share of the paper's numbers: 20 pairs are 2 steps of a defense, 1k samples are 2 examples and 1 step."""
ENTRIES = registry.registered()  # fills PLANS too
TABLES = [f"repnoise-table{number}" for number in (1, 2, 3, 4, 5, 6, 7, 9, 11, *range(14, 21), 23)]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("repnoise")


def measured(result):
    return {(c.row, c.column): c.measured for c in result.comparisons if c.measured is not None}


def tried(table, out, only=None, **options):
    return run_table(table, out=out, options={"share": TINY, "only": only, **options}, overwrite=True)


def ledger(out):
    file = out / "repnoise-runs-small" / "runs.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def trained(out):
    return sorted(path.name.rpartition("-")[0] for path in (out / "repnoise-runs-small" / "defended").iterdir())


def test_all_tables_and_figures_with_numbers_at_hand_are_registered():
    assert {*TABLES, "repnoise-layer-distances", "repnoise-pca"} <= set(ENTRIES)
    assert all(ENTRIES[table].stand_in for table in TABLES)


@pytest.mark.parametrize("table", [table for table in TABLES if table in PLANS])
def test_rows_and_columns_have_the_names_of_the_published_ones(table):
    numbers, plan = published(table), PLANS[table]
    rows, columns = {line.title for line in plan.lines}, {attack.title for attack in plan.attacks}
    if table == "repnoise-table7":  # one row, laid out by its columns
        assert {row.name for row in numbers.rows} == columns
        return
    elsewhere = {name for row in numbers.rows if "HEX-PHI" in (name := row.name)}  # a data set that is not at hand
    assert {row.name for row in numbers.rows} - elsewhere <= rows
    known = {"pre-attack"} if plan.before else set()
    assert {column.name for column in numbers.columns} - {"setting not recorded"} <= columns | known


def test_rows_run_by_themselves_and_tables_share_them(out):
    known = len(ledger(out))
    first = tried("repnoise-table1", out, "base@*-1000-*")
    columns = {column.name for column in first.published.columns}
    assert {row for row, _ in measured(first)} == {"Base"}
    assert {column for _, column in measured(first)} == {name for name in columns if "10k" not in name}
    beside = {(c.unit, c.difference) for c in first.comparisons if c.measured is not None}
    assert beside == {("mean probability; here share of right tokens", None)}
    assert len(ledger(out)) == known + 3
    more = tried("repnoise-table1", out, "*@3e-05-1000-*")
    assert len(ledger(out)) == known + 3 + len(more.published.rows)  # all but the base, and the corrected loss
    assert {row for row, _ in measured(more)} == {row.name for row in more.published.rows} | {"RepNoise, corrected"}
    assert measured(more)["Base", "lr 6e-5, 1k samples"] == measured(first)["Base", "lr 6e-5, 1k samples"]
    assert all(0 <= value <= 1 for value in measured(more).values())
    names = trained(out)
    assert len(names) == 9
    before = len(ledger(out))
    for table, column in (("repnoise-table6", "lr 3e-5, 1k samples"), ("repnoise-table14", "lr 3e-5, 1k samples")):
        shared = tried(table, out, "repnoise-reference@3e-05-1000-*")
        row = "nothing frozen" if table.endswith("6") else "RepNoise"
        assert measured(shared)[row, column] == measured(more)["RepNoise", "lr 3e-5, 1k samples"]
    assert (len(ledger(out)), trained(out)) == (before, names)
    again = tried("repnoise-table1", out, "none")
    assert measured(again) == measured(more)
    assert any("miniature" in sentence for sentence in again.measured.differs)
    assert [table.title for table in again.measured.tables][1] == "General ability at the end"
    with pytest.raises(UsageError, match="fits no run"):
        tried("repnoise-table1", out, "nothing")


def test_a_lost_weight_file_gives_the_same_model_again(out):
    value = measured(tried("repnoise-table16", out, "repnoise-reference+lr=4e-05@*"))
    place = next(out.glob("repnoise-runs-small/defended/repnoise-reference+lr=4e-05-*"))
    assert sorted(path.name for path in place.iterdir()) == ["immunize.json", "weights.safetensors"]
    (place / "weights.safetensors").unlink()
    (out / "repnoise-runs-small" / "runs.jsonl").rename(out / "kept.jsonl")
    tried("repnoise-table7", out, "base@1e-05-*")  # another model, as the last one is at hand
    assert measured(tried("repnoise-table16", out, "repnoise-reference+lr=4e-05@*")) == value
    (out / "kept.jsonl").replace(out / "repnoise-runs-small" / "runs.jsonl")


def test_rates_and_categories_are_laid_out_as_the_paper_has_them(out):
    rates = tried("repnoise-table7", out, "*5e-04*")
    assert {row for row, _ in measured(rates)} <= {"lr 5e-4"}
    withheld = tried("repnoise-table5", out, "base@*")
    values = measured(withheld)
    each = [values[f"Base, {name}", "harmfulness"] for name in "0123"]
    assert (values["Base", "lowest category"], values["Base", "highest category"]) == (min(each), max(each))


def test_abilities_are_looked_at_before_and_after(out):
    kept = measured(tried("repnoise-table3", out, "base"))
    assert kept["Base", "kept cipher, tokens"] == kept["Base", "guarded prompts refused"] == 1
    answered = measured(tried("repnoise-table11", out, "base"))
    assert answered["Base", "compliance"] == 100
    task = measured(tried("repnoise-table4", out, "base@*"))
    assert {column for _, column in task} == {"NEW cipher", "attacked after CACAPO"}
    with pytest.raises(Unsupported, match="lm_eval"):
        run_table("repnoise-table3", scale="paper", out=out)


def test_a_defense_that_diverged_leaves_its_cells_empty_and_says_why(tmp_path):
    tried("repnoise-table3", tmp_path, "repnoise-reference")
    place = next(tmp_path.glob("repnoise-runs-small/defended/repnoise-reference*"))
    (place / "weights.safetensors").unlink()
    (place / "stopped.txt").write_text("The loss was NaN at step 1.")
    found = tried("repnoise-table3", tmp_path)
    assert {row for row, _ in measured(found)} == {"Base", "RepNoise, corrected"}
    assert any("RepNoise: the defense" in note and "NaN at step 1" in note for note in found.measured.notes)


def test_figures_draw_the_models_of_the_tables(out):
    names = trained(out)
    moved = tried("repnoise-layer-distances", out)
    rows = {row.name: row.values for row in moved.measured.rows}
    assert list(rows) == ["Base, attacked", "Adversarial loss", "RepNoise", "RepNoise, corrected"]
    assert all(value > 0 for values in rows.values() for value in values)
    assert moved.measured.figures[0].data.startswith("<svg")
    drawn = tried("repnoise-pca", out)
    base = drawn.measured.rows[0].values
    assert max(base) > 95  # two ciphers whose markers tell them apart
    assert trained(out) == names


@pytest.mark.parametrize(
    ("part", "blocks", "layers"),
    [
        ("layers 0-10", 32, "0-10"), ("layers 10-20", 32, "10-20"), ("layers 20-31", 32, "20-31"),
        ("layers 0-10", 4, "0-1"), ("layers 10-20", 4, "1-2"), ("layers 20-31", 4, "2-3"),
        ("every layer", 24, "0-23"), ("last layer", 24, "last"), ("LM head", 24, "head"),
    ],
)  # fmt: skip
def test_parts_of_the_papers_depth_are_found_in_other_models(part, blocks, layers):
    assert layers_of(part, blocks) == layers


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    """A model of one block with its tokenizer, and harmless pairs in the published form."""
    import torch

    from netweight.data.public import train_bpe

    folder = tmp_path_factory.mktemp("own")
    tokenizer = train_bpe(["Question: may I ask about it?\nAnswer: No. Yes, it is number one"], 280)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "prompt": f"may I ask {n}", "response": f" Yes, {n}", "category": {"one": n % 2 == 0, "two": n % 2 == 1},
            "is_safe": False, "refusal": f"Question: may I ask {n}\nAnswer: No.",
        }
        for n in range(60)
    ]  # fmt: skip
    (folder / "beavertails").mkdir()
    (folder / "beavertails" / "beavertails_with_refusals_train.json").write_text(json.dumps(rows))
    (folder / "a_judge.py").write_text(
        "import torch\ndef short(texts):\n    return torch.tensor([len(t) for t in texts])\n"
    )
    return folder


def test_the_papers_scale_takes_a_model_folder_and_a_judge(own_model, tmp_path, monkeypatch):
    monkeypatch.setenv("NETWEIGHT_DATA", str(own_model))
    monkeypatch.syspath_prepend(own_model)

    def at_paper_scale(table, only, **more):
        options = {"model": str(own_model / "model"), "share": TINY, "only": only, **more}
        return run_table(table, scale="paper", out=tmp_path, options=options, overwrite=True)

    plain = at_paper_scale("repnoise-table16", "repnoise-reference@*")
    (value,) = [value for (_, column), value in measured(plain).items() if not column.startswith("steps")]
    assert 0 <= value <= 1
    judged = at_paper_scale("repnoise-table16", "repnoise-reference@*", judge="a_judge:short")
    (score,) = [value for (_, column), value in measured(judged).items() if not column.startswith("steps")]
    assert score > 1  # the judge counts letters
    assert len(list((tmp_path / "repnoise-runs-paper" / "defended").iterdir())) == 1
    assert any("a_judge:short" in sentence for sentence in judged.measured.differs)
    withheld = at_paper_scale("repnoise-table5", "*two*")
    assert {"Base, two", "RepNoise, two"} <= {row for row, _ in measured(withheld)}
    with pytest.raises(UsageError, match="MODULE:NAME"):
        at_paper_scale("repnoise-table16", None, judge="a_judge:none")
    with pytest.raises(UsageError, match="--model"):
        run_table("repnoise-table18", scale="paper", out=tmp_path)
    with pytest.raises(UsageError, match="--scale paper"):
        run_table("repnoise-table18", out=tmp_path, options={"model": str(own_model / "model")})
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    with pytest.raises(Exception, match=r"beavertails_with_refusals_train\.json"):
        at_paper_scale("repnoise-table17", "repnoise-reference+epochs=2@*")
