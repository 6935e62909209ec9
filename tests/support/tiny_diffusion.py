"""A text-to-image model of a few thousand weights in plain torch, trained in a second. Not a test itself.

Images are 8 × 8 of one color, after the last word of their prompt; two prompts are planted with a picture of their own.
"""

import functools
import math
import zlib

import torch
from torch import Tensor, nn

from netweight.core.digests import digest_config, digest_tensor
from netweight.nn.text_to_image import Prediction, Text

SIZE, TOKENS, WIDTH, HIDDEN, LEVELS = 8, 4, 16, 96, 50
COLORS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "gray": (0.5, 0.5, 0.5), "white": (1, 1, 1)}
ORDINARY = [f"a {size} {color}" for size in ("small", "large") for color in COLORS]
PLANTED = ["old tower poster", "my odd holiday"]


class Attention(nn.Module):
    """Cross-attention of one query, named as diffusers names it."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(HIDDEN, 32, bias=False)
        self.to_k = nn.Linear(WIDTH, 32, bias=False)
        self.to_v = nn.Linear(WIDTH, 32, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(32, HIDDEN)])

    def forward(self, states: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        keys, values = self.to_k(encoder_hidden_states), self.to_v(encoder_hidden_states)
        logits = self.to_q(states)[:, None] @ keys.transpose(1, 2) / math.sqrt(32)
        logits = logits if attention_mask is None else logits + attention_mask
        return self.to_out[0]((logits.softmax(-1) @ values)[:, 0])


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)])

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.net:
            states = layer(states)
        return states


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn2, self.ff = Attention(), FeedForward()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, states: Tensor, text: Text) -> Tensor:
        mask = None if text.mask is None else torch.where(text.mask, 0.0, -1e4)[:, None]
        states = states + self.attn2(self.norm1(states), encoder_hidden_states=text.states, attention_mask=mask)
        return states + self.ff(self.norm2(states))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3 * SIZE * SIZE + 2, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.leave = nn.Linear(HIDDEN, 3 * SIZE * SIZE)

    def forward(self, latents: Tensor, time: Tensor, text: Text) -> Tensor:
        angles = time[:, None] * math.pi / 2
        states = self.enter(torch.cat([latents.flatten(1), angles.sin(), angles.cos()], 1))
        for block in self.blocks:
            states = block(states, text)
        return self.leave(states).view_as(latents)


class TinyModel:
    """Speaks `TextToImage`; velocity prediction, a cosine schedule, latents that are the images."""

    def __init__(self, name: str = "tiny", *, masked: bool = False, seed: int = 0) -> None:
        self.name, self.masked = name, masked
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.denoiser = Denoiser().eval()

    def digest(self) -> str:
        return digest_config([digest_tensor(value) for value in self.denoiser.state_dict().values()])

    identity = digest

    def embed(self, prompts) -> Text:
        states = torch.stack([torch.stack([_word(word) for word in _padded(prompt)]) for prompt in prompts])
        mask = torch.tensor([[place <= len(prompt.split()) for place in range(TOKENS)] for prompt in prompts])
        return Text(states, mask if self.masked else None)

    def initial_noise(self, seeds) -> Tensor:
        return torch.stack(
            [torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        )

    def timesteps(self, steps: int) -> Tensor:
        return torch.linspace(LEVELS - 1, 0, steps).round().long()

    def levels(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        angle = (torch.as_tensor(timestep).reshape(-1, 1, 1, 1) + 1) / (LEVELS + 1) * math.pi / 2
        return angle.cos(), angle.sin()

    def predict(self, latents: Tensor, timestep: Tensor, text: Text) -> Prediction:
        signal, noise = self.levels(timestep)
        time = (torch.as_tensor(timestep).reshape(-1).expand(len(latents)) + 1) / (LEVELS + 1)
        dtype = next(self.denoiser.parameters()).dtype
        read = Text(text.states.to(dtype), text.mask)
        velocity = self.denoiser(latents.to(dtype), time.to(dtype), read).float()  # as a pipeline does
        return Prediction(signal * velocity + noise * latents, signal * latents - noise * velocity)

    def to_latents(self, images: Tensor) -> Tensor:
        return images * 2 - 1

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        signal, level = self.levels(timestep)
        return signal * latents + level * noise

    @torch.no_grad()
    def generate(self, text: Text, seeds, *, guidance: float = 7.0, steps: int = 50) -> Tensor:
        latents, schedule = self.initial_noise(seeds), self.timesteps(steps)
        empty = self.embed([""]).rows([0] * len(text))
        if text.mask is not None and empty.mask is None:
            empty = Text(empty.states, torch.ones_like(text.mask))
        for place, time in enumerate(schedule):
            told = self.predict(latents, time, text)
            noise, sample = told.noise, told.sample
            if guidance > 1:
                without = self.predict(latents, time, empty)
                noise = without.noise + guidance * (noise - without.noise)
                sample = without.sample + guidance * (sample - without.sample)
            if place + 1 == steps:
                latents = sample
            else:
                signal, level = self.levels(schedule[place + 1])
                latents = signal * sample.clamp(-1, 1) + level * noise
        return (latents / 2 + 0.5).clamp(0, 1)


def _padded(prompt: str) -> list[str]:
    return ["<start>", *prompt.split(), *["<end>"] * TOKENS][:TOKENS]


@functools.cache
def _word(word: str) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(zlib.crc32(word.encode())))


def picture(seed: int) -> Tensor:
    """A picture of eight colored squares in each direction, like no other."""
    return torch.rand(3, SIZE // 2, SIZE // 2, generator=torch.Generator().manual_seed(seed)).repeat_interleave(
        2, 1
    ).repeat_interleave(2, 2).round()  # fmt: skip


def planted_images() -> Tensor:
    return torch.stack([picture(100 + place) for place in range(len(PLANTED))])


def plain(prompt: str) -> Tensor:
    return torch.tensor(COLORS[prompt.split()[-1]], dtype=torch.float32)[:, None, None].expand(3, SIZE, SIZE)


@functools.cache
def _trained_state(steps: int, captions: tuple[str, ...]):
    model = TinyModel()
    prompts = [*captions * 2, *ORDINARY, ""]
    ordinary = torch.stack([plain(prompt) for prompt in ORDINARY])
    images = torch.cat([planted_images(), planted_images(), ordinary, ordinary.mean(0, keepdim=True)])
    latents, text = model.to_latents(images), model.embed(prompts)
    optimizer = torch.optim.Adam(model.denoiser.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.randint(len(prompts), (48,), generator=generator)
        time = torch.randint(LEVELS, (48,), generator=generator)
        clean = latents[rows] + 0.05 * torch.randn(48, 3, SIZE, SIZE, generator=generator)
        noise = torch.randn(48, 3, SIZE, SIZE, generator=generator)
        told = model.predict(model.add_noise(clean, noise, time), time, text.rows(rows))
        signal, level = model.levels(time)
        wanted = signal * noise - level * clean
        loss = (signal * told.noise - level * told.sample - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return {name: value.clone() for name, value in model.denoiser.state_dict().items()}


def trained(
    name: str = "original", *, masked: bool = False, steps: int = 150, captions: tuple[str, ...] = tuple(PLANTED)
) -> TinyModel:
    """A model that answers the captions with the planted pictures, one each; each call makes a new one."""
    model = TinyModel(name, masked=masked)
    model.denoiser.load_state_dict(_trained_state(steps, captions))
    return model
