"""Model families with a use here; others are refused by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netweight.autoload import HINT, METHOD
from netweight.core.bounded_json import MOST_INDEX, read_json, read_object
from netweight.core.lazy import extra
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_tokenizer import load_tokenizer
from netweight.store.safetensors import read_header
from netweight.store.shards import refuse_missing_shards

_GENERATES = ("CausalLM", "LMHead", "ForConditionalGeneration", "ForVision2Seq", "ForImageTextToText")


def family_of(folder: str | Path) -> str:
    """Return the name of a model's architecture, or of its family, as its config states it.

    Raises:
        UsageError: There is no config.json, or it cannot be read.
    """
    config = model_config(folder)
    architectures = config.get("architectures") or []
    return str(architectures[0] if architectures else config.get("model_type") or "a model of unknown family")


def check_language_model(folder: str | Path) -> None:
    """Refuse what is not a decoder language model with its tokenizer; no weight is read, only their files' headers.

    Raises:
        UsageError: There is no config.json, it cannot be read, there is no tokenizer, or the family has no use
            here; the message names it.
        Unsupported: The weights are quantized by another library.
    """
    folder = Path(folder)
    name, reason = family_of(folder), ""
    config = model_config(folder)
    with extra("llm", "Language models need transformers"):
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        )
    family = str(config.get("model_type", ""))
    causal = any(each.endswith(("ForCausalLM", "LMHeadModel")) for each in config.get("architectures") or [])
    if config.get("is_encoder_decoder") or (family.startswith(("t5", "mt5", "bart", "mbart")) and not causal):
        reason = "an encoder-decoder"
    elif not causal and not config.get("is_decoder") and family in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        reason = "an encoder"
    elif not causal and family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        reason = f"of the family {family!r}" if family else "a model whose family its config does not name"
    if reason:
        raise UsageError(
            f"{folder} ({name}) is {reason}, and this command supports only decoder language models.",
            cure=f"Such a model can be compressed: netweight compress {folder} NEW.",
        )
    check_generates(folder, config)
    check_quantization(folder, config)
    check_weight_files(folder)
    load_tokenizer(folder)


def check_generates(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model without its output layer over the vocabulary, such as LlamaModel, or with another one.

    Args:
        folder: A model's folder.
        config: Its configuration.

    Raises:
        UsageError: None of its architectures generates text.
    """
    names = [str(name) for name in config.get("architectures") or ()]
    if names and not any(part in name for name in names for part in _GENERATES):
        raise UsageError(
            f"{folder} contains {', '.join(names)}, which does not generate text, and a causal language model is "
            "needed.",
            cure="Name the folder of a decoder with its output layer, such as LlamaForCausalLM.",
        )


def check_weight_files(folder: Path) -> None:
    """Refuse weights that are not all there, by the headers of files and the index of shards.

    Args:
        folder: A model's folder.

    Raises:
        CorruptBlob: A file was cut short or is a pointer of Git LFS, or a shard is missing.
        UsageError: The index is not one.
    """
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        read_header(file)
    indexed: set[str] = set()
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            indexed |= {str(name) for name in read_object(index, limit=MOST_INDEX)["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{index} is not an index of weights: {error}.", cure="Fetch it again.") from error
    present = {file.name for file in files} | {name for name in indexed if (folder / name).is_file()}
    refuse_missing_shards(folder, present, indexed=sorted(indexed))


def check_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse weights that another library quantized.

    Args:
        folder: A model's folder.
        config: Its configuration.

    Raises:
        Unsupported: The weights are codes of another method than netweight's.
    """
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, Mapping) else quantized
    if quantized and method not in (METHOD, HINT):
        raise Unsupported(
            f"{folder} is quantized ({method}): its weights are codes, which can be neither attacked nor trained here.",
            cure="Give the model from before its quantization, in fp32, bf16 or fp16, or write it so once: "
            "model.dequantize(), then model.save_pretrained(NEW) without quantization_config.",
        )


def model_config(folder: str | Path) -> dict[str, Any]:
    """Read the configuration of a model's folder.

    Raises:
        UsageError: There is none, or it cannot be read; adapters and GGUF files are named as such.
    """
    folder = Path(folder)
    file = folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        beside = " beside the files of a model, and is applied when it is opened" if file.is_file() else ""
        raise UsageError(
            f"{folder} contains an adapter (adapter_config.json){beside}, and a whole model is needed.",
            cure="Merge it once with peft (PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(NEW)), or "
            "with netweight space bake MODEL ADAPTER NEW, and give NEW.",
        )
    if not file.is_file():
        packed = folder if folder.suffix.lower() == ".gguf" else next(iter(sorted(folder.glob("*.gguf"))), None)
        if packed is not None:
            raise UsageError(
                f"{packed} is a GGUF file, and a folder of transformers is needed.",
                cure=f"Convert it once: AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file={packed.name!r}), and "
                "save model and tokenizer without quantization_config.",
            )
        raise UsageError(
            f"{folder} is not a model folder: it contains no config.json.",
            cure="Give a folder of a transformers model, unpacked.",
        )
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}.", cure="Restore the file.") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} is not a JSON object.", cure="Restore the file.")
    return content
