"""A load as a transaction: everything is read and verified first, and only then anything changed.

registry.create_absent(...)                  # state that this optimizer makes lazily
structure = gather_structure(group, registry)
with stage(registry, structure, manifest, store) as staged:
    agree(group, ...)                        # S6: over all ranks
    staged.apply()
"""

from __future__ import annotations

from types import TracebackType

from keepstep.ckpt.apply import Application
from keepstep.ckpt.arena import Arena
from keepstep.ckpt.errors import StructureMismatch
from keepstep.ckpt.fetch import fetch, fetch_headers
from keepstep.ckpt.manifest import Manifest
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.restore import (
    Options,
    compare,
    find_sources,
    has_ranks,
    is_common,
    plan_reads,
)
from keepstep.ckpt.structure import Structure
from keepstep.storage.store import Store

_EXACT = Options()


class Staged:
    """A verified state in memory, not applied yet. Close it, or use it in a ``with``."""

    def __init__(self, application: Application, read_bytes: int, own_arena: Arena | None) -> None:
        self._application = application
        self._own_arena = own_arena
        self.read_bytes = read_bytes
        """Bytes of data read from the store for it, on this rank."""

    def apply(self) -> None:
        """Copy the state into the registered tensors and values. Blocking.

        Raises:
            NotRepresentable: before anything is changed, if a tensor is not as registered.
        """
        self._application.run()

    def close(self) -> None:
        """Free the staging memory, unless it was lent."""
        if self._own_arena is not None:
            self._own_arena.close()

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def stage(
    registry: Registry,
    structure: Structure,
    manifest: Manifest,
    store: Store,
    options: Options = _EXACT,
    arena: Arena | None = None,
) -> Staged:
    """Read and verify what this rank needs of a checkpoint. Blocking; changes nothing.

    Args:
        registry: what this rank has.
        structure: what all ranks have, so that all judge alike what is missing.
        manifest: the checkpoint, whatever its layout.
        store: where its images are.
        options: what may differ.
        arena: memory to stage in (a saver's, while it does not save); if it is None or too small,
            an own one is made.

    Raises:
        StructureMismatch: listing what is missing, unexpected or changed.
        Corrupt, FormatError, NotRestorable: about the checkpoint's files.
        StoreError: as the store raises it.
        ArenaTooLarge: if there is not enough memory.
    """
    chosen = compare(structure, manifest, options)
    values = _values(registry, structure, manifest, options)
    needs = {
        name: held.box
        for name, held in registry.tensors.items()
        if name in chosen and not held.box.is_empty
    }
    plan = Plan(manifest.mesh, manifest.placements, manifest.tensors)
    sources = find_sources(plan, needs, chosen)
    headers = fetch_headers(store, manifest, sorted(sources))
    reads = plan_reads(sources, headers, manifest.tensors)
    own_arena = None
    if arena is None or arena.capacity_bytes < reads.stage_bytes:
        arena = own_arena = Arena(reads.stage_bytes, f"the restore of rank {registry.rank}")
    fetch(store, manifest, headers, reads, arena.view)
    application = Application(registry, reads.pieces, arena.view, values)
    return Staged(application, sum(read.size_bytes for read in reads.reads), own_arena)


def _values(
    registry: Registry, structure: Structure, manifest: Manifest, options: Options
) -> dict[str, object]:
    """The values to set: those that are registered and wanted."""
    with_ranks = has_ranks(structure, manifest)
    found, missing, changed = {}, [], []
    for name, value in registry.values.items():
        if not options.wants(name) or not (with_ranks or is_common(name)):
            continue
        if name not in manifest.values:
            missing.append(name)
            continue
        reason = value.refuse(manifest.values[name])
        if reason is not None:
            changed.append(f"{name}: {reason}")
        found[name] = manifest.values[name]
    if changed or (missing and not options.allow_missing):
        raise StructureMismatch(
            f"the values of generation {manifest.state.generation}, step {manifest.state.step} "
            f"do not fit; nothing was loaded",
            missing=() if options.allow_missing else missing,
            changed=changed,
        )
    return found
