"""The element types of the format by number and name: how wide their numbers are and where their exponent stands.

Read by the reference decoder and the fallback encoder; `native/format.cpp` holds the same table.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ELEMENT_TYPES", "ElementType"]


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type.

    Attributes:
        code: Its number in a blob's header.
        name: safetensors' name where it has one.
        bits: Bits of an element; below 8 the bytes are opaque.
        number_bytes: Bytes of one number: 1, 2, 4 or 8. A complex element is two numbers.
        exponent_bits: Of a number; 0 for integers and opaque bytes.
        mantissa_bits: Of a number.
    """

    code: int
    name: str
    bits: int
    number_bytes: int
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def head_bytes(self) -> int:
        """Bytes of a number that its first plane holds: the top two, or the only one."""
        return min(self.number_bytes, 2)

    @property
    def tails(self) -> int:
        """Planes of lower bytes after the first plane, one byte each."""
        return self.number_bytes - self.head_bytes


ELEMENT_TYPES = (
    ElementType(1, "BOOL", 8, 1),
    ElementType(2, "U8", 8, 1),
    ElementType(3, "I8", 8, 1),
    ElementType(4, "F8_E5M2", 8, 1, 5, 2),
    ElementType(5, "F8_E4M3", 8, 1, 4, 3),
    ElementType(6, "F8_E8M0", 8, 1),
    ElementType(7, "F8_E4M3FNUZ", 8, 1, 4, 3),
    ElementType(8, "F8_E5M2FNUZ", 8, 1, 5, 2),
    ElementType(9, "I16", 16, 2),
    ElementType(10, "U16", 16, 2),
    ElementType(11, "F16", 16, 2, 5, 10),
    ElementType(12, "BF16", 16, 2, 8, 7),
    ElementType(13, "I32", 32, 4),
    ElementType(14, "U32", 32, 4),
    ElementType(15, "F32", 32, 4, 8, 23),
    ElementType(16, "F64", 64, 8, 11, 52),
    ElementType(17, "I64", 64, 8),
    ElementType(18, "U64", 64, 8),
    ElementType(19, "C64", 64, 4, 8, 23),
    ElementType(20, "C128", 128, 8, 11, 52),
    ElementType(21, "C32", 32, 2, 5, 10),
    ElementType(22, "F4", 4, 1),
    ElementType(23, "F6_E2M3", 6, 1),
    ElementType(24, "F6_E3M2", 6, 1),
)
