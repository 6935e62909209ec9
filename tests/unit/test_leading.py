"""Leading components of matrices against their whole decomposition in fp64."""

from __future__ import annotations

import pytest
import torch

from netweight.nn.leading import leading_components

SPECTRA = {
    "as trained ones": lambda count: torch.arange(1, count + 1.0) ** -1,
    "steep": lambda count: torch.logspace(0, -7, count),
    "some and noise": lambda count: torch.cat([torch.full((12,), 5.0), torch.linspace(1, 0.9, count - 12)]),
    "level": torch.ones,
    "of rank 3": lambda count: torch.cat([torch.ones(3), torch.zeros(count - 3)]),
}


@pytest.mark.parametrize("shape", [(400, 300), (300, 400), (350, 350), (30, 40)])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_components_are_the_best_and_say_what_they_leave_out(shape, spectrum, dtype):
    draw = torch.Generator().manual_seed(0)
    count = min(shape)
    one, two = (torch.linalg.qr(torch.randn(side, count, generator=draw, dtype=torch.float64)).Q for side in shape)
    values = SPECTRA[spectrum](count).double()
    matrix = ((one * values) @ two.T).to(dtype)
    found = torch.linalg.svdvals(matrix.double())
    for rank in (1, 7, 16):
        left, kept, right, lost = leading_components(matrix, rank)
        assert left.shape == (shape[0], len(kept))
        assert right.shape == (shape[1], len(kept))
        assert len(kept) <= rank
        whole = float(found.square().sum())
        best = float(found[rank:].square().sum())
        difference = float((matrix.double() - (left * kept) @ right.T).square().sum())
        assert difference == pytest.approx(best, rel=1e-6, abs=1e-13 * whole)
        assert lost == pytest.approx(best, rel=1e-6, abs=1e-13 * whole)
        torch.testing.assert_close(left.T @ left, torch.eye(len(kept), dtype=torch.float64), rtol=0, atol=1e-9)


def test_nothing_has_one_component_of_value_zero():
    left, values, right, lost = leading_components(torch.zeros(500, 600), 4)
    assert (len(values), float(values[0]), lost) == (1, 0.0, 0.0)
    assert left.isfinite().all()
    assert right.isfinite().all()


def test_enormous_and_tiny_values_do_not_overflow():
    matrix = torch.randn(400, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for scale in (1e-30, 1e30):
        _, values, _, lost = leading_components((matrix * scale).float(), 4)
        expected = torch.linalg.svdvals(matrix)
        torch.testing.assert_close(values / scale, expected[:4], rtol=1e-5, atol=0)
        assert lost / scale**2 == pytest.approx(float(expected[4:].square().sum()), rel=1e-5)


def test_a_share_of_the_square_needs_fewer_components():
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 50, generator=draw) * torch.arange(1, 51.0) ** -1
    values = torch.linalg.svdvals(matrix.double()).square()
    for energy in (0.5, 0.9, 0.999):
        _, kept, _, lost = leading_components(matrix, 50, energy)
        assert lost <= (1 - energy) * float(values.sum())
        assert lost + float(kept[-1] ** 2) > (1 - energy) * float(values.sum())
