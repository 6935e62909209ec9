"""The names of a model's own modules, in which the names of a file can be looked up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError
from netweight.store.lora_formats.naming import flat

# Older files have this level of CLIP's text encoder, and newer models may not.
_TEXT_MODEL = ".text_model."
# What releases of transformers, and models with and without images, put before the layers of one language model.
_BODIES = ("model.language_model.", "language_model.model.", "model.")
_HEADS = ("lm_head", "language_model.lm_head")


def other_spellings(name: str) -> list[str]:
    """Return what a module or parameter of a language model is called in other releases and larger models.

    Args:
        name: The name, such as `model.layers.0.self_attn.q_proj`.

    Returns:
        Its other names; none for what is not of a language model.
    """
    for group in (_BODIES, _HEADS):
        if start := next((each for each in group if name.startswith(each)), None):
            return [other + name.removeprefix(start) for other in group if other != start]
    return []


class ModelNames:
    """The names of a model's modules, with the component in front for a pipeline's.

    Args:
        modules: The names.
        parameters: The names of all parameters, in the order in which the model declares them, if they are known.
    """

    def __init__(self, modules: Iterable[str], parameters: Sequence[str] | None = None) -> None:
        self._names = set(modules)
        self.parameters = parameters
        """The names of all parameters in their order; None where they are not known."""
        self._older = {name.replace(_TEXT_MODEL, ".", 1): name for name in self._names}
        self._flat: dict[str, list[str]] = {}
        for name in sorted(self._names):
            self._flat.setdefault(flat(name), []).append(name)

    def __contains__(self, name: object) -> bool:
        """Return whether the model has a module of this name."""
        return name in self._names

    def __iter__(self):  # type: ignore[no-untyped-def]
        """All names, sorted."""
        return iter(sorted(self._names))

    def find(self, paths: Sequence[str], flattened: bool, component: str) -> str | None:
        """The module that a name in a file means, or None.

        Args:
            paths: What the name may be without prefix.
            flattened: Whether its dots were replaced by underscores.
            component: The component, or empty for any denoiser and for models that are not pipelines.

        Raises:
            UsageError: Several modules have this name when flattened.
        """
        components = [f"{component}."] if component else ["", "unet.", "transformer."]
        for path in paths:
            for start in components:
                if not flattened and (own := self.own(f"{start}{path}")):
                    return own
                if flattened:
                    plain = path.removeprefix("text_model_")
                    meanings = self._flat.get(flat(f"{start}{path}")) or self._flat.get(flat(f"{start}{plain}")) or []
                    if len(meanings) > 1:
                        raise UsageError(
                            f"The name {path!r} may mean {' or '.join(meanings)}.",
                            cure="Save the adapter with dotted names, as diffusers and peft write them.",
                        )
                    if meanings:
                        return meanings[0]
        return None

    def own(self, name: str) -> str | None:
        """The model's own name of a module, whichever release of transformers wrote the name; None if it has none."""
        if name in self._names:
            return name
        if (older := self._older.get(name.replace(_TEXT_MODEL, ".", 1))) is not None:
            return older
        return next((other for other in other_spellings(name) if other in self._names), None)

    def not_found(self, name: str) -> NameNotFound:
        """The error for a name that the model does not have."""
        near = ", ".join(nearest_names(name.replace("_", "."), self._names))
        return NameNotFound(
            f"The model has no module {name!r}.",
            cure=f"Name the model that the adapter was trained on; the nearest names are {near}.",
        )
