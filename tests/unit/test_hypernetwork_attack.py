"""What a server reads from one client's change of a hypernetwork, and from a sum over clients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypernetwork_under_test import (
    LR,
    WEIGHT_DECAY,
    cosine,
    hypernetwork_for,
    small_body,
    strokes,
    train_client,
)
from torch import nn

from netweight.attacks.gradient_inversion.analytic import (
    HypernetworkChange,
    read_thresholds,
    recover_gradient,
    separate_clients,
    singular_gradient,
    threshold_trunk,
)
from netweight.attacks.gradient_inversion.chains import Block, Peel, read_chain, undone
from netweight.attacks.gradient_inversion.tailored import PeelingConfig, TailoredConfig, invert_generated, tailored
from netweight.errors import NameNotFound, Unsupported, UsageError
from netweight.methods.federate.small_cnn import small_cnn
from netweight.metrics.images import psnr
from netweight.nn.hypernetwork import Hypernetwork, ParameterLayout

RULE = {"lr": LR, "weight_decay": WEIGHT_DECAY}


def client(*, steps=1, images=1, hidden=(24,), seed=0, clip=50.0):
    body, head = small_body(), nn.Linear(16, 5)
    torch.manual_seed(seed + 100)
    network, embedding = hypernetwork_for(body, hidden=hidden), torch.randn(12)
    x = strokes(16, images, seed)
    return body, x, train_client(network, body, head, embedding, x, torch.arange(images) % 5, steps=steps, clip=clip)


@pytest.mark.parametrize("hidden", [(24,), (20, 24)])
@pytest.mark.parametrize("images", [1, 7])
@pytest.mark.parametrize("clip", [50.0, 1.0])
def test_one_step_gives_gradient_weights_and_embedding_away(hidden, images, clip):
    _, _, sent = client(hidden=hidden, images=images, clip=clip)
    found = recover_gradient(sent.before, sent.after, **RULE)
    assert found.rank_one
    assert cosine(found.gradient, sent.first_gradient) > 0.9999
    assert torch.equal(found.first, found.gradient)
    assert torch.allclose(found.generated.float(), sent.generated, atol=1e-2)
    assert cosine(found.embedding, sent.embedding) > 0.999
    assert cosine(found.movement, sent.movement) > 0.95


def test_after_several_steps_the_keys_still_tell_the_first_from_the_sum():
    _, _, sent = client(steps=8, images=6)
    found = recover_gradient(sent.before, sent.after, **RULE)
    assert not found.rank_one
    assert found.energies.sum().item() == pytest.approx(1)
    assert cosine(found.movement, sent.movement) > 0.9
    assert found.first.shape == found.gradient.shape == sent.first_gradient.shape


def test_heads_that_ignore_the_embedding_leak_as_much():
    body, head = small_body(), nn.Linear(16, 5)
    network = hypernetwork_for(body)
    with torch.no_grad():
        network.heads.weight.zero_()
    sent = train_client(network, body, head, torch.randn(12), strokes(16), torch.tensor([2]))
    found = recover_gradient(sent.before, sent.after, **RULE)
    assert cosine(found.first, sent.first_gradient) > 0.9999
    assert cosine(found.movement, sent.movement) > 0.9999


def test_what_cannot_be_read_is_named():
    _, _, sent = client()
    with pytest.raises(UsageError, match="not changed"):
        recover_gradient(sent.before, sent.before, lr=LR)
    with pytest.raises(UsageError, match="rate"):
        recover_gradient(sent.before, sent.after, lr=0)
    less = {name: tensor for name, tensor in sent.before.items() if not name.endswith("heads.bias")}
    with pytest.raises(NameNotFound, match=r"heads\.bias"):
        recover_gradient(less, sent.after, lr=LR)
    broken = {
        **sent.after,
        "hypernetwork.heads.bias": torch.full_like(sent.after["hypernetwork.heads.bias"], torch.nan),
    }
    with pytest.raises(UsageError, match="NaN"):
        recover_gradient(sent.before, broken, lr=LR)


def test_chains_are_read_and_others_are_refused():
    assert read_chain(small_body()).blocks == (Block("0", 1, 0, 2, 0.01), Block("3", 1, 1, 2, 0.01))
    assert [block.name for block in read_chain(small_cnn(3, 32)[0]).blocks] == ["conv1", "conv2", "conv3"]
    assert read_chain(small_cnn()[0]).linear == "fc1"
    for refused in (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3, groups=1, dilation=2), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3)),
    ):
        with pytest.raises(Unsupported):
            read_chain(refused)


def test_an_image_behind_one_block_is_read_without_label_or_classifier():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 12, 3), nn.MaxPool2d(2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(300, 16))
    head, image = nn.Linear(16, 5), strokes(12)
    torch.manual_seed(100)
    sent = train_client(hypernetwork_for(body), body, head, torch.randn(12), image, torch.tensor([0]))
    found = invert_generated(
        recover_gradient(sent.before, sent.after, **RULE), body, shape=(1, 1, 12, 12), seed=0,
        config=PeelingConfig(restarts=2, rounds=4),
    )  # fmt: skip
    assert psnr(found.images, image).mean() > 30
    assert found.objective == min(found.objectives_by_restart) < 0.1
    assert len(found.labels) == 0
    with pytest.raises(UsageError, match="features"):
        invert_generated(recover_gradient(sent.before, sent.after, **RULE), body, shape=(1, 1, 16, 16), seed=0)
    with pytest.raises(UsageError, match="channels"):
        invert_generated(recover_gradient(sent.before, sent.after, **RULE), body, shape=(1, 3, 12, 12), seed=0)


def test_the_network_of_the_paper_gives_a_letter_away():
    body, head = small_cnn(1, 28, 26)
    torch.manual_seed(0)
    network, embedding, image = Hypernetwork(ParameterLayout.of(body).size), torch.randn(64), strokes(28, seed=3)
    sent = train_client(network, body, head, embedding, image, torch.tensor([4]))
    found = recover_gradient(sent.before, sent.after, **RULE)
    assert cosine(found.gradient, sent.first_gradient) >= 0.999
    result = invert_generated(
        found, body, shape=(1, 1, 28, 28), seed=0, config=PeelingConfig(softening=10, rounds=1)
    )  # fmt: skip
    assert psnr(result.images, image).mean() > 20


def block_seen(channels, slope):
    """A block, what its input is and what its output and its gradient are for one image."""
    torch.manual_seed(0)
    inner, last = nn.Conv2d(3, channels, 3).double(), nn.Conv2d(channels, 96, 3, padding=1).double()
    inputs = F.leaky_relu(inner(torch.rand(1, 3, 8, 8).double())).detach()
    output, back = F.leaky_relu(F.max_pool2d(last(inputs), 2), slope), torch.randn(1, 96, 3, 3).double()
    (gradient,) = torch.autograd.grad((output * back).sum(), last.weight)
    block, size = Block("last", 1, 1, 2, slope), (channels, 6, 6)
    return inputs[0], block, (last.weight.detach(), last.bias.detach(), gradient), size, (output.detach()[0], back[0])


@pytest.mark.parametrize("slope", [0.01, 0.0])
def test_a_block_with_as_many_channels_as_places_is_undone_exactly(slope):
    inputs, block, known, size, seen = block_seen(8, slope)
    found, back = Peel(block, *known, size).by_span(*undone(block, *seen))
    assert torch.allclose(found, inputs, rtol=1e-6, atol=1e-6)
    assert back.shape == inputs.shape


def test_a_block_whose_input_is_not_told_is_left():
    _, block, known, size, seen = block_seen(4, 0.01)  # patches of 36 values in 36 places: all lie in any span
    assert Peel(block, *known, size).by_span(*undone(block, *seen)) is None
    _, block, known, size, (output, back) = block_seen(8, 0.01)
    few = Peel(block, *(one[:35] for one in known), size)
    assert few.by_span(*undone(block, output[:35], back[:35])) is None


def test_clients_are_separated_from_their_average_by_their_codes():
    body, head = small_body(), nn.Linear(16, 5)
    network = hypernetwork_for(body)
    embeddings = torch.randn(5, 12, generator=torch.Generator().manual_seed(2))
    sents = [
        train_client(network, body, head, v, strokes(16, 2, i), torch.tensor([i, 0])) for i, v in enumerate(embeddings)
    ]
    average = {name: sum(sent.after[name] for sent in sents) / 5 for name in sents[0].after}
    codes = network.hidden_code(embeddings).detach()
    found = separate_clients(HypernetworkChange(sents[0].before, average, **RULE), codes)
    for one, sent in zip(found, sents, strict=True):
        assert cosine(one, sent.first_gradient) > 0.99
    with pytest.raises(UsageError, match="separate"):
        separate_clients(HypernetworkChange(sents[0].before, average, **RULE), torch.randn(30, 24))


def test_under_noise_the_singular_vector_reads_more_and_who_knows_the_code_most():
    _, _, sent = client()
    network = hypernetwork_for(small_body(), hidden=(24,))
    network.load_state_dict({name.removeprefix("hypernetwork."): value for name, value in sent.before.items()})
    code = network.hidden_code(sent.embedding[None]).detach()
    heads = "hypernetwork.heads.weight"
    scale = (sent.after[heads] - sent.before[heads]).std()
    quality = {"inputs": [], "singular vector": [], "matched filter": []}
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        noisy = {k: v + 3 * scale * torch.randn(v.shape, generator=generator) for k, v in sent.after.items()}
        change = HypernetworkChange(sent.before, noisy, **RULE)
        found = singular_gradient(change)
        expected = torch.from_numpy(np.linalg.svd(change.heads.numpy(), full_matrices=False)[0][:, 0])
        assert abs(cosine(found, expected)) == pytest.approx(1)
        guesses = (change.recovered().first, found, separate_clients(change, code)[0])
        for name, guess in zip(quality, guesses, strict=True):
            quality[name].append(cosine(guess, sent.first_gradient))
    plain, singular, matched = (sum(each) / len(each) for each in quality.values())
    assert plain + 0.05 < singular < matched


def test_a_trunk_of_thresholds_separates_clients_whose_embeddings_nobody_knows():
    body, head = small_body(), nn.Linear(16, 5)
    network = hypernetwork_for(body, hidden=(96,))
    malicious = threshold_trunk(network.state_dict(), seed=3)
    network.load_state_dict(malicious)
    embeddings = torch.randn(3, 12, generator=torch.Generator().manual_seed(4))
    sents = [
        train_client(network, body, head, v, strokes(16, 2, i), torch.tensor([i, 0])) for i, v in enumerate(embeddings)
    ]
    average = {name: sum(sent.after[name] for sent in sents) / 3 for name in sents[0].after}
    found = read_thresholds(HypernetworkChange(sents[0].before, average, **RULE))
    assert all(max(cosine(row, sent.first_gradient) for row in found) > 0.99 for sent in sents)


def test_the_tailored_attack_searches_within_its_box():
    body, image, sent = client()
    found = tailored(
        sent.before, sent.after, body, shape=(1, 1, 16, 16), classes=5, features=16, seed=0,
        config=TailoredConfig(steps=30, restarts=2), **RULE,
    )  # fmt: skip
    assert found.images.shape == image.shape
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert found.history[-1] < found.history[0]
    assert torch.allclose(found.labels.sum(1), torch.ones(1))
