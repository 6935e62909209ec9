"""Depth of a defense: weights, losses and representations by layer; probes, planes, frozen layers."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="transformers is not installed")

from decoders_under_test import FAMILIES, decoder, drawn, some_pairs

from netweight.data.tokens import collate
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_language_model import block_numbers, frozen, structure_of
from netweight.methods.immunize.layers import lens_by_layer, representations, weight_changes
from netweight.methods.immunize.losses import response_loss
from netweight.methods.immunize.plane import PrincipalPlane
from netweight.methods.immunize.probes import probe_accuracies


def test_changes_of_weights_are_found_where_they_are():
    before = decoder("neox")
    after = copy.deepcopy(before)
    with torch.no_grad():
        after.gpt_neox.layers[1].mlp.dense_4h_to_h.weight[0, :4] += 1.5
        structure_of(after).unembedding.weight.mul_(1.1)
    found = {change.layer: change for change in weight_changes(before, after.bfloat16().float())}
    exact = {change.layer: change for change in weight_changes(before, copy.deepcopy(before))}
    assert list(found)[:3] == [f"gpt_neox.layers.{index}" for index in range(3)]
    assert all(change.distance == change.relative == 0 for change in exact.values())
    assert found["gpt_neox.layers.1"].distance == pytest.approx(3.0, rel=0.02)
    assert found[structure_of(after).unembedding_name + ".weight"].relative == pytest.approx(0.1, rel=0.05)
    assert found["gpt_neox.layers.0"].relative < 0.01
    with pytest.raises(UsageError, match="parameters, such as"):
        weight_changes(before, decoder("neox", layers=2))
    with pytest.raises(Unsupported):
        weight_changes(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_ends_with_the_models_own_loss(family):
    model, batch = decoder(family), collate([pair.harmful for pair in some_pairs()], pad_id=0)
    losses = lens_by_layer(model, batch)
    parts = structure_of(model)
    assert len(losses) == 4
    assert losses[-1] == pytest.approx(response_loss(model, batch).detach().item(), rel=1e-5)
    embedded = torch.nn.functional.cross_entropy(
        parts.unembedding(parts.norm(model.get_input_embeddings()(batch.input_ids)))[:, :-1].transpose(1, 2),
        batch.labels[:, 1:],
    )
    if family != "gpt2":  # whose first state has positions added
        assert losses[0] == pytest.approx(embedded.detach().item(), rel=1e-5)


def test_representations_are_means_over_answers_whatever_the_batch():
    model, examples = decoder(), [pair.harmful for pair in some_pairs(5)]
    found = representations(model, examples, batch_size=2)
    assert [state.shape for state in found] == [(5, 16)] * 4
    ids = torch.tensor([examples[3].prompt + examples[3].response])
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    for state, alone in zip(found, states, strict=True):
        torch.testing.assert_close(state[3], alone[0, len(examples[3].prompt) :].mean(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError):
        representations(model, [])


def test_probes_see_a_shift_and_nothing_else():
    kind = torch.randn(120, 6, generator=drawn())
    other = torch.randn(90, 6, generator=drawn(1))
    same = probe_accuracies(kind, other)
    assert len(same) == 10
    assert 0.3 < np.mean(same) < 0.7
    other[:, 2] += 3
    apart = probe_accuracies(kind, other)
    assert np.mean(apart) > 0.85
    assert apart == probe_accuracies(kind, other) != probe_accuracies(kind, other, seed=1)
    assert probe_accuracies(kind, 5 + kind, seeds=1) == [1.0]
    with pytest.raises(UsageError, match="1 and 90 examples"):
        probe_accuracies(kind[:1], other)


def test_a_probe_is_at_the_minimum_of_the_penalized_mean_loss():
    from netweight.methods.immunize.probes import _fit

    features = torch.randn(60, 4, generator=drawn(), dtype=torch.float64)
    labels = (features[:, 0] + torch.randn(60, generator=drawn(2)) > 0).double()
    weights = _fit(features, labels, 0.05).requires_grad_()
    scores = features @ weights[1:] + weights[0]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
    (slope,) = torch.autograd.grad(loss + 0.05 / 2 * weights[1:].square().sum(), weights)
    assert float(slope.abs().max()) < 1e-6


@given(st.integers(3, 20), st.integers(3, 9), st.integers(0, 99))
def test_a_plane_holds_the_largest_variance(count, width, seed):
    points = torch.randn(count, width, generator=drawn(seed), dtype=torch.float64) * torch.arange(1, width + 1)
    plane = PrincipalPlane.fit(points)
    values, vectors = np.linalg.eigh(np.cov(points.numpy(), rowvar=False))
    np.testing.assert_allclose(plane.shares, (values / values.sum())[::-1][:2], atol=1e-8)
    placed = plane.place(points).numpy()
    np.testing.assert_allclose(placed.var(0, ddof=1), values[::-1][:2], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(np.abs(plane.axes[0].numpy() @ vectors[:, -1]), 1, atol=1e-6)
    with pytest.raises(UsageError):
        PrincipalPlane.fit(points[:1])


def test_layers_are_read_as_numbers():
    assert block_numbers("0-10", 32) == (list(range(11)), False)
    assert block_numbers("10-20", 32) == (list(range(10, 21)), False)
    assert block_numbers("20-31, head", 32) == (list(range(20, 32)), True)
    assert block_numbers("last", 32) == ([31], False)
    assert block_numbers("1,3-4,4", 32) == ([1, 3, 4], False)
    for wrong in ("", "ten", "0_ten", "-3", "5-2", "30-32", "32", "1-", "0x1"):
        with pytest.raises(UsageError):
            block_numbers(wrong, 32)


def test_only_the_layers_named_are_frozen_and_only_for_the_block():
    model = decoder(layers=12)
    model.model.layers[3].mlp.up_proj.weight.requires_grad_(False)
    before = {name: value.requires_grad for name, value in model.named_parameters()}
    with frozen(model, "0-1,10") as names:
        held = {name for name, value in model.named_parameters() if not value.requires_grad}
        assert {name.split(".")[2] for name in names} == {"0", "1", "10"}
        assert held == {*names, "model.layers.3.mlp.up_proj.weight"}
    assert {name: value.requires_grad for name, value in model.named_parameters()} == before
    with pytest.raises(ZeroDivisionError), frozen(model, "head"):
        1 / model.lm_head.weight.requires_grad
    assert model.lm_head.weight.requires_grad
