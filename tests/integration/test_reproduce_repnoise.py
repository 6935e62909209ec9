"""RepNoise's tables on the miniature, in a few steps: they run, fit the published ones and share their runs."""

import json

import pytest

from netweight.errors import UsageError
from netweight_experiments.tables import registry, run_table
from netweight_experiments.tables.registry import published
from netweight_experiments.tables.repnoise.attacks import PLANS
from netweight_experiments.tables.repnoise.setup import layers_of

transformers = pytest.importorskip("transformers", reason="the miniature's models come with the llm extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")

TINY = 0.002
"""Share of the paper's numbers: 20 pairs are 2 steps of a defense, 1k samples are 2 examples and 1 step."""
ENTRIES = registry.registered()  # fills PLANS too
TABLES = ["repnoise-table1"]


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


@pytest.mark.parametrize("table", [table for table in TABLES if table in PLANS])
def test_rows_and_columns_have_the_names_of_the_published_ones(table):
    numbers, plan = published(table), PLANS[table]
    rows, columns = {line.title for line in plan.lines}, {attack.title for attack in plan.attacks}
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
    assert (len(ledger(out)), trained(out)) == (before, names)
    again = tried("repnoise-table1", out, "none")
    assert measured(again) == measured(more)
    assert any("miniature" in sentence for sentence in again.measured.differs)
    assert [table.title for table in again.measured.tables][1] == "General ability at the end"
    with pytest.raises(UsageError, match="fits no run"):
        tried("repnoise-table1", out, "nothing")


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

    plain = at_paper_scale("repnoise-table1", "repnoise-reference@3e-05-1000-*")
    value = measured(plain)["RepNoise", "lr 3e-5, 1k samples"]
    assert 0 <= value <= 1
    judged = at_paper_scale("repnoise-table1", "repnoise-reference@3e-05-1000-*", judge="a_judge:short")
    score = measured(judged)["RepNoise", "lr 3e-5, 1k samples"]
    assert score > 1  # the judge counts letters
    assert len(list((tmp_path / "repnoise-runs-paper" / "defended").iterdir())) == 1
    assert any("a_judge:short" in sentence for sentence in judged.measured.differs)
    with pytest.raises(UsageError, match="a_judge has no 'none'"):
        at_paper_scale("repnoise-table1", None, judge="a_judge:none")
    with pytest.raises(UsageError, match="--model"):
        run_table("repnoise-table1", scale="paper", out=tmp_path / "other")
    with pytest.raises(UsageError, match="--scale paper"):
        run_table("repnoise-table1", out=tmp_path / "other", options={"model": str(own_model / "model")})
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    with pytest.raises(Exception, match=r"beavertails_with_refusals_train\.json"):
        at_paper_scale("repnoise-table1", "repnoise-reference@6e-05-1000-*")
