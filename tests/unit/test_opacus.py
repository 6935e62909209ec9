"""Privacy accounting by opacus's accountants."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from netweight.errors import MissingExtra, UsageError
from netweight.methods.federate import accounting

installed = pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="opacus is not installed")


@installed
@pytest.mark.parametrize(("n", "published"), [(600, 10.625), (1000, 8.242)])
def test_the_papers_noise(n, published):
    noise = accounting.noise_multiplier(4, 1e-5, n=n, batch_size=50, epochs=1000)
    assert noise == pytest.approx(published, abs=5e-4)
    spent = accounting.epsilon_spent(noise, 1e-5, n=n, batch_size=50, epochs=1000)
    assert 3.99 <= spent <= 4


@installed
def test_noise_for_all_is_enough_for_each_and_needed_by_one():
    sizes = [30, 51, 600]  # 51 examples take two steps per epoch at rate 0.98, 30 take one at rate 1
    noise = accounting.noise_multiplier_for_all(4, 1e-5, sizes=sizes, batch_size=50, epochs=20)
    spent = [accounting.epsilon_spent(noise, 1e-5, n=n, batch_size=50, epochs=20) for n in sizes]
    assert max(spent) <= 4
    assert max(spent) == spent[1] >= 3.99


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="epochs=0"):
        accounting.noise_multiplier(4, 1e-5, n=600, batch_size=50, epochs=0)
    with pytest.raises(UsageError, match="epsilon=-1"):
        accounting.noise_multiplier(-1, 1e-5, n=600, batch_size=50, epochs=1)
    with pytest.raises(UsageError, match="published outright"):
        accounting.noise_multiplier(4, 0.01, n=600, batch_size=50, epochs=1)
    with pytest.raises(UsageError, match="gives no privacy"):
        accounting.epsilon_spent(0, 1e-5, n=600, batch_size=50, epochs=1)
    with pytest.raises(UsageError, match="no client"):
        accounting.noise_multiplier_for_all(4, 1e-5, sizes=[], batch_size=50, epochs=1)


def test_without_opacus_the_cure_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(MissingExtra, match=r"netweight\[dp\]"):
        accounting.epsilon_spent(1, 1e-5, n=600, batch_size=50, epochs=1)
