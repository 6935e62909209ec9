"""A text-to-image model whose memorization is planted by hand, so that what to find is known. Not a test itself.

Its values decide how far predicted noise is drawn from a scramble of the initial noise to one fixed picture per prompt.
"""

import zlib

import torch
from torch import Tensor, nn

from netweight.core.digests import digest_config, digest_tensor
from netweight.nn.text_to_image import Prediction, Text

SIZE, TOKENS, WIDTH = 12, 3, 8
LAYERS = ("down_blocks.0.attn2", "down_blocks.1.attn2", "mid_block.attn2", "up_blocks.0.attn2")


class Attention(nn.Module):
    def __init__(self, neurons, generator):
        super().__init__()
        self.to_k = nn.Linear(WIDTH, neurons, bias=False)
        self.to_v = nn.Linear(WIDTH, neurons, bias=False)
        with torch.no_grad():
            self.to_k.weight.zero_()  # nothing attends here
            self.to_v.weight.copy_(torch.randn(neurons, WIDTH, generator=generator))


class Block(nn.Module):
    def __init__(self, neurons, generator):
        super().__init__()
        self.attn2 = Attention(neurons, generator)


class Denoiser(nn.Module):
    def __init__(self, seed, neurons):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.down_blocks = nn.ModuleList([Block(neurons, generator), Block(neurons, generator)])
        self.up_blocks = nn.ModuleList([Block(neurons, generator)])
        self.mid_block = Block(neurons, generator)
        self.picture = nn.Parameter(torch.randn(2, SIZE, SIZE, generator=generator), requires_grad=False)
        self.pull = nn.Parameter(
            0.5 * torch.randn(len(LAYERS), neurons, generator=generator) / neurons**0.5, requires_grad=False
        )
        self.calls = 0
        self.rows = 0

    def forward(self, latents: Tensor, states: Tensor) -> Tensor:
        self.calls, self.rows = self.calls + 1, self.rows + len(latents)
        pull = torch.zeros(len(latents))
        for place, name in enumerate(LAYERS):
            values = self.get_submodule(f"{name}.to_v")(states).abs().mean(1)
            pull = pull + values @ self.pull[place]
        share = torch.sigmoid(pull)[:, None, None, None]
        return latents + share * self.picture + (1 - share) * latents.roll((3, 5), (2, 3)).flip(1)


class Planted:
    """The `TextToImage`; what is generated or encoded is not needed here."""

    def __init__(self, seed=0, neurons=6):
        self.denoiser = Denoiser(seed, neurons).eval()

    name = "planted"

    def digest(self):
        return digest_config([digest_tensor(value) for value in self.denoiser.state_dict().values()])

    identity = digest

    def embed(self, prompts):
        rows = [
            torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(zlib.crc32(text.encode())))
            for text in prompts
        ]
        return Text(torch.stack(rows))

    def initial_noise(self, seeds):
        return torch.stack(
            [torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        )

    def timesteps(self, steps):
        return torch.linspace(999, 1, steps).long()

    def predict(self, latents, timestep, text):
        noise = self.denoiser(latents, text.states)
        return Prediction(noise, -noise)

    def add_noise(self, latents, noise, timestep):
        return 0.07 * latents + noise
