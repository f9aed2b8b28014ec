"""torch's element types by the names of the format."""

from __future__ import annotations

import torch

from keepstep.ckpt.errors import NotRepresentable

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4_X2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.complex32: "C32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The format's name of `dtype`. Raises NotRepresentable, about the tensor called `name`."""
    found = _NAMES.get(dtype)
    if found is None:
        raise NotRepresentable(name, f"the format has no element type {dtype}; convert it first")
    return found


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a name of the format. Raises KeyError."""
    return _DTYPES[name]
