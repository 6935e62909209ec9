"""Merges beside peft's own arithmetic, and adapters of a bank that are like one in a file."""

import pytest
import torch
from adapters_under_test import PROJ_IN, SHAPES, TO_OUT, TO_Q, random_adapter
from peft.utils import merge_utils

from netweight import Adapter, AdapterBank, read_adapter, write_adapter
from netweight.core.progress import QUIET
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space import merging
from netweight.methods.space.merging import merge_files
from netweight.methods.space.settings import MergeSettings
from netweight.methods.space.space_files import find_similar
from netweight.nn.lora import combined

KERNELS = {PROJ_IN: (2, 2)}


def dense(adapters, name):
    return [adapter.factors[name].dense().double() for adapter in adapters]


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
@pytest.mark.filterwarnings("ignore:The density")
def test_ties_is_that_of_peft_on_the_changes(density):
    adapters = [random_adapter(seed, dtype=torch.float64) for seed in range(3)]
    weights = (1.0, 0.5, 2.0)
    how = MergeSettings(method="ties", weights=weights, density=density)
    for name, change in merging.merged(adapters, how):
        expected = merge_utils.ties(dense(adapters, name), torch.tensor(weights, dtype=torch.float64), density)
        torch.testing.assert_close(change.dense().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["dare", "dare-ties"])
@pytest.mark.filterwarnings("ignore:The density")
def test_dare_drops_at_random_and_keeps_the_mean(method, monkeypatch):
    adapters = [random_adapter(seed, dtype=torch.float64) for seed in range(2)]
    weights, kept = torch.tensor([1.0, 0.5], dtype=torch.float64), []

    def remember(change, how, name, number):
        kept.append(trimmed(change, how, name, number))
        return kept[-1]

    trimmed = merging._trimmed
    monkeypatch.setattr(merging, "_trimmed", remember)
    how = MergeSettings(method=method, weights=(1.0, 0.5), density=0.7, seed=3)
    for name, change in merging.merged(adapters, how):
        for whole, part in zip(dense(adapters, name), kept[-2:], strict=True):
            assert set((part / whole).flatten().mul(0.7).round(decimals=9).tolist()) <= {0.0, 1.0}
        theirs = merge_utils.dare_linear if method == "dare" else merge_utils.dare_ties
        expected = theirs(kept[-2:], weights, 1.0) if method == "dare" else merge_utils.ties(kept[-2:], weights, 1.0)
        torch.testing.assert_close(change.dense().double(), expected, rtol=1e-5, atol=1e-6)
    draws = [dict(merging.merged(adapters, how.replace(seed=seed)))[TO_Q].dense() for seed in range(400)]
    if method == "dare":
        summed = sum(weight * change for weight, change in zip(weights, dense(adapters, TO_Q), strict=True))
        torch.testing.assert_close(torch.stack(draws).mean(0).double(), summed, rtol=0, atol=0.35)
    assert not torch.equal(draws[0], draws[1])


def test_weights_by_block_and_modules_that_one_lacks(tmp_path):
    whole, part = random_adapter(0), Adapter({TO_Q: random_adapter(1).factors[TO_Q]})
    how = MergeSettings(weights=(2.0, 3.0), blocks=(("unet.mid_block.**", "0.5"), ("unet.down_blocks.**", "0,7")))
    found = dict(merging.merged([whole, part], how))
    torch.testing.assert_close(
        found[TO_Q].dense(), 0.5 * whole.factors[TO_Q].dense() + 0.5 * part.factors[TO_Q].dense()
    )
    assert float(found[TO_OUT].dense().abs().sum()) == 0
    assert list(found) == sorted(SHAPES)
    for bad, error, words in (
        ({"weights": (1.0,) * 3}, UsageError, "2 adapters have 3 weights"),
        ({"weights": (1.0,)}, UsageError, "2 adapters have 1 weights"),
        ({"blocks": (("unet.**", "1,x"),)}, UsageError, "are not numbers"),
        ({"blocks": (("nowhere.**", "1"),)}, NameNotFound, "matches none"),
    ):
        with pytest.raises(error, match=words):
            dict(merging.merged([whole, part], MergeSettings(**bad)))


@pytest.mark.parametrize("layout", ["diffusers", "peft", "kohya"])
def test_a_merged_file_is_of_the_highest_rank_and_says_its_error(tmp_path, layout):
    adapters = [random_adapter(seed, dtype=torch.float64) for seed in range(3)]
    paths = [write_adapter(one, tmp_path / str(n), kernels=KERNELS) for n, one in enumerate(adapters)]
    exact = merge_files(paths, tmp_path / "sum", MergeSettings(layout=layout), overwrite=False)
    assert exact.relative_error < 1e-7
    summed = combined(adapters)
    for name, change in read_adapter(exact.path).factors.items():
        torch.testing.assert_close(change.dense().double(), summed.factors[name].dense().double(), rtol=1e-5, atol=1e-5)
    how = MergeSettings(method="ties", layout=layout)
    found = merge_files(paths, tmp_path / "ties", how, overwrite=False)
    assert found.ranks[1] <= 3
    lost = whole = 0.0
    changes = read_adapter(found.path).factors
    for name, change in merging.merged(adapters, how):
        lost += float((change.dense() - changes[name].dense()).double().square().sum())
        whole += float(change.dense().double().square().sum())
    assert found.relative_error == pytest.approx((lost / whole) ** 0.5, rel=1e-4)
    assert found.relative_error > 0.01


def test_similar_adapters_of_a_bank_are_found_by_the_modules_that_both_have(tmp_path):
    (tmp_path / "loras").mkdir()
    adapters = {str(seed): random_adapter(seed) for seed in range(5)}
    adapters["part"] = Adapter({TO_Q: random_adapter(2).scaled(7).factors[TO_Q]})
    for name, adapter in adapters.items():
        write_adapter(adapter, tmp_path / "loras" / f"{name}.safetensors", kernels=KERNELS)
    AdapterBank.ingest(tmp_path / "loras", tmp_path / "bank")
    file = write_adapter(random_adapter(2).scaled(-0.5), tmp_path / "mine", kernels=KERNELS)
    found = find_similar(file, tmp_path / "bank", 6, QUIET)
    assert [each.shared_cosine for each in found] == sorted((each.shared_cosine for each in found), reverse=True)
    by_name = {each.name: each for each in found}
    assert by_name["2"].cosine == pytest.approx(-1)
    assert by_name["2"].shared == pytest.approx(1)
    assert by_name["part"].shared_cosine == pytest.approx(-1)
    mine = random_adapter(2)
    share = (mine.factors[TO_Q].inner(mine.factors[TO_Q])) / mine.norm() ** 2
    assert by_name["part"].shared == pytest.approx(share)
    assert by_name["part"].cosine == pytest.approx(-(share**0.5))
    inner = mine.inner(adapters["1"])
    assert by_name["1"].cosine == pytest.approx(-inner / mine.norm() / adapters["1"].norm())
    other = write_adapter(Adapter({"unet.conv_in": random_adapter(0).factors[TO_Q]}), tmp_path / "other", layout="peft")
    with pytest.raises(UsageError, match="does not change any module"):
        find_similar(other, tmp_path / "bank", 3, QUIET)
