"""8-bit optimizers of other libraries give compressed models the dense bits, with and without LayerwiseOptimizer."""

import pytest
import torch
from models_under_test import differing, pair, stack

import netweight


def bitsandbytes(monkeypatch):
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return library.optim.AdamW8bit, {"min_8bit_size": 64}


def torchao(monkeypatch):
    library = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # it compiles each weight's step
    return library.AdamW8bit, {}


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole model", "layer by layer"])
@pytest.mark.parametrize("library", [bitsandbytes, torchao])
def test_eight_bit_optimizers_give_the_dense_bits(monkeypatch, library, layerwise):
    kind, options = library(monkeypatch)
    x, losses = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)), []
    models = pair(lambda: stack(2, width=128))
    for model in models:
        optimizer = (
            netweight.LayerwiseOptimizer(model, kind, lr=1e-2, **options)
            if layerwise
            else kind(model.parameters(), lr=1e-2, **options)
        )
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert losses[0] > losses[2]
    assert not differing(*models)
    assert isinstance(models[1][0].weight, netweight.CompressedTensor)
