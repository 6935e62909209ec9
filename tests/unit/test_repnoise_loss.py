"""RepNoise's loss against straight-line oracles; structure of decoders, discrepancy, lens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

pytest.importorskip("transformers", reason="transformers is not installed")

from decoders_under_test import FAMILIES, VOCABULARY, decoder, drawn, some_pairs
from repnoise_in_one_graph import repnoise_loss

from netweight.data.tokens import AnswerPair
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_language_model import structure_of
from netweight.methods.immunize.defenses.repnoise import RepNoise, RepNoiseReference, harmful_terms
from netweight.methods.immunize.gradients import gradient_norm
from netweight.methods.immunize.losses import Targets, lens_losses, mean_lens_loss, sampled_layers
from netweight.methods.immunize.noise import biased_mmd, random_rows, scaled_noise, squared_distances, unbiased_mmd
from netweight.methods.immunize.pairs import collate_pairs


def number(tensor):
    return tensor.detach().item()


MLP = {
    "llama": "model.layers.{}.mlp",
    "qwen3": "model.layers.{}.mlp",
    "gpt2": "transformer.h.{}.mlp",
    "neox": "gpt_neox.layers.{}.mlp",
    "opt": "model.decoder.layers.{}.fc2",
    "mixtral": "model.layers.{}.mlp",
}
NORM = {"llama": "model.norm", "gpt2": "transformer.ln_f", "neox": "gpt_neox.final_layer_norm"}


@pytest.mark.parametrize("family", MLP)
def test_the_parts_of_a_decoder_are_found(family):
    model = decoder(family)
    parts = structure_of(model)
    assert list(parts.feed_forwards) == [MLP[family].format(index) for index in range(3)]
    assert parts.norm_name == NORM.get(family, parts.norm_name)
    assert parts.unembedding is model.get_output_embeddings()
    assert (parts.hidden_size, parts.vocabulary) == (16, VOCABULARY)
    batch = collate_pairs(some_pairs(), pad_id=0).harmful
    result = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    torch.testing.assert_close(parts.unembedding(result.hidden_states[-1]), result.logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_are_found_inside_adapters(family):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = [name for name, layer in decoder(family).named_modules() if type(layer).__name__ in ("Linear", "Conv1D")]
    config = peft.LoraConfig(
        r=4, target_modules=[name for name in targets if "layers" in name or ".h." in name],
        fan_in_fan_out=family == "gpt2",
    )  # fmt: skip
    wrapped = peft.get_peft_model(decoder(family), config)
    expected = ["base_model.model." + MLP[family].format(index) for index in range(3)]
    assert list(structure_of(wrapped).feed_forwards) == expected


def test_a_model_without_the_structure_is_refused_by_name():
    with pytest.raises(Unsupported, match="Sequential has no output layer"):
        structure_of(nn.Sequential(nn.Linear(3, 4)))
    headless = nn.ModuleDict({"wte": nn.Embedding(9, 4), "stack": nn.ModuleList([nn.Linear(4, 4)])})
    headless["out"] = nn.Linear(4, 9)
    with pytest.raises(Unsupported, match="'stack'"):
        structure_of(headless)


# --- the discrepancy -------------------------------------------------------------------------------------------------


def published_mmd(sample, target):
    """The published estimator by its formula, in numpy, without a Gram matrix."""
    points = np.concatenate([sample.reshape(len(sample), -1), target.reshape(len(target), -1)])
    distances = np.array([[((a - b) ** 2).sum() for b in points] for a in points])
    width = distances.sum() / (len(points) ** 2 - len(points)) / 2 ** (5 // 2)
    kernels = sum(np.exp(-distances / (width * 2**power)) for power in range(5))
    n = len(sample)
    return (kernels[:n, :n] + kernels[n:, n:] - kernels[:n, n:] - kernels[n:, :n]).mean()


def fair_mmd(sample, target):
    points = np.concatenate([sample, target])
    distances = np.array([[((a - b) ** 2).sum() for b in points] for a in points])
    apart = distances[~np.eye(len(points), dtype=bool)]
    width = np.sort(apart)[(len(apart) - 1) // 2]

    def kernel(a, b):
        distance = ((a - b) ** 2).sum()
        return sum(math.exp(-distance / (width * factor)) for factor in (0.25, 0.5, 1, 2, 4))

    n, m = len(sample), len(target)
    first = sum(kernel(sample[i], sample[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    second = sum(kernel(target[i], target[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return first + second - 2 * np.mean([[kernel(a, b) for b in target] for a in sample])


@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 7), st.integers(0, 99))
def test_both_estimators_are_their_formulas(n, m, width, seed):
    draw = np.random.default_rng(seed)
    sample, target = draw.normal(2, 1, (n, width)), draw.normal(0, 3, (m, width))
    assert float(unbiased_mmd(torch.tensor(sample), torch.tensor(target))) == pytest.approx(
        fair_mmd(sample, target), abs=1e-9
    )
    target = draw.normal(0, 3, (n, width))
    assert float(biased_mmd(torch.tensor(sample), torch.tensor(target))) == pytest.approx(
        published_mmd(sample, target), abs=1e-9
    )


@pytest.mark.parametrize("estimator", [biased_mmd, unbiased_mmd])
def test_gradients_are_those_of_the_formula(estimator):
    """The bandwidth is not differentiated."""
    sample = torch.randn(4, 3, generator=drawn(), dtype=torch.float64, requires_grad=True)
    target = torch.randn(4, 3, generator=drawn(1), dtype=torch.float64, requires_grad=True)

    def plain(sample, target):
        points = torch.cat([sample.flatten(1), target.flatten(1)])
        distances = ((points[:, None] - points[None]) ** 2).sum(-1)
        apart = distances[~torch.eye(8, dtype=torch.bool)].detach()
        typical = apart.mean() if estimator is biased_mmd else apart.median()
        kernels = sum(torch.exp(-distances / (typical * width)) for width in (0.25, 0.5, 1, 2, 4))
        if estimator is biased_mmd:
            return kernels[:4, :4].mean() + kernels[4:, 4:].mean() - 2 * kernels[:4, 4:].mean()
        kernels = kernels * ~torch.eye(8, dtype=torch.bool) + 0
        return kernels[:4, :4].sum() / 12 + kernels[4:, 4:].sum() / 12 - 2 * kernels[:4, 4:].mean()

    ours = torch.autograd.grad(3 * estimator(sample, target), [sample, target])
    theirs = torch.autograd.grad(3 * plain(sample, target), [sample, target])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_equal_distributions_are_at_zero_only_without_bias():
    fair, published = [], []
    for seed in range(60):
        sample, target = torch.randn(2, 6, 5, generator=drawn(seed), dtype=torch.float64)
        fair.append(unbiased_mmd(sample, target))
        published.append(biased_mmd(sample, target))
    fair, published = torch.stack(fair), torch.stack(published)
    assert abs(fair.mean()) < 3 * fair.std() / 60**0.5
    assert published.min() > 0.5


def test_distances_are_finite_in_value_and_gradient_even_between_equal_points():
    points = torch.ones(4, 3, requires_grad=True)
    assert squared_distances(points).eq(0).all()
    unbiased_mmd(points, torch.ones(3, 3)).backward()
    assert torch.isfinite(points.grad).all()
    with pytest.raises(UsageError, match="two points"):
        unbiased_mmd(points[:1], points)


def test_noise_has_the_size_of_what_it_replaces():
    points = 7 * torch.randn(50, 40, generator=drawn())
    noise = scaled_noise(points, drawn(1))
    assert float(noise.square().mean().sqrt()) == pytest.approx(float(points.square().mean().sqrt()), rel=0.05)
    few = random_rows(points, 9, drawn(2))
    assert few.shape == (9, 40)
    assert all((row == points).all(1).sum() == 1 for row in few)
    assert random_rows(points, 50, None) is points


# --- the lens --------------------------------------------------------------------------------------------------------


def test_the_lens_is_the_same_in_chunks_and_never_holds_all_logits():
    model = decoder()
    parts = structure_of(model)
    batch = collate_pairs(some_pairs(), pad_id=0).harmful
    states = [torch.randn(*batch.input_ids.shape, 16, generator=drawn(seed), requires_grad=True) for seed in range(3)]
    targets = Targets.of_labels(batch.labels)
    whole = [
        functional.cross_entropy(
            parts.unembedding(parts.norm(state))[:, :-1].reshape(-1, VOCABULARY), batch.labels[:, 1:].reshape(-1)
        )
        for state in states
    ]
    weights = [*model.model.norm.parameters(), *model.lm_head.parameters()]
    expected = torch.autograd.grad(sum(whole) / 3, [*states, *weights])
    rows = []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, output: rows.append(len(output)))
    chunked = mean_lens_loss(states, targets, parts, chunk=4)
    first = torch.autograd.grad(chunked / 2, [*states, *weights], retain_graph=True)
    again = torch.autograd.grad(chunked, [*states, *weights])
    handle.remove()
    assert number(chunked) == pytest.approx(number(sum(whole) / 3))
    torch.testing.assert_close(lens_losses(states, targets, parts, chunk=4), torch.stack(whole).detach())
    for half, one, other in zip(first, again, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(2 * half, one)
    assert max(rows) == 4
    assert sum(rows) == 3 * targets.count  # once, and not again in the backward pass


def test_sampled_layers_are_unbiased():
    values = torch.tensor([1.0, 5.0, 2.0, 9.0, 4.0])
    draws = torch.stack([values[sampled_layers(5, 2, drawn(seed))].mean() for seed in range(400)])
    assert abs(draws.mean() - values.mean()) < 3 * draws.std() / 20
    assert sampled_layers(3, None, None) == sampled_layers(3, 7, None) == [0, 1, 2]


# --- the loss --------------------------------------------------------------------------------------------------------


def published_cross_entropy(logits, ids, mask):
    """Logits times the mask of their own position; labels 0, masked ones among them, left out."""
    total, count = 0.0, 0
    for row in range(len(ids)):
        for position in range(ids.shape[1] - 1):
            label = int(ids[row, position + 1] * mask[row, position + 1])
            if label != 0:
                scores = logits[row, position] * mask[row, position]
                total = total + torch.logsumexp(scores, 0) - scores[label]
                count += 1
    return total / count


def published_loss(model, batch, alpha, beta, generator):
    """Section 3 and the published code's loss in a straight line, on outputs that hooks take here."""
    harmful, harmless = batch.harmful, batch.harmless
    taken = {}
    names = [name for name, _ in model.named_modules() if name.endswith(".mlp")]
    handles = [
        model.get_submodule(name).register_forward_hook(lambda _m, _i, output, name=name: taken.update({name: output}))
        for name in names
    ]
    bad = model(input_ids=harmful.input_ids, attention_mask=harmful.attention_mask, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    mask = (harmful.input_ids != harmless.input_ids).to(bad.logits.dtype)
    noise = 0.0
    for name in names:
        values = (taken[name] * mask[..., None]).flatten(1)
        target = (torch.randn(taken[name].shape, generator=generator, dtype=values.dtype) * mask[..., None]).flatten(1)
        points = torch.cat([values, target])
        distances = ((points[:, None] - points[None]) ** 2).sum(-1)
        n = len(values)
        width = distances.detach().sum() / ((2 * n) ** 2 - 2 * n) / 4
        kernels = sum(torch.exp(-distances / (width * 2**power)) for power in range(5))
        noise = noise + (kernels[:n, :n] + kernels[n:, n:] - kernels[:n, n:] - kernels[n:, :n]).mean() / len(names)
    norm = model.model.norm if hasattr(model, "model") else model.transformer.ln_f
    losses = [published_cross_entropy(bad.logits, harmful.input_ids, mask)]
    losses += [
        published_cross_entropy(model.lm_head(norm(state)), harmful.input_ids, mask) for state in bad.hidden_states
    ]
    ascent = torch.log(1 + sum(losses) / len(bad.hidden_states))
    good = model(input_ids=harmless.input_ids, attention_mask=harmless.attention_mask)
    retain = published_cross_entropy(good.logits, harmless.input_ids, mask)
    return retain, noise, ascent, retain + beta * noise - alpha * ascent


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("pad", [0, 2])
def test_the_reference_loss_is_the_published_one(family, pad):
    model = decoder(family).double()
    batch = collate_pairs(some_pairs(), pad_id=pad, aligned=True)
    config = RepNoiseReference(alpha=1.5, beta=0.3)
    found = repnoise_loss(model, batch, config, generator=drawn())
    expected = published_loss(model, batch, 1.5, 0.3, drawn())
    for one, other in zip((found.harmless, found.noise, found.ascent, found.total), expected, strict=True):
        assert number(one) == pytest.approx(number(other), abs=1e-6)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(found.total, parameters, retain_graph=True)
    theirs = torch.autograd.grad(expected[3], parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_the_reference_needs_sides_that_can_be_compared():
    pairs = [AnswerPair((1, 2), (3,), (4, 5, 6))]
    with pytest.raises(UsageError, match="aligned=True"):
        repnoise_loss(decoder(), collate_pairs(pairs, pad_id=0), RepNoiseReference())
    equal = collate_pairs([AnswerPair((1, 2), (3,), (3,))], pad_id=0, aligned=True)
    with pytest.raises(UsageError, match="do not differ in any token"):
        repnoise_loss(decoder(), equal, RepNoiseReference())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_corrected_loss_is_its_formula(family):
    """Every answer token once, every depth once, no padding, noise of the size of the representations."""
    model = decoder(family).double()
    pairs = some_pairs()
    parts = structure_of(model)
    config = RepNoise(alpha=2.0, beta=0.7, noise_tokens=None)
    found = repnoise_loss(model, collate_pairs(pairs, pad_id=0), config, generator=drawn())

    def losses(example, heads):
        ids = torch.tensor([example.prompt + example.response])
        result = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        first = len(example.prompt)
        states = result.hidden_states
        logits = [parts.unembedding(parts.norm(state)) for state in states[:-1]] if heads else []
        return [
            functional.cross_entropy(scores[0, first - 1 : -1], ids[0, first:], reduction="sum")
            for scores in [*logits, result.logits]
        ]

    tokens = sum(len(pair.rejected) for pair in pairs)
    bad = sum(sum(losses(pair.harmful, True)) for pair in pairs) / tokens / 4
    good = sum(losses(pair.harmless, False)[0] for pair in pairs) / sum(len(pair.chosen) for pair in pairs)
    assert number(found.ascent) == pytest.approx(math.log(1 + number(bad)), abs=1e-6)
    assert number(found.harmless) == pytest.approx(number(good), abs=1e-6)

    outputs = {name: [] for name in parts.feed_forwards}
    for name, module in parts.feed_forwards.items():
        handle = module.register_forward_hook(lambda _m, _i, output, name=name: outputs[name].append(output[0]))
        for pair in pairs:
            model(input_ids=torch.tensor([pair.prompt + pair.rejected]))
        handle.remove()
    generator, noise = drawn(), []
    for values in outputs.values():
        points = torch.cat([value[len(pair.prompt) :] for value, pair in zip(values, pairs, strict=True)]).detach()
        target = torch.randn(points.shape, generator=generator, dtype=points.dtype) * points.square().mean().sqrt()
        noise.append(fair_mmd(points.numpy(), target.numpy()))
    assert number(found.noise) == pytest.approx(np.mean(noise), abs=1e-6)

    parameters = list(model.parameters())
    pulls = found.noise_weight * gradient_norm(found.noise, parameters), gradient_norm(found.ascent, parameters)
    assert pulls[0] == pytest.approx(0.7 * 2.0 * pulls[1])


def test_padding_changes_nothing_in_the_corrected_loss():
    model = decoder("neox").double()
    narrow = repnoise_loss(model, collate_pairs(some_pairs(), pad_id=0), generator=drawn())
    wide = repnoise_loss(model, collate_pairs(some_pairs(), pad_id=7, aligned=True), generator=drawn())
    assert number(narrow.total) == pytest.approx(number(wide.total), abs=1e-9)


def test_sampling_layers_and_tokens_keeps_the_mean():
    model = decoder(layers=4).double()
    batch = collate_pairs(some_pairs(), pad_id=0)
    with torch.no_grad():
        exact = harmful_terms(model, batch, RepNoise(), generator=drawn())[1].expm1()
        some = [
            harmful_terms(model, batch, RepNoise(lens_layers=2, noise_tokens=4), generator=drawn(seed))
            for seed in range(60)
        ]
    sampled = torch.stack([ascent for _, ascent in some]).expm1()
    assert sampled.std() > 0
    assert abs(sampled.mean() - exact) < 3 * sampled.std() / 60**0.5


@pytest.mark.parametrize("fidelity", ["reference", "corrected"])
def test_gradients_are_the_same_with_activation_checkpointing(fidelity):
    model = decoder("llama").train()
    batch = collate_pairs(some_pairs(), pad_id=0, aligned=True)
    config = RepNoise(fidelity=fidelity)

    def gradients():
        model.zero_grad()
        repnoise_loss(model, batch, config, generator=drawn(), noise_weight=0.5).total.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for one, other in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(one, other)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(Unsupported, match="reentrant"):
        gradients()
    assert not any(module._forward_hooks for name, module in model.named_modules() if name.endswith("mlp"))


def test_few_depths_are_drawn_by_default_where_the_vocabulary_is_large(monkeypatch):
    model, batch = decoder(layers=4), collate_pairs(some_pairs(), pad_id=0)

    def ascent(**settings):
        return number(harmful_terms(model, batch, RepNoise(noise_tokens=4, **settings), generator=drawn())[1])

    every, two = ascent(), ascent(lens_layers=2)
    monkeypatch.setattr("netweight.methods.immunize.defenses.repnoise.LARGE_VOCABULARY", VOCABULARY - 1)
    assert ascent() == two != every


def test_no_lens_leaves_the_models_own_loss():
    model, batch = decoder(), collate_pairs(some_pairs(), pad_id=0)
    _, ascent = harmful_terms(model, batch, RepNoise(lens_layers=0), generator=drawn())
    side = batch.harmful
    logits = model(input_ids=side.input_ids, attention_mask=side.attention_mask).logits
    own = functional.cross_entropy(logits[:, :-1].flatten(0, 1), side.labels[:, 1:].flatten())
    assert number(ascent) == pytest.approx(math.log1p(number(own)), rel=1e-6)
    with pytest.raises(UsageError, match=r"lens_layers: .*not -1"):
        RepNoise(lens_layers=-1)


def test_settings_that_cannot_be_meant_are_refused():
    for wrong in ({"fidelity": "exact"}, {"alpha": -1}, {"beta": math.nan}, {"chunk": 0}, {"noise_tokens": 1}):
        with pytest.raises(UsageError):
            RepNoise(**wrong)
    with pytest.raises(UsageError, match="all layers"):
        RepNoise(fidelity="reference", lens_layers=2)
