"""Identification of a LoRA file's architecture and its modules' names in diffusers, from the whole file.

All names, the shapes and the trainer's note in the header decide together; a single name never does. Names in no table
stay as they are, and are said. Text encoders are told by their prefix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store.lora_formats.model_names import ModelNames
from netweight.store.lora_formats.naming import Match, Naming, Piece, flat, namings

Spelling = Literal["kohya", "comfyui", "diffusers", "peft"]
"""Spellings of names: flattened after `lora_unet_`; the authors' with dots; those of diffusers; a plain model's."""

AUTHORS = "diffusion_model"
"""The component of a module of a diffusion model in no table, under the name that its authors gave it."""
DENOISERS = ("unet", "transformer", "transformer_2")
"""The components that denoise, under their names in diffusers; a model of two stages has the last two."""
ARCHITECTURE = "netweight.architecture"
"""In files that we write in the authors' names: the table that they were written by."""
COMPONENTS = (
    "unet", AUTHORS, "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3", "connectors",
    "text_conditioner",
)  # fmt: skip

_PEFT = "base_model.model."
# What wrappers of modules leave in names: torch.compile, FSDP, activation checkpointing, and peft within a pipeline.
_WRAPPERS = re.compile(
    r"(?<=\.)base_model\.model\.|(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_UNDOTTED = re.compile(r"(?:\w*_)?lora_(?P<rest>\w*_\d+_\w+)|(?P<whole>\w+_\d+_\w+)")
_FLAT_ENCODERS = {"lora_te_": 1, "lora_te1_": 1, "lora_te2_": 2, "lora_te3_": 3}
_FLAT_DENOISERS = ("lora_unet_", "lora_transformer_", "lora_dit_", "lycoris_")
_DOTTED_ENCODERS = {"clip_l": 1, "clip_g": 2, "t5xxl": 3}
_DOTTED_ENCODER = re.compile(r"(?:text_encoders\.)?(clip_l|clip_g|t5xxl)\.(?:transformer\.)?(.+)")
_DENOISER_PREFIXES = (
    "model.diffusion_model.", "diffusion_model.", "transformer_2.", "transformer.", "unet.", "pipe.dit.", "dit.",
    "conditional_transformer.", "module.", "net.",
)  # fmt: skip
# The points of a table that the trainer's note in the header names.
_NOTED = 1000
_OF_DENOISERS = tuple(f"{name}." for name in reversed(DENOISERS))
# Names of layers that transformers' language models share with some diffusion models.
_BODY = (
    r"transformer\.(h|encoder|wte|wpe|word_embeddings)\b.*"
    r"|transformer\.blocks\.\d+\.(attn\.(Wqkv|out_proj)|ffn\.(up|down)_proj|norm_[12])"
)
_LANGUAGE = re.compile(
    r"((language_)?model\.)*(transformer\.)?(layers|h|decoder\.layers|encoder\.layers?|gpt_neox\.layers|block)\.\d+\."
    r"(.*\.)?([qkvo]_proj|qkv_proj|(gate_|up_|gate_up_|down_)proj|c_attn|c_proj|c_fc|Wqkv|out_proj|query_key_value"
    rf"|dense.*|fc1|fc2|fc_in|fc_out|w[io].*|SelfAttention.*)|{_BODY}|(.*\.)?(lm_head|embed_tokens|embed_out)"
)
# Language models of GPT-2's kind call their body `transformer`, as pipelines call a component.
_LANGUAGE_BODY = re.compile(_BODY)


def component_of(name: str) -> tuple[str, str]:
    """The pipeline's component that a module is of, and its name there; no component for a plain model's.

    Language models of GPT-2's kind call their body `transformer`, which is not a component.
    """
    component, _, rest = name.partition(".")
    if component not in COMPONENTS or not rest or (component == "transformer" and _LANGUAGE_BODY.fullmatch(name)):
        return "", name
    return component, rest


@final
@dataclass(frozen=True)
class Identity:
    """Identity of a file's modules."""

    naming: Naming | None
    """The table of the denoiser's architecture; None where no table knows it, or the file has no denoiser."""
    pieces: Mapping[str, tuple[Piece, ...]]
    """The module as the file writes it → the modules that it denotes."""
    spelling: Spelling
    """The spelling of most names in the file."""
    unknown: tuple[str, ...] = ()
    """Modules of a diffusion model in no table, which keep their names."""
    others: tuple[Naming, ...] = ()
    """The tables of further architectures in which all these names mean the same modules."""

    def sentence(self) -> str:
        """Say what was recognized."""
        if self.naming is None and not self.unknown:
            return ""
        first = self.unknown[0] if self.unknown else ""
        if self.naming is None:
            return (
                f"Architecture unknown: {len(self.unknown)} modules such as {first} are in no table of names, and keep "
                "their names."
            )
        alike = (
            f" (or {', '.join(each.title for each in self.others)}, which call these modules alike)"
            if self.others
            else ""
        )
        several = len(self.unknown) > 1
        rest = f"; {len(self.unknown)} modules such as {first} are" if several else f"; the module {first} is"
        rest += f" not in its table, and {'keep their names' if several else 'keeps its name'}"
        return f"Architecture: {self.naming.title}{alike}{rest if self.unknown else ''}."


@final
@dataclass(frozen=True)
class _Written:
    """A module's name in a file, its prefix taken off."""

    name: str
    paths: tuple[str, ...]
    """Candidates for the module's path: the name without its prefix, or with a shorter part of it removed."""
    flattened: bool = False
    encoder: int = 0
    """The number of the text encoder, from 1; 0 for others."""
    component: str = ""
    """The component, where the prefix says it."""
    denoises: bool = False
    """True if the prefix belongs to the denoiser of a diffusion model."""
    kind: str = ""
    """`unet` or `transformer`, where the prefix says which one the denoiser is."""
    spelling: Spelling = "peft"


def identify(
    shapes: Mapping[str, tuple[int, int]],
    where: Path,
    *,
    notes: Mapping[str, str] | None = None,
    naming: Naming | None = None,
    model: ModelNames | None = None,
    component: str | None = None,
    whole_model: bool = False,
) -> Identity:
    """Find the architecture of a file and the modules that its names denote.

    Args:
        shapes: Module as the file writes it → rows and columns of its change.
        where: The file, for messages.
        notes: The file's metadata, in which trainers may name the architecture.
        naming: The table to take, whatever the file looks like.
        model: The names of the model's own modules, which names may be looked up in.
        component: The component that all modules belong to, if that is known.
        whole_model: Whether these are all modules of a model, of which a table may lack some and others may know more.

    Raises:
        UsageError: Two architectures fit and differ in what names mean; or the file is not of the one that was named.
        CorruptBlob: Modules of two architectures are in one file.
        Unsupported: A flattened name is in no table, so that its dots cannot be found again.
    """
    for name in shapes:
        if re.fullmatch(r"lora_\w+", name) and not name.startswith((*_FLAT_ENCODERS, *_FLAT_DENOISERS)):
            raise Unsupported(
                f"{where}: the name {name!r} does not belong to a known component.",
                cure=f"Known are names that begin with {', '.join((*_FLAT_DENOISERS, *_FLAT_ENCODERS))}.",
            )
    written = [_read(name, component) for name in shapes]
    encoders = [each for each in written if each.encoder]
    rest = [each for each in written if not each.encoder]
    pieces: dict[str, tuple[Piece, ...]] = {}
    chosen: Naming | None = None
    others: tuple[Naming, ...] = ()
    unknown: list[str] = []
    if model is not None:
        for each in list(rest):
            if module := model.find(each.paths, each.flattened, each.component):
                pieces[each.name] = (Piece(module),)
                rest.remove(each)
    if rest:
        chosen, others = _choose(rest, shapes, where, notes or {}, naming, whole_model)
        # Names without a prefix are of one model: all of a diffusion model's authors, or all of another model.
        bare = [each for each in rest if not each.denoises and not each.flattened]
        authors = chosen is None and any(map(_authors_name, bare))
        authors = authors and not any(_LANGUAGE.fullmatch(each.paths[-1]) for each in bare)
        if authors:
            chosen, others = _choose(
                [replace(each, denoises=True) for each in rest], shapes, where, notes or {}, naming, whole_model
            )
            spelled = [] if chosen is None else [match for each in rest if (match := _match(each, chosen)) is not None]
            if any(match.names == "diffusers" and not match.is_authors for match in spelled):
                # A file that mixes both spellings fits neither.
                chosen, others, authors = None, (), False
        for each in rest:
            identified = None if chosen is None else _pieces(each, chosen, shapes[each.name])
            if identified:
                pieces[each.name] = identified
            elif chosen is None and not each.denoises and not each.flattened and not authors:
                pieces[each.name] = (Piece(_own_name(each, component)),)
            else:
                pieces[each.name] = (Piece(_kept(each, where, chosen, model)),)
                unknown.append(each.name)
    for each in encoders:
        pieces[each.name] = (Piece(_encoder(each, chosen, where, model)),)
    spelling = Counter(_spelling(each, chosen) for each in written).most_common(1)[0][0]
    return Identity(chosen, pieces, spelling, tuple(unknown), others)


def identify_modules(shapes: Mapping[str, tuple[int, int]], naming: Naming | None = None) -> Naming | None:
    """The architecture of an adapter whose modules are called as in diffusers, with components; None if unknown."""
    denoiser = {name: shape for name, shape in shapes.items() if component_of(name)[0] in DENOISERS}
    return identify(denoiser, Path("adapter"), naming=naming).naming if denoiser else None


def _read(name: str, component: str | None) -> _Written:
    for prefix, number in _FLAT_ENCODERS.items():
        if name.startswith(prefix):
            return _Written(name, (flat(name.removeprefix(prefix)),), True, number, denoises=True, spelling="kohya")
    for prefix in _FLAT_DENOISERS:
        if name.startswith(prefix):
            paths = (flat(name.removeprefix(prefix)),)
            return _Written(name, paths, True, denoises=prefix != "lycoris_", spelling="kohya")
    if match := _UNDOTTED.fullmatch(name):
        paths = (match["rest"] or match["whole"],)
        return _Written(name, paths, True, denoises=True, spelling="kohya")
    plain = _WRAPPERS.sub("", name.removeprefix(_PEFT))
    if match := _DOTTED_ENCODER.fullmatch(plain):
        return _Written(name, (match[2],), encoder=_DOTTED_ENCODERS[match[1]], denoises=True, spelling="comfyui")
    if match := re.fullmatch(r"text_encoder(?:_([23]))?\.(.+)", plain):
        return _Written(name, (match[2],), encoder=int(match[1] or 1), denoises=True, spelling="diffusers",
                        component=plain.partition(".")[0])  # fmt: skip
    if match := re.fullmatch(r"(connectors|text_conditioner)\.(.+)", plain):
        return _Written(name, (plain, match[2]), component=match[1], denoises=True, spelling="diffusers")
    if component:
        number = int(component[-1]) if component[-1].isdigit() else 1
        encoder = number if component.startswith("text_encoder") else 0
        own = plain.removeprefix(f"{component}.")
        return _Written(name, (own,), encoder=encoder, component=component, denoises=True, spelling="diffusers")
    names, start = [plain], ""
    while following := next((each for each in _DENOISER_PREFIXES if names[-1].startswith(each)), None):
        names.append(names[-1].removeprefix(following))
        start = start or following
        if following in _OF_DENOISERS:
            # The part after a component is a module's own name, whatever it begins with.
            break
    # Language models call their body `transformer`, too, and wrappers call what they hold `module`.
    says = start not in ("", "module.", "net.") and not (start == "transformer." and _LANGUAGE_BODY.fullmatch(plain))
    spelling: Spelling = "peft"
    if says:
        spelling = "diffusers" if start in _OF_DENOISERS else "comfyui"
    own = "transformer_2" if start == "transformer_2." else ""
    kind = {"unet.": "unet", "transformer.": "transformer", "transformer_2.": "transformer"}.get(
        start if says else "", ""
    )
    return _Written(name, tuple(reversed(names)), component=own, denoises=says, spelling=spelling, kind=kind)


def _match(each: _Written, naming: Naming) -> Match | None:
    if each.kind and naming.component != each.kind:
        return None
    matches = (naming.match(path, flattened=each.flattened) for path in each.paths)
    return next((match for match in matches if match is not None), None)


def _pieces(each: _Written, naming: Naming, shape: tuple[int, int]) -> tuple[Piece, ...] | None:
    match = _match(each, naming)
    pieces = None if match is None else match.pieces(*shape, each.component or naming.component)
    return None if pieces is None else tuple(pieces)


def _choose(
    written: list[_Written],
    shapes: Mapping[str, tuple[int, int]],
    where: Path,
    notes: Mapping[str, str],
    naming: Naming | None,
    whole_model: bool,
) -> tuple[Naming | None, tuple[Naming, ...]]:
    """Choose the table that knows the names, and name the others that say the same."""
    if naming is None and all(not each.denoises and not each.flattened and _LANGUAGE.fullmatch(each.paths[-1])
                              for each in written):  # fmt: skip
        # This is an adapter of a language model, whose names are not in any table.
        return None, ()
    tables = [naming] if naming else [each for each in namings() if not each.component.startswith("text_encoder")]
    fitting = {
        table.key: {each.name: fit for each in written if (fit := _pieces(each, table, shapes[each.name]))}
        for table in tables
    }
    by_key = {table.key: table for table in tables}
    if naming is not None:
        if not fitting[naming.key] and whole_model:
            return None, ()
        if not fitting[naming.key]:
            raise UsageError(
                f"{where}: {written[0].name} is not a module of {naming.title}, and neither is any other name in the "
                "file.",
                cure="Leave --model out to determine the architecture from the file.",
            )
        return naming, ()
    if not any(each.denoises or each.flattened for each in written):
        # Names without a prefix may be a language model's: all must be known, and one must be no language model's.
        # A name without a number, such as `first` or `proj_out`, is one that any model may have.
        numbered = [each for each in written if re.search(r"\.\d+\.", each.paths[-1])]
        own = [each.name for each in numbered if not _LANGUAGE.fullmatch(each.paths[-1])]
        least = 0.7 * len(written) if whole_model else len(written)
        fitting = {key: fit for key, fit in fitting.items() if len(fit) >= least and any(name in fit for name in own)}
    most = max((len(fit) for fit in fitting.values()), default=0)
    if not most:
        return None, ()
    best = [key for key, fit in fitting.items() if len(fit) == most]
    ranked = sorted(best, key=lambda key: -_evidence(by_key[key], fitting[key], written, shapes, notes))
    first = ranked[0]
    # Behind a component of diffusers, a name that diffusers gives comes before one that authors give.
    if same := [key for key in ranked if _keeps_all(written, fitting[key])]:
        first, ranked = same[0], same
    level = _evidence(by_key[first], fitting[first], written, shapes, notes)
    if most < len(written) and not whole_model:
        _refuse_two(first, fitting, by_key, written, where)
        if level < _NOTED and _like_diffusers(by_key[first], fitting[first], written):
            return None, ()
    if level < _NOTED and not whole_model and _like_another(by_key[first], fitting[first], written):
        return None, ()
    # How a file is usually written decides which table comes first, and does not exclude another one.
    evidence = {key: _evidence(by_key[key], fitting[key], written, shapes, notes) for key in ranked}
    equal = [key for key in ranked if evidence[key] == level]
    differing = next((key for key in equal if _contradict(fitting[key], fitting[first])), None)
    if differing is not None:
        both = [each for each in fitting[first] if each in fitting[differing]]
        name = next(each for each in both if fitting[first][each] != fitting[differing][each])
        raise UsageError(
            f"{where}: {name} may be of {by_key[first].title} ({fitting[first][name][0].module}) or of "
            f"{by_key[differing].title} ({fitting[differing][name][0].module}).",
            cure=f"Choose one (--model {first} or --model {differing}).",
        )
    alike = [key for key in ranked if key != first and evidence[key] // 2 == level // 2
             and not _contradict(fitting[key], fitting[first])]  # fmt: skip
    return by_key[first], tuple(by_key[key] for key in alike)


def _keeps_all(written: list[_Written], pieces: Mapping[str, tuple[Piece, ...]]) -> bool:
    """Return whether a table knows all names of a file of diffusers as they are."""
    return all(
        each.kind
        and [piece.module for piece in pieces.get(each.name, ())] == [_WRAPPERS.sub("", each.name.removeprefix(_PEFT))]
        for each in written
    )


def _like_diffusers(naming: Naming, pieces: Mapping[str, tuple[Piece, ...]], written: list[_Written]) -> bool:
    """Return whether names are those of an architecture that only diffusers names, some of which one table knows.

    Such names stay as they are. Only U-Nets with the authors' names behind `unet.` are of their table nevertheless.
    """
    if not all(each.kind for each in written):
        return False
    matches = [match for each in written if each.name in pieces and (match := _match(each, naming)) is not None]
    return naming.component != "unet" or any(match.names == "diffusers" for match in matches)


def _like_another(naming: Naming, found: Mapping[str, tuple[Piece, ...]], written: list[_Written]) -> bool:
    """Return whether names behind the authors' prefix are nowhere the authors', but only those that diffusers gives.

    They are of an architecture in no table, whose authors give the names that diffusers gives another one.
    """
    if not all(each.spelling == "comfyui" for each in written):
        return False
    matches = [match for each in written if each.name in found and (match := _match(each, naming)) is not None]
    return all(match.names == "diffusers" and not match.is_authors for match in matches)


def _contradict(one: Mapping[str, tuple[Piece, ...]], other: Mapping[str, tuple[Piece, ...]]) -> bool:
    """Return whether a name means different modules in two tables."""
    return any(other.get(name, pieces) != pieces for name, pieces in one.items())


def _refuse_two(
    best: str,
    fitting: Mapping[str, Mapping[str, tuple[Piece, ...]]],
    tables: Mapping[str, Naming],
    written: list[_Written],
    where: Path,
) -> None:
    """Refuse a file in which some modules are of one architecture alone, and others of another one alone."""
    names = {each.name for each in written}
    numbered = {each.name for each in written if re.search(r"\.\d+\.", each.paths[-1]) or each.flattened}
    for each in written:
        if each.name in fitting[best] or each.name not in numbered:
            continue
        # An architecture that no table has may share some names with one, and some with another.
        whole = (key for key, fit in fitting.items() if each.name in fit and names <= {*fit, *fitting[best]})
        key = next(whole, None)
        alone = key and next((name for name in fitting[best] if name not in fitting[key] and name in numbered), None)
        # Behind the prefix of diffusers, blocks of one family are of one model, which no table has.
        if key is not None and alone and not (each.kind and _family(each) in {_family(one) for one in written
                                                                             if one.name == alone}):  # fmt: skip
            raise CorruptBlob(
                f"{where} contains modules of two architectures: {alone} of {tables[best].title}, and {each.name} of "
                f"{tables[key].title}.",
                cure="Save the modules of each architecture in a file of its own.",
            )


def _family(each: _Written) -> str:
    """Return the part of a name before its first number, such as `transformer_blocks`."""
    return re.split(r"\.\d+\.", each.paths[0], maxsplit=1)[0]


def _evidence(
    naming: Naming,
    pieces: Mapping[str, tuple[Piece, ...]],
    written: list[_Written],
    shapes: Mapping[str, tuple[int, int]],
    notes: Mapping[str, str],
) -> int:
    """Return the evidence for a table among those that know the names: the trainer's note first, then shapes."""
    family = notes.get("ss_base_model_version") or notes.get("modelspec.architecture", "").partition("/")[0]
    points = 10_000 * (notes.get(ARCHITECTURE) == naming.key)
    points += _NOTED * (family != "" and any(re.fullmatch(pattern, family.lower()) for pattern in naming.families))
    for each in written:
        match = _match(each, naming) if each.name in pieces else None
        if match is None:
            continue
        rows, columns = shapes[each.name]
        if match.names == "authors" and (ratio := naming.ratios.get(match.entry.authors)):
            points += 1 if rows * ratio[1] == columns * ratio[0] else -1
        for index, pattern in enumerate(match.entry.diffusers):
            if (widths := naming.columns.get(pattern)) and (match.names == "authors" or index == match.index):
                points += 1 if columns in widths else 0
    return 2 * points + written_as_usual(naming, [each.name for each in written])


def written_as_usual(naming: Naming, names: Sequence[str]) -> bool:
    """Return whether all names are written as files of an architecture usually are.

    Behind peft's prefix only the authors' names count: trainers write these so with scale 1, and peft itself writes
    the names of diffusers, whose scale lies in its settings.
    """
    if not naming.usual or not all(re.fullmatch(naming.usual, name) for name in names):
        return False
    if not any(name.startswith(_PEFT) for name in names):
        return True
    matches = (_match(_read(name, None), naming) for name in names)
    return all(match is None or match.is_authors for match in matches)


def _authors_name(each: _Written) -> bool:
    """Return whether a name without a prefix is one of a diffusion model's authors, though its shape is not theirs."""
    if _LANGUAGE.fullmatch(each.paths[-1]):
        return False
    if not re.search(r"\.\d+\.", each.paths[-1]):
        return False
    matches = (_match(each, naming) for naming in namings())
    return any(match is not None and match.names == "authors" for match in matches)


def _own_name(each: _Written, component: str | None) -> str:
    """The name of a module of a model that is not a pipeline's."""
    name = each.paths[-1]
    return f"{component}.{name}" if component else name


def _kept(each: _Written, where: Path, naming: Naming | None, model: ModelNames | None) -> str:
    """The name that a module in no table keeps."""
    if each.flattened:
        if model is not None:
            raise model.not_found(each.name)
        table = f"the table of {naming.title}" if naming else "any table"
        raise Unsupported(
            f"{where}: the name {each.name!r} is not in {table}, so the positions of its dots are ambiguous.",
            cure="Name the architecture (--model NAME, or the model's folder), or save the adapter with dotted names.",
        )
    if each.component:
        return f"{each.component}.{each.paths[0]}"
    component = {"unet.": "unet", "transformer.": "transformer"}
    plain = _WRAPPERS.sub("", each.name.removeprefix(_PEFT))
    start = next((start for start in component if plain.startswith(start)), None)
    return f"{component[start] if start else AUTHORS}.{each.paths[0]}"


def _encoder(each: _Written, naming: Naming | None, where: Path, model: ModelNames | None) -> str:
    component = each.component or ("text_encoder" if each.encoder == 1 else f"text_encoder_{each.encoder}")
    if each.encoder == 3 and naming is not None and not each.component:
        component = naming.t5
    if model is not None and (module := model.find(each.paths, each.flattened, component)):
        return module
    if not each.flattened:
        return f"{component}.{each.paths[0]}"
    table = next(table for table in namings() if table.component == "text_encoder")
    match = table.match(each.paths[0], flattened=True)
    if match is None:
        if model is not None:
            raise model.not_found(each.name)
        raise Unsupported(
            f"{where}: the name {each.name!r} does not belong to a known text encoder, so the positions of its dots "
            "are ambiguous.",
            cure="Name the model's folder (--model PATH), or save the adapter with dotted names.",
        )
    [piece] = match.pieces(1, 1, component) or []
    return piece.module


def _spelling(each: _Written, naming: Naming | None) -> Spelling:
    """Return the spelling of a name; the authors' names are ComfyUI's with any prefix."""
    if naming is None or each.flattened or each.encoder:
        return each.spelling if each.flattened or naming or each.denoises else "peft"
    match = _match(each, naming)
    if match is None or each.spelling == "comfyui":
        return "comfyui" if each.spelling != "diffusers" else "diffusers"
    return "diffusers" if match.names == "diffusers" else "comfyui"
