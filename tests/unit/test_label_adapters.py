"""Near-duplicates among adapters, against dense changes of weights."""

import itertools

import pytest
import torch

from netweight.labels.adapter_rows import NEAR_DUPLICATE, near_duplicates
from netweight.nn.lora import LowRank

SHAPES = {"a": (12, 7), "b": (5, 9)}


def change(generator, shape, rank):
    up, down = torch.randn(shape[0], rank, generator=generator), torch.randn(rank, shape[1], generator=generator)
    return LowRank(up=up, down=down, scale=0.5)


def dense(changes):
    return torch.cat([(each.scale * each.up.double() @ each.down.double()).flatten() for each in changes.values()])


def entry(name, changes):
    return name, changes, float(dense(changes).norm())


def test_near_duplicates_are_those_of_dense_changes():
    generator = torch.Generator().manual_seed(0)
    adapters = [
        (f"{rank}", {name: change(generator, shape, rank) for name, shape in SHAPES.items()}) for rank in (1, 2, 3)
    ]
    first = adapters[1][1]
    twin = {module: LowRank(up=3 * each.up, down=each.down, scale=each.scale) for module, each in first.items()}
    wider = {
        module: LowRank(up=torch.cat([each.up, 0.01 * torch.randn(each.shape[0], 2, generator=generator)], 1),
                        down=torch.cat([each.down, torch.randn(2, each.shape[1], generator=generator)]),
                        scale=each.scale)
        for module, each in first.items()
    }  # fmt: skip
    adapters += [("three times", twin), ("other rank", wider), ("negative", {
        module: LowRank(up=-each.up, down=each.down, scale=each.scale) for module, each in first.items()
    })]  # fmt: skip
    expected = {}
    for (one, a), (other, b) in itertools.combinations(adapters, 2):
        cosine = float(torch.nn.functional.cosine_similarity(dense(a), dense(b), 0))
        if cosine >= NEAR_DUPLICATE:
            expected[one, other] = cosine
    found = {(one, other): cosine for one, other, cosine in near_duplicates([entry(*each) for each in adapters])}
    assert {name for pair in expected for name in pair} == {"2", "three times", "other rank"}
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-9)


def test_adapters_of_other_modules_or_of_zeros_are_not_compared():
    generator = torch.Generator().manual_seed(1)
    one = {"a": change(generator, (4, 4), 1)}
    nothing = {"a": LowRank(up=torch.zeros(4, 1), down=torch.zeros(1, 4), scale=1.0)}
    assert (
        near_duplicates([entry("1", one), entry("2", {"b": one["a"]}), entry("3", nothing), entry("4", nothing)]) == []
    )
