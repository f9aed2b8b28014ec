"""What is wrong with a host directory, in words that say what to do next."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.keeper_errors import Refusal
from keepstep.ckpt.pool_errors import HostDirDamaged, HostDirFull, HostDirRefused, PoolDamaged

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Around what opens or makes the host directory at `path`.

    Raises:
        HostDirDamaged: what an earlier keeper left there cannot be used.
        HostDirFull: its file system has no room, or no name, left.
    """
    try:
        yield
    except (FileNotFoundError, HostDirRefused):  # gone again, which callers know; says all itself
        raise
    except (FormatError, PoolDamaged, Refusal) as error:
        raise HostDirDamaged(_advised(path, str(error))) from error
    except OSError as error:
        where = error.filename if isinstance(error.filename, str | os.PathLike) else path
        what = f"{where}: {error.strerror or error}"
        if error.errno in _FULL:
            raise HostDirFull(
                f"{what}; free space there (`df -h {path.parent}`, `df -i {path.parent}`, and "
                "`keepstep clean`, which lists what dead runs left), or choose another shm_dir"
            ) from error
        raise HostDirDamaged(_advised(path, what)) from error


def _advised(path: Path, what: str) -> str:
    clean = f"`keepstep clean --shm-dir {path.parent} --yes`"
    return (
        f"{what}. What lies in {path} cannot be used: free it with {clean}, or remove it, and "
        "start again; a run then goes on from its peers, its disks or its store"
    )
