"""Rows of a label about ingredients: parts, parameters, types, license, tokenizer, code.

Everything here is read from configuration files and the headers of tensors; nothing is loaded or run.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from netweight.core.quantities import count, many, size
from netweight.labels.identify_subject import LabelSubject, canonical, read_config
from netweight.labels.label import Row, RowGroup
from netweight.labels.weights import WeightFacts
from netweight.store.safetensors import is_pickle

_LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "LICENCE", "COPYING")
# What a file of a license says near its beginning → the identifier that hubs use.
_LICENSE_MARKS = (
    ("Apache License", "apache-2.0"),
    ("MIT License", "mit"),
    ("GNU AFFERO GENERAL PUBLIC LICENSE", "agpl-3.0"),
    ("GNU GENERAL PUBLIC LICENSE", "gpl-3.0"),
    ("CreativeML", "creativeml-openrail-m"),
    ("OpenRAIL", "openrail"),
    ("LLAMA", "llama"),
    ("Gemma Terms", "gemma"),
)
_CODE_SUFFIXES = (".py", ".so", ".dll", ".dylib", ".sh", ".exe", ".pyc")
# Bytes of tokenizer.json; that of a vocabulary of 262,144 has 33 MB.
_MOST_TOKENIZER = 1 << 26
# Names of files that may be pickles, or hold some; the content decides, but for those that are always pickles.
_ALWAYS_PICKLES = (".pkl", ".pickle", ".joblib")
_MAYBE_PICKLES = (
    ".bin", ".pt", ".pth", ".ckpt", ".npy", ".npz", ".dat", ".data", ".model", ".weights", ".pdparams", "",
)  # fmt: skip
_KERAS = (".h5", ".hdf5", ".keras")  # their Lambda layers hold code
# Jinja expressions that reach beyond the values a chat template is given.
_TEMPLATE_ESCAPES = re.compile(r"__\w+__|\.mro\b|\bimport\b|\bpopen\b|\bsubclasses\b|\bcycler\b|\blipsum\b")


def ingredient_group(subject: LabelSubject, facts: WeightFacts) -> RowGroup:
    """Return the rows about what the files are made of.

    Args:
        subject: What the label is about.
        facts: What the pass over its tensors found.
    """
    rows = [
        Row(key="kind", title="Architecture", value=architecture(subject)),
        *_parameter_rows(facts),
        *_part_rows(subject),
        *_quantization_rows(subject, facts),
        *_origin_rows(subject),
        *_tokenizer_rows(subject, facts),
        *code_rows(subject),
    ]
    return RowGroup(
        title="Ingredients", anchor="ingredients", rows=tuple(rows), basis="configuration files and headers"
    )


def architecture(subject: LabelSubject) -> str:
    """Return the name of the model's class or family, or that nothing names one.

    Args:
        subject: What the label is about.
    """
    config = subject.config
    heads = config.get("architectures")
    if isinstance(heads, list) and heads:
        return ", ".join(map(str, heads))
    for key in ("_class_name", "model_type", "base_model_class", "peft_type"):
        if config.get(key):
            return str(config[key])
    return "not stated in the files"


def _parameter_rows(facts: WeightFacts) -> list[Row]:
    numbers = sum(tensor.count for tensor in facts.tensors)
    shares = [
        f"{dtype} {count(sum(tensor.count for tensor in tensors))}" for dtype, tensors in facts.by_dtype().items()
    ]
    return [
        Row(key="parameters", title="Numbers in the files", value=count(numbers), number=numbers,
            basis=f"{many(len(facts.tensors), 'tensor')}; buffers count, tied tensors count once per copy"),
        Row(key="dtypes", title="Types", value=", ".join(shares), indent=1,
            detail={dtype: len(tensors) for dtype, tensors in facts.by_dtype().items()}),
    ]  # fmt: skip


def _part_rows(subject: LabelSubject) -> list[Row]:
    if subject.kind != "pipeline":
        return []
    parts = {
        name: value[-1]
        for name, value in subject.config.items()
        if isinstance(value, list) and len(value) == 2 and value[-1]
    }
    rows = [Row(key="parts", title="Parts", value=f"{len(parts)}", number=len(parts))]
    for name, kind in parts.items():
        present = (subject.folder / name).is_dir()
        rows.append(Row(
            key=f"part_{name}", title=name, value=str(kind) if present else f"{kind}: folder missing", indent=1,
            state="measured" if present else "warning",
        ))  # fmt: skip
    return rows


def quantization_of(config: dict[str, Any]) -> str | None:
    """Return the method of quantization that a configuration names, also within nested ones; None without one.

    Args:
        config: The content of `config.json`.
    """
    for value in (config, *(each for each in config.values() if isinstance(each, dict))):
        stated = value.get("quantization_config")
        if isinstance(stated, dict):
            method = stated.get("quant_method") or stated.get("quant_algo") or stated.get("quant_type")
            return canonical(method) if method else "stated without a method"
    return None


def _quantization_rows(subject: LabelSubject, facts: WeightFacts) -> list[Row]:
    configs = [subject.config] if subject.kind != "pipeline" else [
        read_config(file) for file in sorted(subject.folder.glob("*/config.json"))
    ]  # fmt: skip
    named = [name for name in (quantization_of(config) for config in configs) if name is not None]
    codes = [
        tensor for tensor in facts.tensors
        if tensor.dtype in ("I8", "U8", "F8_E4M3", "F8_E5M2", "I32") and len(tensor.shape) >= 2 and tensor.count > 1024
    ]  # fmt: skip
    if named:
        return [Row(key="quantization", title="Quantization", value=", ".join(dict.fromkeys(named)))]
    if codes:
        return [Row(
            key="quantization", title="Quantization", value="codes without a stated method", state="warning",
            basis=f"{many(len(codes), 'matrix', 'matrices')} of {codes[0].dtype}, such as {codes[0].name}",
        )]  # fmt: skip
    return [Row(key="quantization", title="Quantization", value="none stated")]


def front_matter(folder: Path) -> dict[str, Any]:
    """Return the metadata at the beginning of a folder's model card; empty without any.

    Args:
        folder: The model's folder.
    """
    card = folder / "README.md"
    try:
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
    except UnicodeDecodeError:
        return {}
    head = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---\r?\n", text, re.DOTALL)
    try:
        value = yaml.safe_load(head[1]) if head else {}
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def license_of(folder: Path) -> tuple[str, str]:
    """Return the license of a folder and where it is stated; the license is empty where nothing states one.

    Args:
        folder: The model's folder.
    """
    stated = front_matter(folder).get("license")
    if stated:
        return canonical(stated), "stated in README.md"
    for name in _LICENSES:
        file = folder / name
        if file.is_file():
            start = file.read_bytes()[:2000].decode("utf-8", errors="replace")
            license_id = next((each for mark, each in _LICENSE_MARKS if mark.lower() in start.lower()), None)
            if license_id is None:
                return f"see {name}", f"the text of {name} is not recognized"
            return license_id, f"read from the text of {name}"
    return "", "neither README.md nor a LICENSE file states one"


def _origin_rows(subject: LabelSubject) -> list[Row]:
    folder, config = subject.folder, subject.config
    inside = subject.path.is_dir()
    stated, where = license_of(folder) if inside else ("", "a single file contains no license")
    rows = [Row(
        key="license", title="License", value=stated or "not stated", basis=where,
        state="measured" if stated else "warning",
    )]  # fmt: skip
    base = (front_matter(folder).get("base_model") if inside else None) or config.get("base_model_name_or_path")
    rows.append(Row(key="base_model", title="Base model", value=canonical(base) if base else "not stated"))
    return rows


def _tokenizer_rows(subject: LabelSubject, facts: WeightFacts) -> list[Row]:
    if subject.kind != "language model":
        return []
    ids = token_ids(subject.folder)
    name = read_config(subject.folder / "tokenizer_config.json").get("tokenizer_class")
    if ids is None:
        files = [entry.name for entry in subject.folder.iterdir() if "token" in entry.name or "vocab" in entry.name]
        value = "files that are not read here" if files else "no tokenizer in the folder"
        return [Row(key="tokenizer", title="Tokenizer", value=value, state="warning", basis=", ".join(files[:3]))]
    rows = [Row(
        key="tokenizer", title="Tokenizer", value=f"{name or 'unnamed'}, {len(ids):,} tokens", number=len(ids),
        unit="tokens",
    )]  # fmt: skip
    vocabulary = embedding_rows(subject, facts)
    if vocabulary:
        unused = vocabulary - len([each for each in ids if each < vocabulary])
        beyond = len([each for each in ids if each >= vocabulary])
        rows.append(Row(
            key="unreachable_tokens", title="Rows that no token uses", value=f"{unused:,} of {vocabulary:,}",
            number=unused, unit="tokens", indent=1, basis="rows of the embedding without an entry in tokenizer.json",
        ))  # fmt: skip
        if beyond:
            rows.append(Row(
                key="tokens_without_row", title="Tokens without a row", value=f"{beyond:,}", number=beyond,
                unit="tokens", indent=1, state="warning", basis="such tokens cannot be embedded",
            ))  # fmt: skip
    return rows


def token_ids(folder: Path) -> set[int] | None:
    """Return the ids of all tokens that `tokenizer.json` lists; None without that file.

    Args:
        folder: The model's folder.
    """
    content = _tokenizer(folder)
    if content is None:
        return None
    model = content.get("model", {})
    vocabulary = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(vocabulary, dict):
        ids = {int(each) for each in vocabulary.values() if isinstance(each, int)}
    else:
        ids = set(range(len(vocabulary)))
    return ids | set(added_tokens(folder))


def added_tokens(folder: Path) -> dict[int, str]:
    """Return the texts of the tokens that `tokenizer.json` adds to its vocabulary, by their ids.

    Args:
        folder: The model's folder.
    """
    added = (_tokenizer(folder) or {}).get("added_tokens") or []
    return {
        token["id"]: str(token.get("content", ""))
        for token in added
        if isinstance(token, dict) and isinstance(token.get("id"), int)
    }


def _tokenizer(folder: Path) -> dict[str, Any] | None:
    """The content of `tokenizer.json`; None if it is missing or damaged."""
    file = folder / "tokenizer.json"
    if not file.is_file() or file.stat().st_size > _MOST_TOKENIZER:
        return None
    # Large vocabularies exceed the bounds of the careful reader, so the standard reader opens this file.
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def embedding_rows(subject: LabelSubject, facts: WeightFacts) -> int:
    """Return how many rows the embedding of tokens has; 0 if no tensor is recognized as one.

    Args:
        subject: What the label is about.
        facts: What the pass over its tensors found.
    """
    names = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")
    text = subject.config.get("text_config")
    size = (text if isinstance(text, dict) else subject.config).get("vocab_size")
    rows = [tensor.shape[0] for tensor in facts.tensors if tensor.name.endswith(names) and len(tensor.shape) == 2]
    return max(rows, default=size if isinstance(size, int) else 0)


def code_rows(subject: LabelSubject) -> list[Row]:
    """Return the rows about files that run code when the model is opened.

    Args:
        subject: What the label is about.
    """
    files = [subject.path] if subject.path.is_file() else [
        file for file in sorted(subject.path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(subject.path).parts)
    ]  # fmt: skip
    pickles = [file for file in files if file in subject.pickles or _is_pickled(file)]
    keras = [file for file in files if file.suffix in _KERAS]
    scripts = [file for file in files if file.suffix in _CODE_SUFFIXES]
    remote = remote_code(subject, files)
    rows = []
    values = [
        *([f"{many(len(scripts), 'program file')} ({scripts[0].name})"] if scripts else []),
        *([f"remote code ({remote[0]})"] if remote else []),
        *([many(len(pickles), "pickle")] if pickles else []),
        *([f"{many(len(keras), 'Keras file')} ({keras[0].name})"] if keras else []),
    ]
    rows.append(Row(
        key="code", title="Files that can run code", value=", ".join(values) or "none",
        state="warning" if values else "measured", basis=f"{many(len(files), 'file')} by name and content",
        detail={"scripts": [file.name for file in scripts], "pickles": [file.name for file in pickles],
                "keras": [file.name for file in keras], "remote_code": remote},
    ))  # fmt: skip
    rows += scan_rows(pickles)
    rows += _template_rows(subject, files)
    other = [file for file in files if file not in (*subject.weights, *subject.pickles, *subject.copies)]
    nbytes = sum(file.stat().st_size for file in other)
    rows.append(Row(
        key="other_files", title="Other files", value=f"{size(nbytes)} in {many(len(other), 'file')}", number=nbytes,
        unit="bytes",
    ))  # fmt: skip
    return rows


def remote_code(subject: LabelSubject, files: Sequence[Path]) -> list[str]:
    """Return the classes that configurations ask to be imported from the model's own files.

    Args:
        subject: What the label is about.
        files: All files of the model.
    """
    named: list[str] = []
    for file in files:
        if file.name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
            mapping = read_config(file).get("auto_map")
            if isinstance(mapping, dict):
                named += [canonical(value) for value in mapping.values()]
    return named


def _is_pickled(file: Path) -> bool:
    """Return whether a file is a pickle or an archive with pickles, by its content."""
    if file.suffix in _ALWAYS_PICKLES:
        return True
    if file.suffix not in _MAYBE_PICKLES:
        return False
    with file.open("rb") as opened:
        start = opened.read(256)
    if not zipfile.is_zipfile(file):
        return _holds_objects(start) or is_pickle(start)
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        arrays = [name for name in names if name.endswith(".npy")]
        return any(name.endswith(".pkl") for name in names) or any(
            _holds_objects(archive.open(name).read(256)) for name in arrays
        )


def _holds_objects(start: bytes) -> bool:
    """Return whether a file is an array of objects, which numpy stores as a pickle."""
    return start.startswith(b"\x93NUMPY") and b"|O" in start


def scan_rows(pickles: Sequence[Path]) -> list[Row]:
    """Return what a scanner of pickles found, or that none is installed.

    Args:
        pickles: The files to scan.
    """
    if not pickles:
        return []
    if find_spec("picklescan") is None:
        return [Row(
            key="pickle_scan", title="Pickles scanned", value='no scanner is installed: pip install "netweight[label]"',
            state="not measured", indent=1,
        )]  # fmt: skip
    from picklescan.scanner import scan_file_path

    results = [scan_file_path(str(file)) for file in pickles]
    globals_ = [each for result in results for each in result.globals]
    dangerous = [f"{each.module}.{each.name}" for each in globals_ if each.safety.value == "dangerous"]
    suspicious = [f"{each.module}.{each.name}" for each in globals_ if each.safety.value == "suspicious"]
    failed = [file.name for file, result in zip(pickles, results, strict=True) if result.scan_err]
    if dangerous:
        value, state = f"dangerous: {', '.join(dict.fromkeys(dangerous))}", "warning"
    elif failed:
        value, state = f"could not be read: {', '.join(failed[:3])}", "warning"
    elif suspicious:
        value, state = f"unusual calls: {', '.join(list(dict.fromkeys(suspicious))[:3])}", "warning"
    else:
        value, state = "no dangerous calls", "measured"
    return [Row(
        key="pickle_scan", title="Pickles scanned", value=value, state="warning" if state == "warning" else "measured",
        indent=1, strong=bool(dangerous), basis=f"picklescan, {many(len(pickles), 'file')}",
        detail={"dangerous": dangerous, "suspicious": suspicious},
    )]  # fmt: skip


def chat_template(folder: Path) -> str | None:
    """Return the chat template of a folder; None without one.

    Args:
        folder: The model's folder.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    template = read_config(folder / "tokenizer_config.json").get("chat_template")
    if template is None:
        template = read_config(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = next((each.get("template") for each in template if isinstance(each, dict)), None)
    return template if isinstance(template, str) else None


def _template_rows(subject: LabelSubject, files: Sequence[Path]) -> list[Row]:
    if not subject.path.is_dir():
        return []
    template = chat_template(subject.folder)
    escapes = sorted(set(_TEMPLATE_ESCAPES.findall(template))) if template else []
    if not escapes:
        return []
    return [Row(
        key="template_calls", title="Chat template accesses", value=", ".join(escapes), state="warning",
        basis="names that a template needs only to escape from its sandbox",
    )]  # fmt: skip
