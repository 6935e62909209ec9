"""The page that computes its pictures: its engine beside torch, layer by layer and as a whole, and all controls."""

import json
from importlib import resources

import pytest
import torch
from browser import DARK, needs_chromium, watch
from torch import nn

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from netweight.hf.load_pipeline import text_to_image
from netweight.methods.space.inversion import generate_images
from netweight.methods.space.points import read_points
from netweight.methods.space.space import WeightSpace
from netweight.methods.space.view.build import live_pipeline
from netweight.methods.space.view.page import write_view
from netweight.store.bank.bank import AdapterBank
from netweight.toys.faces_pipeline import FACES_BANK, FACES_SETTINGS, faces_pipeline, faces_view

pytestmark = [needs_chromium, pytest.mark.skipif(not FACES_BANK.exists(), reason="no bank of drawn faces is here")]

HEADS, GROUPS, WIDTH, TIME = 2, 4, 16, 12
SETTINGS = FACES_SETTINGS.replace(adapters=4, samples=1, components=1, steps=3)


def rows(map_):
    """(1, c, h, w) as the engine has it: places and channels."""
    return map_[0].permute(1, 2, 0).flatten().tolist()


def image(map_):
    return {"x": rows(map_), "h": map_.shape[2], "w": map_.shape[3], "c": map_.shape[1]}


def cases():
    """Name → layer, call in the engine with `x`, `map`, `text` and `time`, and what torch computes."""
    torch.manual_seed(0)
    map_, text, time = torch.randn(1, WIDTH, 6, 4), torch.randn(1, 5, 8), torch.randn(1, TIME)
    x = map_.permute(0, 2, 3, 1).flatten(1, 2)
    transformer = {"in_channels": WIDTH, "norm_num_groups": GROUPS, "cross_attention_dim": 8, "num_layers": 2}
    layers = {
        "convolution": (nn.Conv2d(WIDTH, 7, 3, padding=1), "conv(map, 'convolution').x", lambda f: rows(f(map_))),
        "halved": (nn.Conv2d(WIDTH, 7, 3, 2, 1), "conv(map, 'halved', 2).x", lambda f: rows(f(map_))),
        "single": (nn.Conv2d(WIDTH, 5, 1), "conv(map, 'single').x", lambda f: rows(f(map_))),
        "linear": (nn.Linear(WIDTH, 9), "linear(x, 24, 'linear')", lambda f: f(x)),
        "groups": (nn.GroupNorm(GROUPS, WIDTH), "groupNorm(map, 'groups', 4, 1e-5).x", lambda f: rows(f(map_))),
        "layer": (nn.LayerNorm(WIDTH), "layerNorm(x, 16, 'layer')", lambda f: f(x)),
        "silu": (nn.SiLU(), "silu(x)", lambda f: f(x)),
        "self": (Attention(WIDTH, heads=HEADS, dim_head=8), "attention(x, 24, x, 'self')", lambda f: f(x)),
        "cross": (
            Attention(WIDTH, 8, heads=HEADS, dim_head=8), "attention(x, 24, text, 'cross')", lambda f: f(x, text)
        ),
        "gated": (FeedForward(WIDTH, activation_fn="geglu"), "gated(x, 24, 'gated')", lambda f: f(x)),
        "resnet": (
            ResnetBlock2D(in_channels=WIDTH, out_channels=8, temb_channels=TIME, groups=GROUPS, eps=1e-5),
            "resnet(map, time, 'resnet').x", lambda f: rows(f(map_, time)),
        ),
        "transformer": (
            Transformer2DModel(HEADS, 8, **transformer), "transformer(map, text, 'transformer').x",
            lambda f: rows(f(map_, text).sample),
        ),
    }  # fmt: skip
    for layer, _, _ in layers.values():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, 0.1, 0.3)
    upsampled = nn.functional.interpolate(map_, scale_factor=2, mode="nearest")
    layers["doubled"] = (nn.Identity(), "doubled(map).x", lambda f: rows(upsampled))
    layers["means"] = (nn.AvgPool2d(2), "means(map, 2).x", lambda f: rows(f(map_)))
    layers["joined"] = (nn.Identity(), "joined(map, map).x", lambda f: rows(torch.cat([map_, map_], 1)))
    return layers, {"map": image(map_), "x": rows(map_), "text": text.flatten().tolist(), "time": time[0].tolist()}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`Transformer2DModelOutput` is deprecated:FutureWarning")
def test_every_layer_of_the_engine_computes_what_torch_does(tmp_path):
    layers, given = cases()
    weights = {}
    for name, (layer, _, _) in layers.items():
        for key, value in layer.state_dict().items():
            value = value.permute(0, 2, 3, 1) if value.ndim == 4 else value  # as a page has it: channels last
            weights[f"{name}.{key}"] = {"data": value.flatten().tolist(), "shape": list(value.shape)}
    engine = resources.files("netweight.methods.space.view").joinpath("engine.js").read_text()
    page = tmp_path / "engine.html"
    page.write_text(
        f"""<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'x'"><body>
        <script>{engine}</script><script>
        config = {{ heads: {HEADS}, groups: {GROUPS}, eps: 1e-5 }};
        for (const [name, {{ data, shape }}] of Object.entries({json.dumps(weights)}))
          tensors[name] = {{ data: Float32Array.from(data), shape }};
        const {{ map, x: values, text: words, time: moment }} = {json.dumps(given)};
        map.x = Float32Array.from(map.x);
        const x = Float32Array.from(values), text = Float32Array.from(words), time = Float32Array.from(moment);
        </script></body>"""
    )
    calls = "".join(f"seen[{name!r}] = [...{call}];" for name, (_, call, _) in layers.items())
    seen = watch(page, 800, actions=calls)
    for name, (layer, _, torchs) in layers.items():
        expected = torch.as_tensor(torchs(layer)).flatten()
        found = torch.tensor(seen[name])
        assert found.shape == expected.shape, name
        assert (found - expected).abs().max() < 2e-5 * max(1, expected.abs().max()), name


ACTIONS = """
  const one = selector => document.querySelector(selector), all = selector => [...document.querySelectorAll(selector)];
  const html = document.documentElement;
  const until = async test => { while (!test()) await new Promise(next => setTimeout(next, 5)); };
  const painted = async act => { html.dataset.painted = ""; act(); await until(() => html.dataset.painted); };
  const move = (name, value) => {
    const card = all(".stage").find(each => each.querySelector("h4").textContent === name);
    const slider = card.querySelector("input");
    slider.value = value;
    for (const kind of ["input", "change"]) slider.dispatchEvent(new Event(kind, { bubbles: true }));
  };
  const pixels = face => [...face.getContext("2d").getImageData(0, 0, face.width, face.height).data];
  const look = () => [pixels(one(".whole")).join(), one("#position").textContent];
  const saved = () => decodeURIComponent(one("#save").href.replace("data:application/json,", ""));
  await until(() => html.dataset.ready && html.dataset.painted);
  seen.zero = look();
  await painted(() => { move("beard", 2.5); move("width", -1); });
  seen.moved = look();
  seen.point = saved();
  seen.faces = all(".whole").map(pixels);
  seen.measured = all(".measured").map(part => part.textContent);
  seen.nearest = all("#nearest button").map(part => part.textContent);
  await painted(() => one("#random").click());
  seen.random = look();
  await painted(() => one("#undo").click());
  seen.undone = look();
  await painted(() => one("#reset").click());
  seen.reset = look();
  one("#plot").scrollIntoView({ behavior: "instant" });
  const mark = all("#plot .mark")[3].getBoundingClientRect();
  const where = { clientX: (mark.left + mark.right) / 2, clientY: (mark.top + mark.bottom) / 2, bubbles: true };
  document.elementFromPoint(where.clientX, where.clientY).dispatchEvent(new MouseEvent("click", where));
  seen.clicked = [one("#card h3").textContent, pixels(one("#card .portrait"))];
  await painted(() => one("#card .go").click());
  seen.model = look();
  seen.model_point = saved();
  seen.model_nearest = all("#nearest button").map(part => part.textContent);
  await painted(() => one("#nearest button:not(:first-child), #nearest li:nth-child(2) button").click());
  seen.neighbor = one("#position").textContent;
  seen.page = Math.max(seen.page, html.scrollWidth);
"""


@pytest.fixture(scope="module")
def view():
    return faces_view(settings=SETTINGS)


@pytest.fixture(scope="module")
def page(view, tmp_path_factory):
    return write_view(view, tmp_path_factory.mktemp("live") / "faces.html")


@pytest.fixture(scope="module")
def space():
    return WeightSpace.fit(AdapterBank.open(FACES_BANK))


def psnr(pixels, expected):
    shown = torch.tensor(pixels, dtype=torch.float64).reshape(*expected.shape[1:3], 4)[..., :3]
    return float(10 * torch.log10(255**2 / (shown - expected[0]).square().mean().clamp_min(1e-9)))


@pytest.mark.parametrize(("width", "dark"), [(390, True), pytest.param(1280, False, marks=pytest.mark.study)])
def test_a_moved_slider_shows_what_the_pipeline_paints_at_that_point(page, view, space, tmp_path, width, dark):
    assert page.read_text().count("background: url(data:image/png") == len(view.first)  # before the engine has one
    seen = watch(page, width, *([DARK] if dark else []), actions=ACTIONS)
    assert psnr(list(map(int, seen["zero"][0].split(","))), torch.from_numpy(view.first[:1])) > 40
    model = text_to_image(faces_pipeline())
    for point, faces in ((seen["point"], seen["faces"]), (seen["model_point"], [seen["model"][0].split(",")])):
        (tmp_path / "point.json").write_text(point)
        points = read_points(tmp_path / "point.json")
        images = generate_images(
            model, space, points.scores, SETTINGS.prompts, SETTINGS.seeds, guidance=1.0, steps=SETTINGS.steps,
        )[0]  # fmt: skip
        images = images.permute(0, 2, 3, 1) * 255
        for number, face in enumerate(faces):
            assert psnr(list(map(int, face)), images[number : number + 1]) > 40
    assert torch.allclose(points.scores[0], space.scores[255])  # a model's point is its own
    assert seen["clicked"][0] == "person-00255"
    assert psnr(seen["clicked"][1], images[:1]) > 40  # its face beside the map
    assert seen["moved"][1] == "width \u22121 σ, beard +2.5 σ"
    assert seen["undone"] == seen["moved"] != seen["random"]
    assert seen["reset"] == seen["zero"] != seen["moved"]
    assert seen["model"][1] == "person-00255: All at 0."
    assert seen["model_nearest"][0] == "person-002551.00"
    assert seen["neighbor"] != seen["model"][1]
    assert len(seen["nearest"]) == 4
    assert len(seen["measured"]) == 8
    assert float(seen["measured"][3].removeprefix("measured +")) > 0.5  # a beard
    assert seen["page"] <= width
    assert seen["outside"] == []
    assert (seen["dark"] == "rgb(20, 23, 26)") == dark


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers with numpy 2
def test_what_a_page_cannot_compute_is_named(space):
    model = text_to_image(faces_pipeline())
    settings = FACES_SETTINGS.replace(steps=3)
    assert "scheduler" in live_pipeline(_with_memory(model), space, settings, [0])
    model.pipeline.unet.register_to_config(resnet_time_scale_shift="scale_shift")
    assert "unusual resnet_time_scale_shift" in live_pipeline(model, space, settings, [0])


def _with_memory(model):
    from diffusers import DPMSolverMultistepScheduler

    other = text_to_image(faces_pipeline())
    other.pipeline.scheduler = DPMSolverMultistepScheduler.from_config(model.pipeline.scheduler.config)
    return other
