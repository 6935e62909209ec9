"""Gradient inversion on tiny networks: clients against torch's own training, attacks against known truth."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from netweight.attacks.gradient_inversion.analytic import (
    doubt_of_labels,
    first_layer,
    label_counts,
    label_of_one,
    labels_of_update,
    layer_input,
    layer_inputs,
)
from netweight.attacks.gradient_inversion.client import gradient_of, known_parameters, sgd_difference
from netweight.attacks.gradient_inversion.matching import (
    DLGConfig,
    MatchingConfig,
    ROGConfig,
    cosine_distance,
    descend,
    dlg,
    invert,
    relative_distance,
    rog,
    rog_client,
    run_attack,
    starting_points,
    total_variation,
)
from netweight.core.progress import QUIET, Progress
from netweight.errors import NameNotFound, UsageError
from netweight.metrics.images import psnr


def network(*, activation=nn.Sigmoid, classes=4, seed=0, dtype=torch.float64, wide=1.0, hidden=20):
    """A convolution and two linear layers for 8 × 8 images."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, stride=2), activation(), nn.Flatten(), nn.Linear(96, hidden), activation(),
        nn.Linear(hidden, classes),
    ).to(dtype)  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(wide)
    return model


def perceptron(width, *, seed=0, classes=4, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, classes)).to(dtype)


def batch(n, *, classes=4, size=8, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 1, size, size, generator=generator, dtype=dtype)
    return images, torch.randint(0, classes, (n,), generator=generator)


def digit(dtype=torch.float64):
    sklearn = pytest.importorskip("sklearn.datasets", reason="scikit-learn is in the evidence extra")
    return torch.tensor(sklearn.load_digits().images[0], dtype=dtype)[None, None] / 16


def test_the_gradient_is_autograds_and_differentiable_in_the_images():
    model, (images, labels) = network(), batch(1)
    found = gradient_of(model)(known_parameters(model), (images, labels))
    expected = torch.autograd.grad(F.cross_entropy(model(images), labels), tuple(model.parameters()))
    for (name, _), wanted in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], wanted)

    def last(images):
        return gradient_of(model)(known_parameters(model), (images, labels))["0.weight"].square().sum()

    assert torch.autograd.gradcheck(last, images.clone().requires_grad_())


@pytest.mark.parametrize(
    ("steps", "size", "momentum", "decay"), [(1, None, 0.0, 0.0), (3, None, 0.9, 0.0), (4, 2, 0.5, 0.01), (5, 3, 0, 0)]
)
def test_unrolled_steps_are_those_of_torchs_sgd(steps, size, momentum, decay):
    model, (images, labels) = network(), batch(5)
    before = known_parameters(model)
    client = sgd_difference(model, lr=0.3, steps=steps, batch_size=size, momentum=momentum, weight_decay=decay)
    found = client(before, (images, labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum, weight_decay=decay)
    parts = list(zip(images.split(size or 5), labels.split(size or 5), strict=True))
    for step in range(steps):
        part = parts[step % len(parts)]
        optimizer.zero_grad()
        F.cross_entropy(model(part[0]), part[1]).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach() - before[name])


def test_clients_with_normalization_in_train_mode_are_imitated_and_not_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4)).double()
    images, labels = batch(4)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = gradient_of(model)(known_parameters(model), (images, labels))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    expected = torch.autograd.grad(F.cross_entropy(model(images), labels), model[0].weight)[0]
    torch.testing.assert_close(found["0.weight"], expected)


def test_what_a_client_cannot_do_is_refused():
    model, data = network(), batch(2)
    params = known_parameters(model)
    with pytest.raises(NameNotFound, match=r"'0.weight' of the model is missing"):
        gradient_of(model)({name: value for name, value in params.items() if name != "0.weight"}, data)
    with pytest.raises(NameNotFound, match=r"no parameter '0.wieght'. Nearest: 0.weight"):
        gradient_of(model)({**params, "0.wieght": params["0.weight"]}, data)
    with pytest.raises(UsageError, match=r"'0.bias' has shape \(2,\); the model's has \(6,\)"):
        gradient_of(model)({**params, "0.bias": torch.zeros(2)}, data)
    with pytest.raises(UsageError, match="0 steps"):
        sgd_difference(model, lr=0.1, steps=0)


@given(seed=st.integers(0, 10_000), classes=st.integers(3, 9))
def test_the_label_of_one_image_is_exact(seed, classes):
    model, (images, labels) = network(seed=seed, classes=classes, wide=2), batch(1, classes=classes, seed=seed)
    client = gradient_of(model)
    gradient = client(known_parameters(model), (images, labels))
    assert label_of_one(gradient["5.bias"]) == int(labels)
    assert label_of_one(gradient["5.weight"]) == int(labels)
    for sent in (client, sgd_difference(model, lr=0.01, steps=1)):
        params = known_parameters(model)
        observed = sent(params, (images, labels))
        assert labels_of_update(sent, params, observed, shape=(1, 1, 8, 8), seed=0).tolist() == labels.tolist()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 1000))
def test_labels_are_counted_exactly_when_the_mean_probabilities_are_known(labels, seed):
    model = network(classes=5, seed=seed)
    images, _ = batch(len(labels), seed=seed)
    gradient = gradient_of(model)(known_parameters(model), (images, torch.tensor(labels)))["5.bias"]
    probabilities = model(images).detach().softmax(1).mean(0)
    counts = label_counts(gradient, len(labels), probabilities=probabilities)
    assert counts.tolist() == [labels.count(label) for label in range(5)]


def test_labels_of_a_batch_are_found_on_a_network_that_is_not_trained():
    model, (images, labels) = network(classes=5), batch(8, classes=5)
    client = sgd_difference(model, lr=0.05, steps=2)
    params = known_parameters(model)
    observed = client(params, (images, labels))
    found = labels_of_update(client, params, observed, shape=tuple(images.shape), seed=0)
    assert found.tolist() == sorted(labels.tolist())


def test_labels_that_cannot_be_read_are_refused():
    with pytest.raises(UsageError, match="3 classes have the sign of a label"):
        label_of_one(torch.tensor([-1.0, -1.0, -1.0, 3.0]))
    with pytest.raises(UsageError, match="does not determine the label"):
        label_of_one(torch.ones(2, 3))
    with pytest.raises(UsageError, match="cannot be counted"):
        label_counts(torch.zeros(3), 0)
    with pytest.raises(NameNotFound, match="no bias of the model's last linear layer"):
        labels_of_update(lambda *_: {}, {}, {"0.weight": torch.zeros(2, 2)}, shape=(1, 1, 2, 2), seed=0)


class ClassifierFirst(nn.Module):
    """A network whose classifier is registered before a hidden layer, with or without a bias."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classifier, self.hidden = nn.Linear(20, 4, bias=bias), nn.Linear(64, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.sigmoid(self.hidden(x.flatten(1))))


def test_labels_are_read_from_the_classifier_wherever_it_is_registered():
    images, labels = batch(12, dtype=torch.float32)
    for biased in (True, False):
        model = ClassifierFirst(bias=biased)
        client, params = gradient_of(model), known_parameters(model)
        about = {"shape": tuple(images.shape), "seed": 0}
        observed = client(params, (images, labels))
        if biased:
            assert labels_of_update(client, params, observed, **about).tolist() == sorted(labels.tolist())
        else:  # the bias of a hidden layer shows no labels
            with pytest.raises(NameNotFound, match="no bias of the model's last linear layer"):
                labels_of_update(client, params, observed, **about)


@pytest.mark.parametrize("scale", [0.5, 2.0, 12.0, -1.0])
def test_labels_of_a_client_with_another_loss_are_doubted(scale):
    """Reported of other libraries: the client's loss is half of that with which its gradient is imitated."""
    model, (images, labels) = network(), batch(12)
    client, params = gradient_of(model), known_parameters(model)
    about = {"shape": tuple(images.shape), "seed": 0}
    observed = client(params, (images, labels))
    assert doubt_of_labels(client, params, observed, **about) < 0.1
    other = {name: scale * value for name, value in observed.items()}
    assert doubt_of_labels(client, params, other, **about) > 0.15
    with pytest.raises(UsageError, match="is zero, so that it shows no labels"):
        labels_of_update(client, params, {name: 0 * value for name, value in observed.items()}, **about)


@given(seed=st.integers(0, 10_000))
def test_one_image_is_read_off_the_first_layer(seed):
    model, (images, labels) = perceptron(64, seed=seed, dtype=torch.float32), batch(1, seed=seed, dtype=torch.float32)
    for client in (gradient_of(model), sgd_difference(model, lr=0.1, steps=1)):
        observed = client(known_parameters(model), (images, labels))
        found = first_layer(observed, "1", shape=(1, 1, 8, 8), labels=labels)
        torch.testing.assert_close(found.images, images, atol=1e-5, rtol=0)


def test_rows_that_one_image_activates_give_it_away_in_a_batch():
    inputs = torch.rand(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slopes = torch.tensor([[1.0, 0, 0], [2, 0, 0], [0, 3, 0], [0, -1, 0], [0, 5, 0], [1, 1, 0], [0, 0, 0]]).double()
    found = layer_inputs(slopes @ inputs, slopes.sum(1))
    assert found.rows == (3, 2, 1)
    torch.testing.assert_close(found.inputs[:2], inputs[[1, 0]])
    torch.testing.assert_close(found.inputs[2], inputs[:2].mean(0))  # a mixture, which one row alone cannot exclude
    images = first_layer(
        {"w.weight": (slopes @ inputs)[:5], "w.bias": slopes.sum(1)[:5]},
        "w",
        shape=(3, 1, 2, 5),
        labels=torch.arange(3),
    ).images
    assert images[2].isnan().all()
    assert not images[:2].isnan().any()


def test_first_layers_that_tell_nothing_are_refused():
    with pytest.raises(UsageError, match="zero or not finite"):
        layer_input(torch.zeros(3, 4), torch.zeros(3))
    with pytest.raises(UsageError, match="not those of a linear layer"):
        layer_input(torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(NameNotFound, match=r"No tensor 'fc1.bias' was observed. Nearest: fc1.weight"):
        first_layer({"fc1.weight": torch.ones(2, 4)}, "fc1", shape=(1, 1, 2, 2), labels=torch.zeros(1))
    with pytest.raises(UsageError, match=r"has 4 inputs; images of shape \(1, 3, 3\) have 9"):
        first_layer({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, "", shape=(1, 1, 3, 3), labels=torch.zeros(1))


def test_dlg_finds_a_digit_and_its_label():
    model, image = network(classes=4, wide=3), digit()
    client = gradient_of(model)
    params = known_parameters(model)
    observed = client(params, (image, torch.tensor([2])))
    found = dlg(client, params, observed, shape=(1, 1, 8, 8), classes=4, config=DLGConfig(steps=60), seed=0)
    assert float(psnr(found.images, image)) > 40
    assert int(found.labels.argmax()) == 2
    assert found.history[0] > found.history[-1] == found.objective
    known = dlg(client, params, observed, shape=(1, 1, 8, 8), labels=torch.tensor([2]), config=DLGConfig(40, 2), seed=0)
    assert float(psnr(known.images, image)) > 40
    assert known.objective == min(known.objectives_by_restart)
    assert len(known.objectives_by_restart) == 2


def ig(client, params, observed, labels, **settings):
    return invert(
        client, params, observed, shape=(1, 1, 8, 8), labels=labels, config=MatchingConfig(**settings), seed=3
    )


def test_ig_finds_a_digit_without_its_label_from_a_gradient_and_from_two_local_steps():
    model, image, label = network(), digit(), torch.tensor([1])
    params = known_parameters(model)
    for client in (gradient_of(model), sgd_difference(model, lr=0.1, steps=2)):
        observed = client(params, (image, label))
        found = ig(client, params, observed, None, steps=200, total_variation=1e-6)
        assert found.labels.tolist() == [1]
        assert float(psnr(found.images, image)) > 25
        assert found.objective < 0.01 * found.history[0]
        assert found.images.min() >= 0
        assert found.images.max() <= 1


def test_both_distances_agree_on_directions_and_one_of_them_counts_the_length():
    torch.manual_seed(0)
    one, other = ({"a": torch.randn(3), "b": torch.randn(2, 2)} for _ in range(2))
    a, b = (torch.cat([part.flatten() for part in update.values()]) for update in (one, other))
    assert float(cosine_distance(one, other)) == pytest.approx(1 - float(F.cosine_similarity(a, b, dim=0)), abs=1e-6)
    assert float(cosine_distance({name: 3 * part for name, part in one.items()}, one)) == pytest.approx(0, abs=1e-6)
    assert float(relative_distance(one, other)) == pytest.approx(float((a - b).norm() ** 2 / b.norm() ** 2 / 2))
    model, (image, label) = network(), batch(1)
    client, params = gradient_of(model), known_parameters(model)
    observed = client(params, (image, label))
    found = ig(client, params, observed, label, steps=100, total_variation=0, distance="squared")
    assert found.attack == "IG (squared distance)"
    assert float(psnr(found.images, image)) > 25
    with pytest.raises(UsageError, match="no distance 'cubed'"):
        MatchingConfig(distance="cubed")


@pytest.mark.parametrize("hidden", [20, 1100])
def test_restarts_are_what_single_starts_would_be_and_the_best_is_kept(hidden):
    """Also where the network is so large that restarts are differentiated one by one."""
    model, (image, label) = network(hidden=hidden), batch(1)
    client, params = gradient_of(model), known_parameters(model)
    observed = client(params, (image, label))
    several = ig(client, params, observed, label, steps=20, restarts=3, annealed=False)
    starts = starting_points(params, (1, 1, 8, 8), 3, 3).clamp(0, 1)

    def objective(images):
        matched = cosine_distance(client(params, (images, label)), observed)
        return matched + MatchingConfig.total_variation * total_variation(images)

    def box(images):
        images.clamp_(0, 1)

    ends = [
        descend(objective, (start[None],), steps=20, lr=0.1, signed=True, project=box).objectives[0] for start in starts
    ]
    assert several.objectives_by_restart == pytest.approx(ends, rel=1e-9)
    assert several.objective == min(several.objectives_by_restart)
    first = ig(client, params, observed, label, steps=20, annealed=False)
    assert first.objectives_by_restart == pytest.approx(ends[:1], rel=1e-9)


@pytest.mark.parametrize("model", [network(), nn.Sequential(nn.BatchNorm2d(1), network()).double()])
def test_each_restart_has_a_weight_of_its_own_and_may_begin_with_given_images(model):
    """Also where vmap cannot run the model: normalization writes its statistics."""
    images, labels = batch(2)
    client, params = gradient_of(model), known_parameters(model)
    observed, start = client(params, (images, labels)), torch.rand(3, 2, 1, 8, 8, dtype=torch.float64)
    about = {"shape": (2, 1, 8, 8), "labels": labels, "seed": 0}
    config = MatchingConfig(steps=12, restarts=3, total_variation=(0.0, 0.1, 0.3))
    several = invert(client, params, observed, start=start, config=config, **about)
    assert several.every.shape == (3, 2, 1, 8, 8)
    assert any(torch.equal(several.images, each) for each in several.every)
    for number, weight in enumerate(config.total_variation):
        single = MatchingConfig(steps=12, total_variation=weight)
        alone = invert(client, params, observed, start=start[number, None], config=single, **about)
        torch.testing.assert_close(alone.images, several.every[number])
    with pytest.raises(UsageError, match=r"begin with have the shape \(1, 2, 1, 8, 8\), not \(3, 2, 1, 8, 8\)"):
        invert(client, params, observed, start=start[:1], config=config, **about)
    with pytest.raises(UsageError, match="one for each restart"):
        MatchingConfig(restarts=2, total_variation=(0.1,))


def test_models_that_vmap_cannot_run_get_their_restarts_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Sigmoid(), nn.Flatten(), nn.Linear(108, 4)).double()
    images, labels = batch(2)
    client, params = gradient_of(model), known_parameters(model)
    observed = client(params, (images, labels))
    config = MatchingConfig(steps=3, restarts=2)
    found = invert(client, params, observed, shape=(2, 1, 8, 8), labels=labels, config=config, seed=0)
    assert len(set(found.objectives_by_restart)) == 2


def test_chosen_tensors_and_further_terms_enter_the_objective():
    model, (image, label) = network(), batch(1)
    client, params = gradient_of(model), known_parameters(model)
    observed = {**client(params, (image, label)), "5.bias": torch.full((4,), torch.nan)}
    with pytest.raises(UsageError, match=r"'5.bias' contains NaN or infinity"):
        ig(client, params, observed, label, steps=5)
    config = MatchingConfig(steps=100, tensors=("0.*", "!0.weight"), total_variation=0)  # six numbers tell little
    features = model[0](image).detach()

    def likeness(images, labels):
        return (model[0](images) - features).square().mean()

    plain, guided = (
        invert(client, params, observed, shape=(1, 1, 8, 8), labels=label, seed=3, terms=terms, config=config).images
        for terms in ((), (likeness,))
    )
    assert float(psnr(plain, image)) < 15
    assert float(psnr(guided, image)) > 20


def test_a_restart_that_diverges_loses():
    def objective(value):
        return value.log() if value > 0 else value * torch.nan

    found = descend(objective, (torch.tensor([-1.0, 2.0]),), steps=3, lr=0.1)
    assert found.best == 1
    assert math.isnan(found.objectives[0])
    assert found.history[0] == pytest.approx(math.log(2))
    assert list(found.history) == sorted(found.history, reverse=True)


@pytest.mark.parametrize(("schedule", "path"), [("constant", [1, 1, 1, 1]), ("steps", [1, 1, 0.1, 0.01])])
def test_schedules_scale_the_steps(schedule, path):
    found = descend(lambda x: x.sum(), (torch.zeros(1, 1),), steps=4, lr=0.1, signed=True, schedule=schedule)
    moved = torch.tensor(found.history).diff().abs() / 0.1
    assert moved.tolist() == pytest.approx(path, rel=1e-3)


def test_total_variation_is_the_mean_step_between_neighbors():
    image = torch.tensor([[0.0, 1.0, 1.0], [0.0, 3.0, 1.0]])
    assert float(total_variation(image)) == pytest.approx((0 + 2 + 0) / 3 + (1 + 0 + 3 + 2) / 4)
    assert float(total_variation(image[:1])) == 0.5
    assert float(total_variation(image[:1, :1])) == 0


def test_smoothness_is_weighed_less_and_less():
    def nothing(params, batch):
        return {"a": batch[0].sum().reshape(1) * 0 + 1}

    settings = {"shape": (1, 1, 4, 4), "labels": torch.tensor([0]), "seed": 0}
    ends = []
    for annealed in (True, False):
        config = MatchingConfig(steps=8, lr=1e-9, total_variation=1.0, annealed=annealed)
        history = invert(nothing, {"a": torch.ones(1)}, {"a": torch.ones(1)}, config=config, **settings).history
        ends.append(history[-1] / history[0])
    assert ends == pytest.approx([0.1, 1.0], rel=1e-4)


def test_rog_gives_a_coarse_image_and_says_that_nothing_came_after():
    model = network(activation=nn.LeakyReLU)
    ramp = torch.linspace(0, 1, 8, dtype=torch.float64)
    images = torch.stack([ramp.expand(8, 8), ramp.expand(8, 8).T])[:, None]
    client, params, labels = rog_client(model), known_parameters(model), torch.tensor([0, 3])
    observed = client(params, (images, labels))
    settings = {"shape": (2, 1, 8, 8), "labels": labels, "config": ROGConfig(steps=50, lr=0.2), "seed": 0}
    found = rog(client, params, observed, **settings)
    assert found.attack == "ROG (no post-processing)"
    assert found.objective < 0.1 * found.history[0]
    assert (psnr(found.images, images) > 20).all()
    polished = rog(client, params, observed, post_processing=lambda coarse: coarse.clamp(0, 1), **settings)
    assert polished.attack == "ROG (the user's post-processing)"
    assert torch.equal(polished.images, found.images.clamp(0, 1))
    with pytest.raises(UsageError, match="post-processing returned images of shape"):
        rog(client, params, observed, post_processing=lambda coarse: coarse[:1], **{**settings, "config": ROGConfig(1)})
    with pytest.raises(UsageError, match="update is zero"):
        rog(client, params, {name: value * 0 for name, value in observed.items()}, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "ig", "layer": "fc1"}, "'layer' belongs to the attack 'first-layer'"),
        ({"name": "dlg", "total_variation": 0.1}, "'total_variation' belongs to the attack 'ig'"),
        ({"name": "first-layer"}, "needs the name of the layer"),
        ({"name": "dlg"}, "needs the labels or the number of classes"),
        ({"name": "ig", "shape": (1, 8, 8)}, r"shape of a batch is \(n, c, h, w\)"),
        ({"name": "ig", "bounds": (1.0, 0.0)}, "not a range of pixels"),
        ({"name": "ig", "total_variation": -1.0}, "IG cannot run"),
        ({"name": "ig", "params": {}}, "parameters that the client started from"),
        ({"name": "ig", "observed": {}}, "Nothing was observed"),
        ({"name": "ig", "observed": {"0.wieght": torch.zeros(1)}}, r"a tensor '0.wieght'. Nearest: 0.weight"),
        ({"name": "ig", "observed": {"0.bias": torch.zeros(2)}}, r"has shape \(2,\); the client would send \(6,\)"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says):
    model = network()
    given = {"params": known_parameters(model), "observed": {}, "shape": (1, 1, 8, 8), **settings}
    if given["name"] == "ig":
        given["labels"] = torch.tensor([0])
    with pytest.raises((UsageError, NameNotFound), match=says):
        run_attack(given.pop("name"), gradient_of(model), given.pop("params"), given.pop("observed"), seed=0, **given)


@pytest.mark.parametrize("name", ["ig", "dlg", "rog", "first-layer"])
def test_every_attack_runs_by_name(name):
    model, (images, labels) = perceptron(64), batch(1)
    client, params = gradient_of(model), known_parameters(model)
    further = {"dlg": {"classes": 4, "steps": 2}, "first-layer": {"layer": "1"}}.get(name, {"steps": 2})
    found = run_attack(name, client, params, client(params, (images, labels)), shape=(1, 1, 8, 8), seed=0, **further)
    assert found.images.shape == images.shape
    assert found.attack.lower().startswith(name.replace("-", " "))
    assert found.steps == further.get("steps", 0)


class Stopping(Progress):
    """Raises KeyboardInterrupt after so many steps."""

    def __init__(self, steps):
        super().__init__("off")
        self.left = steps

    def task(self, *arguments, **options):
        task = super().task(*arguments, **options)
        real = task.update

        def update(amount=1):
            self.left -= amount
            if self.left < 0:
                raise KeyboardInterrupt
            real(amount)

        task.update = update
        return task


@pytest.mark.parametrize(("name", "further"), [
    ("ig", {"steps": 120, "restarts": 2}), ("ig", {"steps": 7, "total_variation": 0.1}),
    ("rog", {"steps": 60}), ("dlg", {"classes": 4, "steps": 9, "restarts": 3}),
])  # fmt: skip
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
def test_a_search_that_was_stopped_continues_to_the_same_bits(name, further, share, tmp_path):
    model, (images, labels) = network(), batch(1)
    client, params = gradient_of(model), known_parameters(model)
    observed = client(params, (images, labels))

    def attacked(folder, progress=QUIET, client=client):
        return run_attack(
            name, client, params, observed, shape=(1, 1, 8, 8), seed=0, folder=folder, progress=progress, **further
        )

    steps = further["steps"] * (further.get("restarts", 1) if name == "dlg" else 1)
    whole = attacked(None)
    if share < 1:
        with pytest.raises(KeyboardInterrupt):
            attacked(tmp_path, Stopping(round(steps * share)))
    else:
        attacked(tmp_path)
    counted = Stopping(2 * steps)
    found = attacked(tmp_path, counted)
    assert counted.left == steps, "steps are reported, those of the first call, too"
    assert torch.equal(found.images, whole.images)
    assert torch.equal(found.labels, whole.labels)
    assert found.history == whole.history
    assert found.objectives_by_restart == whole.objectives_by_restart


def test_a_search_of_another_network_begins_anew(tmp_path):
    """The weights are the same, and the code is not, which their digests do not show."""
    model, other, (images, labels) = network(), network(activation=nn.Tanh), batch(1)
    params = known_parameters(model)
    observed = gradient_of(model)(params, (images, labels))
    given = {"shape": (1, 1, 8, 8), "labels": labels, "steps": 6, "seed": 0}
    run_attack("ig", gradient_of(model), params, observed, folder=tmp_path, **given)
    found = run_attack("ig", gradient_of(other), params, observed, folder=tmp_path, **given)
    expected = run_attack("ig", gradient_of(other), params, observed, **given)
    assert torch.equal(found.images, expected.images)
