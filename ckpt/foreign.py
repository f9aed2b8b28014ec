"""What a file that is not ours seems to be, from its first bytes: for messages."""

from __future__ import annotations

from keepstep.storage.store import Buffer

SNIFF_BYTES = 64

_SIGNATURES = (
    (b"PK\x03\x04", "a zip archive, such as torch.save writes (pickle inside: never loaded)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x93NUMPY", "a numpy .npy file"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstandard file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"GGUF", "a GGUF model"),
    (b"\x7fELF", "an ELF executable"),
    (b"%PDF", "a PDF"),
    (b"version https://git-lfs", "a Git LFS pointer: the real file was never fetched"),
    (b"<!DOCTYPE", "an HTML page, such as a failed download leaves"),
    (b"<!doctype", "an HTML page, such as a failed download leaves"),
    (b"<html", "an HTML page, such as a failed download leaves"),
    (b"<?xml", "an XML document, such as an object store's error"),
)


def seems(data: Buffer) -> str | None:
    """What `data`, the beginning of a file, seems to be; None if nothing known.

    Only for kinds that can be neither an image nor a document of ours.
    """
    head = bytes(memoryview(data)[:SNIFF_BYTES])
    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            return kind
    # A pickle since protocol 2 begins with its number; an image would be of a header over 100 MB.
    if len(head) >= 2 and head[0] == 0x80 and head[1] in range(2, 6):
        return f"a pickle of protocol {head[1]} (never loaded: it could run code)"
    if head and not head.strip(b"\0"):
        return "nothing but zero bytes"
    return None
