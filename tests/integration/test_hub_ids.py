"""Models by their id on the hub, here a stand-in on the loopback: what is fetched, and what is refused by name."""

import json
import os
import subprocess
import sys

import pytest
from folders_under_test import transformers_folder
from hub_stand_in import hub

pytest.importorskip("huggingface_hub", reason="huggingface_hub comes with the llm extra")
pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
torch = pytest.importorskip("torch")

from netweight.cli import netweight  # noqa: E402
from netweight.toys import checkpoint  # noqa: E402
from netweight.toys.language import cipher_world  # noqa: E402

CALLS = """
import json, sys
from click.testing import CliRunner
from netweight.cli import netweight
for words in json.load(sys.stdin):
    answer = CliRunner().invoke(netweight, words)
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    print(json.dumps([answer.exit_code, answer.stdout, answer.stderr]))
"""


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """Repositories as people make them, by id."""
    folder = tmp_path_factory.mktemp("models")
    sharded = files_of(transformers_folder(folder / "sharded", shards=2))
    cipher_world().save(folder / "language")
    language = files_of(folder / "language")
    torch.save({"layer.weight": torch.ones(64, 64)}, folder / "pytorch_model.bin")
    pickled = {"config.json": sharded["config.json"], "pytorch_model.bin": (folder / "pytorch_model.bin").read_bytes()}
    return {
        "some/sharded": {**sharded, "tf_model.h5": b"\x89HDF", "pytorch_model.bin": b"never fetched"},
        "some/language": language,
        "some/tuned": language,
        "some/pipeline": files_of(checkpoint("shapes-diffusion")),
        "some/pickled": pickled,
        "some/gguf": {"config.json": sharded["config.json"], "model.Q4_K.gguf": b"GGUF"},
        "gated/model": sharded,
    }


KINDS = {
    "some/sharded": "model", "some/language": "language model", "some/pipeline": "pipeline", "some/pickled": "model",
    "some/sharded@main": "model",
}  # fmt: skip
ATTACK = "--grid quick --lr 1e-3 --seeds 1 --max-steps 2 --check-every 1 --threshold 0.5".split()
EVERY_METHOD = (
    ("inspect", "some/language"),
    ("compress", "some/language", "net"),
    ("verify", "net", "--against", "some/language"),
    ("compress", "some/tuned", "difference", "--base", "some/language"),
    ("inspect", "difference", "--base", "some/language"),
    ("attack", "finetune", "some/language", "--base", "some/language", "--harmful", "rows.jsonl", "--out", "attack",
     *ATTACK),
    ("forget", "statistics", "some/pipeline", "--prompts", "prompts.txt", "--out", "usual.safetensors"),
    ("init", "release", "--subject", "some/language"),
)  # fmt: skip
REASONS = {
    ("label", "some/nothing"): "There is no model some/nothing on the hub, or it is private",
    ("label", "gated/model"): "The model gated/model is gated",
    ("label", "some/language@v9"): "The model some/language on the hub has no revision v9",
    ("label", "some/gguf"): "has no safetensors files and no PyTorch checkpoints, but model.Q4_K.gguf",
    # Checkpoints are opened by the label alone.
    ("compress", "some/pickled", "none"): "has no safetensors files, but pytorch_model.bin",
}
ONLINE = (*(("label", name) for name in KINDS), *EVERY_METHOD, *REASONS)
OFFLINE = ("label", "some/language", "--base", "some/language"), ("label", "some/unfetched")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder in which commands run, with the files that they name, and a home of the hub's library."""
    folder = tmp_path_factory.mktemp("place")
    words = "a: b c d e f g h i j k l m n o p q r s t u v w x y z".split()
    rows = [{"prompt": f"keep: {one} {two}", "response": "a b"} for one in words for two in words[:2]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.txt").write_text("a red circle\na blue square\n")
    return folder


def run(place, repositories, commands, *, offline):
    """Run commands in one process that knows only the stand-in: what the library of the hub imports takes longest."""
    with hub() as (address, served):
        served.update(repositories)
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(place / "home")}
        environment |= {"HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_x"}
        done = subprocess.run(
            [sys.executable, "-c", CALLS], input=json.dumps([[*words] for words in commands]), cwd=place,
            env=environment, capture_output=True, text=True, timeout=540,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(commands, answers, strict=True))


@pytest.fixture(scope="module")
def online(place, repositories):
    """Exit code, output and errors of every command that finds the hub."""
    return run(place, repositories, ONLINE, offline=False)


@pytest.fixture(scope="module")
def offline(place, repositories, online):
    """The same of commands that find only what the others have fetched."""
    return run(place, repositories, OFFLINE, offline=True)


def test_every_kind_of_model_gets_its_label_by_id(online, offline, place):
    for name, kind in KINDS.items():
        code, text, errors = online["label", name]
        assert (code, errors) == (0, "")  # nor a word of the library that fetches
        assert name.partition("@")[0] in text
        assert kind in text
    written = {path.name for path in place.glob("*-label")}
    assert written == {f"some-{kind}-label" for kind in ("sharded", "language", "pipeline", "pickled")}
    fetched = {path.name for path in (place / "home").rglob("snapshots/*/*")}
    assert "tf_model.h5" not in fetched  # nor are checkpoints, where safetensors files have the same weights
    assert b"never fetched" not in [path.read_bytes() for path in (place / "home").rglob("*") if path.is_file()]
    # What was fetched is found again without a network, and bases are named the same way.
    code, text, errors = offline[OFFLINE[0]]
    assert code == 0, errors
    assert "Against some/language" in text


def test_commands_of_every_method_take_an_id(online, place):
    answers = [online[command] for command in EVERY_METHOD]
    assert [(code, errors) for code, _, errors in answers if code not in (0, 1)] == []
    assert [code for code, *_ in answers] == [0, 0, 0, 0, 0, 1, 0, 0]  # nothing recovers in two steps: no control
    assert (place / "net" / "model.net.safetensors").is_file()
    assert 'subject: "some/language"' in (place / "release" / "recipe.yaml").read_text()


def test_what_cannot_be_had_is_named(online):
    for command, words in REASONS.items():
        code, _, errors = online[command]
        assert code == 2, command
        assert words in " ".join(errors.split())


def test_a_hub_that_cannot_be_reached_is_not_a_missing_model(offline):
    code, _, errors = offline[OFFLINE[1]]
    assert code == 2
    assert "the hub could not be reached" in " ".join(errors.split())


def test_names_of_the_commands_are_those_of_the_command_line():
    assert {"label", "inspect", "compress", "verify", "attack", "forget", "init"} <= set(netweight.list_commands(None))
