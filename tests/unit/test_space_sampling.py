"""Samplers and their audit, against moments, scikit-learn's mixture, and populations that are known."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_spaces import known_scores

from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.audits import neighbor_findings, spread_findings
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.points import (
    ConditionalSampler,
    GaussianSampler,
    KernelSampler,
    PairSampler,
    nearest,
    nearest_distances,
    row_of,
)
from netweight.methods.space.settings import SampleSettings

few = settings(max_examples=20, deadline=None)


def value(findings, start):
    return next(each.value for each in findings if each.name.startswith(start))


def two_clusters(count=300, components=5):
    noise = torch.Generator().manual_seed(0)
    side = (torch.rand(count, generator=noise) < 0.5).double() * 2 - 1
    scores = 0.3 * torch.randn(count, components, generator=noise, dtype=torch.float64)
    scores[:, 0] += 2 * side
    return scores


def samplers():
    scores, labels, _ = known_scores(300)
    return scores, {
        "gaussian": GaussianSampler.fit(scores),
        "pairs": PairSampler.fit(scores, neighbors=len(scores)),
        "kernel": KernelSampler.fit(scores, bandwidth=0.4),
        "conditional": ConditionalSampler.fit(scores, labels),
    }


def test_every_sampler_keeps_mean_and_spread_and_is_repeatable():
    scores, every = samplers()
    for name, sampler in every.items():
        points = sampler.draw(1500, seed=1)
        assert points.shape == (1500, 12), name
        assert points.dtype == torch.float32
        assert torch.allclose(points.std(0), scores.std(0), rtol=0.16), name
        assert torch.allclose(points.mean(0), scores.mean(0), atol=0.12), name
        assert torch.equal(sampler.draw(5, seed=1), points[:5]), name
        assert not torch.equal(sampler.draw(5, seed=2), points[:5]), name
        with pytest.raises(UsageError, match="0 samples"):
            sampler.draw(0, seed=0)


@few
@given(st.floats(0.1, 3), st.integers(0, 2**31))
def test_gaussian_is_the_papers(factor, seed):
    scores, _, _ = known_scores(50, seed=seed % 100)
    drawn, plain = (GaussianSampler.fit(scores, factor=f).draw(4, seed=seed).double() for f in (factor, 1.0))
    mean = scores.double().mean(0)
    assert torch.allclose(drawn - mean, factor * (plain - mean), atol=1e-5)


def test_what_is_drawn_by_default_spreads_in_every_component_as_models_do():
    scores = torch.randn(200, 12, generator=torch.Generator().manual_seed(3)).abs() ** 1.5
    assert SampleSettings().sampler == "pairs"
    spread = PairSampler.fit(scores).draw(400, seed=0).std(0) / scores.std(0)
    assert float(spread.min()) > 0.8


def test_pairs_are_of_models_that_are_alike_so_that_a_sample_is_not_between_two_kinds():
    scores = two_clusters()
    alike, any_two = (PairSampler.fit(scores, neighbors=count).draw(200, seed=5)[:, 0] for count in (8, len(scores)))
    assert float((alike.abs() < 1).double().mean()) < 0.05
    assert float((any_two.abs() < 1).double().mean()) > 0.2
    with pytest.raises(UsageError, match="at least 1, not 0"):
        PairSampler.fit(scores, neighbors=0)


def test_pairs_are_sums_of_two_different_models_about_the_mean():
    scores, _, _ = known_scores(40)
    centered = scores.double() - scores.double().mean(0)
    unit = torch.nn.functional.normalize(centered)
    sums = (centered[:, None] + centered[None]) / (2 + 2 * unit @ unit.T).clamp_min(1e-6).sqrt()[:, :, None]
    points = PairSampler.fit(scores, factor=1.5).draw(60, seed=4).double() - scores.double().mean(0)
    apart = torch.cdist(points, 1.5 * sums.flatten(0, 1)).view(60, 40, 40)
    for number in range(60):
        first, second = divmod(int(apart[number].argmin()), 40)
        assert apart[number, first, second] < 1e-4
        assert first != second
    with pytest.raises(UsageError, match="multiplied with 0"):
        PairSampler.fit(scores, factor=0)


def test_kernels_go_from_training_models_to_the_gaussian():
    scores = two_clusters()
    copies = KernelSampler.fit(scores, bandwidth=0.0).draw(20, seed=0)
    assert nearest_distances(copies, scores).max() < 1e-5
    gaussian, widest = GaussianSampler.fit(scores), KernelSampler.fit(scores, bandwidth=1.0)
    assert torch.allclose(gaussian.draw(9, seed=3), widest.draw(9, seed=3), rtol=1e-2)
    chosen = KernelSampler.fit(scores)
    assert 0.05 < chosen.bandwidth < 0.6
    middle = [float((each.draw(800, seed=0)[:, 0].abs() < 1).double().mean()) for each in (chosen, gaussian)]
    assert middle[0] < 0.75 * middle[1]


def test_the_bandwidth_of_gaussian_models_is_large():
    noise = torch.randn(200, 60, generator=torch.Generator().manual_seed(0))
    assert KernelSampler.fit(noise).bandwidth > 0.9


def test_conditions_are_kept_and_other_attributes_follow():
    scores, labels, _ = known_scores(500, correlated=0.7)
    sampler = ConditionalSampler.fit(scores, labels)
    decoders = {name: fit_direction(scores, labels, name, kind="decoder") for name in ("beard", "width")}
    along = {
        beard: {
            name: sampler.draw(400, seed=0, given={"beard": beard}).double() @ each.vector
            for name, each in decoders.items()
        }
        for beard in (0.0, 1.0)
    }
    gap = along[1.0]["beard"].mean() - along[0.0]["beard"].mean()
    assert gap > 2 * along[0.0]["beard"].std()
    assert along[1.0]["width"].mean() > along[0.0]["width"].mean() + 0.5  # they go together in training
    bold = ConditionalSampler.fit(scores, labels, emphasis=2.0).draw(400, seed=0).double() @ decoders["beard"].vector
    plain = sampler.draw(400, seed=0).double() @ decoders["beard"].vector
    assert float(bold.std() / plain.std()) > 1.5  # the rest keeps its spread
    with pytest.raises(UsageError, match="emphasis above 0"):
        ConditionalSampler.fit(scores, labels, emphasis=0)
    with pytest.raises(NameNotFound, match="'bread'"):
        sampler.draw(1, seed=0, given={"bread": 1.0})
    with pytest.raises(NameNotFound, match="'bread'"):
        ConditionalSampler.fit(scores, labels, ["bread"])
    with pytest.raises(UsageError, match="too few"):
        ConditionalSampler.fit(
            scores[:5], type(labels)(labels.names[:5], {n: type(c)(n, c.values[:5]) for n, c in labels.columns.items()})
        )


@pytest.mark.parametrize("scores", [torch.ones(2, 3), torch.full((5, 3), torch.nan), torch.ones(5)])
def test_scores_that_make_no_sampler_are_refused(scores):
    with pytest.raises(UsageError, match="at least 3 models"):
        GaussianSampler.fit(scores)
    with pytest.raises(UsageError, match="bandwidth"):
        KernelSampler.fit(torch.randn(5, 2), bandwidth=2.0)
    with pytest.raises(UsageError, match="factor above 0"):
        GaussianSampler.fit(torch.randn(5, 2), factor=0)


# --- the audit


def test_spread_is_that_of_the_columns():
    noise = torch.Generator().manual_seed(0)
    training = torch.randn(400, 3, generator=noise)
    samples = torch.randn(400, 3, generator=noise) * torch.tensor([1.0, 0.5, 2.0])
    whole, *each = spread_findings(samples, training, ["a", "b", "c"])
    expected = (samples.std(0) / training.std(0)).tolist()
    assert [finding.value for finding in each] == pytest.approx(expected)
    assert all(finding.ci95[0] < finding.value < finding.ci95[1] for finding in (whole, *each))
    assert whole.value == pytest.approx(sum(expected) / 3)
    assert whole.passed
    assert whole.detail["least of"] == "b"
    shrunk, *_ = spread_findings(0.6 * training, training, ["a", "b", "c"])
    assert shrunk.passed is False
    assert shrunk.value == pytest.approx(0.6, rel=1e-5)


def test_copies_collapse_and_strangers_are_told():
    scores = two_clusters(200)
    faithful = neighbor_findings(two_clusters(400)[200:], scores)
    assert value(faithful, "precision") > 0.85
    assert value(faithful, "recall") > 0.85
    assert value(faithful, "distance") == pytest.approx(1, abs=0.25)
    copies = neighbor_findings(scores[:50] + 1e-6, scores)
    assert value(copies, "samples that copy") == 1
    collapsed = neighbor_findings(scores[:1] + 0.01 * torch.randn(100, 5), scores)
    assert value(collapsed, "recall") < 0.05
    strangers = neighbor_findings(scores + 50, scores)
    assert value(strangers, "precision") == 0
    assert value(strangers, "distance") > 10


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UsageError, match="at least 5"):
        neighbor_findings(torch.ones(2, 3), torch.ones(9, 3))
    with pytest.raises(UsageError, match="identical copy"):
        neighbor_findings(torch.ones(9, 3), torch.ones(9, 3))
    with pytest.raises(UsageError, match="do not differ in 'b'"):
        spread_findings(torch.randn(9, 2), torch.tensor([[1.0, 1.0]] * 5 + [[2.0, 1.0]]), ["a", "b"])
    with pytest.raises(UsageError, match="NaN"):
        spread_findings(torch.full((9, 1), torch.nan), torch.randn(9, 1), ["a"])


# --- neighbors


@few
@given(st.integers(0, 2**31))
def test_neighbors_are_those_of_numpy(seed):
    noise = torch.Generator().manual_seed(seed)
    scores, point = torch.randn(12, 4, generator=noise), torch.randn(4, generator=noise)
    names = [f"m{number}" for number in range(12)]
    [found] = nearest(point, scores, names, count=12)
    center = scores.double().mean(0).numpy()
    ours, theirs = point.double().numpy() - center, scores.double().numpy() - center
    cosines = theirs @ ours / np.linalg.norm(ours) / np.linalg.norm(theirs, axis=1)
    assert [each.number for each in found] == np.argsort(-cosines).tolist()
    assert [each.cosine for each in found] == pytest.approx(sorted(cosines, reverse=True))
    [close] = nearest(point, scores, names, count=3, measure="distance")
    distances = np.linalg.norm(theirs - ours, axis=1)
    assert [each.distance for each in close] == pytest.approx(sorted(distances)[:3])
    assert nearest_distances(scores, rank=2)[0] == pytest.approx(sorted(np.linalg.norm(theirs - theirs[0], axis=1))[2])


def test_a_model_is_its_own_neighbor_and_names_are_checked():
    scores, labels, _ = known_scores(20)
    [found] = nearest(scores[7], scores, labels.names, count=2)
    assert found[0].name == "model-007"
    assert found[0].cosine == pytest.approx(1)
    assert row_of("model-003", labels.names) == 3
    with pytest.raises(NameNotFound, match="'model-003'"):
        row_of("model-3", labels.names)
    with pytest.raises(UsageError, match="one space"):
        nearest(scores[0, :3], scores, labels.names)
    with pytest.raises(UsageError, match="NaN"):
        nearest(scores[0] * torch.nan, scores, labels.names)
    with pytest.raises(UsageError, match="no measure"):
        nearest(scores[0], scores, labels.names, measure="taste")
    with pytest.raises(UsageError, match="no neighbor number 3"):
        nearest_distances(scores[:3], rank=3)
