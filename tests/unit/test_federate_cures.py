"""Cures of federated learning and gradient inversion name options that their commands have; a clip has its effect."""

import ast
import re
from pathlib import Path

import click
import pytest
import torch
from torch import nn

import netweight
from netweight.cli import netweight as program
from netweight.errors import UsageError
from netweight.methods.federate.catalog import named_method
from netweight.methods.federate.plan import FederationPlan
from netweight.methods.federate.protections import HardenedMethod

SOURCES = Path(netweight.__file__).parent
FOLDERS = ("methods/federate", "plugins/flower", "attacks/gradient_inversion")
# Command line → the words after `netweight`; those of Flower are options of its commands and of its nodes.
COMMANDS = ("federate run", "federate audit", "federate report", "federate export", "attack gradient-inversion")
OF_FLOWER = {"--run-config", "--node-config", "--federation-config"}


def options_of(command):
    group = program
    for word in command.split():
        group = group.get_command(click.Context(group), word)
    return {name for each in group.params for name in (*each.opts, *each.secondary_opts)}


def cures():
    """Yield where each cure is, and the text of its constants."""
    for folder in FOLDERS:
        for file in sorted((SOURCES / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.keyword) and node.arg == "cure":
                    parts = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
                    yield f"{file.name}:{node.lineno}", "".join(str(part) for part in parts)


def test_every_option_in_a_cure_is_one_of_a_command():
    known = {
        "methods/federate": set().union(*(options_of(each) for each in COMMANDS[:4])),
        "plugins/flower": OF_FLOWER,
        "attacks/gradient_inversion": options_of(COMMANDS[4]) | {"--attack"},
    }
    every = OF_FLOWER.union(*known.values())
    named = [(where, word) for where, cure in cures() for word in re.findall(r"--[a-z][a-z-]+", cure)]
    assert len(named) > 20
    assert [each for each in named if each[1] not in every] == []


def test_a_clip_is_that_of_examples_under_differential_privacy_and_of_updates_with_noise():
    task = FederationPlan(method="fedavg", clients=5).task()
    plan = FederationPlan(method="dp-fedavg", noise_multiplier=2.0, clients=5, clip=0.7)
    (phase,) = plan.make_method(task).phases
    assert phase.privacy.clip == 0.7
    (phase,) = plan.replace(clip=None).make_method(task).phases
    assert phase.privacy.clip == 0.04
    for given, clip in ((None, 1.0), (0.3, 0.3)):
        method = FederationPlan(method="fedavg", noise=0.01, clients=5, clip=given).make_method(task)
        assert isinstance(method, HardenedMethod)
        assert method.noise.clip == clip


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"method": "fedavg"}, "Leave --clip out, add --noise"),
        ({"method": "dp-fedavg", "noise": 0.1}, "Leave out --clip"),
    ],
)
def test_a_clip_without_an_effect_or_of_two_meanings_is_refused(settings, cure):
    with pytest.raises(UsageError) as refused:
        FederationPlan(clip=0.5, **settings)
    assert cure in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"alpha": 0.1}, "Give --partition dirichlet"),
        ({"delta": 1e-6}, "add --noise, or use --method dp-fedavg"),
        ({"liars": 2}, "Give --lie"),
        ({"lie": "constant", "liars": 5, "clients": 5}, "Give --set liars=4 or less"),
        ({"refuse": True}, "use --method hyperfl"),
        ({"method": "local", "noise": 0.1}, "Leave --noise out"),
        ({"method": "local", "lie": "scaled"}, "Leave --lie out"),
    ],
)
def test_options_without_an_effect_are_refused(settings, cure):
    with pytest.raises(UsageError) as refused:
        FederationPlan(**settings)
    assert cure in str(refused.value)


def test_more_steps_than_any_client_trains_are_refused():
    plan = FederationPlan(clients=5, minimum_steps=1000, epochs=1)
    with pytest.raises(UsageError, match=r"at most 6 local steps.* Give --minimum-steps 6 or less"):
        plan.make_method(plan.task())


def unseeded(channels, size, classes):
    frozen = nn.Linear(channels * size * size, 4).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), frozen, nn.Linear(4, 4)), nn.Linear(4, classes)


def test_a_network_that_is_made_again_begins_with_the_same_numbers():
    plan = FederationPlan(clients=5, model=f"{__name__}:unseeded")
    one, two, other = plan.task(), plan.task(), plan.replace(seed=1).task()
    for name, value in one.body.state_dict().items():
        assert torch.equal(value, two.body.state_dict()[name])
    assert not torch.equal(one.initial_body(), other.initial_body())


def normalized(channels, size, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, 5), nn.LayerNorm(5)), nn.Linear(5, classes)


def test_fedbn_without_normalization_layers_is_refused():
    """Reported of other libraries: its results are those of FedAvg, and nobody says why."""
    plan = FederationPlan(method="fedbn", clients=5)
    with pytest.raises(UsageError, match=r"no normalization layers.*--method fedavg"):
        plan.make_method(plan.task())
    fitting = plan.replace(model=f"{__name__}:normalized")
    assert fitting.make_method(fitting.task()).name == "fedbn"


def test_a_flower_app_is_told_where_noise_is_given():
    with pytest.raises(UsageError, match="give `apps` a function"):
        named_method("dp-fedavg")
    with pytest.raises(UsageError, match="Leave out noise_multiplier and clip"):
        named_method("fedavg", clip=1.0)
