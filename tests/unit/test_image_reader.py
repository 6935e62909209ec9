"""A reader of attributes that a user brings: what it does wrong is named, wherever it is called."""

import sys
import types

import pytest
import torch

from netweight.errors import UsageError
from netweight.methods.space.image_reader import import_reader


@pytest.fixture
def reader_that(monkeypatch):
    """Make a module `own` whose function `read` is the given one, and import it as a reader."""

    def make(read):
        module = types.ModuleType("own")
        module.read = read
        monkeypatch.setitem(sys.modules, "own", module)
        return import_reader("own:read")

    return make


IMAGES = torch.rand(3, 3, 8, 8)


def test_what_a_reader_returns_is_passed_on_with_its_gradient(reader_that):
    images = IMAGES.clone().requires_grad_()
    values = reader_that(lambda images: {"light": images.mean((1, 2, 3))})(images)
    assert torch.equal(values["light"], images.mean((1, 2, 3)))
    values["light"].sum().backward()
    assert images.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda images: 1 / 0, "The reader 'own:read' fails: ZeroDivisionError"),
        (lambda images: images.mean(), "returned Tensor instead of a dict"),
        (lambda images: {}, "instead of a dict"),
        (lambda images: {"beard": images.mean((2, 3))}, r"\(3, 3\) for 'beard'"),
        (lambda images: {"beard": [0.5] * len(images)}, "list for 'beard'"),
        (lambda images: {"beard": torch.full((len(images),), torch.nan)}, "NaN or infinity for 'beard'"),
    ],
)
def test_a_reader_that_fails_is_named(reader_that, read, says):
    with pytest.raises(UsageError, match=says):
        reader_that(read)(IMAGES)
