"""Adapters that begin to hold at a timestep, in the pipeline that comes with the package."""

import warnings

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from known_spaces import KnownSpace

from netweight.errors import NameNotFound, Unsupported
from netweight.hf.adapters import delayed_injection, switch_on_step_end
from netweight.hf.load_pipeline import text_to_image
from netweight.methods.space.edits import Delay
from netweight.methods.space.inversion import generate_images
from netweight.nn.apply_lora import linear_layers
from netweight.store.lora_formats.writing import export_adapter
from netweight.toys.diffusion import shapes_pipeline

PROMPT, STEPS = "a large red circle on a gray ground", 8


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    pipeline = shapes_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    shapes = linear_layers(pipeline.unet, ("**.attn2.to_q", "**.attn2.to_v"), component="unet")
    space = KnownSpace(modules=shapes)
    space.basis *= 0.7
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("before", "after")):
        export_adapter(space.adapter(space.scores[number]), folder / name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of a second adapter, which is what is wanted here
            pipeline.load_lora_weights(folder / name, weight_name="pytorch_lora_weights.safetensors", adapter_name=name)
    return pipeline, space


def made(pipeline, **more):
    generator = torch.Generator().manual_seed(3)
    images = pipeline(
        PROMPT, num_inference_steps=STEPS, guidance_scale=3.0, generator=generator, output_type="pt", **more
    ).images
    return images[0]


@pytest.mark.parametrize("until", [1000, 500, 0])
def test_weights_change_at_the_timestep(world, until):
    pipeline, space = world
    model = text_to_image(pipeline)
    pipeline.unet.set_adapter("before")
    with delayed_injection(pipeline, Delay(until), after="after", before="before"):
        ours = made(pipeline)
    assert pipeline.unet.active_adapters() == ["before"]
    assert not pipeline.unet._forward_pre_hooks
    pipeline.disable_lora()
    expected = generate_images(
        model, space, space.scores[1:2], [PROMPT], [3], guidance=3.0, steps=STEPS, delay=Delay(until),
        before=space.scores[:1],
    )[0, 0]  # fmt: skip
    pipeline.enable_lora()
    assert torch.allclose(ours, expected, atol=2e-3)


def test_the_callback_does_the_same_from_the_second_step(world):
    pipeline, _ = world
    pipeline.unet.set_adapter("before")
    with delayed_injection(pipeline, Delay(500), after="after", before="before"):
        expected = made(pipeline)
    pipeline.unet.set_adapter("before")
    ours = made(pipeline, callback_on_step_end=switch_on_step_end(Delay(500), after="after", before="before"))
    assert torch.allclose(ours, expected, atol=1e-5)
    pipeline.unet.set_adapter("before")
    alone = made(pipeline)
    assert (ours - alone).abs().max() > 0.02


def test_before_may_be_the_base_model(world):
    pipeline, _ = world
    pipeline.unet.set_adapter("after")
    with delayed_injection(pipeline, Delay(0), after="after"):
        ours = made(pipeline)
    pipeline.disable_lora()
    base = made(pipeline)
    pipeline.enable_lora()
    assert (ours - base).abs().mean() < 0.25 * (made(pipeline) - base).abs().mean()


def test_mistakes_are_named(world):
    pipeline, _ = world
    with pytest.raises(NameNotFound, match="Nearest: after"), delayed_injection(pipeline, Delay(1), after="aftr"):
        pass
    with pytest.raises(Unsupported, match="no denoiser"), delayed_injection(object(), Delay(1), after="after"):
        pass
