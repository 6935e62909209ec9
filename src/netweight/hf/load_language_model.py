"""Language models from folders of transformers, dense and with tokenizer; compressed folders too. Their parts.

`load_causal_lm` keeps the dtype that a model was saved in: where it is to be trained or attacked, nothing of it may be
rounded on the way in. `language_model` opens encoder-decoders as well, in bf16. A folder without a tokenizer may hold
one of llama2.c. Defenses and attacks that look inside a decoder find their way by `structure_of`. `measure_tasks` runs
tasks of EleutherAI's lm-evaluation-harness, where it is installed; the harness fetches their data itself, or reads
tasks of your own from a folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from netweight.core.devices import check_device
from netweight.core.foreign_errors import opening, refuse_missing_weights
from netweight.core.lazy import extra, open_compressed_with
from netweight.core.progress import silent_bars
from netweight.errors import MissingExtra, NameNotFound, Unsupported, UsageError
from netweight.hf.compare_logits import alike
from netweight.hf.language_model_folder import (
    check_generates,
    check_quantization,
    check_weight_files,
    model_config,
)
from netweight.hf.load_tokenizer import load_tokenizer
from netweight.hf.loaded_weights import refuse_lost_weights, refuse_two_heads, warn_of_own_code
from netweight.report.finding import Finding
from netweight.store.reader import StoredFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_causal_lm(folder: str | Path, *, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a causal language model in evaluation mode, in the dtype it was saved in."""
    check_device(device)
    model, tokenizer = _opened(Path(folder), "AutoModelForCausalLM", "auto", "a causal language model")
    rows = vocabulary_of(model)
    if tokenizer.eos_token is None:
        ends = model.config.eos_token_id
        end = ends[0] if isinstance(ends, list) and ends else ends
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end) if isinstance(end, int) else None
    # A padding token that was added to the tokenizer alone has no row in the embedding; padding is masked, so the end
    # of sequence does as well, and so does any other token with a row.
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(each for each in pads if isinstance(each, int) and (rows is None or 0 <= each < rows))
    if pad != tokenizer.pad_token_id:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    nn.Module.to(model, device)
    return model, tokenizer


def load_network(folder: str | Path) -> PreTrainedModel:
    """Open a model of transformers in evaluation mode, compressed weights as they are; no tokenizer is needed."""
    model_config(folder)
    with extra("llm", "The model needs transformers"):
        import transformers
    open_compressed_with("transformers")
    with opening(folder, "a model", cure="Check config and weights."), silent_bars():
        model: Any = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, dtype="auto", trust_remote_code=False
        )
    network: PreTrainedModel = model.eval()
    return network


def language_model(
    folder: Path, kind: Literal["decoder", "encoder-decoder"]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a language model in evaluation mode, in bf16."""
    if kind == "decoder":
        return _opened(folder, "AutoModelForCausalLM", torch.bfloat16, "a decoder")
    return _opened(folder, "AutoModelForSeq2SeqLM", torch.bfloat16, "an encoder-decoder")


def _opened(
    folder: Path, loader: str, dtype: torch.dtype | str, what: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with extra("llm", "Language models need transformers"):
        import transformers
    config = model_config(folder)
    _check_kind(folder, config, what, causal=loader == "AutoModelForCausalLM")
    tokenizer = load_tokenizer(folder)
    check_weight_files(folder)
    compressed = bool(config.get("quantization_config"))
    dtype = _saved_dtype(folder) if dtype == "auto" else dtype
    cure = "Check that the config and all weights exist, or fetch the model again."
    with opening(folder, what, cure=cure), silent_bars():
        if compressed:
            open_compressed_with("transformers")
        model, loaded = getattr(transformers, loader).from_pretrained(
            folder, local_files_only=True, dtype=dtype, trust_remote_code=False, ignore_mismatched_sizes=True,
            output_loading_info=True, **_any_attention(folder, config),
        )  # fmt: skip
    refuse_missing_weights(folder, loaded, what)
    refuse_lost_weights(folder, model, loaded.get("unexpected_keys", ()))
    warn_of_own_code(folder, config, model)
    if compressed:
        import netweight

        netweight.decompress_(model)
    refuse_two_heads(folder, model)
    return model.eval(), tokenizer


# Kernels of attention that transformers has itself, on every device.
_ATTENTION = (None, "eager", "sdpa")


def _any_attention(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without the kernel of attention that it names, where a library beside torch has it.

    A configuration may name the kernel of the machine on which a model was trained, such as flash_attention_2. All
    kernels compute the same, and transformers chooses one that exists where none is named.
    """
    if all(config.get(name) in _ATTENTION for name in ("attn_implementation", "_attn_implementation")):
        return {}
    import transformers

    opened: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    opened._attn_implementation = None
    return {"config": opened}


_WIDE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that weights are opened in, by their names in safetensors files."""


def _saved_dtype(folder: Path) -> torch.dtype | str:
    """Return the type of most bytes of a model's weights; "auto" where it is none of those that are computed with.

    The type that a configuration states may be another one: merged and converted models often state a narrower type
    than their files have, and "auto" would round the weights to it.
    """
    sizes: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        stored = StoredFile(file)
        try:
            for name in stored.names():
                info = stored.info(name)
                sizes[info.dtype] += info.nbytes
        finally:
            stored.close()
    most = sizes.most_common(1)
    return _WIDE.get(most[0][0], "auto") if most else "auto"


# Number of tokens of the vocabulary in the check of outputs.
_TRIED_TOKENS = 16


def _check_kind(folder: Path, config: Mapping[str, Any], what: str, *, causal: bool) -> None:
    """Refuse models that are not decoders, before anything is loaded."""
    names = [str(name) for name in config.get("architectures") or ()]
    named = ", ".join(names) or str(config.get("model_type"))
    if causal and config.get("is_encoder_decoder"):
        raise UsageError(
            f"{folder} contains {named}, an encoder-decoder, and {what} is needed.",
            cure="Name the folder of a decoder.",
        )
    if causal:
        check_generates(folder, config)
    check_quantization(folder, config)


def check_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase, sequences: Iterable[Sequence[int]]) -> None:
    """Refuse tokens that the tokenizer knows and the model's embedding does not.

    Args:
        model: A language model.
        tokenizer: Its tokenizer, to which tokens may have been added.
        sequences: Token ids of rows.

    Raises:
        UsageError: A sequence holds a token beyond the embedding.
    """
    rows = vocabulary_of(model)
    if rows is None or len(tokenizer) <= rows:
        return
    beyond = sorted({token for sequence in sequences for token in sequence if token >= rows})
    if beyond:
        names = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in beyond[:3])
        raise UsageError(
            f"The rows contain {names}, which were added to the tokenizer. The model's embedding has {rows} rows, so "
            "it never learned these tokens.",
            cure="Remove these rows, or call model.resize_token_embeddings(len(tokenizer)) and save the model.",
        )


def check_finite(model: nn.Module) -> None:
    """Refuse a model with a weight that is NaN or infinite, by the weight's name."""
    for name, value in model.named_parameters():
        # Of a sharded tensor, the part of this process is taken.
        part = value.to_local() if hasattr(value, "to_local") else value
        if not bool(part.isfinite().all()):
            raise UsageError(
                f"The weight {name!r} contains NaN or infinity.", cure="Use an undamaged copy of the model."
            )


@torch.no_grad()
def check_outputs(model: nn.Module) -> None:
    """Refuse a model whose predictions are no numbers, or that depend on later tokens or on padding.

    Predictions of large models in float16 may be no numbers. A model that sees the answer while it predicts it, or
    whose rows change each other in a batch, would be trained, attacked and scored wrongly.

    Args:
        model: A causal language model in evaluation mode; the first tokens of its vocabulary are run through it.

    Raises:
        UsageError: A logit is NaN or positive infinity.
        Unsupported: Predictions change with tokens that follow, or with padding and other rows of a batch.
    """
    rows, weight = vocabulary_of(model), next(model.parameters())
    ids = torch.arange(min(rows or 1, _TRIED_TOKENS), device=weight.device)[None]
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    if bool((logits.isnan() | logits.isposinf()).any()):
        kind = str(weight.dtype).removeprefix("torch.")
        wider = "model.to(torch.bfloat16).save_pretrained(NEW), whose range is larger" if kind == "float16" else ""
        raise UsageError(
            f"The model's predictions are NaN or infinite; it is computed in {kind}.",
            cure=f"Convert it once: {wider}." if wider else "Check its weights and its config.json.",
        )
    half = ids.shape[1] // 2
    if half:
        _check_rows(model, ids, logits[0], half)


def _check_rows(model: nn.Module, ids: Tensor, logits: Tensor, half: int) -> None:
    """Refuse a model that predicts the beginning of a text otherwise when the text goes on, or when padding follows."""
    beginning = ids[:, :half]
    padded = torch.cat([ids, torch.cat([beginning, ids[:, :1].expand(1, ids.shape[1] - half)], 1)])
    mask = torch.ones_like(padded)
    mask[1, half:] = 0
    alone: Tensor = model(input_ids=beginning, attention_mask=torch.ones_like(beginning)).logits[0]
    batch: Tensor = model(input_ids=padded, attention_mask=mask).logits
    name = type(model).__name__
    if not alike(logits[:half], alone):
        raise Unsupported(
            f"{name} predicts a token otherwise when other tokens follow it, so it sees the answers that it should "
            "predict.",
            cure="Give a causal language model. A config.json of a family that exists as an encoder and as a decoder "
            'needs "is_decoder": true.',
        )
    if not (alike(batch[0], logits) and alike(batch[1, :half], alone)):
        raise Unsupported(
            f"{name} predicts the tokens of a row otherwise when padding or another row is beside it, so rows cannot "
            "be trained on and scored in batches.",
            cure="Give a model of another family.",
        )


def positions_of(model: nn.Module) -> int | None:
    """Return the number of tokens that the configuration (of the text part) allows; None if unknown."""
    config: Any = getattr(model, "config", None)
    of_text = getattr(config, "get_text_config", None)
    config = of_text() if callable(of_text) else config
    try:
        longest = getattr(config, "max_position_embeddings", None)
    except NotImplementedError:
        # XLNet's configuration raises this error where there is no limit.
        return None
    return longest if isinstance(longest, int) and longest > 0 else None


def embedding_of(model: nn.Module) -> nn.Embedding | None:
    """The model's embedding of tokens; None if there is none to be found."""
    for module in model.modules():
        accessor = getattr(module, "get_input_embeddings", None)
        embedding = accessor() if callable(accessor) else module
        if isinstance(embedding, nn.Embedding):
            return embedding
    return None


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the number of tokens of the input embedding; None without one."""
    embedding = embedding_of(model)
    return None if embedding is None else int(embedding.weight.shape[0])


def context_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that a model takes, as its configuration and its tokenizer say."""
    longest = int(min(tokenizer.model_max_length, 1 << 30))
    return min(longest, positions_of(model) or longest)


# File in a trained model's folder that says how it was trained and what came of it.
ABOUT = "training.json"


# ---- the parts of a decoder, found by what they are and not by what they are called ----------------------------------

_CURE = (
    "Give a decoder with one list of blocks, each with attention and a feed-forward layer, then a norm and a linear "
    "layer to the vocabulary, such as a causal language model of transformers."
)
# A feed-forward layer takes the hidden state, and at most the residual as well. Attention takes far more inputs.
_MOST_INPUTS = 2


@final
@dataclass(frozen=True)
class DecoderStructure:
    """A decoder's parts by the names that they have in the model that was searched."""

    blocks: Mapping[str, nn.Module]
    """Decoder blocks by name, first to last."""
    feed_forwards: Mapping[str, nn.Module]
    """Modules whose output is that of the blocks' feed-forward layers before the residual, one for each block."""
    norm: nn.Module
    """Module that normalizes the output of the last block."""
    norm_name: str
    """Name of this module."""
    unembedding: nn.Module
    """Module that turns a normalized state into logits."""
    unembedding_name: str
    """Name of this module."""
    hidden_size: int
    """Width of the residual stream."""
    vocabulary: int
    """Number of logits."""


def structure_of(model: nn.Module) -> DecoderStructure:
    """Find a decoder's parts."""
    if any(getattr(getattr(module, "config", None), "is_encoder_decoder", False) for module in model.modules()):
        raise Unsupported(f"{type(model).__name__} has an encoder beside its decoder.", cure=_CURE)
    names = {id(module): name for name, module in model.named_modules()}
    unembedding = _unembedding(model)
    vocabulary, hidden = _matrix(unembedding).shape
    path, feed_forwards = _stack(model, hidden)
    stack = model.get_submodule(path)
    norm = _final_norm(model, path, hidden)
    return DecoderStructure(
        blocks={f"{path}.{name}": block for name, block in stack.named_children()},
        feed_forwards={name: model.get_submodule(name) for name in feed_forwards},
        norm=norm,
        norm_name=names[id(norm)],
        unembedding=unembedding,
        unembedding_name=names[id(unembedding)],
        hidden_size=hidden,
        vocabulary=vocabulary,
    )


def _matrix(module: nn.Module) -> Tensor:
    weight: Any = module.weight
    tensor: Tensor = weight
    return tensor


def _unembedding(model: nn.Module) -> nn.Module:
    """The layer to the vocabulary: what the model says it is, else the last layer shaped like an embedding."""
    for module in model.modules():
        accessor = getattr(module, "get_output_embeddings", None)
        layer = accessor() if callable(accessor) else None
        if isinstance(layer, nn.Module) and isinstance(getattr(layer, "weight", None), Tensor):
            return layer
    shapes = {module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.weight.shape in shapes]
    if not layers:
        raise Unsupported(f"{type(model).__name__} has no output layer.", cure=_CURE)
    return layers[-1]


def _stack(model: nn.Module, hidden: int) -> tuple[str, list[str]]:
    """The name of the list of blocks and the names of their feed-forward layers: of several lists the largest."""
    stacks: list[tuple[int, str, list[str]]] = []
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for path, blocks in lists:
        layers = [_feed_forward(block, hidden) for block in blocks]
        if layers and None not in layers:
            size = sum(parameter.numel() for parameter in blocks.parameters())
            stacks.append((size, path, [f"{path}.{index}.{layer}" for index, layer in enumerate(layers)]))
    if not stacks:
        tried = ", ".join(repr(path) for path, _ in lists) or "none"
        raise Unsupported(
            f"{type(model).__name__} has no list of decoder blocks with feed-forward layers of width {hidden} "
            f"(lists of modules: {tried}).",
            cure=_CURE,
        )
    _, path, layers_found = max(stacks, key=lambda entry: entry[0])
    return path, layers_found


def _shapes(module: nn.Module) -> set[tuple[int, int]]:
    """The shapes of a module's matrices; of stacked ones, such as merged experts, those of one."""
    return {tuple(weight.shape[-2:]) for weight in module.parameters() if weight.dim() >= 2}  # type: ignore[misc]


def _widens_and_narrows(shapes: set[tuple[int, int]], hidden: int) -> bool:
    """Return whether matrices lead out of the hidden width and back; gate and up projection may be one matrix."""
    out = {wide for first, wide in shapes if first == hidden}
    back = {wide for wide, last in shapes if last == hidden}
    return any(wide in back or 2 * wide in back or wide in {2 * narrow for narrow in back} for wide in out)


def _inputs(module: nn.Module) -> int:
    """Return the number of named arguments of a module's forward."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(parameter.kind not in kinds for parameter in inspect.signature(module.forward).parameters.values())


def _children(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A block's parts, seen through wrappers that hold nothing but it."""
    children = list(block.named_children())
    if len(children) == 1:
        prefix, inner = children[0]
        yield from ((f"{prefix}.{name}", child) for name, child in _children(inner))
    yield from children


def _feed_forward(block: nn.Module, hidden: int) -> str | None:
    """The name within a block of the module that puts out the feed-forward layer's result, or None."""
    # That is the part that widens and narrows again and takes little but the hidden state; where the two layers stand
    # in the block by themselves, the second of them.
    parts = [(name, part, _shapes(part)) for name, part in _children(block)]
    inputs = {name: _inputs(part) for name, part, shapes in parts if _widens_and_narrows(shapes, hidden)}
    whole = [name for name, count in inputs.items() if count == min(inputs.values()) <= _MOST_INPUTS]
    if whole:
        return whole[0] if len(whole) == 1 else None
    halves = [
        name
        for name, part, shapes in parts
        if _inputs(part) == 1 and any(hidden in shape and shape[0] != shape[1] for shape in shapes)
    ]
    return halves[1] if len(halves) == 2 else None


def _final_norm(model: nn.Module, path: str, hidden: int) -> nn.Module:
    """The last part beside the stack that holds vectors of the hidden width and no matrix."""
    around = model.get_submodule(path.rpartition(".")[0])
    parts = [(name, part, [value.shape for value in part.parameters()]) for name, part in around.named_children()]
    norms = [part for _, part, shapes in parts if shapes and all(tuple(shape) == (hidden,) for shape in shapes)]
    if not norms:
        raise Unsupported(f"There is no norm of width {hidden} beside {path!r}.", cure=_CURE)
    return norms[-1]


_HOW = 'Write numbers from 0, ranges such as "10-20" with both ends, "last" or "head", with commas between.'


def block_numbers(layers: str, blocks: int) -> tuple[list[int], bool]:
    """Read which layers are meant."""
    # Numbers are read as numbers. The code of RepNoise looks for the digits "0" to "9" in a parameter's name where
    # layers 0 to 10 are meant, and so finds every block of a model with 32: the paper's row "0-10" of table 6 is that
    # of a model all of whose blocks were frozen, if it came from this code.
    numbers: set[int] = set()
    head = False
    for part in (text.strip() for text in layers.split(",")):
        span = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if part == "head":
            head = True
        elif part == "last":
            numbers.add(blocks - 1)
        elif span is None:
            raise UsageError(f"{part!r} does not name any layers.", cure=_HOW)
        else:
            first = int(span[1])
            last = int(span[2] or first)
            if not first <= last < blocks:
                raise UsageError(f"There are no layers {part!r}: the model has blocks 0 to {blocks - 1}.", cure=_HOW)
            numbers.update(range(first, last + 1))
    return sorted(numbers), head


@contextmanager
def frozen(model: nn.Module, layers: str) -> Iterator[list[str]]:
    """Keep layers from being trained within a block of code."""
    parts = structure_of(model)
    numbers, head = block_numbers(layers, len(parts.blocks))
    modules = [list(parts.blocks.values())[number] for number in numbers] + [parts.unembedding] * head
    chosen = {id(value) for module in modules for value in module.parameters()}
    held = {name: value for name, value in model.named_parameters() if id(value) in chosen and value.requires_grad}
    try:
        for value in held.values():
            value.requires_grad_(False)
        yield list(held)
    finally:
        for value in held.values():
            value.requires_grad_(True)


# ---- tasks of lm-evaluation-harness ----------------------------------------------------------------------------------

# Task and metric → score, standard error, number of examples.
Scores: TypeAlias = Mapping[tuple[str, str], tuple[float, float | None, int | None]]
# Quantile of a normal 95 % interval around the harness's own standard error.
_Z = 1.959964


def check_lm_eval() -> None:
    """Refuse before hours of work what would fail after them."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtra("Tasks need lm-evaluation-harness, which is not installed.", cure="Run: pip install lm-eval")


def measure_tasks(
    folder: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    device: str = "cpu",
    own: str | Path | None = None,
) -> Scores:
    """Run tasks on a model folder."""
    check_lm_eval()
    harness: Any = importlib.import_module("lm_eval")
    tasks_manager: Any = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=None if own is None else str(own)
    )
    unknown = [task for task in tasks if task not in tasks_manager.all_tasks]
    if unknown:
        raise NameNotFound(f"lm-evaluation-harness has no task {unknown[0]!r}.", cure="See: lm-eval ls tasks")
    model, tokenizer = load_causal_lm(folder, device=device)
    wrapped = importlib.import_module("lm_eval.models.huggingface").HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=8
    )
    results = harness.simple_evaluate(
        model=wrapped,
        tasks=list(tasks),
        limit=limit,
        task_manager=tasks_manager,
        bootstrap_iters=1000,
        log_samples=False,
    )
    return _scores(results)


def _scores(evaluation: Mapping[str, Any]) -> Scores:
    scores: dict[tuple[str, str], tuple[float, float | None, int | None]] = {}
    for task, results in evaluation["results"].items():
        n = evaluation.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in results.items():
            metric, _, filtered = key.partition(",")
            error = results.get(f"{metric}_stderr,{filtered}")
            if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
                deviation = float(error) if isinstance(error, int | float) else None
                scores[task, metric if filtered == "none" else f"{metric} ({filtered})"] = float(value), deviation, n
    return scores


def task_findings(name: str, before: Scores, after: Scores) -> list[Finding]:
    """Put a defended model's scores beside its base's."""
    findings = []
    for (task, metric), (value, error, n) in after.items():
        ends = None if error is None else (value - _Z * error, value + _Z * error)
        base = before.get((task, metric), (None, None, None))[0]
        findings.append(Finding(f"{task} {metric}, {name}", value, ci95=ends, n=n or None, baseline=base))
    return findings
