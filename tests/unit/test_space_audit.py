"""Audits of a space in use, on worlds whose answers are known: pictures whose colors are the attributes."""

import numpy as np
import pytest
import torch
from known_spaces import known_scores

import netweight.methods.space.audits as audits
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.directions import direction_of, fit_direction
from netweight.methods.space.edits import (
    EditCurve,
    corrected_steps,
    curve_findings,
    edit_curve,
    identity,
    perceptual_distance,
)
from netweight.methods.space.settings import CorrectionSettings
from netweight.metrics.descriptors import CenteredPixels

NAMES = ["red", "green", "blue"]


def painted(scores):
    """Pictures whose channels are the first three scores, brought to 0 to 1; two alike per point."""
    colors = 0.5 + scores[:, None, :3, None, None] / 10
    return colors.expand(len(scores), 2, 3, 12, 12)


def seen(images):
    return images.mean((2, 3))


def curve(vector, strengths=(0.5, 1.0, 2.0), count=20, **how):
    scores = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    direction = direction_of(scores, torch.tensor(vector), name="red", kind="encoder")
    made = edit_curve(painted, seen, scores, direction, names=NAMES, ranges=[1.0, 1.0, 0.5], strengths=strengths, **how)
    return made, direction


def test_a_curve_tells_effect_and_cost():
    made, direction = curve([0.8, 0.6, 0.0, 0.0, 0.0], unit="raw")
    strengths = torch.tensor([0.0, 0.5, 1.0, 2.0]).double()
    assert torch.allclose(made.strengths, strengths)
    assert torch.allclose(made.effects.mean(1), strengths * 0.08, atol=1e-6)
    assert torch.allclose(made.costs.mean(1), strengths * (0.06 + 0.0) / 2, atol=1e-6)
    assert made.effect_at(0.03) == pytest.approx(0.08, abs=1e-5)
    assert made.cost_of(0.12) == pytest.approx(0.045, abs=1e-5)
    assert made.cost_of(0.5) is None
    assert made.effect_at(1.0) == pytest.approx(0.16, abs=1e-5)  # never that dear: what the last strength does
    back, _ = curve([0.8, 0.6, 0.0, 0.0, 0.0], (-0.5, -1.0), unit="raw")
    assert torch.allclose(back.effects.mean(1), torch.tensor([0.0, 0.04, 0.08]).double(), atol=1e-6)
    farthest, _ = curve([0.8, 0.6, 0.0, 0.0, 0.0], (1.0,))
    assert float(farthest.effects[1].mean()) == pytest.approx(0.08 * direction.reach, rel=1e-4)


def test_findings_of_a_curve_have_targets_and_say_what_was_not_reached():
    made, _ = curve([1.0, 0.1, 0.0, 0.0, 0.0], (2.0, 4.0, 8.0), unit="raw")
    effect, cost = curve_findings(made)
    assert effect.passed
    assert effect.value == pytest.approx(0.8, abs=0.01)
    assert cost.passed
    assert cost.value == pytest.approx(0.03, abs=1e-4)
    weak, _ = curve([1.0, 0.0, 0.0, 0.0, 0.0], (1.0,), unit="raw")
    effect, cost = curve_findings(weak)
    assert effect.passed is False
    assert cost.value is None
    assert "reaches 0.10" in cost.detail["reason"]


def test_an_interval_over_points_covers_their_spread():
    noise = torch.Generator().manual_seed(1)
    effects = torch.stack([torch.zeros(40), 0.7 + 0.2 * torch.randn(40, generator=noise)]).double()
    made = EditCurve("x", torch.tensor([0.0, 1.0]), "reach", effects, 0.01 * effects.abs(), label="encoder")
    found = curve_findings(made)[0]
    assert found.ci95[0] < 0.7 < found.ci95[1]
    assert found.ci95[1] - found.ci95[0] == pytest.approx(4 * 0.2 / 40**0.5, rel=0.4)


def test_curves_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="do not move away from 0"):
        curve([1.0, 0, 0, 0, 0], (1.0, 0.5))
    with pytest.raises(UsageError, match="do not move away from 0"):
        curve([1.0, 0, 0, 0, 0], ())
    with pytest.raises(NameNotFound, match="'pink'"):
        curve([1.0, 0, 0, 0, 0], target="pink")
    scores = torch.randn(5, 5)
    direction = direction_of(scores, torch.ones(5), name="red", kind="encoder")
    with pytest.raises(UsageError, match="do not fit 5 points and 3 attributes"):
        edit_curve(
            painted, lambda images: seen(images)[:, :2], scores, direction, names=NAMES, ranges=[1, 1, 1], strengths=[1]
        )


def test_a_correction_takes_back_what_an_edit_changed_besides():
    generator = torch.Generator().manual_seed(2)
    training = torch.randn(60, 5, generator=generator)
    mixing = torch.eye(3) + 0.3 * torch.randn(3, 3, generator=generator)

    def bent(scores, seeds=(0, 1)):
        """Attributes are mixed and bent, so that no direction of the scores is that of one attribute."""
        seen = scores[:, :3] @ mixing
        return painted(torch.cat([seen + 0.05 * seen.square(), scores[:, 3:]], 1))[:, : len(seeds)]

    def widely(scores, seeds):
        return bent(scores, (0,)).expand(-1, len(seeds), -1, -1, -1)

    directions = [
        direction_of(training, torch.eye(5)[place], name=name, kind="encoder") for place, name in enumerate(NAMES)
    ]
    ranges, points = [1.0, 1.0, 0.5], training[20:40]

    def steps(target="red", directions=directions, ranges=ranges, **how):
        return corrected_steps(
            widely, seen, points, directions, target, CorrectionSettings(**{"effect": 0.1, **how}), ranges=ranges,
            deviations=training.std(0),
        )  # fmt: skip

    def apart(step):
        """How much of the attribute an edit changes, and of the others on average."""
        both = [seen(bent(each.float()).flatten(0, 1)).view(20, 2, 3).mean(1) for each in (points, points + step)]
        change = (both[1] - both[0]) / torch.tensor(ranges)
        return change[:, 0], change[:, 1:].abs().mean()

    plain, (effects, cost) = apart(0.1 * directions[0].vector), apart(found := steps())
    assert found.shape == points.shape
    assert torch.allclose(effects, torch.full_like(effects, 0.1), atol=0.01)
    assert cost / effects.mean() < 0.1 * plain[1] / plain[0].mean()
    less = apart(steps(effect=-0.1))[0]
    assert torch.allclose(less, torch.full_like(less, -0.1), atol=0.01)
    with pytest.raises(NameNotFound, match="'pink'"):
        steps("pink")
    with pytest.raises(UsageError, match="do not match"):
        steps(directions=directions[:1], ranges=[1.0])
    with pytest.raises(UsageError, match="2 attributes"):
        steps(directions=directions[:2], ranges=[1.0, 1.0])


def test_comparisons_say_what_they_are():
    images, others = torch.rand(4, 3, 16, 16), torch.rand(4, 3, 16, 16)
    name, same = identity(CenteredPixels())
    assert name == "identity by NCC"
    assert torch.allclose(same(images, images), torch.ones(4).double())
    pairs = zip(images.flatten(1).numpy(), others.flatten(1).numpy(), strict=True)
    correlations = [np.corrcoef(one, other)[0, 1] for one, other in pairs]
    assert same(images, others).tolist() == pytest.approx(correlations, abs=1e-5)
    name, distance = perceptual_distance()
    assert "stand-in" in name
    assert torch.allclose(distance(images, images), torch.zeros(4).double(), atol=1e-9)
    assert (distance(images, others) > 0.5).all()
    assert perceptual_distance(lambda x: [x])[0] == "LPIPS"


def test_directions_are_audited():
    scores, labels, _ = known_scores(200)
    directions = [fit_direction(scores, labels, name) for name in ("beard", "width")]
    found = audits.direction_findings(directions)
    assert [each.name for each in found[:2]] == ["held-out AUC of beard", "held-out R² of width"]
    assert found[2].value == pytest.approx(abs(directions[0].cosine(directions[1])))
    with pytest.raises(UsageError, match="no held-out score"):
        audits.direction_findings([fit_direction(scores, labels, "hue", folds=0)])
