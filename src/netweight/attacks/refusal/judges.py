"""Judges of whether an answer is a refusal, or helps: phrases, first tokens, a user's function, a classifier."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from netweight.core.foreign_errors import opening, refuse_missing_weights, running
from netweight.core.lazy import extra, import_named
from netweight.data.answers import holds_phrase
from netweight.errors import NameNotFound, UsageError
from netweight.hf.load_language_model import positions_of

Judge: TypeAlias = Callable[[list[str]], list[float]]
"""Answers → one number from 0 to 1 for each."""
NAMED = ("phrases", "first-tokens")
"""Judges by name."""
_REFUSAL = re.compile(r"refus|reject|declin", re.IGNORECASE)
# Answers that a classifier sees at once.
_BATCH = 16
# RoBERTa and its relatives begin to count after the position of padding.
_UNUSED_POSITIONS = 2


def phrase_judge(phrases: Sequence[str]) -> Judge:
    """Return the judge that gives 1 to answers with a phrase."""
    return lambda answers: [float(holds_phrase(answer, phrases)) for answer in answers]


def user_judge(name: str, *, option: str, device: str = "cpu") -> Judge:
    """Return the judge that a user names.

    Args:
        name: `MODULE:NAME` of a function from answers to numbers, or the folder of a text classification model, with
            `#LABEL` for the label whose probability is the number.
        option: The command's option, for errors.
        device: Where a model goes.

    Raises:
        UsageError: There is no such function or model.
        NameNotFound: The model has no such label.
    """
    folder, _, label = name.partition("#")
    if (Path(folder) / "config.json").is_file():
        return _classifier(Path(folder), label, device)
    if ":" not in name:
        raise UsageError(
            f"{option} {name} is neither a function nor the folder of a model.",
            cure=f"Give {', '.join(NAMED)}, MODULE:NAME, or a folder with a config.json.",
        )
    function: Callable[[list[str]], Any] = import_named(name, f"The judge of {option}")

    def judge(answers: list[str]) -> list[float]:
        import torch

        with running(f"The judge {name!r} of {option}"):
            returned = function(answers)
        try:
            values = torch.as_tensor(returned).double().flatten()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"The judge {name} returned a {type(returned).__name__} that does not consist of numbers.",
                cure="Return a list of numbers from 0 to 1.",
            ) from error
        if not bool(values.isfinite().all()):
            raise UsageError(f"The judge {name} gave NaN or infinity.", cure="Return a number for each answer.")
        numbers = values.tolist()
        if len(numbers) != len(answers):
            raise UsageError(
                f"The judge {name} gave {len(numbers)} numbers for {len(answers)} answers.", cure="Return one for each."
            )
        return numbers

    return judge


def _classifier(folder: Path, label: str, device: str) -> Judge:
    with extra("llm", "A judging model needs transformers"):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    what = "a text classification model"
    with opening(folder, f"{what} with its tokenizer", cure="Name the folder of such a model, or another judge."):
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    refuse_missing_weights(folder, loaded, what)
    model = model.to(device).eval()
    # A decoder may have no token for padding; any one does, because padding is masked.
    if tokenizer.pad_token is None or model.config.pad_token_id is None:
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        model.config.get_text_config().pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    longest = positions_of(model)
    # A tokenizer without a length of its own would not cut long answers.
    if longest is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest - _UNUSED_POSITIONS)
    # The labels of such a classifier do not exclude each other.
    several = model.config.problem_type == "multi_label_classification"
    labels = {str(name): int(place) for place, name in model.config.id2label.items()}
    fitting = [name for name in labels if name == label or (not label and _REFUSAL.search(name))]
    if len(fitting) != 1:
        raise NameNotFound(
            f"The labels of {folder} are {', '.join(labels)}, and it is not evident which of them is meant.",
            cure=f"Name the label: {folder}#LABEL.",
        )

    def judge(answers: list[str]) -> list[float]:
        import torch

        # An empty answer, which some models cannot read, counts neither as a refusal nor as help.
        numbers = [0.0] * len(answers)
        asked = [place for place, answer in enumerate(answers) if answer.strip()]
        for first in range(0, len(asked), _BATCH):
            places = asked[first : first + _BATCH]
            texts = tokenizer([answers[place] for place in places], padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                logits = model(**texts.to(device)).logits
            shares = logits.sigmoid() if several or logits.shape[1] == 1 else logits.softmax(-1)
            for place, share in zip(places, shares[:, labels[fitting[0]]].tolist(), strict=True):
                numbers[place] = share
        return numbers

    return judge
