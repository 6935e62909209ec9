"""Many adapters trained in one forward pass end as each one alone does, and are what peft and diffusers understand."""

import copy

import pytest
import torch

pytest.importorskip("diffusers", reason="adapters of pipelines")

from netweight.data.tokens import Example
from netweight.errors import NameNotFound, TrainingStopped, UsageError
from netweight.hf.adapters import AdapterSubject, train_pictures, train_texts
from netweight.hf.load_pipeline import text_to_image
from netweight.nn import AdapterStack, applied, merge_
from netweight.nn.train_lora import AdapterRecipe
from netweight.toys.drawn_pictures import identities, photographs
from netweight.toys.faces_pipeline import faces_pipeline
from netweight.toys.language import LlamaShape, initialized

RECIPE = AdapterRecipe(rank=2, steps=4, learning_rate=0.02)
LLAMA = LlamaShape(vocabulary=40, width=16, inner=24, layers=2, heads=2, context=32, pad_id=0, end_id=1)


@pytest.fixture(scope="module")
def model():
    return text_to_image(faces_pipeline())


def subjects(count, pictures=6):
    found = []
    for number, person in enumerate(identities(count, 3)):
        prompts, images = photographs(person, pictures - number, torch.Generator().manual_seed(number))
        found.append(AdapterSubject(f"person {number}", images, tuple(prompts)))
    return found


def alone(model, subject, recipe):
    return train_pictures(model, [subject], recipe, each=3).stack


def assert_same(stack, number, other):
    """Alike as matrices: of single weights whose gradient is next to nothing, Adam enlarges the last bits' noise."""
    for name in stack.modules:
        for mine, theirs in ((stack.up, other.up), (stack.down, other.down)):
            assert (mine[name][number] - theirs[name][0]).norm() <= 1e-3 * theirs[name][0].norm() + 1e-6


@pytest.mark.parametrize(
    ("prediction", "recipe"),
    [
        ("v_prediction", RECIPE),
        ("epsilon", AdapterRecipe(steps=3, start="independent")),
        ("sample", AdapterRecipe(steps=3, train_down=False)),
    ],
)
def test_trained_together_is_trained_alone(model, prediction, recipe):
    pipeline = copy.copy(model.pipeline)
    pipeline.scheduler = type(model.pipeline.scheduler).from_config(
        model.pipeline.scheduler.config, prediction_type=prediction
    )
    model = text_to_image(pipeline)
    people = subjects(3)
    before = copy.deepcopy(model.denoiser.state_dict())
    fitted = train_pictures(model, people, recipe, each=3)
    assert fitted.names == tuple(person.name for person in people)
    for number, person in enumerate(people):
        assert_same(fitted.stack, number, alone(model, person, recipe))
    moved = [bool((value[0] != value[1]).any()) for value in fitted.stack.down.values()]
    assert all(moved) == (recipe.start == "independent" or recipe.train_down)
    assert all(torch.equal(value, before[name]) for name, value in model.denoiser.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.denoiser.parameters())
    assert not any(module._forward_hooks for module in model.denoiser.modules())


def test_an_adapter_brings_the_model_nearer_to_its_person(model):
    person = subjects(1)[0]
    fitted = train_pictures(model, [person], AdapterRecipe(steps=40), each=4)
    clean, text = model.to_latents(person.images), model.embed(person.prompts)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(99))
    time = torch.full((len(clean),), 600)
    with torch.no_grad():
        before = model.training_errors(clean, noise, time, text).mean()
        with applied(model.denoiser, fitted.stack.adapter(0), component=model.component):
            after = model.training_errors(clean, noise, time, text).mean()
    assert after < 0.9 * before


def test_diffusers_and_peft_run_the_same_adapter(model, tmp_path):
    peft = pytest.importorskip("peft", reason="an independent reading of the same factors")
    from safetensors.torch import save_file

    adapter = train_pictures(model, subjects(1), RECIPE, each=3).stack.adapter(0)
    keys = {}
    for name, change in adapter.factors.items():
        keys[f"{name}.lora_A.weight"], keys[f"{name}.lora_B.weight"] = change.down.clone(), change.up.clone()
    save_file(keys, tmp_path / "pytorch_lora_weights.safetensors")
    text, latents = model.embed(["a face on a green ground"] * 2), model.initial_noise([0, 1])
    time = torch.tensor([500, 20])
    plain = copy.deepcopy(model.pipeline.unet)

    def said(network):
        with torch.no_grad():
            return network(latents, time, text.states).sample

    with applied(model.denoiser, AdapterStack.of([adapter]), torch.zeros(2, dtype=torch.int64), component="unet"):
        ours = said(model.denoiser)
    other = faces_pipeline()
    other.load_lora_weights(tmp_path)
    assert any(isinstance(module, peft.tuners.lora.Linear) for module in other.unet.modules())
    torch.testing.assert_close(said(other.unet), ours, atol=1e-5, rtol=1e-4)
    merge_(plain, adapter, component="unet")
    torch.testing.assert_close(said(plain), ours, atol=1e-5, rtol=1e-4)
    assert (said(model.denoiser) - ours).abs().max() > 1e-3


def test_guided_generation_runs_each_prompt_with_its_own_adapter(model):
    stack = train_pictures(model, subjects(2), RECIPE, each=3).stack
    text = model.embed(["a face on a green ground"] * 2)
    with applied(model.denoiser, stack, torch.tensor([1, 0]), component="unet"):
        both = model.generate(text, [5, 6], guidance=2.0, steps=3)
    for place, number in enumerate((1, 0)):
        with applied(model.denoiser, stack.adapter(number), component="unet"):
            one = model.generate(text.rows([place]), [5 + place], guidance=2.0, steps=3)
        torch.testing.assert_close(both[place], one[0], atol=1e-4, rtol=0)


def test_language_models_train_together_as_alone():
    model = initialized(LLAMA, 0)
    examples = {
        f"task {task}": [Example((2 + row, 20), (3 + task + row % 4, 1)) for row in range(5 + task)]
        for task in range(3)
    }
    recipe = AdapterRecipe(steps=5, learning_rate=0.05)
    together = train_texts(model, examples, recipe, pad_id=0, each=3)
    assert set(together.stack.modules) == {f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"}
    for number, (name, rows) in enumerate(examples.items()):
        assert_same(together.stack, number, train_texts(model, {name: rows}, recipe, pad_id=0, each=3).stack)


def test_what_cannot_be_trained_is_refused_by_name(model):
    person = subjects(1)[0]
    with pytest.raises(UsageError, match="not within 0 and 1"):
        AdapterSubject("nan", torch.full((1, 3, 16, 16), float("nan")), ("a face",))
    with pytest.raises(UsageError, match=r"'few'.*2 prompts"):
        AdapterSubject("few", person.images, ("a", "b"))
    with pytest.raises(UsageError, match=r"'small' become latents of shape \(3, 16, 16\)"):
        train_pictures(model, [AdapterSubject("small", torch.zeros(1, 3, 16, 16), ("a face",))], RECIPE)
    with pytest.raises(UsageError, match="2 adapters with 1 different names"):
        train_pictures(model, [person, person], RECIPE)
    with pytest.raises(NameNotFound, match="to_q"):
        train_pictures(model, [person], RECIPE, layers="**.to_queries")
    with pytest.raises(TrainingStopped, match=r"'person 0' became nan at step \d"):
        train_pictures(model, [person], AdapterRecipe(learning_rate=1e30, steps=9))
    with pytest.raises(UsageError, match="learning_rate=-1"):
        AdapterRecipe(learning_rate=-1)
    with pytest.raises(UsageError, match="'empty' has no examples"):
        train_texts(initialized(LLAMA, 0), {"empty": []}, RECIPE, pad_id=0)
    assert not any(module._forward_hooks for module in model.denoiser.modules())
