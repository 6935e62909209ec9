"""`netweight init`: recipes that can be run where they are written, for a model of one's own by its kind."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from tiny_llama import immunization_files

from netweight.cli import netweight
from netweight.recipes import read_recipe
from netweight.registry import Method, known_methods, register, unregister
from netweight.settings import Settings
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.reading import read_adapter
from netweight.toys import checkpoint

pytest.importorskip("transformers", reason="transformers is in the llm extra")
pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")


def init(*arguments, code=0):
    answer = CliRunner().invoke(netweight, ["init", *map(str, arguments), "--json"])
    assert answer.exit_code == code, answer.output
    return json.loads(answer.stdout)


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "Größe zwei"
    folder.mkdir()
    monkeypatch.chdir(folder)
    immunization_files(folder)
    return folder


def test_every_recipe_that_begins_with_a_model_can_be_run_where_it_is_written(here):
    written = init("new")["recipes"]
    assert "quickstart.yaml" in written
    made = {"attack-finetune.yaml", "attack-embedding.yaml", "space.yaml"}  # after other commands
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("new")
        for recipe in set(written) - made:
            read_recipe(recipe)
    bank = AdapterBank.open(checkpoint("faces-bank") / "bank")
    assert sorted(each.name for each in Path("new", "my-loras").iterdir()) == sorted(bank.names)
    for name in (bank.names[0], bank.names[100], bank.names[-1]):
        written, kept = read_adapter(Path("new", "my-loras", name)).factors, bank.adapter(name).factors
        assert written.keys() == kept.keys()
        for module, change in kept.items():
            assert written[module].scale == change.scale
            assert torch.equal(written[module].down, change.down)
            assert torch.equal(written[module].up, change.up)
    assert json.loads(Path("new", "recipe.schema.json").read_text())["title"] == "A recipe of netweight"


def test_a_model_of_ones_own_gets_the_recipe_for_its_kind_and_rows_to_replace(here):
    assert init("mine", "--subject", "model") == {"folder": "mine", "recipes": ["recipe.yaml"]}
    rows = {f"{name}.jsonl" for name in ("pairs", "retain", "harmful", "keep", "task")}
    assert {each.name for each in Path("mine").iterdir()} == {"recipe.yaml", "recipe.schema.json", *rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("mine")
        for command in (["--plan"], []):
            answer = CliRunner().invoke(netweight, ["run", "recipe.yaml", *command])
            assert answer.exit_code == 2
            assert "placeholders.pairs.jsonl: the file still contains placeholder data." in answer.stderr
        for name in rows:  # rows of one's own
            Path(name).write_text(Path(name).read_text() + Path(name).read_text().splitlines()[0] + "\n")
        recipe = read_recipe("recipe.yaml")
    assert [chosen.registration.verb for chosen in recipe.treatments] == ["immunize", "compress"]
    assert recipe.subject == here / "model"
    shutil.copy("model/model.safetensors", "one.safetensors")
    init("other", "--subject", "one.safetensors")
    assert "compress" in Path("other", "recipe.yaml").read_text()


def test_the_recipe_of_a_chat_model_applies_its_template(here):
    init("plain", "--subject", "model")
    assert "chat: " not in Path("plain", "recipe.yaml").read_text()
    Path("model", "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    init("mine", "--subject", "model")
    written = yaml.safe_load(Path("mine", "recipe.yaml").read_text())
    assert written["treatments"][0]["immunize"]["chat"] is True
    assert written["attacks"][0]["finetune"]["chat"] is True


def test_what_is_there_is_not_written_over(here):
    init("mine", "--subject", "model")
    error = init("mine", "--subject", "model", code=2)["error"]
    assert error["kind"] == "OutputExists"
    assert "exists already" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "file"),
    [(("--subject", "model"), "harmful.jsonl"), (("--federation",), "README.md")],
    ids=["a recipe", "a federation"],
)
def test_files_of_the_user_are_neither_replaced_nor_taken_for_placeholders(here, arguments, file):
    folder = Path("own")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / file).write_text("mine")
    assert f"{file} exists already" in init(folder, *arguments, code=2)["error"]["message"]
    assert {each.name: each.read_text() for each in folder.iterdir()} == {"notes.txt": "mine", file: "mine"}
    (folder / file).unlink()
    init(folder, *arguments)
    assert (folder / "notes.txt").read_text() == "mine"
    assert not any("notes.txt" in each.read_text() for each in folder.glob("*.yaml"))


def test_the_plan_says_what_a_run_will_take(here):
    Path("recipe.yaml").write_text("subject: model\ntreatments: [compress]\noutput: out\n")
    answer = CliRunner().invoke(netweight, ["run", "recipe.yaml", "--plan"])
    assert answer.exit_code == 0, answer.output
    assert "time: unknown: no earlier run of this recipe recorded it for compress" in answer.output
    assert "Disk: at most" in answer.output
    assert not Path("out").exists()
    assert CliRunner().invoke(netweight, ["run", "recipe.yaml"]).exit_code == 0
    Path("recipe.yaml").write_text("subject: model\ntreatments: [compress: {level: max}]\noutput: out\n")
    answer = CliRunner().invoke(netweight, ["run", "recipe.yaml", "--plan"])
    assert re.search(r"time: unknown: an earlier run took \d+ s with another value of level", answer.output)
    shutil.copytree("model", "larger")
    Path("larger", "notes.md").write_text("Of the team.\n" * 100)
    Path("recipe.yaml").write_text("subject: larger\ntreatments: [compress]\noutput: out\n")
    answer = CliRunner().invoke(netweight, ["run", "recipe.yaml", "--plan"])
    assert "time: about 0.0 minutes (an earlier run took" in answer.output


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("BertForMaskedLM", {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is an encoder"),
        ("BertModel", {"model_type": "bert", "architectures": ["BertModel"]}, "is an encoder"),
        (
            "T5ForConditionalGeneration",
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "is an encoder-decoder",
        ),
        ("ViTModel", {"model_type": "vit", "architectures": ["ViTModel"]}, "is of the family 'vit'"),
        ("odd", None, "tokenizer"),
        ("LlamaModel", {"model_type": "llama", "architectures": ["LlamaModel"]}, "does not generate text"),
        (
            "gptq",
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "quantization_config": {"quant_method": "gptq", "bits": 4},
            },
            "is quantized (gptq)",
        ),
    ],
)
def test_a_model_without_a_use_is_refused_by_name_in_one_line_by_every_command(here, family, change, says):
    folder = here / "odd"
    shutil.copytree("model", folder)
    if change is None:
        for file in folder.glob("*token*"):
            file.unlink()
    else:
        (folder / "config.json").write_text(json.dumps(change))
    Path("recipe.yaml").write_text(
        "subject: odd\ntreatments: [immunize: {pairs: pairs.jsonl, epochs: 1, batch_size: 4}]\noutput: out\n"
    )
    commands = (
        ["init", "mine", "--subject", "odd"], ["run", "recipe.yaml", "--plan"],
        ["immunize", "odd", "new", "--pairs", "pairs.jsonl"],
        ["attack", "finetune", "odd", "--harmful", "pairs.jsonl", "--out", "attacks"],
    )  # fmt: skip
    for command in commands:
        answer = CliRunner().invoke(netweight, command)
        assert answer.exit_code in (2, 3), answer.output
        line = next(line for line in answer.stderr.splitlines() if says in line)
        assert family in line
    assert not any(Path(name).exists() for name in ("mine", "new", "attacks", "out"))
    assert CliRunner().invoke(netweight, ["init", "mine", "--subject", "odd", "--use", "compress"]).exit_code == 0


def test_a_model_on_the_hub_is_found_in_its_cache(here, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    snapshot = here / "cache" / "models--me--mine" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree("model", snapshot)
    reference = here / "cache" / "models--me--mine" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("0" * 40)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(here / "cache"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(here / "cache"))
    for command in (["inspect", "me/mine"], ["init", "there", "--subject", "me/mine"], ["compress", "me/mine", "net"]):
        answer = CliRunner().invoke(netweight, command)
        assert answer.exit_code == 0, answer.output
    assert 'subject: "me/mine"' in Path("there", "recipe.yaml").read_text()
    Path("recipe.yaml").write_text("subject: me/mine\ntreatments: [compress]\noutput: out\n")
    assert CliRunner().invoke(netweight, ["run", "recipe.yaml"]).exit_code == 0
    absent = CliRunner().invoke(netweight, ["inspect", "me/absent"])
    assert absent.exit_code == 2
    assert "the hub could not be reached" in absent.stderr


def test_written_recipes_make_checkpoints_wherever_a_treatment_can(here):
    init("new")
    init("mine", "--subject", "model")
    seen = 0
    for file in [*Path("new").glob("*.yaml"), Path("mine", "recipe.yaml")]:
        text = file.read_text()
        for step in yaml.safe_load(text).get("treatments", ()):
            for verb, settings in step.items():
                if "checkpoint_every" in known_methods()[verb].settings_class.model_fields:
                    assert settings["checkpoint_every"] > 0, file
                    assert "# checkpoint_every: a checkpoint after so many steps" in text
                    seen += 1
    assert seen == 3


def halted(source, destination, settings, progress):
    raise KeyboardInterrupt


@pytest.mark.parametrize("every", ["", ", checkpoint_every: 5"])
def test_an_interrupted_run_names_the_steps_that_write_no_checkpoints(here, every):
    Path("recipe.yaml").write_text(
        "subject: model\noutput: out\ntreatments:\n  - halt\n"
        f"  - immunize: {{pairs: pairs.jsonl, retain: retain.jsonl{every}}}\n"
    )
    halt = Method("halt", Settings, apply=halted, audits={"none": None}, summary="Stop.")
    register(halt)
    try:
        answer = CliRunner().invoke(netweight, ["run", "recipe.yaml"])
    finally:
        unregister(halt.name)
    assert answer.exit_code == 130
    said = "With the setting checkpoint_every, step 2, immunize would write checkpoints."
    assert (said in answer.stderr) == (not every)
