"""The audit of a federation: what it finds where everything leaks, and where little does."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import nn

from netweight.attacks.gradient_inversion.analytic import read_text
from netweight.attacks.gradient_inversion.matching import MatchingConfig
from netweight.attacks.gradient_inversion.tailored import PeelingConfig
from netweight.core.seeds import derive
from netweight.errors import Unsupported, UsageError
from netweight.methods.federate import ClientData, Federation, HyperFL, LocalTraining, Task, fedavg, train
from netweight.methods.federate.acceptance import AcceptanceLimits
from netweight.methods.federate.algorithms.direct import fedavg_private_head, local_only
from netweight.methods.federate.catalog import named_method
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.exposure import AuditConfig, _pixel_range, audit, exposure
from netweight.methods.federate.exposure_report import exposure_figure, exposure_findings, exposure_table
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client
from netweight.methods.federate.observation import observe, read_update
from netweight.methods.federate.protections import HardenedMethod, UpdateNoise
from netweight.methods.federate.reconstruction import ATTACKS, Search, ServerKnowledge, nearest_pair
from netweight.methods.federate.report import add_sections
from netweight.methods.federate.threats import ThreatModel, own_threat
from netweight.metrics.images import psnr
from netweight.report.audit import audits_of, run_audits
from netweight.report.report import Report

QUICK = Search(PeelingConfig(softening=6, rounds=2), MatchingConfig(steps=10))
attacked = partial(exposure, search=QUICK)
ONE_STEP = ThreatModel(first_round=True)


def picture_task(clients: int = 6, n: int = 12) -> Task:
    """A small CNN on pictures of blobs, whose features are few and exact."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.MaxPool2d(2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(300, 16), nn.LeakyReLU()
    )
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    data = []
    for client in range(clients):
        generator = torch.Generator().manual_seed(client)
        centers = torch.rand(n, 2, 1, 1, generator=generator) * 8 + 2
        images = torch.exp(-((y - centers[:, 0]) ** 2 + (x - centers[:, 1]) ** 2) / 4)[:, None]
        labels = (centers[:, 0, 0, 0] > 6).long()
        data.append(ClientData((images, labels), (images, labels)))
    return Task(body, nn.Linear(16, 2), data)


METHOD = HyperFL(LocalTraining(epochs=2, batch_size=4), embedding=8, hidden=(16,))


@pytest.fixture(scope="module")
def run() -> TrainedFederation:
    return train(picture_task(), METHOD, Federation(rounds=2))


def test_one_step_gives_the_gradient_and_the_image_away(run: TrainedFederation) -> None:
    found = attacked(run, ONE_STEP, updates=5, summed_over=6, seed=1)
    sent = [cosine for cosine in found.cosines if cosine != 0]  # a client that is certain has no gradient
    assert len(sent) >= 3
    assert min(sent) > 0.999
    assert sum(found.psnr) / 5 > sum(found.random_psnr) / 5 + 3
    assert "exactly" in found.verdict[1]
    assert "reconstructed" in found.verdict[1]


def test_generating_the_head_too_leaks_as_much_and_is_refused_alike() -> None:
    whole = train(picture_task(), dataclasses.replace(METHOD, private_head=False), Federation(rounds=2))
    found = attacked(whole, ONE_STEP, updates=5, summed_over=6, seed=1)
    sent = [cosine for cosine in found.cosines if cosine != 0]
    assert len(sent) >= 3
    assert min(sent) > 0.999
    summed = attacked(whole, dataclasses.replace(ONE_STEP, summed_over=6), updates=5, summed_over=6, seed=1)
    assert summed.cosines == pytest.approx(summed.aggregate)
    malicious = ThreatModel(batch_size=4, server="imprint")
    assert attacked(whole, malicious, updates=5, summed_over=6, seed=1).psnr
    careful = dataclasses.replace(whole, method=HardenedMethod(whole.method, acceptance=AcceptanceLimits()))
    assert "does not take part" in attacked(careful, malicious, updates=5, summed_over=6, seed=1).verdict[1]


def test_a_sum_of_all_clients_gives_away_what_the_aggregate_does(run: TrainedFederation) -> None:
    found = attacked(run, dataclasses.replace(ONE_STEP, summed_over=6), updates=5, summed_over=6, seed=1)
    assert found.cosines == pytest.approx(found.aggregate)
    assert "reveals no more" in found.verdict[1]


def test_noise_hides_the_gradient() -> None:
    task = picture_task()
    noisy = train(task, HardenedMethod(METHOD, noise=UpdateNoise(clip=1.0, multiplier=0.3)), Federation(rounds=1))
    found = attacked(noisy, ONE_STEP, updates=5, summed_over=6, seed=1)
    assert max(map(abs, found.cosines)) < 0.5


def test_clients_refuse_a_malicious_server_and_few_steps(
    run: TrainedFederation, caplog: pytest.LogCaptureFixture
) -> None:
    malicious = ThreatModel(batch_size=4, server="imprint")
    plain = attacked(run, malicious, updates=5, summed_over=6, seed=1)
    assert plain.psnr
    careful = dataclasses.replace(run, method=HardenedMethod(METHOD, acceptance=AcceptanceLimits()))
    refused = attacked(careful, malicious, updates=5, summed_over=6, seed=1)
    assert not refused.cosines
    assert "does not take part" in refused.verdict[1]
    assert "does not take part" in caplog.text
    stubborn = dataclasses.replace(run, method=HardenedMethod(METHOD, minimum_steps=6))
    assert "does not take part" in attacked(stubborn, ONE_STEP, updates=5, summed_over=6, seed=1).verdict[1]


@pytest.mark.parametrize(("private_head", "lonely"), [(True, 0.25), (False, 0.5)])
def test_honest_rounds_are_not_refused(private_head: bool, lonely: float) -> None:
    method = dataclasses.replace(METHOD, private_head=private_head)
    careful = HardenedMethod(method, minimum_steps=6, acceptance=AcceptanceLimits(lonely=lonely))
    run = train(picture_task(), careful, Federation(rounds=2))
    assert not any(round.refusals for round in run.rounds)


def test_federated_averaging_with_a_private_head_leaks_too() -> None:
    run = train(picture_task(), fedavg_private_head(LocalTraining(epochs=1, batch_size=4)), Federation(rounds=1))
    found = attacked(run, ONE_STEP, updates=5, summed_over=6, seed=1)
    assert min(found.cosines) > 0.99


def test_the_own_schedule_is_that_of_the_smallest_client(run: TrainedFederation) -> None:
    assert own_threat(run) == ThreatModel(batch_size=4, local_steps=6, examples=12)


def test_the_audit_is_registered_and_reports(run: TrainedFederation, tmp_path: object) -> None:
    assert set(audits_of("federate")) == {"accuracy", "server attack"}
    config = AuditConfig(threats=(ONE_STEP,), updates=5, summed_over=6, search=QUICK)
    found = run_audits("federate", run, config, seed=3)
    assert {finding.name for finding in found["accuracy"].findings} >= {"clients left out of rounds"}
    names = [finding.name for finding in found["server attack"].findings]
    assert any("this run" in name for name in names)
    targets = [finding for finding in found["server attack"].findings if finding.target is not None]
    assert targets
    assert all("this run" in finding.name for finding in targets)
    exposures = audit(run, config, seed=3)
    again = [(one.name, one.value, one.ci95) for one in exposure_findings(exposures, seed=3)]  # but for their time
    assert again == [(one.name, one.value, one.ci95) for one in found["server attack"].findings]
    assert len(exposure_table(exposures).rows) == 2
    assert exposure_figure(exposures) is not None
    report = Report("test")
    add_sections(report, run, exposures, seed=3)
    page = report.write(str(tmp_path)).read_text()
    assert "Exposure to the server" in page


def test_a_report_without_an_audit_says_so(run: TrainedFederation, tmp_path: object) -> None:
    report = Report("test")
    add_sections(report, run, [], seed=3)
    assert "server attack" in report.write(str(tmp_path)).read_text()


def test_what_is_observed_does_not_depend_on_who_else_is_attacked(run: TrainedFederation) -> None:
    alone, among = (observe(run, ONE_STEP, clients, seed=1)[0] for clients in ([0], [0, 1, 2]))
    assert torch.equal(alone.images, among.images)
    assert torch.equal(alone.gradient, among.gradient)


def test_bodies_that_are_no_chains_are_searched_and_large_sums_reported_without_images() -> None:
    task = picture_task()
    body = nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.Tanh())
    run = train(Task(body, task.head, task.data), METHOD, Federation(rounds=1))
    found = attacked(run, ONE_STEP, updates=5, summed_over=6, seed=1)
    assert set(found.image_attacks) == {"matching, classifier unknown"}
    threat = ThreatModel(batch_size=3, first_round=True, summed_over=6)
    many = attacked(run, threat, updates=5, summed_over=6, seed=1)
    assert not many.psnr
    assert "18 images are not searched together" in many.why_no_images
    value = next(f for f in exposure_findings([many], seed=1) if f.name.startswith("PSNR"))
    assert value.value is None


def test_whole_batches_of_an_honest_server_are_searched() -> None:
    """The audit is as near as the library's own search on the same update, and its verdict names attacks and time."""
    run = train(picture_task(), fedavg(LocalTraining(epochs=1, lr=0.05, batch_size=4)), Federation(rounds=1))
    threat, config = ThreatModel(batch_size=4, first_round=True), MatchingConfig(steps=300)
    found = exposure(run, threat, updates=1, summed_over=6, seed=1, search=Search(matching=config))
    assert {"peeling", "matching"} <= set(found.image_attacks)
    (seen,) = observe(run, threat, [0], seed=1)
    read = read_update(run, seen.message, seen.answer())
    evidence = ServerKnowledge(
        run.task, run.method.training, read, seen.message, seen.answer(), 4, (1, 12, 12), _pixel_range(run), 1, 4
    )  # type: ignore[attr-defined]
    low, high = _pixel_range(run)
    alone = ATTACKS["matching"](evidence, Search(matching=config), derive(1, "image", 0))
    unit = (alone - low) / (high - low)
    best = nearest_pair([unit.clamp(0, 1)], ((seen.images - low) / (high - low)).clamp(0, 1), psnr)[3]
    assert found.psnr[0] >= best - 1e-6
    assert "processor seconds an update" in found.verdict[1]
    assert found.psnr[0] > found.guess


def test_no_image_comes_out_is_said_only_where_every_attack_was_searched(run: TrainedFederation) -> None:
    found = attacked(run, ONE_STEP, updates=5, summed_over=6, seed=1)
    low = dataclasses.replace(found, psnr=(5.0, 5.1, 5.2, 5.0, 5.1), random_psnr=(9.0,) * 5, average_psnr=(9.5,) * 5)
    assert "what they return is worse than a guess (" in low.verdict[1]
    for less in (
        dataclasses.replace(low, not_searched=("matching: 50 images are not searched together, only up to 16.",)),
        dataclasses.replace(low, psnr=low.psnr[:1], random_psnr=(9.0,), average_psnr=(9.5,)),
        dataclasses.replace(low, psnr=(3.0, 14.0, 4.0, 13.0, 9.0)),
    ):
        assert "worse than a guess" not in less.verdict[1]
        assert "the attacks recovered no image (" in less.verdict[1]


def test_what_cannot_be_attacked_is_refused(run: TrainedFederation) -> None:
    with pytest.raises(UsageError, match="whole passes"):
        observe(run, ThreatModel(batch_size=4, local_steps=4, examples=12), [0], seed=1)
    with pytest.raises(UsageError, match="12 examples"):
        observe(run, ThreatModel(batch_size=40), [0], seed=1)
    with pytest.raises(UsageError, match="sum over 9 clients cannot be formed"):
        observe(run, ThreatModel(summed_over=9), [0, 1], seed=1)
    alone = train(picture_task(), local_only(LocalTraining(epochs=1)), Federation(rounds=1))
    assert "shares nothing" in attacked(alone, ONE_STEP, updates=5, summed_over=6, seed=1).verdict[1]


def test_update_noise_has_the_stated_size_and_clip() -> None:
    task = picture_task(clients=1)
    clip, multiplier = 0.05, 0.01
    noisy = HardenedMethod(METHOD, noise=UpdateNoise(clip, multiplier))
    state = METHOD.start(task, seed=520)
    run = train(task, noisy, Federation(rounds=1))
    change = torch.cat([(run.state[name] - value).flatten() for name, value in state.items()])
    expected = math.sqrt(clip**2 + (clip * multiplier) ** 2 * len(change))
    assert float(change.norm()) == pytest.approx(expected, rel=0.05)


def test_a_state_that_jumps_between_rounds_is_refused_and_an_honest_one_is_not(caplog):
    """A careful client remembers a sketch of the last state, and how far it moved itself."""
    task, method = picture_task(), HardenedMethod(METHOD, acceptance=AcceptanceLimits(lonely=1.0))
    run = train(task, method, Federation(rounds=2))
    assert [r.refusals for r in run.rounds] == [{}, {}]
    assert {name for name in run.private[0] if name.startswith("refusal.")} == {
        "refusal.seed", "refusal.round", "refusal.state", "refusal.change",
    }  # fmt: skip

    def trained(change):
        state = {name: value + change * torch.randn_like(value) for name, value in run.state.items()}
        client = Client(0, run.private[0], state)
        return method.train(task, LocalModel(task), [client], round=3, seed=0)

    torch.manual_seed(0)
    assert len(trained(0.0)) == 1
    assert trained(0.2) == []
    assert "the state changed more than clients change it" in caplog.text


def test_secure_sums_are_taken_apart_by_who_knows_embeddings_or_sends_thresholds(run: TrainedFederation) -> None:
    for changes in ({"knows_embeddings": True}, {"server": "thresholds"}):
        threat = dataclasses.replace(ONE_STEP, summed_over=6, **changes)
        found = attacked(run, threat, updates=5, summed_over=6, seed=1)
        sent = [cosine for cosine in found.cosines if cosine != 0]
        assert sum(sent) / len(sent) > 0.9
        assert found.attack in ("matched filter", "thresholds")


def test_a_server_that_fishes_for_one_class_gets_an_image_out_of_a_batch() -> None:
    task = picture_task()
    data = [ClientData((one.train[0], torch.arange(12) % 4), one.test) for one in task.data]
    for method in (named_method("fedavg"), named_method("hyperfl-whole")):
        done = train(Task(task.body, nn.Linear(16, 4), data), method, Federation(rounds=1))
        honest, fished = (
            attacked(done, ThreatModel(8, server=server), updates=5, summed_over=6, seed=1)
            for server in ("honest", "fishing")
        )
        assert sum(fished.psnr) > sum(honest.psnr) + 5 * 3.0
        assert "images can be reconstructed" in fished.verdict[1]


def test_nobody_fishes_where_the_classifier_stays_with_the_client(run: TrainedFederation) -> None:
    found = attacked(run, ThreatModel(batch_size=4, server="fishing"), updates=5, summed_over=6, seed=1)
    assert "has nothing to change" in found.why_no_images


class SmallTransformer(nn.Module):
    """Embeddings of tokens and places, or places as waves, a layer of attention, and the mean over the places."""

    def __init__(self, learned: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.places = nn.Embedding(12, 16) if learned else None
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return features, shape `(n, 16)`, of tokens, shape `(n, length)`."""
        place = torch.arange(tokens.shape[1])
        waves = torch.sin(place[:, None] / 10.0 ** (torch.arange(16) / 8))
        return self.layer(self.tokens(tokens) + (waves if self.places is None else self.places(place))).mean(1)


class Numbers(nn.Module):
    """Tokens as they are."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return floats."""
        return tokens.float()


def sentences(client: int) -> ClientData:
    """Nine tokens in a row, some of them twice, and which of two classes the first belongs to."""
    tokens = torch.randint(50, (6, 9), generator=torch.Generator().manual_seed(client))
    tokens[:, 7] = tokens[:, 2]
    return ClientData((tokens, tokens[:, 0] % 2), (tokens, tokens[:, 0] % 2))


def test_text_is_read_off_one_step_of_a_transformer() -> None:
    torch.manual_seed(0)
    task = Task(SmallTransformer(), nn.Linear(16, 2), [sentences(client) for client in range(5)])
    for method in (named_method("fedavg"), named_method("hyperfl-body")):
        done = train(task, method, Federation(rounds=1))
        found = attacked(done, ThreatModel(first_round=True), updates=5, summed_over=5, seed=1)
        assert found.tokens == (1.0,) * 5
        assert max(found.frequent) < 0.5
        assert found.verdict[1].endswith("its text can be read.")
        assert exposure_table([found]).rows[0][4] == 1.0
        (tokens,) = [one for one in exposure_findings([found], seed=1) if one.name.startswith("tokens recovered")]
        assert tokens.value == 1.0


def test_the_text_of_a_sum_of_clients_is_not_read() -> None:
    torch.manual_seed(0)
    task = Task(SmallTransformer(), nn.Linear(16, 2), [sentences(client) for client in range(5)])
    done = train(task, named_method("fedavg"), Federation(rounds=1))
    found = attacked(done, ThreatModel(first_round=True, summed_over=5), updates=5, summed_over=5, seed=1)
    assert sum(found.tokens) / 5 < 0.5


@pytest.mark.parametrize("length", [9, 14])  # a normalized layer of 16 tells 14 apart
@pytest.mark.parametrize("norm_first", [False, True])
def test_text_is_read_where_places_are_not_learned(length: int, norm_first: bool) -> None:
    torch.manual_seed(0)
    body = SmallTransformer(learned=False)
    body.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    tokens = torch.randint(50, (1, length))
    params = dict(body.named_parameters())
    loss = nn.functional.cross_entropy(nn.Linear(16, 2)(body(tokens)), torch.ones(1, dtype=torch.long))
    gradient = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    assert torch.equal(read_text(body, params, gradient, length), tokens[0])


def test_text_is_looked_for_in_bodies_that_begin_with_tokens() -> None:
    body = nn.Linear(9, 4)
    with pytest.raises(Unsupported, match="does not begin with tokens"):
        read_text(nn.Sequential(Numbers(), body), dict(body.named_parameters(prefix="1")), {}, 9)
