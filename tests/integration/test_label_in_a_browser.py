"""Labels in headless Chromium: at 480 pixels, on a phone, in the dark, on paper, and by their words alone."""

import base64
import json
import re

import pytest
import torch
from browser import DARK, chromium, console, look, needs_chromium
from safetensors.torch import save_file

import netweight
from netweight.labels.page import folder_page, label_page, pictures_page
from netweight.labels.picture import spoken, svg

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def label(tmp_path_factory):
    """The label of a language model with rows of all kinds, and long names."""
    folder = tmp_path_factory.mktemp("model") / "-".join(["a-language-model-with-a-long-name"] * 3)
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {f"model.layers.{n}.mlp.down_proj.weight": torch.randn(64, 64).bfloat16().float() for n in range(3)}
    save_file({**tensors, "model.norm.weight": torch.full((64,), float("nan"))}, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "auto_map": {"AutoModel": "modeling.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("")
    save_file({name: 1.01 * value for name, value in tensors.items()}, folder.parent / "base.safetensors")
    return netweight.label(folder, base=folder.parent / "base.safetensors")


@pytest.fixture(scope="module")
def page(label, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "label.html"
    file.write_text(label_page(label))
    return file


@pytest.mark.parametrize(("width", "options"), [(360, ()), (480, ()), (480, (DARK,)), (1280, (DARK,))])
def test_the_page_fits_every_width_and_is_legible(page, width, options):
    seen = look(page, width, *options)
    assert seen["pale"] == []
    assert seen["page"] <= width
    assert seen["broken"] == 0


def test_the_page_is_whole_on_paper(page, tmp_path):
    printed = tmp_path / "printed.html"
    printed.write_text(page.read_text().replace("@media print", "@media all"))
    assert look(printed, 720)["page"] <= 720


def test_the_console_stays_silent(page):
    assert console(page)[0] == []


def test_side_by_side_and_folders_fit_a_phone(label, tmp_path):
    for name, text in (
        ("both.html", label_page(label, against=label)),
        ("folder.html", folder_page("models", [label, label], [(tmp_path / "broken.safetensors", "It is damaged.")])),
    ):
        file = tmp_path / name
        file.write_text(text)
        seen = look(file, 390)
        assert seen["page"] <= 390
        assert seen["pale"] == []


# What a picture shows: texts that leave the sheet, and texts that lie over one another.
MEASURE = """<script>
const texts = [...document.querySelectorAll("svg text")].map(part => [part.textContent, part.getBBox()]);
const sheet = document.querySelector("svg").viewBox.baseVal;
const outside = texts.filter(([, b]) => b.x < 4 || b.x + b.width > sheet.width - 4 || b.y + b.height > sheet.height);
const over = [];
texts.forEach(([one, a], i) => texts.slice(i + 1).forEach(([other, b]) => {
  if (a.x < b.x + b.width - 1 && b.x < a.x + a.width - 1 && a.y < b.y + b.height - 2 && b.y < a.y + a.height - 2)
    over.push([one, other]); }));
document.body.dataset.seen = JSON.stringify({outside: outside.map(([text]) => text), over, count: texts.length});
</script>"""


@pytest.mark.parametrize("options", [(), (DARK,)], ids=["light", "dark"])
def test_no_text_of_the_picture_leaves_the_sheet_or_lies_over_another(label, tmp_path, options):
    file = tmp_path / "picture.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{svg(label)}{MEASURE}</body>")
    dump = chromium(file, "--dump-dom", *options).stdout
    seen = json.loads(re.search(r'data-seen="([^"]*)"', dump)[1].replace("&quot;", '"').replace("&amp;", "&"))
    assert seen["count"] > 30
    assert seen["outside"] == []
    assert seen["over"] == []


def test_the_picture_follows_the_dark_setting(label, tmp_path):
    from PIL import Image

    colors = []
    for name, options in (("light", ()), ("dark", (DARK,))):
        file = tmp_path / f"{name}.html"
        source = base64.b64encode(svg(label).encode()).decode()
        file.write_text(f'<!doctype html><meta name=color-scheme content="light dark"><body style="margin:0">'
                        f'<img src="data:image/svg+xml;base64,{source}">')  # fmt: skip
        shot = tmp_path / f"{name}.png"
        chromium(file, f"--screenshot={shot}", "--force-device-scale-factor=1", *options)
        colors.append(Image.open(shot).convert("L").getpixel((30, 20)))
    assert colors[0] > 200 > 80 > colors[1]


def test_a_page_of_pictures_says_the_labels_to_a_screen_reader(label, tmp_path):
    file = tmp_path / "pictures.html"
    file.write_text(pictures_page("Labels", "Two labels.", [("Before", label), ("After", label)]))
    seen = look(file, 480, actions="seen.alt = [...document.images].map(image => image.alt);")
    assert seen["page"] <= 480
    assert seen["images"] == 2
    assert seen["broken"] == 0
    assert seen["alt"] == [" ".join(spoken(label))] * 2
