import numpy
import pytest
import torch

from netweight.core import seeds
from netweight.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0,), 4569838562417982705),
        ((0, "client", 3, "round", 7), 5941534273385593434),
        ((-1, "ü"), 1860827800030005330),
        ((2**100, 2**100), 1860736538447731418),
    ],
)
def test_derived_seeds_never_change(arguments, expected):
    assert seeds.derive(*arguments) == expected


def test_paths_do_not_collide():
    paths = [(), (1,), ("1",), (1, 1), (11,), ("a", "b"), ("ab",), ("a", "b", ""), ("",), (0,), (-1,)]
    assert len({seeds.derive(5, *path) for path in paths}) == len(paths)


@pytest.mark.parametrize("arguments", [(True,), (1.0,), ("1",), (1, None), (1, True), (1, 2.0)])
def test_anything_but_text_and_integers_is_refused(arguments):
    with pytest.raises(UsageError, match=r"seed"):
        seeds.derive(*arguments)


def test_generators_are_the_derived_ones():
    expected = torch.Generator().manual_seed(seeds.derive(1, "x"))
    assert torch.equal(torch.rand(3, generator=seeds.torch_generator(1, "x")), torch.rand(3, generator=expected))
    expected = numpy.random.default_rng(seeds.derive(1, "x"))
    assert seeds.numpy_generator(1, "x").random() == expected.random()
