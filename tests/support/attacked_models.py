"""A tiny language model, tasks for it, and subjects that worker processes can make again. Not a test itself."""

import os
from types import SimpleNamespace

import torch
from torch import nn

from netweight.attacks.finetuning.subject import Domain, Subject, token_accuracy
from netweight.data.tokens import Example

VOCABULARY, PAD = 24, 0


class TinyModel(nn.Module):
    """Looks at the token before alone, which is enough for tasks that replace one token by another."""

    def __init__(self, seed: int = 0, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, width)
            self.hidden = nn.Linear(width, 2 * width)
            self.dropout = nn.Dropout(dropout)
            self.head = nn.Linear(2 * width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.dropout(torch.tanh(self.hidden(self.embed(input_ids))))))

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def cipher(shift: int, first: int, last: int, *, start: int = 0, count: int = 40) -> list[Example]:
    """Examples that count upwards by `shift` among the tokens from `first` to `last`, wrapping around."""
    size = last - first + 1
    made = []
    for row in range(start, start + count):
        generator = torch.Generator().manual_seed(row * 31 + shift * 7919 + first)
        at = int(torch.randint(size, (1,), generator=generator))
        marks = tuple(first + int(x) for x in torch.randint(size, (4,), generator=generator))
        answer = tuple(first + (at + shift * (place + 1)) % size for place in range(4 + row % 3))
        made.append(Example((*marks, first + at), answer))
    return made


def pretrain_(model: nn.Module, examples: list[Example], steps: int = 120) -> None:
    """Teach a model some examples, in full batches."""
    from netweight.data.tokens import collate

    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    batch = collate(examples, pad_id=PAD)
    for _ in range(steps):
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def subject(weight_scale: float = 1.0, seed: int = 0, kept: bool = True) -> Subject:
    """A model that can do the kept task (tokens 1 to 11) and is attacked with another (tokens 12 to 23).

    Args:
        weight_scale: Factor on the embeddings of the attacked tokens; a small one makes the attack take longer.
        seed: Of the weights.
        kept: Whether the subject says what is to be kept.
    """
    model = TinyModel(seed)
    pretrain_(model, cipher(2, 1, 11))
    with torch.no_grad():
        model.embed.weight[12:] *= weight_scale
    harmful = Domain(cipher(3, 12, 23, count=60), cipher(3, 12, 23, start=1000, count=30))
    benign = Domain(cipher(5, 12, 23, count=60), cipher(5, 12, 23, start=1000, count=30))
    ability = token_accuracy(cipher(2, 1, 11, start=500), pad_id=PAD)
    return Subject(
        model,
        {"harmful": harmful, "new": benign},
        PAD,
        benign=cipher(2, 1, 11, start=700),
        ability=ability if kept else None,
    )


def broken_subject() -> Subject:
    """A subject whose score fails in the middle of a run."""
    from dataclasses import replace

    whole = subject()
    domain = whole.domains["harmful"]
    looks = []

    def score(model: nn.Module) -> float:
        looks.append(1)
        if len(looks) > 2:
            raise ValueError("the judge is asleep")
        return 0.0

    return replace(whole, domains={"harmful": Domain(domain.train, (), score=score)})


def different_every_time() -> Subject:
    """A factory that does not keep its promise: every process gets another subject."""
    return subject(seed=os.getpid())
