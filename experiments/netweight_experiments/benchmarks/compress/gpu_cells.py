"""The measurements of `compress.gpu`: each a function of the visit (device, model, size) that returns numbers.

A measurement that cannot be made here raises `Unsupported` or `MissingExtra`, with the reason. On the CPU, which is
there to show that everything runs, sizes are tiny and the numbers mean nothing.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import netweight
from netweight import codec
from netweight.core.seeds import torch_generator
from netweight.errors import CorruptBlob, MissingExtra, OutOfMemory, Unsupported
from netweight.methods.compress.folder_format import MANIFEST
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight_experiments.benchmarks.compress import fixed_products, gpu_kernels, model_parts
from netweight_experiments.cuda_graphs import captured
from netweight_experiments.memory import TensorLedger
from netweight_experiments.tables.neuzip.paper_scale_inference import FIXED as FIXED_ROW
from netweight_experiments.tables.neuzip.paper_scale_inference import LOSSLESS, apply_way, infer, tasks_of
from netweight_experiments.tables.neuzip.paper_scale_models import PAPER, TRIAL, Extent, Run, in_turns, let_go
from netweight_experiments.tables.neuzip.paper_scale_training import train
from netweight_experiments.tables.neuzip.quantizers import held_bytes, linear_layers
from netweight_experiments.tables.neuzip.throughput import throughput
from netweight_experiments.tables.neuzip.training import COMPRESSED, FIXED, LOMO, VANILLA, arrange

BATCHES = (1, 8, 32, 64, 256)
"""Sequences that are generated at once."""
WAYS = {"dense": "Vanilla", "fixed": FIXED_ROW, "codec": LOSSLESS, "NF4": "Quant NF4", "INT8": "Quant INT8"}
"""Ways to hold weights, by the names of the paper's rows."""
PROMPT = "def fibonacci(n):"
"""What every sequence begins with."""
SEED = 20261128


@dataclass(frozen=True)
class Visit:
    """What is measured on, and how large the measurement is."""

    device: str
    """Where to measure, such as `cuda:0`."""
    dry_run: bool
    """Whether sizes are tiny, on any device."""
    model: str | None = None
    """Folder of a language model of transformers, compressed or not, or of its parts; None for no real model."""

    @property
    def place(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    @property
    def extent(self) -> Extent:
        """How large a measurement on random weights is."""
        if self.dry_run:
            return TRIAL
        return replace(PAPER, batches=BATCHES, prompt=16, rounds=5)

    @property
    def batches(self) -> tuple[int, ...]:
        """Sequences that are generated at once."""
        return self.extent.batches


# ---- the real model --------------------------------------------------------------------------------------------------


def model_folder(model: str | None) -> Path:
    """Return the dense folder of the real model, made of its parts or decompressed if need be.

    Args:
        model: What the visit was given.

    Raises:
        Unsupported: None was given, or there is no such folder.
    """
    if model is None:
        raise Unsupported("no model was given: make bench-gpu MODEL=FOLDER (a folder of transformers, or of its parts)")
    folder = Path(model)
    if not folder.is_dir():
        raise Unsupported(f"there is no folder {folder}")
    if (folder / model_parts.CONTENTS).is_file():
        joined = folder.with_name(f"{folder.name}-joined")
        folder = joined if model_parts.is_joined(folder, joined) else model_parts.join(folder, joined)
    if (folder / MANIFEST).is_file():
        dense = folder.with_name(f"{folder.name}-dense")
        if not dense.is_dir():
            netweight.decompress_folder(folder, dense)
        folder = dense
    return folder


@lru_cache(maxsize=1)
def _real_models(model: str | None, device: str) -> tuple[Any, Mapping[str, Any], Mapping[str, int], Mapping[str, str]]:
    """The tokenizer; the model in every form that can be had here; the bytes of each; why others are missing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, place = model_folder(model), torch.device(device)
    dense: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(place)
    layers = linear_layers(dense)
    models, missing = {}, {}
    for name, row in WAYS.items():
        try:
            models[name] = dense if name == "dense" else copy.deepcopy(dense)
            if name in ("fixed", "codec"):  # heads and embeddings, too, as `from_pretrained` does
                netweight.compress_(models[name], prefer="speed" if name == "fixed" else "memory")
            else:
                apply_way(row, models[name], layers, place)
        except (MissingExtra, Unsupported) as error:
            del models[name]
            missing[name] = error.reason
    held = {name: held_bytes(each) for name, each in models.items()}
    return AutoTokenizer.from_pretrained(folder), models, held, missing


def real_generation(visit: Visit, batch: int) -> dict[str, Any]:
    """Generate greedily with the real model in every form, in turns; tokens are compared with the dense model's."""
    tokenizer, models, held, missing = _real_models(visit.model, visit.device)
    tokens, rounds = (2, 2) if visit.dry_run else (32, 5)
    inputs = tokenizer([PROMPT] * batch, return_tensors="pt").to(visit.place)

    @torch.inference_mode()
    def generate(model: Any) -> torch.Tensor:
        answer: torch.Tensor = model.generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        return answer

    answers = {name: generate(each) for name, each in models.items()}
    seconds = in_turns({name: _bound(generate, each) for name, each in models.items()}, visit.place, rounds=rounds)
    steps = _step_seconds(visit, models, batch, rounds)
    return {
        "batch": batch,
        "tokens": tokens,
        "missing": dict(missing),
        "ways": {
            name: {
                "tokens a second, generate": batch * tokens / median(seconds[name]),
                "speed / dense, generate": _ratio(seconds, name),
                "speed / dense, a step": _ratio(steps, name),
                "milliseconds, a step": 1e3 * median(steps[name]),
                "share of tokens equal to dense": float((answers[name] == answers["dense"]).float().mean()),
                "bytes held": held[name],
            }
            for name in models
        },
    }


def _bound(function: Callable[[Any], Any], model: Any) -> Callable[[], Any]:
    return lambda: function(model)


def _step_seconds(visit: Visit, models: Mapping[str, Any], batch: int, rounds: int) -> dict[str, tuple[float, ...]]:
    """Seconds of a decoding step with a cache, in a CUDA graph where one can be captured."""
    dense = models["dense"]
    extent = replace(visit.extent, batches=(batch,))
    task = tasks_of(dense, linear_layers(dense), extent, visit.place)[f"step {batch}"]
    calls = {}
    for name, each in models.items():
        call = task.bind(each)
        try:
            calls[name] = captured(call, visit.place)
        except RuntimeError:  # a quantizer whose kernels cannot be captured runs from Python
            calls[name] = call
    return in_turns(calls, visit.place, rounds=rounds)


def _ratio(seconds: Mapping[str, tuple[float, ...]], name: str) -> float:
    return float(median(dense / own for own, dense in zip(seconds[name], seconds["dense"], strict=True)))


def real_loading(visit: Visit) -> dict[str, Any]:
    """Load the compressed folder to the device: the default form there, and the time beside the dense folder's."""
    from transformers import AutoModelForCausalLM

    folder = model_folder(visit.model)
    with tempfile.TemporaryDirectory() as place:
        compressed = Path(place) / "net"
        netweight.compress_folder(folder, compressed)
        result: dict[str, Any] = {}
        for name, source in (("dense", folder), ("compressed", compressed)):
            started = time.perf_counter()
            model: Any = AutoModelForCausalLM.from_pretrained(source, device_map=visit.device, dtype=torch.bfloat16)
            if visit.place.type == "cuda":
                torch.cuda.synchronize(visit.place)
            stored = [each.stored for each in model.parameters() if isinstance(each, CompressedTensor)]
            result[name] = {
                "seconds": time.perf_counter() - started,
                "bytes held": netweight.memory_footprint(model),
                "weights in the fixed-length form": sum(each.fixed for each in stored),
                "weights in the codec's form": sum(not each.fixed for each in stored),
            }
            del model
    return result


def trained_in_every_way(visit: Visit) -> dict[str, Any]:
    """Train the real model for a few steps in every way; losses, peaks and seconds."""
    *_, result = real_training(visit)
    return result


def real_training(visit: Visit, chosen: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Train the real model for a few steps in every way, or those chosen; yield losses, peaks and seconds after each.

    Seconds are of all threads' processor time on the CPU, which other programs hardly influence, and elapsed on a GPU.
    The first half of the steps gives the peak, the second half the time.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(visit.model)
    _real_models.cache_clear()
    steps, length = (2, 8) if visit.dry_run else (6 if visit.place.type == "cuda" else 4, 512)
    text = Path(__file__).read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :length].to(visit.place)
    result: dict[str, Any] = {"steps": steps, "tokens": ids.shape[1], "optimizer": "AdamW"}
    ways = {"plain": VANILLA, "LOMO": LOMO, "fixed": FIXED, "codec": COMPRESSED}
    chunked = {"plain, chunked loss": VANILLA, "codec, chunked loss": COMPRESSED}
    clock = time.perf_counter if visit.place.type == "cuda" else time.process_time
    for name, way in {**ways, **chunked}.items():
        if chosen and name not in chosen:
            continue
        let_go(visit.place)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.to(visit.place).train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        states = {"states": "compressed"} if way in (FIXED, COMPRESSED) else {}
        optimizer = arrange(way, model, torch.optim.AdamW, lr=1e-5, **states)
        losses: list[str] = []
        with netweight.chunk_loss(model) if name in chunked else nullcontext():
            with _peak_of(visit.place, model, optimizer) as peak:
                for _ in range(steps // 2):
                    losses.append(_step(model, optimizer, ids))
            seconds = []  # without what counts tensors, which takes time for every operator
            for _ in range(steps - steps // 2):
                started = clock()
                losses.append(_step(model, optimizer, ids))
                seconds.append(clock() - started)
        result[name] = {"losses": losses, "seconds a step": median(seconds), "peak bytes": peak["bytes"]}
        del model, optimizer
        if name in ("fixed", "codec") and "LOMO" in result:
            result[name]["steps whose loss differs from LOMO's"] = sum(
                one != other for one, other in zip(losses, result["LOMO"]["losses"], strict=True)
            )
            result[name]["speed / LOMO"] = result["LOMO"]["seconds a step"] / result[name]["seconds a step"]
        yield result


def _step(model: Any, optimizer: Any, ids: torch.Tensor) -> str:
    """Make one step of training and return the loss, with all its bits."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()).hex()


@contextmanager
def _peak_of(place: torch.device, model: Any, optimizer: Any) -> Any:
    """The most bytes of tensors in the block: the allocator's on a GPU, counted elsewhere."""
    peak: dict[str, int] = {}
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
        yield peak
        peak["bytes"] = torch.cuda.max_memory_allocated(place)
    else:
        with TensorLedger(model, optimizer) as ledger:
            yield peak
        peak["bytes"] = ledger.peak.nbytes


# ---- random weights of the shape of Llama-3 8B -----------------------------------------------------------------------


def random_inference(visit: Visit, way: str) -> dict[str, Any]:
    """Measure one way to hold the weights of Llama-3 8B beside bf16.

    Measured are steps at every batch, a window of 1,024 tokens, and the memory that the driver gets back.
    """
    extent = visit.extent
    result = infer(
        Run(extent.shapes[0], WAYS[way], visit.place.type, visit.dry_run),
        extent,
        lambda task: task == "window" or task.startswith("step"),
    )
    if "missing" in result:
        raise Unsupported(result["missing"])
    speeds = {
        f"speed / dense, {task}": _ratio({"way": own["way"], "dense": own["vanilla"]}, "way")
        for task, own in result["seconds"].items()
    }
    steps = {f"tokens a second, {task}": batch / median(result["seconds"][task]["way"]) for batch in visit.batches
             if (task := f"step {batch}") in result["seconds"]}  # fmt: skip
    return {**speeds, **steps, **{key: value for key, value in result.items() if key != "seconds"}}


def random_training(visit: Visit, way: str) -> dict[str, Any]:
    """Train the shape of Llama-3 8B by SGD in one way; `compress.gpu` reports speeds as ratios to LOMO's."""
    ways = {"LOMO": LOMO, "fixed": FIXED, "codec": COMPRESSED}
    result = train(Run(visit.extent.shapes[0], ways[way], visit.place.type, visit.dry_run))
    if "missing" in result:
        raise Unsupported(result["missing"])
    return {**result, "seconds a step": median(result["seconds"])}


# ---- kernels ---------------------------------------------------------------------------------------------------------


def codec_rates(visit: Visit) -> dict[str, Any]:
    """Decode and encode matrices: beside the peers that are installed, and by the kernels alone."""
    side = 64 if visit.dry_run else 16384
    found = throughput(visit.place, side, rounds=visit.extent.rounds)
    nbytes = 2 * side**2
    rates = {
        name: {
            "GB/s packed": nbytes / median(point["pack"]) / 1e9,
            "GB/s unpacked": nbytes / median(point["unpack"]) / 1e9,
            "share of bytes": point["share"],
        }
        for name, (point,) in found["ways"].items()
    }
    kernels: Any = "measured on GPUs only"
    if visit.place.type == "cuda":
        kernels = {
            f"{rows} x {columns}": gpu_kernels.measure((rows, columns), 15, visit.extent.rounds, visit.place)
            for rows, columns in gpu_kernels.SIZES
        }
    return {"side": side, "ways": rates, "missing": found["missing"], "kernels alone, GB/s": kernels}


def many_rows(visit: Visit) -> dict[str, Any]:
    """Multiply 64 and 256 rows of inputs with weights in the fixed-length form, beside torch's product."""
    shapes, work = ([(64, 64)], 1 << 14) if visit.dry_run else ([(14336, 4096), (4096, 14336), (4096, 4096)], 1 << 29)
    with torch.no_grad():
        return {
            f"{rows} x {columns}, {batch} rows of inputs": fixed_products.measure(
                rows, columns, batch, work, visit.extent.rounds, visit.place
            )
            for rows, columns in shapes
            for batch in (32, 64, 256)
        }


# ---- bad input -------------------------------------------------------------------------------------------------------


def _layers(visit: Visit) -> nn.Sequential:
    generator = torch_generator(SEED, "layers")
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    for layer in layers:
        layer.weight.data = torch.randn(512, 512, generator=generator) * 0.02
    return layers.bfloat16().to(visit.place).requires_grad_(False)


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [
        (each.dense() if isinstance(each, CompressedTensor) else each.detach()).cpu().clone()
        for each in model.parameters()
    ]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


def damaged_blob(visit: Visit) -> dict[str, Any]:
    """Bring a damaged weight to the device: its first use must name the damage, and other weights stay as they were."""
    model = _layers(replace(visit, device="cpu"))
    values = _values(model)
    netweight.compress_(model, prefer="memory")
    damaged: Any = model[2].weight
    payload = damaged.stored.payload
    payload[payload.numel() // 2 : payload.numel() // 2 + 64] ^= 255
    model.to(visit.place)
    try:
        if visit.place.type == "cpu":  # where bytes are checked when they are read from a file, not when they are used
            codec.decode(damaged.stored.blob, check=True)
        else:
            with torch.no_grad():
                model(torch.ones(1, 512, dtype=torch.bfloat16, device=visit.place))
            netweight.check_device()
        message = None
    except CorruptBlob as error:
        message = str(error)
    others = [each for number, each in enumerate(model) if number != 2]
    return {
        "refused": message is not None,
        "message": message,
        "other weights as they were": _same(_values(nn.Sequential(*others)), values[:2] + values[3:]),
    }


def unsupported_card(visit: Visit) -> dict[str, Any]:
    """Pretend that the card is too old: the reason must be named, and results be right all the same."""
    from netweight.codec import cuda
    from netweight.methods.compress.runtime import cuda as device

    model = _layers(visit)
    x = torch.randn(2, 512, generator=torch_generator(SEED, "x")).bfloat16().to(visit.place)
    expected = model(x)
    device._kernels_run.cache_clear()
    try:
        with patch("torch.cuda.get_device_capability", lambda *_: (6, 1)), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            reason = cuda.unavailable_because()
            netweight.compress_(model)
            equal = bool(torch.equal(model(x), expected))
    finally:
        device._kernels_run.cache_clear()
    return {"reason": reason, "warnings": [str(each.message) for each in said], "outputs equal": equal}


def memory_ends(visit: Visit) -> dict[str, Any]:
    """Let the device's memory end while a model is compressed: a named error, and all weights with their values."""
    from netweight.methods.compress.runtime.storage import CompressedStorage

    model = _layers(visit)
    values, real, calls = _values(model), CompressedStorage.of, []

    def of(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            if visit.place.type == "cuda":
                torch.empty(1 << 44, dtype=torch.uint8, device=visit.place)  # more than any card has
            raise torch.OutOfMemoryError("pretended")
        return real(*arguments, **options)

    try:
        with patch.object(CompressedStorage, "of", of):
            netweight.compress_(model, prefer="memory")
        message = None
    except OutOfMemory as error:
        message = str(error)
    gc.collect()
    return {"refused": message is not None, "message": message, "weights as they were": _same(_values(model), values)}
