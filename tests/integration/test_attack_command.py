"""`netweight attack gradient-inversion` end to end: a client's files in, images and a report out."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from netweight.attacks.gradient_inversion.client import gradient_of, known_parameters, sgd_difference
from netweight.cli import netweight
from netweight.store import open_store

pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 30), nn.Sigmoid(), nn.Linear(30, 4))

model = make()
number = 3
"""
MEAN, STD = 0.25, 0.5


@pytest.fixture
def case(tmp_path, monkeypatch):
    """A folder with a user's model and what a client sent of one image, from weights other than the model's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "victim_model", None)
    del sys.modules["victim_model"]  # put back or unloaded again after the test
    (tmp_path / "victim_model.py").write_text(MODULE)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 30), nn.Sigmoid(), nn.Linear(30, 4))
    params = known_parameters(model)
    generator = torch.Generator().manual_seed(2)
    truth = torch.rand(2, 1, 12, 12, generator=generator).round(decimals=2)
    labels = torch.tensor([3, 1])
    save_file(params, "params.safetensors")
    for n in (1, 2):
        data = (truth[:n] - MEAN) / STD, labels[:n]
        save_file({"images": truth[:n].contiguous()}, f"truth{n}.safetensors")
        save_file(gradient_of(model)(params, data), f"gradient{n}.safetensors")
        save_file(sgd_difference(model, lr=0.1, steps=2)(params, data), f"difference{n}.safetensors")
    return truth


def call(*arguments, n=1, sent="gradient", update=None):
    fixed = [
        update or f"{sent}{n}.safetensors", "--model", "victim_model:make", "--params", "params.safetensors",
        "--shape", f"{n},1,12,12", "--mean", str(MEAN), "--std", str(STD), "--out", "out",
    ]  # fmt: skip
    # Later options win, so that a test can change one.
    return CliRunner().invoke(netweight, ["attack", "gradient-inversion", *fixed, *arguments])


def test_the_first_layer_gives_the_image_away(case, tmp_path):
    answer = call("--attack", "first-layer", "--layer", "1", "--reference", "truth1.safetensors", "--json")
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    findings = {finding["name"]: finding for finding in result["findings"]}
    assert result["labels"] == [3]
    assert findings["PSNR"]["value"] > 80
    assert findings["SSIM"]["value"] > 0.9999
    assert findings["LPIPS"]["value"] is None
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["provenance"]["inputs"].keys() == {
        "gradient1.safetensors",
        "params.safetensors",
        "truth1.safetensors",
    }
    assert "out/report.html" in result["report"]
    io = pytest.importorskip("skimage.io", reason="scikit-image is in the evidence extra")
    assert abs(io.imread(tmp_path / "out" / "image-0.png") - case[0, 0].numpy() * 255).max() < 0.51


@pytest.mark.parametrize("sent", [[], ["--sent", "difference", "--lr", "0.1", "--local-steps", "2"]])
def test_ig_tells_people_what_it_found(case, sent):
    answer = call(
        "--steps", "150", "--total-variation", "0", "--restarts", "2", "--reference", "truth1.safetensors", *sent,
        sent="difference" if sent else "gradient",
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    assert "IG: 1 images, labels 3" in answer.stdout
    assert "LPIPS                 –" in answer.stdout
    decibels = float(answer.stdout.split("PSNR")[1].split()[0])
    assert decibels > 20


def test_labels_that_do_not_explain_the_update_are_doubted(case):
    for share, doubted in ((1.0, False), (0.4, True)):
        with open_store("gradient2.safetensors") as store:
            sent = {name: (share * store.get(name)).contiguous() for name in store.names()}
        save_file(sent, "sent.safetensors")
        answer = call("--steps", "2", "--json", n=2, update="sent.safetensors")
        assert answer.exit_code == 0, answer.output
        (section,) = json.loads(Path("out/report.json").read_text())["sections"]
        assert any("The labels may be wrong" in warning for warning in section["warnings"]) == doubted
        assert any("give --labels" in warning for warning in section["warnings"]) == doubted


def test_a_batch_is_matched_with_its_images(case):
    answer = call(
        "--attack", "dlg", "--labels", "1,3", "--steps", "80", "--reference", "truth2.safetensors", "--json", n=2
    )
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    assert result["labels"] == [3, 1]  # in the order of the reference
    assert next(finding["value"] for finding in result["findings"] if finding["name"] == "PSNR") > 30


def test_a_reconstruction_better_than_allowed_fails(case):
    arguments = ("--attack", "first-layer", "--layer", "1", "--reference", "truth1.safetensors")
    answer = call(*arguments, "--max-psnr", "20")
    assert answer.exit_code == 1
    assert "MISSED" in answer.stdout
    assert call(*arguments, "--max-psnr", "200").exit_code == 0


def test_without_the_true_images_only_the_objective_is_told(case):
    answer = call("--model", "victim_model:model", "--attack", "rog", "--steps", "3", "--labels", "3", "--json")
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    assert result["attack"] == "ROG (no post-processing)"
    assert [finding["name"] for finding in result["findings"]] == ["objective at the end"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "victim_model:nothing"], "--model 'victim_model:nothing' cannot be imported"),
        (["--model", "no_such_module:x"], "there is no module 'no_such_module'"),
        (["--model", "victim_model:number"], "is neither a torch module nor a function that"),
        (["--params", "truth1.safetensors"], "does not fit the model"),
        (["--shape", "1,1,x"], "is not a list of numbers"),
        (["--shape", "1,1,12"], "(n, c, h, w)"),
        (["--shape", "1,2,12,12"], "gray or color images"),
        (["--mean", "0,1"], "do not normalize images of 1 channels"),
        (["--std", "0"], "deviations are above 0"),
        (["--shape", "1,1,12,11"], "The model does not take images of shape (1, 1, 12, 11)"),
        (["--labels", "1,2"], "2 labels were given for 1 images"),
        (["--sent", "difference"], "Give --lr"),
        (["--lr", "0.1"], "--lr can be given only for local training, but the client sent a gradient"),
        (["--max-psnr", "3"], "Give --reference"),
        (["--reference", "truth2.safetensors"], "does not contain exactly one tensor of shape (1, 1, 12, 12)"),
        (["--attack", "first-layer", "--layer", "2"], "No tensor '2.weight' was observed"),
        (["--layer", "1"], "'layer' belongs to the attack 'first-layer'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_cure(case, arguments, says, tmp_path):
    answer = call(*arguments)
    assert answer.exit_code == 2
    assert says in " ".join(answer.stderr.split())
    assert not (tmp_path / "out").exists()


def test_an_update_with_other_tensors_is_refused(case, tmp_path):
    answer = call("--labels", "1", update="truth1.safetensors")
    assert answer.exit_code == 2
    assert "does not send a tensor 'images'" in " ".join(answer.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_state_dict_with_running_statistics_is_an_update(case, tmp_path):
    """What a client sends that saves its whole `state_dict` after local training, batch normalization included."""
    body = (
        "nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(576, 4))"
    )
    (tmp_path / "victim_with_norm.py").write_text(
        f"import torch\nfrom torch import nn\n\ndef make():\n    torch.manual_seed(0)\n    return {body}\n"
    )
    model = eval(body, {"nn": nn}).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nn.functional.cross_entropy(model((case[:1] - MEAN) / STD), torch.tensor([3])).backward()
    optimizer.step()
    save_file({n: v - before[n] for n, v in model.state_dict().items()}, "all.safetensors")
    save_file({n: v - before[n] for n, v in model.named_parameters()}, "weights.safetensors")
    about = ["--model", "victim_with_norm:make", "--sent", "difference", "--lr", "0.1", "--steps", "5", "--labels", "3"]
    images = []
    for start in (before, {name: before[name] for name, _ in model.named_parameters()}):
        save_file(start, "start.safetensors")
        for update in ("all", "weights"):
            told = call(*about, "--params", "start.safetensors", update=f"{update}.safetensors")
            assert told.exit_code == 0, told.output
            assert ("3 buffers were left out" in " ".join(told.output.split())) == (update == "all")
            images.append((tmp_path / "out" / "image-0.png").read_bytes())
    assert len(set(images)) == 1
