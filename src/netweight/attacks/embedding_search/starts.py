"""Where searches begin: embeddings of prompts, and noise that looks like an embedding. The search calls it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from netweight.attacks.embedding_search.settings import SearchSettings, Start
from netweight.core.seeds import derive, torch_generator
from netweight.errors import UsageError
from netweight.probe.diffusion import Text, TextToImage

__all__ = ["joined", "noise_like", "starting_points"]


def joined(texts: Sequence[Text]) -> Text:
    """Put prompts behind one another; where some have a mask and others none, theirs lets every token count.

    Args:
        texts: At least one, of one model.
    """
    states = torch.cat([text.states for text in texts])
    if all(text.mask is None for text in texts):
        return Text(states)
    masks = [torch.ones_like(text.states[..., 0], dtype=torch.bool) if text.mask is None else text.mask.bool()
             for text in texts]  # fmt: skip
    return Text(states, torch.cat(masks))


def noise_like(text: Text, seed: int) -> Text:
    """Draw noise with the mean and deviation that each channel has over all prompts and tokens.

    Args:
        text: Prompts to take them from.
        seed: Of the draw.

    Returns:
        One prompt, all of whose tokens count.
    """
    states = text.states.float()
    mean, deviation = states.mean((0, 1)), states.flatten(0, 1).std(0, correction=0)
    drawn = torch.randn(states.shape[1:], generator=torch_generator(seed)).to(states)
    return Text((mean + deviation * drawn).to(text.states)[None])


def starting_points(
    model: TextToImage, prompt: str, unrelated: Sequence[str], settings: SearchSettings, *, seed: int
) -> tuple[list[tuple[Start, int]], Text]:
    """Return the embeddings that searches for one target begin with.

    Args:
        model: Its text encoder is used, no denoiser.
        prompt: The target's.
        unrelated: Prompts that have nothing to do with it; noise takes its statistics from them.
        settings: Which starts, and how many of each.
        seed: Of the choice of prompts and of the noise.

    Returns:
        Which start each is and its number among those, and the embeddings, one row for each.

    Raises:
        UsageError: There is no unrelated prompt, or the only ones are the target's own, and some start needs one.
    """
    others = [other for other in dict.fromkeys(unrelated) if other != prompt]
    if not others and set(settings.starts) & {"unrelated", "noise"}:
        raise UsageError(
            f"There is no prompt unrelated to {prompt!r} to start from.",
            cure='Give some, or search from the start "original" alone.',
        )
    first = derive(seed, "unrelated") % len(others) if others else 0
    names: list[tuple[Start, int]] = []
    texts: list[Text] = []
    for start in settings.starts:
        for number in range(settings.restarts):
            names.append((start, number))
            if start == "noise":
                texts.append(noise_like(model.embed(others), derive(seed, "noise", number)))
            else:
                texts.append(model.embed([prompt if start == "original" else others[(first + number) % len(others)]]))
    return names, joined(texts)
