"""Element types: their names in the format, their sizes, and how safetensors stores them.

Names are those of the safetensors format. Types that it lacks, or that its older readers lack, are
stored there as plain bytes (``U8``, shape flattened to the number of bytes), and the image's
metadata says what they are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type: our name, bytes per element, and its name in a safetensors header."""

    name: str
    itemsize: int
    stored: str

    @property
    def is_native(self) -> bool:
        """Whether safetensors has the type itself."""
        return self.stored == self.name


_NATIVE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
_AS_BYTES = {
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "F4_X2": 1,  # two float4_e2m1 in one byte: shapes count bytes, as torch's float4_e2m1fn_x2 does
    "C32": 4,
    "C128": 16,
}

DTYPES: dict[str, Dtype] = {
    **{name: Dtype(name, itemsize, name) for name, itemsize in _NATIVE.items()},
    **{name: Dtype(name, itemsize, "U8") for name, itemsize in _AS_BYTES.items()},
}
"""All element types of format 1, by name."""
