"""Weight spaces against dense algebra and scikit-learn."""

import pytest
import torch
from spaces_under_test import bank_of, dense, flat, random_adapters

from netweight.errors import CorruptBlob, UsageError
from netweight.generate.stack import AdapterStack
from netweight.methods.space.inner_product import inner_products
from netweight.methods.space.method import WeightSpace


@pytest.fixture(scope="module")
def adapters():
    return random_adapters(24)


@pytest.fixture(scope="module")
def space(adapters):
    return WeightSpace.fit(bank_of(adapters[:20]), components=6)


def test_inner_products_are_those_of_dense_changes(adapters):
    one, other = AdapterStack.of(adapters[:5]), AdapterStack.of(random_adapters(4, seed=3, ranks=(2,)))
    expected = dense(adapters[:5]) @ dense(random_adapters(4, seed=3, ranks=(2,))).T
    torch.testing.assert_close(inner_products(one, other), expected, rtol=1e-12, atol=1e-10)


def test_scores_are_those_of_scikit_learn(space, adapters):
    decomposition = pytest.importorskip("sklearn.decomposition")
    oracle = decomposition.PCA(6, svd_solver="full")
    expected = torch.from_numpy(oracle.fit_transform(dense(adapters[:20]).numpy())).float()
    signs = (space.scores * expected).sum(dim=0).sign()
    torch.testing.assert_close(space.scores, expected * signs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(space.deviations, torch.from_numpy(oracle.explained_variance_).sqrt().float())
    new = torch.from_numpy(oracle.transform(dense(adapters[20:]).numpy())).float()
    found = torch.stack([space.project(one) for one in adapters[20:]])
    torch.testing.assert_close(found, new * signs, rtol=1e-5, atol=1e-5)
    point = space.scores[3] * 1.5
    expected = torch.from_numpy(oracle.inverse_transform((point * signs)[None].double().numpy()))[0]
    torch.testing.assert_close(flat(space.changes(point.double())), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense([space.adapter(point)])[0], expected, rtol=1e-5, atol=1e-5)
    mean = torch.from_numpy(oracle.mean_)
    torch.testing.assert_close(dense([space.mean_adapter])[0], mean, rtol=1e-5, atol=1e-5)


def test_changes_differentiate(space):
    point = space.scores[:2].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda scores: flat(space.changes(scores)), point)


def test_saved_and_opened(space, adapters, tmp_path):
    bank = bank_of(adapters[:20])
    space.save(tmp_path / "space")
    space.save(tmp_path / "alone", standalone=True)
    point = space.scores[5] * 0.5
    grown = bank_of(adapters)
    for again in (
        WeightSpace.open(tmp_path / "space", bank), WeightSpace.open(tmp_path / "space", grown),
        WeightSpace.open(tmp_path / "alone"),
    ):  # fmt: skip
        assert again.names == space.names
        assert again.config == space.config
        assert torch.equal(again.scores, space.scores)
        assert torch.equal(again.deviations, space.deviations)
        torch.testing.assert_close(flat(again.changes(point)), flat(space.changes(point)))
        torch.testing.assert_close(again.project(adapters[21]), space.project(adapters[21]))
    with pytest.raises(UsageError, match="combinations of the adapters"):
        WeightSpace.open(tmp_path / "space")
    with pytest.raises(UsageError, match="another bank"):
        WeightSpace.open(tmp_path / "space", bank_of(random_adapters(20, seed=9)))
    damaged = tmp_path / "space" / "space.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    with pytest.raises(CorruptBlob, match="digest"):
        WeightSpace.open(tmp_path / "space", bank)
