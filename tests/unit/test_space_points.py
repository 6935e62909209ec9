"""Points of a space: edits, images that they make, and images turned into points again."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from known_spaces import KnownSpace, known_scores
from tiny_diffusion import TinyModel, trained

from netweight.errors import TrainingStopped, Unsupported, UsageError
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.edits import Delay, Move, edit
from netweight.methods.space.inversion import DenoisingLoss, generate_images, invert_loss
from netweight.methods.space.settings import INVERSIONS, InversionSettings
from netweight.nn.apply_lora import applied

few = settings(max_examples=20, deadline=None)


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


# --- edits


@few
@given(st.lists(st.tuples(st.sampled_from(["beard", "width", "hue"]), st.floats(-5, 5)), min_size=1, max_size=4))
def test_edits_add_commute_and_can_be_undone(parts):
    scores, labels, _ = known_scores(60)
    moves = [Move(fit_direction(scores, labels, name, kind="difference"), strength) for name, strength in parts]
    points = scores[:3]
    after = edit(points, moves)
    expected = points.double() + sum(m.strength * m.direction.deviation * m.direction.vector for m in moves)
    assert torch.allclose(after.double(), expected, atol=1e-5)
    assert torch.allclose(edit(points, moves[::-1]), after, atol=1e-5)
    back = edit(after, [Move(m.direction, -m.strength) for m in moves])
    assert torch.allclose(back, points, atol=1e-5)
    assert after.dtype == points.dtype
    assert edit(points[0], moves).shape == (12,)


def test_edits_that_cannot_be_are_refused():
    scores, labels, _ = known_scores(60)
    beard = fit_direction(scores, labels, "beard")
    with pytest.raises(UsageError, match="no move"):
        edit(scores, [])
    with pytest.raises(UsageError, match="12 components, but the point has 5"):
        edit(scores[:, :5], [Move(beard, 1.0)])
    with pytest.raises(UsageError, match="not finite"):
        edit(scores, [Move(beard, float("nan"))])
    with pytest.raises(UsageError, match="cannot begin at timestep"):
        Delay(-1)
    assert [Delay(700).edited(t) for t in (999, 701, 700, torch.tensor(0))] == [False, False, True, True]


# --- images of points

TINY = {"unet.blocks.0.attn2.to_q": (32, 96), "unet.blocks.1.attn2.to_v": (32, 16), "unet.blocks.1.ff.net.2": (96, 192)}


def test_points_are_painted_as_models_with_their_weights():
    model, space = TinyModel(), KnownSpace(modules=TINY)
    images = generate_images(model, space, space.scores[:3], ["a small red"], [5, 6], steps=4, rows=4)
    assert images.shape == (3, 2, 3, 8, 8)
    assert hooks(model.denoiser) == 0
    for number in range(3):
        alone = TinyModel()
        for name, change in space.changes(space.scores[number]).items():
            alone.denoiser.get_submodule(name.removeprefix("unet.")).weight.data += change
        expected = alone.generate(alone.embed(["a small red"] * 2), [5, 6], guidance=3.0, steps=4)
        assert torch.allclose(images[number], expected, atol=1e-4)


def test_a_delayed_edit_begins_where_it_says():
    model, space = TinyModel(), KnownSpace(modules=TINY)
    before, after = space.scores[:1], 3 * space.scores[1:2]

    def painted(**how):
        return generate_images(model, space, after, ["a small red"], [5], steps=6, **how)

    whole = painted()
    untouched = generate_images(model, space, before, ["a small red"], [5], steps=6)
    assert torch.allclose(painted(delay=Delay(1.0), before=before), whole, atol=1e-5)
    assert torch.allclose(painted(delay=Delay(0.0), before=before), untouched, atol=1e-5)
    base = model.generate(model.embed(["a small red"]), [5], guidance=3.0, steps=6)
    assert torch.allclose(painted(delay=Delay(0.0))[0], base, atol=1e-5)
    apart = [float((painted(delay=Delay(t), before=before) - untouched).abs().mean()) for t in (0.0, 0.5, 1.0)]
    assert apart[0] < apart[1] < apart[2]
    assert hooks(model.denoiser) == 0


def test_what_cannot_be_painted_is_refused():
    model, space = TinyModel(), KnownSpace(modules=TINY)
    with pytest.raises(UsageError, match="2 prompts and 3 seeds"):
        generate_images(model, space, space.scores, ["a", "b"], [0, 1, 2])
    with pytest.raises(UsageError, match="cannot be appended to"):
        generate_images(model, space, space.scores[:2], ["a"], [0], before=space.scores[:1])
    with pytest.raises(Unsupported, match=r"text_encoder\.to_q"):
        generate_images(model, KnownSpace(modules={"text_encoder.to_q": (4, 4)}), space.scores[:1], ["a"], [0])


# --- inversion


class Bowl:
    """A loss whose minimum is a known point: the squared distance of the changes, with noise on the gradients."""

    def __init__(self, space, points, noise=0.0):
        self.wanted, self.noise = space.changes(points), noise

    def __call__(self, changes, generator):
        total = 0
        for name, change in changes.items():
            drawn = self.noise * torch.randn(change.shape, generator=generator)
            total = total + (change - self.wanted[name] + drawn).square().flatten(1).sum(1)
        return total


def test_known_points_are_found_again_each_on_its_own():
    space = KnownSpace(modules=TINY)
    points = space.scores[:4]
    found = invert_loss(space, Bowl(space, points), 4, InversionSettings(steps=150))
    assert torch.allclose(found.scores, points, atol=0.02)
    assert found.losses.shape == (150, 4)
    assert (found.improvements > 100).all()
    expected = (points / space.deviations).square().mean(1).sqrt()
    assert torch.allclose(found.distances, expected, atol=0.02)
    alone = invert_loss(space, Bowl(space, points[2:3]), 1, InversionSettings(steps=150))
    assert torch.allclose(alone.scores[0], found.scores[2], atol=1e-4)


def test_averaging_quiets_noise_and_a_prior_draws_to_the_mean():
    space = KnownSpace(modules=TINY)
    points = space.scores[:8]

    def error(**how):
        found = invert_loss(
            space, Bowl(space, points, noise=2.0), 8, InversionSettings(steps=200, learning_rate=0.3, **how)
        )
        return float(((found.scores - points) / space.deviations).square().mean())

    assert error(averaged=0.5) < 0.7 * error(averaged=0.0)
    free, held = (
        invert_loss(space, Bowl(space, points), 8, InversionSettings(steps=200, prior=prior)).scores
        for prior in (0.0, 8.0)
    )
    precision = 2 * space.deviations**2  # of the loss, in standard deviations; the prior's is 8
    assert torch.allclose(held, free * precision / (precision + 8), atol=0.05)


def test_only_the_first_components_move_and_presets_are_the_papers():
    space = KnownSpace(modules=TINY)
    found = invert_loss(space, Bowl(space, space.scores[:2]), 2, InversionSettings(steps=100, components=2))
    assert not found.scores[:, 2:].any()
    assert torch.allclose(found.scores[:, :2], space.scores[:2, :2], atol=0.02)
    reference, far = INVERSIONS["reference"], INVERSIONS["reference out of distribution"]
    assert (reference.steps, reference.learning_rate, reference.weight_decay, reference.components) == (
        400,
        0.1,
        1e-10,
        10_000,
    )
    assert (far.steps, far.learning_rate, far.weight_decay, far.components) == (800, 1.0, 0.0, 1_000)
    assert not any((reference.scaled, far.scaled, reference.prior, far.prior, reference.averaged, far.averaged))


def test_reference_settings_take_the_steps_of_plain_adam():
    """Golden: two steps of Adam from 0 on raw scores, by hand."""
    space = KnownSpace(modules=TINY)
    settings = InversionSettings(steps=2, learning_rate=0.1, weight_decay=1e-10, scaled=False, averaged=0.0)
    found = invert_loss(space, Bowl(space, space.scores[:1]), 1, settings).scores[0].double()
    x, m, v = torch.zeros(6).double(), 0.0, 0.0
    for step in (1, 2):
        gradient = 2 * (x - space.scores[0].double()) + 1e-10 * x
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        x = x - 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    assert torch.allclose(found, x, atol=1e-5)


def test_divergence_is_named():
    space = KnownSpace(modules=TINY)

    def broken(changes, generator):
        total = next(iter(changes.values())).flatten(1).sum(1)
        return torch.where(torch.tensor([False, True]), total / 0, total)

    with pytest.raises(TrainingStopped, match=r"target 1 is not finite at step 0.*learning rate"):
        invert_loss(space, broken, 2)
    with pytest.raises(UsageError, match="one per target"):
        invert_loss(space, lambda changes, generator: torch.zeros(3), 2)
    with pytest.raises(UsageError, match="no target"):
        invert_loss(space, broken, 0)
    for wrong in ({"steps": 0}, {"learning_rate": 0}, {"averaged": 2}, {"components": 0}, {"prior": -1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            InversionSettings(**wrong)


def test_images_are_inverted_through_a_denoiser():
    """Images that a point's model makes lead back towards that point: its models denoise them better than the mean."""
    model = trained()
    space = KnownSpace(modules=TINY)
    points = 2 * space.scores[:2]
    images = generate_images(model, space, points, ["a small red"], list(range(6)), steps=20, guidance=1.0)
    loss = DenoisingLoss(model, images, ["a small red"], draws=2, steps=40, said="velocity")
    found = invert_loss(space, loss, 2, InversionSettings(steps=80))
    own, swapped, mean = (loss_of(loss, space, each) for each in (found.scores, found.scores.flip(0), 0 * found.scores))
    assert (own < mean).all()
    assert (own < swapped).all()
    assert hooks(model.denoiser) == 0


def loss_of(loss, space, scores):
    with torch.no_grad():
        drawn = [loss(space.changes(scores), torch.Generator().manual_seed(seed)) for seed in range(30)]
    return torch.stack(drawn).mean(0)


def test_masks_take_out_what_does_not_count():
    model, space = trained(), KnownSpace(modules=TINY)
    image = torch.rand(1, 3, 8, 8)
    other = image.clone()
    other[..., 4:] = 0.5
    mask = torch.zeros(1, 8, 8)
    mask[..., :4] = 1
    changes, generator = space.changes(space.scores[:1]), torch.Generator()

    @torch.no_grad()
    def loss(picture, mask):
        return float(DenoisingLoss(model, picture, ["a"], masks=mask, said="noise")(changes, generator.manual_seed(1)))

    ones = torch.ones(1, 8, 8)
    assert loss(image, ones) == pytest.approx(loss(image, None))
    assert loss(image, mask) != pytest.approx(loss(image, None))
    told = DenoisingLoss(model, image, ["a"], masks=mask)
    noise = torch.randn(1, 3, 8, 8, generator=generator.manual_seed(1))
    time = model.timesteps(50)[torch.randint(50, (1,), generator=generator)]
    noisy = model.add_noise(model.to_latents(image), noise, time)
    own = {name.removeprefix("unet."): change[0] for name, change in changes.items()}
    with torch.no_grad(), applied(model.denoiser, own):
        said = model.predict(noisy, time, model.embed(["a"])).noise
    with torch.no_grad():
        ours = float(told(changes, generator.manual_seed(1)))
    assert ours == pytest.approx(float(F.mse_loss(said[..., :4], noise[..., :4])))


@pytest.mark.parametrize(
    ("images", "how", "said"),
    [
        (torch.rand(1, 3, 9, 9), {}, "9 × 9 pixels, and tiny makes 8 × 8"),
        (torch.rand(1, 1, 8, 8), {}, "cannot be inverted"),
        (torch.rand(3, 8, 8), {}, "cannot be inverted"),
        (255 * torch.rand(1, 3, 8, 8), {}, "outside of 0 and 1"),
        (torch.full((1, 3, 8, 8), torch.nan), {}, "outside of 0 and 1"),
        (torch.rand(3, 3, 8, 8), {"prompts": ["a", "b"]}, "2 prompts"),
        (torch.rand(1, 3, 8, 8), {"masks": torch.ones(1, 4, 4)}, "do not fit"),
        (torch.rand(2, 3, 8, 8), {"masks": torch.stack([torch.ones(8, 8), torch.zeros(8, 8)])}, "mask of image 1"),
        (torch.rand(1, 3, 8, 8), {"masks": torch.full((1, 8, 8), 2.0)}, "Masks have values"),
    ],
)
def test_images_that_cannot_be_inverted_are_refused(images, how, said):
    with pytest.raises(UsageError, match=said):
        DenoisingLoss(TinyModel(), images, how.pop("prompts", ["a"]), **how)
