"""What a compressed file says about itself: JSON under the key `netweight` of `__metadata__`. Used by the store only.

    {"version": 1,
     "tensors": {"encoder.weight": {"dtype": "BF16", "shape": [384, 384], "digest": "xxh3-128:..."}},
     "header": "..."}

The version is 2 if tensors are rounded; their digests are those of what comes back.

`header` is there if the file was made from a safetensors file: that file's header, deflated, as base64. With it the
original is restored byte for byte: tensor order, metadata and padding included.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from netweight.errors import CorruptBlob, Unsupported
from netweight.store.header import MAX_HEADER, Header, nbytes_of, parse_header

__all__ = ["KEY", "REFUSALS", "SUFFIX", "Description", "Original", "deflate_text", "inflate_text"]

KEY = "netweight"
SUFFIX = ".net"
VERSION = 1
ROUNDED = 2  # version of descriptions of files with lossy blobs, which older releases cannot read
_SENTENCE = "these weights are compressed by netweight: pip install netweight, then run netweight decompress"
REFUSALS = {
    "format": _SENTENCE,
    "lora_adapter_metadata": json.dumps({f"{part}.{_SENTENCE}": 1 for part in ("unet", "transformer", "text_encoder")}),
}
"""Further entries of `__metadata__`, there to stop loaders that know nothing of netweight and would find none of the
names they look for. transformers up to 4.57 refuses a `format` that it does not know, and shows it. diffusers makes a
LoRA's config of `lora_adapter_metadata`, refuses names that it does not know, and shows them."""


@final
@dataclass(frozen=True)
class Original:
    """One tensor as it was before compression.

    Attributes:
        dtype: Its safetensors dtype, e.g. `"BF16"`.
        shape: Its shape.
        digest: Digest of its bytes, with the name of the algorithm.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return nbytes_of(self.dtype, self.shape)


@final
@dataclass(frozen=True)
class Description:
    """Everything that a compressed file says about what it holds.

    Attributes:
        tensors: The tensors as they were, by their original names.
        header: The header of the file that was compressed, or None if the tensors did not come from a file.
        rounded: Whether any of the tensors is rounded.
    """

    tensors: Mapping[str, Original]
    header: Header | None
    rounded: bool = False

    def to_json(self) -> str:
        """Write the description.

        Returns:
            The JSON text.
        """
        fields: dict[str, Any] = {
            "version": ROUNDED if self.rounded else VERSION,
            "tensors": {
                name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "digest": tensor.digest}
                for name, tensor in self.tensors.items()
            },
        }
        if self.header is not None:
            fields["header"] = deflate_text(self.header.raw)
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Description:
        """Read and check a description.

        Args:
            text: The JSON.
            where: The file it came from, for errors.

        Returns:
            The description.

        Raises:
            CorruptBlob: The text is damaged or contradicts itself.
            Unsupported: A newer release wrote it.
        """
        try:
            fields = json.loads(text)
            version = fields["version"]
            if version not in (VERSION, ROUNDED):
                raise Unsupported(
                    f"the format version is {version!r}; this release reads up to version {ROUNDED}.",
                    cure="Upgrade netweight: pip install --upgrade netweight.",
                )
            tensors = {name: _original(entry) for name, entry in fields["tensors"].items()}
            header = parse_header(inflate_text(fields["header"], limit=MAX_HEADER)) if "header" in fields else None
        except Unsupported as error:
            raise Unsupported(f"{where}: {error.reason}", cure=error.cure) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptBlob(
                f"{where}: netweight's description is damaged ({error}).", cure="Fetch the file again."
            ) from error
        described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        if header is not None and {span.name: (span.dtype, span.shape) for span in header.spans} != described:
            raise CorruptBlob(
                f"{where}: netweight's description contradicts the kept header.", cure="Fetch the file again."
            )
        return cls(tensors, header, version == ROUNDED)


def deflate_text(data: bytes) -> str:
    """Deflate bytes and write them as base64, to be kept in JSON.

    Args:
        data: Any bytes.

    Returns:
        The base64 text.
    """
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def inflate_text(text: str, *, limit: int) -> bytes:
    """Undo `deflate_text`.

    Args:
        text: The base64 text.
        limit: Most bytes to accept, so that hostile input cannot fill the memory.

    Returns:
        The bytes.

    Raises:
        ValueError: The text is damaged or holds more than `limit` bytes.
    """
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), limit)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if not inflater.eof:
        raise ValueError(f"the deflated text is incomplete or holds more than {limit:,} bytes")
    return data


def _original(entry: Mapping[str, Any]) -> Original:
    dtype, shape, digest = entry["dtype"], tuple(entry["shape"]), entry["digest"]
    if not isinstance(digest, str) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("a digest or shape is malformed")
    nbytes_of(dtype, shape)
    return Original(dtype, shape, digest)
