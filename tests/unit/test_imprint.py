"""A malicious server's imprint, and the client that refuses it."""

import pytest
import torch
from hypernetwork_under_test import LR, WEIGHT_DECAY, named, strokes, train_client
from torch import nn

from netweight.attacks.gradient_inversion.chains import imprint, read_imprint
from netweight.errors import NameNotFound, UsageError
from netweight.methods.federate.acceptance import AcceptanceLimits, reasons_to_decline, relative_change, signs_of
from netweight.methods.federate.small_cnn import small_cnn
from netweight.metrics.images import psnr
from netweight.nn.hypernetwork import Hypernetwork, ParameterLayout


@pytest.fixture(scope="module")
def world():
    body, head = small_cnn(1, 28, 10)
    torch.manual_seed(0)
    network = Hypernetwork(ParameterLayout.of(body).size, embedding=8, hidden=(16,))
    return body, head, network, torch.randn(8), strokes(28, 400, seed=1), strokes(28, 8, seed=2)


def test_images_of_a_batch_are_read_one_by_one(world):
    body, head, network, embedding, public, private = world
    sent = imprint(named(network), body, public=public, images=8, seed=0)
    malicious = Hypernetwork(ParameterLayout.of(body).size, embedding=8, hidden=(16,))
    malicious.load_state_dict({name.removeprefix("hypernetwork."): value for name, value in sent.state.items()})
    answer = train_client(malicious, body, head, embedding, private, torch.arange(8))
    found, misfits = read_imprint(sent, answer.after, body, shape=(1, 28, 28), lr=LR, weight_decay=WEIGHT_DECAY)
    assert len(found) == len(misfits)
    best = torch.stack([psnr(found, image.expand_as(found)).max() for image in private])
    assert (best > 18).sum() >= 5


def test_quiet_traps_pass_the_checks_and_still_give_images_away(world):
    body, head, network, embedding, public, private = world
    calm = named(network)
    calm["hypernetwork.heads.weight"].zero_()
    calm["hypernetwork.heads.bias"].copy_(ParameterLayout.of(body).join(dict(body.named_parameters())).detach())
    sent = imprint(calm, body, public=public, images=8, quiet=0.3, seed=0)
    assert sent.traps == 38
    assert reasons_to_decline(sent.state, body=body, embedding=embedding, images=private) == []
    clean = {name.removeprefix("hypernetwork."): value for name, value in sent.state.items()}
    malicious = Hypernetwork(ParameterLayout.of(body).size, embedding=8, hidden=(16,))
    malicious.load_state_dict(clean)
    answer = train_client(malicious, body, head, embedding, private, torch.arange(8))
    found, _ = read_imprint(sent, answer.after, body, shape=(1, 28, 28), lr=LR, weight_decay=WEIGHT_DECAY)
    best = torch.stack([psnr(found, image.expand_as(found)).max() for image in private])
    assert (best > 15).any()


def test_settings_that_cannot_be_meant_are_refused(world):
    body, _, network, _, public, _ = world
    for wrong in ({"share": 0.0}, {"quiet": 2.0}, {"images": 401}):
        with pytest.raises(UsageError):
            imprint(named(network), body, **({"public": public, "images": 8, "seed": 0} | wrong))


def test_honest_states_pass_and_imprints_are_refused(world):
    body, head, network, embedding, public, private = world
    received = named(network)
    assert reasons_to_decline(received, body=body, embedding=embedding) == []
    trained = train_client(network, body, head, embedding, private, torch.arange(8), steps=5).after
    change = relative_change(trained, received, 1e3)
    assert reasons_to_decline(trained, body=body, embedding=embedding, change=change) == []
    for share in (1.0, 0.9):
        state = imprint(received, body, public=public, images=8, share=share, seed=0).state
        reasons = reasons_to_decline(state, body=body, embedding=embedding, images=private)
        assert any("kernels that copy" in reason for reason in reasons)


def test_traps_without_other_signs_are_found_with_the_images(world):
    body, _, network, embedding, _, private = world
    received = named(network)
    calm = {name: value.clone() for name, value in received.items()}
    calm["hypernetwork.heads.weight"].zero_()
    calm["hypernetwork.heads.bias"].copy_(ParameterLayout.of(body).join(dict(body.named_parameters())).detach())
    honest = signs_of(calm, body=body, embedding=embedding, images=private)
    seen = []
    handle = body.fc1.register_forward_hook(lambda *call: seen.append(call[2]))
    body(private)
    handle.remove()
    layout = ParameterLayout.of(body)
    bias = layout.split(calm["hypernetwork.heads.bias"])["fc1.bias"]
    bias -= seen[0].detach().topk(2, dim=0).values.mean(0)  # a threshold between the first and the second image
    trapped = signs_of(calm, body=body, embedding=embedding, images=private)
    assert honest["lonely"] < 0.25 < trapped["lonely"]
    assert honest["peaked"] == trapped["peaked"]
    assert reasons_to_decline(calm, body=body, embedding=embedding) == []
    assert len(reasons_to_decline(calm, body=body, embedding=embedding, images=private)) == 1


def test_each_sign_can_refuse(world):
    body, _, network, embedding, _, _ = world
    received = named(network)
    nan = {**received, "hypernetwork.heads.bias": received["hypernetwork.heads.bias"] * torch.nan}
    assert "NaN" in reasons_to_decline(nan, body=body, embedding=embedding)[0]
    twins = {**received, "hypernetwork.trunk.0.weight": received["hypernetwork.trunk.0.weight"][:1].expand(16, 8)}
    assert "repeat" in reasons_to_decline(twins, body=body, embedding=embedding)[0]
    moved = {name: value + 1 for name, value in received.items()}
    limits = AcceptanceLimits(peaked=1e9)
    assert "changed more" in reasons_to_decline(
        moved, body=body, embedding=embedding, change=relative_change(moved, received, 1.0), limits=limits
    )[-1]  # fmt: skip
    with pytest.raises(NameNotFound):
        reasons_to_decline({"x": torch.ones(1)}, body=body, embedding=embedding)
    with pytest.raises(UsageError, match="embedding"):
        reasons_to_decline(received, body=nn.Linear(2, 2), embedding=embedding)
