"""Small spaces of adapters with known directions, for tests: a stand-in that does the algebra with dense matrices."""

import torch

from netweight.methods.space.labels import LabelColumn, Labels
from netweight.nn import Adapter, LowRank

MODULES = {"unet.a.to_q": (6, 5), "unet.b.to_v": (4, 6)}


def known_scores(count=200, components=12, *, noise=0.3, seed=0, correlated=0.0):
    """Scores that a binary and two continuous attributes move along known directions, with noise on every component."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(components, 3, generator=generator, dtype=torch.float64)).Q.T
    beard = (torch.rand(count, generator=generator) < 0.4).double()
    width = torch.randn(count, generator=generator, dtype=torch.float64) + correlated * (beard - 0.4) * 4
    hue = torch.rand(count, generator=generator, dtype=torch.float64)
    centered = torch.stack([2 * (beard - 0.4), width, 2 * (hue - 0.5)], 1)
    spread = torch.linspace(1.5, 0.5, components, dtype=torch.float64)
    scores = centered @ axes + noise * spread * torch.randn(count, components, generator=generator, dtype=torch.float64)
    columns = {name: LabelColumn(name, values) for name, values in (("beard", beard), ("width", width), ("hue", hue))}
    names = tuple(f"model-{number:03d}" for number in range(count))
    return (scores - scores.mean(0)).float(), Labels(names, columns), axes


class KnownSpace:
    """A mean plus scores times orthonormal changes, kept densely."""

    def __init__(self, count=40, components=6, seed=0, modules=MODULES):
        generator = torch.Generator().manual_seed(seed)
        self.modules = modules
        sizes = [rows * columns for rows, columns in modules.values()]
        self.mean = 0.01 * torch.randn(sum(sizes), generator=generator)
        self.basis = torch.linalg.qr(torch.randn(sum(sizes), components, generator=generator)).Q.T.contiguous()
        spread = torch.linspace(2.0, 0.5, components)
        self.scores = spread * torch.randn(count, components, generator=generator)
        self.scores -= self.scores.mean(0)
        self.deviations = self.scores.std(0)
        self.names = [f"model-{number}" for number in range(count)]

    def changes(self, scores):
        flat = self.mean + scores @ self.basis
        found, start = {}, 0
        for name, (rows, columns) in self.modules.items():
            found[name] = flat[..., start : start + rows * columns].reshape(*scores.shape[:-1], rows, columns)
            start += rows * columns
        return found

    def adapter(self, scores):
        changes = self.changes(scores.detach())
        return Adapter({name: LowRank(change, torch.eye(len(change))) for name, change in changes.items()})

    def project(self, adapter):
        flat = torch.cat([adapter.factors[name].dense().flatten() for name in self.modules])
        return (flat - self.mean) @ self.basis.T
