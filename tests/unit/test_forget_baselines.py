"""Mitigations on one interface: each does to a small model what its paper says, and leaves no trace after its block."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from tiny_diffusion import ORDINARY, PLANTED, TinyModel, planted_images, trained

from netweight.attacks.embedding_search.search import SearchedModel, TargetImage, compare, paired
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core.names import Units
from netweight.errors import NameNotFound, UsageError
from netweight.methods.forget.mitigations import (
    AllActive,
    AttentionScaling,
    DeactivatedNeurons,
    EmbeddingAdjustment,
    RandomTokens,
    WeightPruning,
    neuron_counts,
    random_units,
)
from netweight.nn.text_to_image import Text

correlation = paired()
WORDS = ("red", "white", "tower")
MITIGATIONS = [
    AllActive(),
    DeactivatedNeurons(Units({"blocks.0.attn2.to_v": [0, 3]})),
    EmbeddingAdjustment(iterations=2),
    RandomTokens(1, WORDS),
    AttentionScaling(),
    AttentionScaling(lambda prompts: torch.tensor([[True] * 3 + [False]] * len(prompts))),
    WeightPruning(tuple(ORDINARY[:2]), share=0.1, steps=2),
]


@pytest.fixture(scope="module")
def model():
    return trained()


def made(model, prompts=PLANTED, **more):
    return model.generate(model.embed(prompts), list(range(len(prompts))), guidance=3, steps=8, **more)


@pytest.mark.parametrize("mitigation", MITIGATIONS, ids=lambda one: one.name)
def test_nothing_is_left_behind_even_after_a_failure(model, mitigation):
    before, images = model.digest(), made(model)

    class Stopped(Exception):
        pass

    def stopping():
        with mitigation(model, PLANTED) as mitigated:
            changed = not torch.allclose(made(mitigated), images, atol=1e-6)
            assert changed == (not isinstance(mitigation, AllActive))
            assert mitigated.denoiser is model.denoiser
            assert mitigated.name == model.name
            raise Stopped

    with pytest.raises(Stopped):
        stopping()
    assert model.digest() == before
    assert torch.equal(made(model), images)
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.denoiser.modules()
    )  # no hook outlives its block


def test_deactivation_is_the_zeroing_of_rows(model):
    units = Units({"blocks.0.attn2.to_v": [1, 5], "blocks.1.attn2.to_v": [31]})
    edited = trained()
    with torch.no_grad():
        for name, chosen in units.items():
            edited.denoiser.get_submodule(name).weight[chosen] = 0
    with DeactivatedNeurons(units)(model, PLANTED) as mitigated:
        assert torch.allclose(made(mitigated), made(edited), atol=1e-6)
    with (
        pytest.raises(NameNotFound, match=r"blocks\.0\.attn2\.to_v"),
        DeactivatedNeurons(Units({"blocks.0.attn.to_v": [0]}))(model, PLANTED),
    ):
        pass


def test_random_neurons_are_as_many_and_others(model):
    counts = neuron_counts(model.denoiser)
    assert counts == {"blocks.0.attn2.to_v": 32, "blocks.1.attn2.to_v": 32}
    like = Units({"blocks.0.attn2.to_v": range(10), "blocks.1.attn2.to_v": [4]})
    matched = random_units(like, counts, layer_matched=True, seed=0)
    assert {name: len(chosen) for name, chosen in matched.items()} == {name: len(c) for name, c in like.items()}
    free = random_units(like, counts, layer_matched=False, seed=0)
    assert len(free) == len(matched) == 11
    assert not len(free & like)
    assert not len(matched & like)
    assert random_units(like, counts, layer_matched=False, seed=0) == free
    assert random_units(like, counts, layer_matched=False, seed=1) != free
    with pytest.raises(UsageError, match=r"only 12 neurons of blocks\.0\.attn2\.to_v"):
        random_units(Units({"blocks.0.attn2.to_v": range(20)}), counts, layer_matched=True, seed=0)
    with pytest.raises(UsageError, match="not among the layers"):
        random_units(Units({"elsewhere": [0]}), counts, layer_matched=True, seed=0)


def test_adjusted_embeddings_lower_the_norm_of_the_papers_detector(model):
    adjustment = EmbeddingAdjustment(noises=2)
    noise, time = model.initial_noise([50, 51]), model.timesteps(50)[:1].expand(2)

    def norm(text):
        with torch.no_grad():
            without = model.predict(noise, time, model.embed(["", ""])).noise
            return (model.predict(noise, time, text).noise - without).flatten(1).norm(dim=1).mean()

    with adjustment(model, PLANTED[:1]) as mitigated:
        text = mitigated.embed([PLANTED[0], ORDINARY[0]])
        assert norm(text.rows([0, 0])) < 0.9 * norm(model.embed(PLANTED[:1]).rows([0, 0]))
        assert torch.equal(text.states[1], model.embed(ORDINARY[:1]).states[0])  # others are embedded as ever
        moved = (text.states[0] - model.embed(PLANTED[:1]).states[0]).abs().max()
        assert 0.05 < moved < 10 * 0.06
    reached = dataclasses.replace(adjustment, target=math.inf)
    with reached(model, PLANTED[:1]) as mitigated:
        assert torch.equal(mitigated.embed(PLANTED[:1]).states, model.embed(PLANTED[:1]).states)


def test_random_tokens_are_put_in_and_nothing_else_changes():
    for count in (1, 4, 10):
        tokens = RandomTokens(count, WORDS, seed=2)
        words = tokens.prompt("old tower poster").split()
        assert len(words) == 3 + count
        left = iter(words)
        assert all(any(word == other for other in left) for word in ("old", "tower", "poster"))  # still in order
        assert tokens.prompt("old tower poster") == tokens.prompt("old tower poster")
    assert RandomTokens(4, WORDS).prompt("") == ""
    assert len({RandomTokens(4, WORDS, seed=seed).prompt("a") for seed in range(8)}) > 1
    assert RandomTokens(1, WORDS).name == "1 random token"
    with pytest.raises(UsageError, match="0 random tokens"):
        RandomTokens(0, WORDS)


@pytest.mark.parametrize("masked", [False, True])
def test_scaled_attention_is_that_of_scaled_logits(masked):
    model = trained(masked=masked)
    keep = torch.tensor([[True, True, False, True]])
    attention = model.denoiser.blocks[0].attn2
    states = torch.randn(2, 96, generator=torch.Generator().manual_seed(1))
    text = model.embed(["old tower", ""])
    seen = []
    attention.register_forward_hook(lambda _module, _args, output: seen.append(output))
    with AttentionScaling(lambda _: keep)(model, ["old tower"]) as mitigated:
        latents = mitigated.initial_noise([0, 1])
        with torch.no_grad():
            queries = []
            handle = attention.to_q.register_forward_hook(lambda _module, args, output: queries.append(output))
            mitigated.predict(latents, torch.tensor([9, 9]), text)
            handle.remove()
    with torch.no_grad():
        keys, values = attention.to_k(text.states).numpy(), attention.to_v(text.states).numpy()
    logits = np.einsum("nd,ntd->nt", queries[0].numpy(), keys) / math.sqrt(32)
    logits[0, 0] *= 1.25
    logits[0, ~keep[0].numpy()] = -np.inf
    if masked:
        logits[~text.mask.numpy()] = -np.inf
    share = np.exp(logits - logits.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    with torch.no_grad():
        wanted = attention.to_out[0](torch.tensor(np.einsum("nt,ntd->nd", share, values), dtype=torch.float32))
    assert torch.allclose(seen[0], wanted, atol=1e-4)
    assert states.shape == (2, 96)


def test_pruning_zeroes_what_memorized_prompts_use_more(model):
    pruning = WeightPruning(tuple(ORDINARY), share=0.05, steps=4)
    layer = model.denoiser.blocks[0].ff.net[2]
    whole = layer.weight.detach().clone()
    norms = {}
    for kind, prompts in (("memorized", PLANTED), ("ordinary", ORDINARY)):
        norms[kind] = pruning._norms(model, {"layer": layer}, prompts)["layer"].numpy()
    with pruning(model, PLANTED) as mitigated:
        pruned = (layer.weight == 0).numpy()
        assert mitigated is model
    scores = np.abs(whole.numpy()) * norms["memorized"]
    kth = np.sort(scores, axis=1)[:, -int(0.05 * scores.shape[1])][:, None]
    wanted = (scores >= kth) & (norms["memorized"] > norms["ordinary"])[None]
    assert pruned.any()
    assert (pruned == wanted).mean() == 1
    with pytest.raises(UsageError, match="Cannot prune"):
        WeightPruning(())


def test_padding_masks_reach_only_the_prompts_they_were_given_for():
    model = TinyModel()
    with AttentionScaling(lambda _: torch.zeros(1, 4, dtype=torch.bool), factor=1.0)(model, PLANTED[:1]) as mitigated:
        there = model.predict(model.initial_noise([0]), torch.tensor(3), mitigated.embed(ORDINARY[:1])).noise
    assert torch.allclose(
        there, model.predict(model.initial_noise([0]), torch.tensor(3), model.embed(ORDINARY[:1])).noise
    )
    with (
        AttentionScaling()(model, PLANTED) as mitigated,
        pytest.raises(UsageError, match="does not receive text of the shape"),
    ):
        mitigated.predict(model.initial_noise([0]), torch.tensor(3), Text(torch.zeros(1, 3, 16)))


def test_a_mitigation_by_hooks_can_be_searched(model, tmp_path):
    units = Units({name: range(29) for name in neuron_counts(model.denoiser)})
    settings = SearchSettings(
        steps=10, restarts=1, images=3, guidance=3, generation_steps=8, threshold=0.8, starts=("original",)
    )
    subjects = [
        SearchedModel("on", model),
        SearchedModel("off", model, lambda inner: DeactivatedNeurons(units)(inner, PLANTED)),
    ]
    targets = [TargetImage("one", PLANTED[0], planted_images()[0])]
    found = compare(
        subjects, targets, ORDINARY, settings, seeds=[0], similarity=correlation, measure="NCC", folder=tmp_path
    )
    on, off = (found.of(name)[0].trials[0] for name in ("on", "off"))
    assert on.steps == 0
    assert off.looks[0].score < 0.8
    edited = trained()
    with torch.no_grad():
        for name in units.modules:
            edited.denoiser.get_submodule(name).weight[:29] = 0
    same = compare(
        [SearchedModel("off", edited)], targets, ORDINARY, settings, seeds=[0], similarity=correlation, measure="NCC",
        folder=tmp_path / "edited",
    )  # fmt: skip
    assert off.looks[-1].similarities == pytest.approx(same.runs[0].trials[0].looks[-1].similarities, abs=1e-3)


def test_planted_pictures_are_really_memorized(model):
    images = made(model)
    assert (correlation(images, planted_images()) > 0.9).all()
