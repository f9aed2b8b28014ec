"""Element types of the format as numpy's: for all that works on tensors without torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F4_X2": np.dtype(np.uint8),
    "C32": np.dtype([("real", np.float16), ("imag", np.float16)]),
    "C128": np.dtype(np.complex128),
}
"""numpy's type for each of ours. Two are only bits to numpy: F4_X2 and C32."""

RAW_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}
"""Per item size, a type that is copied as bits: no float's payload, no odd bool is ever changed."""

_REALS = frozenset({"F64", "F32", "F16", "BF16"})
_MANTISSA_BITS = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}
_EXPONENT_BITS = {"F64": 11, "F32": 8, "F16": 5, "BF16": 8}


def numbers(array: Array, dtype: str) -> Array:
    """The values of `array` as float64 or complex128, for measuring; `dtype` is the format's name.

    F4_X2 has two values in each byte, and gives its bytes' codes instead.
    """
    if dtype == "C32":
        return np.asarray(array["real"].astype(np.complex128) + 1j * array["imag"])
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array.astype(np.float64)


def widens(source: str, target: str) -> bool:
    """Whether every value of element type `source` is one of `target` too: a cast is exact."""
    if source == target:
        return True
    if source not in _REALS or target not in _REALS:
        return False
    return (
        _MANTISSA_BITS[source] <= _MANTISSA_BITS[target]
        and _EXPONENT_BITS[source] <= _EXPONENT_BITS[target]
    )
