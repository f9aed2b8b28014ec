"""The drains that a keeper's configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.ckpt.drains import Drains
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.service import Reporter
from keepstep.ckpt.shelf import Shelf
from keepstep.storage.locate import open_store
from keepstep.storage.store import Store

_SINGLE_WRITER = "?single_writer=true"


def open_drains(config: KeeperConfig, shelf: Shelf, reporter: Reporter) -> Drains:
    """Ready for `enter`. Opens nothing yet: a store that cannot be opened is tried again later.

    Tells an event if the store's put-if-absent is done without (`single_writer`).
    """
    url = store_url(config)
    disk: Callable[[], Store] | None = None
    if config.disk_dir:
        disk = lambda: open_store(config.disk_dir, create=True)  # noqa: E731
    if url.endswith(_SINGLE_WRITER):
        reporter.event(
            "single_writer",
            f"{url}: commits are made without put-if-absent, on the word that only this run ever "
            "writes there; a second run, or what is left of an older one, could overwrite entries "
            "of the log, and commits with them, and nobody would be told",
            store=url,
        )
    return Drains(
        lambda: open_store(url), disk, shelf, reporter, job=config.job, patience_s=config.patience_s
    )


def store_url(config: KeeperConfig) -> str:
    """The store's URL, with the option that `single_writer` asks for. File stores need none."""
    is_remote = "://" in config.store_url and not config.store_url.startswith("file://")
    if config.single_writer and is_remote and not config.store_url.endswith(_SINGLE_WRITER):
        return config.store_url + _SINGLE_WRITER
    return config.store_url
