"""Small real models, dense and compressed, and how to compare them to the last bit."""

import copy

import torch
from torch import nn

import netweight
from netweight import CompressedTensor


class Conv1D(nn.Module):
    """As in transformers: a linear layer with its weight transposed."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view((*x.shape[:-1], self.nf))


class Tied(nn.Module):
    """Embedding, layers, and an output layer that shares the embedding's weight."""

    def __init__(self, rows=300, width=64):
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.up = nn.Linear(width, 96)
        self.down = Conv1D(width, 96)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(torch.nn.functional.gelu(self.up(x)))))


class Picture(nn.Module):
    """Convolutions in one and two dimensions, grouped, strided, with padding given as a word."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, groups=2, bias=False)
        self.third = nn.Conv2d(32, 16, 3, padding="same")
        self.last = nn.Conv1d(16, 16, 5, padding=1)

    def forward(self, x):
        return self.last(self.third(self.second(torch.relu(self.first(x)))).flatten(2))


def stack(layers=4, width=64):
    """Some linear layers in a row."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def pair(make, dtype=torch.float32, seed=0, **options):
    """The same model twice: dense, and compressed in memory."""
    torch.manual_seed(seed)
    dense = make().to(dtype)
    compressed = copy.deepcopy(dense)
    netweight.compress_(compressed, **options)
    return dense, compressed


def bits(tensor):
    """A tensor's bytes, so that NaN equals itself and zeros keep their sign."""
    if isinstance(tensor, CompressedTensor):
        tensor = tensor.dense()
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(one, other):
    """Whether two tensors agree in shape, dtype and every bit."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def differing(one, other, what=lambda parameter: parameter):
    """Names of the parameters of two models that differ in any bit."""
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    return [name for (name, p), q in pairs if not same(what(p), what(q))]


def step(model, x):
    """Output and gradient of the input, if it can have one; the parameters' gradients stay."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_() if x.is_floating_point() else x
    y = model(x)
    y.square().mean().backward()
    return y, x.grad if x.is_floating_point() else y
