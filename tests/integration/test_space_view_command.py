"""`netweight space view`: pages about a folder's space and about the miniature in the package, and clear refusals."""

import base64
import json
import re

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from netweight.cli import netweight
from netweight.methods.space.gram import StackBank
from netweight.methods.space.space import WeightSpace
from netweight.nn.apply_lora import linear_layers
from netweight.nn.lora import Adapter, AdapterStack, LowRank
from netweight.toys.diffusion import SHAPES_FOLDER, shapes_pipeline
from netweight.toys.faces_pipeline import FACES_BANK

PROMPT = "a large red circle on a gray ground"
FEW = ("--components", 2, "--samples", 2, "--noises", 1, "--steps", 2)


def run(*arguments, code=0):
    done = CliRunner().invoke(netweight, ["space", "view", *map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("view")
    shapes = linear_layers(shapes_pipeline().unet, "mid_block.**.attn2.to_v", component="unet")
    torch.manual_seed(0)
    adapters = [
        Adapter({name: LowRank(torch.randn(1, k), torch.randn(n, 1)) for name, (n, k) in shapes.items()})
        for _ in range(9)
    ]
    space = WeightSpace.fit(StackBank([f"model {i}" for i in range(9)], AdapterStack.of(adapters)), components=4)
    space.save(place / "shapes", standalone=True)
    rows = "".join(f"model {i},{i},{i % 2}\n" for i in range(9))
    (place / "labels.csv").write_text("name,age,glasses\n" + rows)
    return place


def data(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())[1])


def test_a_page_about_a_space_with_everything(folder, tmp_path):
    page = tmp_path / "page.html"
    asked = ("--pipeline", SHAPES_FOLDER, "--prompt", PROMPT, "--labels", folder / "labels.csv", "--attribute", "age",
             "--start", "model 3", *FEW, "--out", page)  # fmt: skip
    made = run(folder / "shapes", *asked)
    assert made["sliders"] == ["age", "component 1", "component 2"]
    assert made["nbytes"] == page.stat().st_size
    assert made["facts"]["sliders begin at"] == "model 3"
    assert made["facts"]["sampling"] == "2 steps, guidance 3"
    found = data(page)
    assert found["map"]["names"] == [f"model {i}" for i in range(9)]
    assert found["map"]["labels"]["glasses"] == [i % 2 for i in range(9)]
    assert found["samples"]["count"] == 2
    assert len(found["stages"]) == 3
    assert found["live"]["config"]["modules"][0].startswith("mid_block")
    assert PROMPT in page.read_text()
    assert run(folder / "shapes", *asked, code=2)["error"]["kind"] == "OutputExists"
    again = page.read_bytes()
    run(folder / "shapes", *asked, "--overwrite")
    pictures = [re.findall(rb"data:image/png;base64,([^\"]+)", text) for text in (again, page.read_bytes())]
    assert pictures[0] == pictures[1]  # the same command paints the same pictures
    assert all(base64.b64decode(each).startswith(b"\x89PNG") for each in pictures[0])


def test_what_cannot_be_painted_is_refused(folder, tmp_path):
    space, out = folder / "shapes", tmp_path / "page.html"
    full = ("--pipeline", SHAPES_FOLDER, "--prompt", PROMPT, "--out", out)
    for arguments, says in [
        ((space, "--out", out), "--pipeline is missing"),
        ((space, "--pipeline", SHAPES_FOLDER, "--out", out), "--prompt is missing"),
        ((space, *full, "--attribute", "age"), "--labels, for --attribute"),
        ((space, *full, "--components", 0), "no slider"),
        ((space, *full, "--start", "modl 3"), "nearest models are 'model 3'"),
        ((space, *full, "--labels", folder / "labels.csv", "--attribute", "agee"), "age"),
        (("--out", out, "--prompt", PROMPT), "--prompt needs a SPACE"),
    ]:
        told = run(*arguments, code=2)["error"]
        assert says in f"{told['message']} {told['cure']}"
    assert not out.exists()


@pytest.mark.skipif(not FACES_BANK.exists(), reason="the bank of drawn faces is not in this checkout")
def test_the_miniature_needs_no_argument(tmp_path):
    page = tmp_path / "faces.html"
    made = run("--out", page, *FEW, "--adapters", 5)
    assert made["sliders"][:2] == ["width", "skin"]
    assert len(made["sliders"]) == 10
    found = data(page)
    assert len(found["map"]["names"]) == 5
    assert found["live"]["reads"] == made["sliders"][:8]
