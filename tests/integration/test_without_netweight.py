"""What loaders do with a compressed folder where netweight is not installed: they refuse, and say what to install."""

import json
from pathlib import Path

import pytest
import warm
from folders_under_test import content

import netweight

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

SUPPORT = Path(__file__).parents[1] / "support"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "PATH": "",
    "HOME": "/nonexistent",
    "OMP_NUM_THREADS": "1",
}
LIBRARIES = ("transformers:AutoModel,BertModel", "diffusers:StableDiffusionPipeline", "peft")


def run(program, *arguments):
    answer = warm.run(SUPPORT / program, *arguments, env=ENVIRONMENT, libraries=LIBRARIES)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of models as their libraries save them, `plain`, and compressed, `net`."""
    place = tmp_path_factory.mktemp("foreign")
    run("foreign_models.py", "make", place / "plain")
    (place / "net").mkdir()
    for model in (place / "plain").iterdir():
        netweight.compress_folder(model, place / "net" / model.name)
    return place


@pytest.fixture(scope="module")
def answers(place):
    """What each loader said, by its label: None if it loaded."""
    return json.loads(run("foreign_models.py", "load", place / "plain", place / "net").splitlines()[-1])


SAY_WHAT_TO_INSTALL = [
    "transformers",
    "transformers sharded",
    "transformers variant",
    "transformers use_safetensors",
    "transformers class",
    "transformers from hub-like subfolder",
    "transformers pipeline",
    "transformers load_adapter",
    "diffusers pipeline",
    "diffusers pipeline of two libraries",
    "diffusers model",
    "diffusers model, plain memory",
    "diffusers sharded variant",
    "diffusers LoRA",
    "peft",
    "peft config",
    "peft auto class",
]
REFUSE = ["transformers with a foreign config", "peft with a foreign config", "safetensors load_model"]


@pytest.mark.parametrize("loader", SAY_WHAT_TO_INSTALL)
def test_loaders_refuse_and_say_what_to_install(answers, loader):
    assert answers[loader] is not None, "it loaded"
    assert "netweight decompress" in answers[loader]
    assert "pip install" not in answers[loader]


@pytest.mark.parametrize("loader", REFUSE)
def test_loaders_that_are_misled_on_purpose_still_refuse(answers, loader):
    assert answers[loader] is not None, "it loaded"


MODELS = ["bert", "sharded", "variant", "llama", "adapter", "unet", "unet_sharded", "ddpm", "sd", "sd_lora"]


@pytest.mark.parametrize("model", MODELS)
def test_what_the_libraries_save_comes_back_byte_for_byte(place, tmp_path, model):
    netweight.decompress_folder(place / "net" / model, tmp_path / "back")
    assert content(tmp_path / "back") == content(place / "plain" / model)
    findings = netweight.verify(place / "net" / model, against=place / "plain" / model)
    assert [finding.name for finding in findings if finding.passed is False] == []


def test_nothing_was_left_untested(answers, place):
    assert {model.name for model in (place / "net").iterdir()} == set(MODELS)
    assert set(answers) == {*SAY_WHAT_TO_INSTALL, *REFUSE, "plain transformers", "plain diffusers LoRA"}
    assert answers["plain transformers"] is None
    assert answers["plain diffusers LoRA"] is None
