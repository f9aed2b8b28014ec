"""The command line. Thin: each command opens a store, asks `ckpt`, and shows the answer.

Exit status: 0 good, 1 something was found wrong, 2 the command cannot mean what was typed. Errors
are one line on stderr. What needs torch is imported inside the command that needs it: `ls`, `show`,
`verify` and `gc` work without.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from keepstep import __version__, clean_command, train_commands
from keepstep import doctor as doctor_command
from keepstep.ckpt.address import find_live, find_present, parse_address
from keepstep.ckpt.errors import BadName, CheckpointError, NoSuchState
from keepstep.ckpt.lineage import Committed, Lineage
from keepstep.ckpt.log import Log
from keepstep.ckpt.retention import Policy
from keepstep.plan_cli import plan_app
from keepstep.printing import print_json
from keepstep.storage.errors import StoreError
from keepstep.storage.locate import open_store
from keepstep.storage.store import Store

if TYPE_CHECKING:
    from keepstep.ckpt.reader import CheckpointReader

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keeps a large training run in step: trains, checkpoints, resumes, inspects.",
)

app.command("train")(train_commands.train)
app.command("doctor")(doctor_command.doctor)
app.command("clean")(clean_command.clean)
app.add_typer(train_commands.data_app, name="data")
app.add_typer(plan_app, name="plan")

StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE[@STEP]", help="Path or URL; @STEP picks a checkpoint.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
FormatOption = Annotated[str, typer.Option("--format", metavar="FORMAT", help="hf: Hugging Face.")]
_DTYPES = {"fp32": "F32", "fp64": "F64", "bf16": "BF16", "fp16": "F16"}
_DTYPE_NAMES = ", ".join(_DTYPES)


class UsageFault(Exception):
    """The command cannot mean what was typed: exit status 2."""


def main() -> None:
    """Run a command. Errors that a person can act on are one line; others are our defects."""
    try:
        app()
    except (UsageFault, NoSuchState) as error:
        _fail(error, 2)
    except (CheckpointError, StoreError) as error:
        _fail(error, 1)


def _fail(error: Exception, status: int) -> None:
    line = " ".join(str(error).split())
    sys.stderr.write(f"keepstep: {line}\n")
    sys.exit(status)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        sys.stdout.write(f"keepstep {__version__}\n")
        raise typer.Exit


@app.command("ls")
def list_checkpoints(store: StoreArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a store, newest first."""
    from keepstep import reports, views
    from keepstep.ckpt.inspect import checkpoint_rows

    place, step = _open(store)
    lineage = _read(place)
    rows = checkpoint_rows(lineage)
    if step is not None:
        wanted = find_present(lineage, step, place.url)
        rows = [row for row in rows if row.commit == wanted]
    if as_json:
        print_json(reports.ls_json(place.url, lineage, rows, views.now_utc()))
    elif rows:
        Console().print(views.checkpoint_table(rows, views.now_utc()))
    else:
        Console().print(Text(_nothing_yet(place, lineage)))


@app.command("show")
def show(
    store: StoreArgument,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors.")] = False,
    match: Annotated[
        list[str] | None,
        typer.Option("--match", metavar="GLOB", help="Only tensors with such names; may repeat."),
    ] = None,
    norms: Annotated[
        bool, typer.Option("--norms", help="Read the tensors, and give their norms.")
    ] = False,
    log: Annotated[bool, typer.Option("--log", help="List the entries of the log.")] = False,
    sources: Annotated[
        bool,
        typer.Option(
            "--sources", help="Which copy a restore would take, and how long; asks the keepers."
        ),
    ] = False,
    on_host: Annotated[
        str, typer.Option("--on", metavar="HOST", help="With --sources: the host that reads.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show a run and one of its checkpoints: layout, sizes, age, values; on demand, tensors."""
    from keepstep import reports, views
    from keepstep.ckpt.inspect import tensor_rows
    from keepstep.ckpt.log import read_entries
    from keepstep.ckpt.reader import open_checkpoint

    if on_host and not sources:
        raise UsageFault("--on belongs to --sources: add that, or leave --on out")
    place, step = _open(store)
    lineage = _read(place)
    if sources:
        return _show_sources(place, lineage, step, on_host, match or (), as_json)
    wants_tensors = tensors or norms or bool(match)
    chosen = None
    rows = None
    if lineage.live or step is not None or wants_tensors:
        commit = find_present(lineage, step, place.url)
        reader = open_checkpoint(place, commit)
        chosen = (commit, reader.manifest)
        if wants_tensors:
            rows = list(tensor_rows(reader, match or (), with_norms=norms))
    if match and not rows:
        raise UsageFault(f"no tensor matches {' or '.join(match)}")
    records = list(read_entries(place)) if log else None
    if as_json:
        return print_json(reports.show_json(place.url, lineage, chosen, rows, records))
    console = Console()
    console.print(views.store_facts(place.url, lineage), Text())
    if chosen is None:
        console.print(Text(_nothing_yet(place, lineage)))
    else:
        console.print(views.checkpoint_facts(*chosen, views.now_utc()))
    if rows is not None:
        console.print(Text(), views.tensor_table(rows, with_norms=norms))
    if records is not None:
        console.print(Text(), views.log_table(records, lineage))
    return None


def _show_sources(
    store: Store,
    lineage: Lineage,
    step: int | None,
    host: str,
    match: Sequence[str],
    as_json: bool,
) -> None:
    from keepstep.sources_command import find_sources, show_sources, sources_json

    found, notes = find_sources(store, lineage, step, host, match)
    if as_json:
        print_json(sources_json(found, notes))
    else:
        show_sources(found, notes, Console())


@app.command("verify")
def verify_store(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Read every byte that the log refers to, and compare it with its checksum.

    Names the file and the tensor of each wrong byte, and lists files that nothing refers to.
    """
    from keepstep import reports, views
    from keepstep.ckpt.verify import verify

    place, step = _open(store)
    is_watched = sys.stderr.isatty() and not as_json

    def choose(lineage: Lineage) -> list[Committed]:
        return [find_present(lineage, step, place.url)]

    with views.progress_bar("verifying", is_shown=is_watched) as on_progress:
        report = verify(place, None if step is None else choose, on_progress)
    if report.job is None and not report.findings:
        _read(place)  # says what is there instead of a log
    if as_json:
        print_json(reports.verify_json(place.url, report))
    else:
        views.verify_report(report, Console())
    raise typer.Exit(1 if report.findings else 0)


@app.command("gc")
def collect_garbage(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Path or URL.")],
    keep_last: Annotated[
        int | None,
        typer.Option(
            min=0, help="Keep the newest so many; 0 keeps all. Default: as the run does, else 5."
        ),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=0, help="Keep one at each multiple of so many steps. Default: alike."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete old checkpoints, and what interrupted saves left. Never the last good one.

    Safe beside a run that writes to the same store. Files that are not ours are left alone.
    """
    from keepstep import reports, views
    from keepstep.ckpt.gc import collect

    place, step = _open(store)
    if step is not None:
        raise UsageFault("gc works on a whole store: leave out @STEP")
    _read(place)
    log = Log(place)
    policy = _policy(log.read(), keep_last, keep_every)
    report = collect(log, policy, is_dry_run=dry_run)
    if as_json:
        print_json(reports.gc_json(place.url, policy, report))
    else:
        views.gc_report(report, Console())


@app.command("diff")
def diff_checkpoints(
    a: Annotated[str, typer.Argument(metavar="A", help="STORE or STORE@STEP.")],
    b: Annotated[str, typer.Argument(metavar="B", help="STORE or STORE@STEP.")],
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints tensor by tensor, whatever their layouts. Status 1: they differ."""
    from keepstep import convert_views
    from keepstep.ckpt.diff import diff

    left, right = (_reader(text, find_present)[0] for text in (a, b))
    found = diff(left, right)
    if as_json:
        print_json(convert_views.diff_json(found))
    else:
        convert_views.diff_report(found, Console())
    raise typer.Exit(0 if found.is_same else 1)


@app.command("reshard")
def reshard_checkpoint(
    source: StoreArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new store.")],
    layout: Annotated[
        str, typer.Option(metavar="LAYOUT", help="As dp=2,tp=2,pp=2[,dp_replicate=2].")
    ],
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint in another layout into a new store, from which a run goes on."""
    from keepstep import convert_views
    from keepstep.ckpt.layout import BadLayout, parse_layout
    from keepstep.ckpt.reshard import plan_reshard, reshard
    from keepstep.ckpt.writer import TargetTaken

    try:
        wanted = parse_layout(layout)
        reader, lineage = _reader(source, find_live)
        plan_reshard(reader, wanted)  # refused before the target is made
        place = _new_store(target)
        total = convert_views.data_bytes(reader.manifest)
        is_watched = sys.stderr.isatty() and not as_json
        with convert_views.byte_bar("resharding", total, is_shown=is_watched) as on_bytes:
            done = reshard(reader, lineage, place, wanted, by=_self(), on_bytes=on_bytes)
    except (BadLayout, TargetTaken) as error:
        raise UsageFault(str(error)) from error
    if as_json:
        print_json(convert_views.reshard_json(done, place.url))
    else:
        _print_lines(convert_views.reshard_text(done, place.url))


@app.command("export")
def export_model(
    source: StoreArgument,
    target: Annotated[str, typer.Argument(metavar="DIR", help="A new directory.")],
    form: FormatOption,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help=f"Cast to {_DTYPE_NAMES}. Default: exact.")
    ] = None,
    shard_bytes: Annotated[
        int | None, typer.Option(min=1, metavar="BYTES", help="Several files, each at most so big.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a checkpoint as a directory that transformers loads."""
    from keepstep import convert_views
    from keepstep.ckpt.hf_export import export_hf
    from keepstep.ckpt.writer import TargetTaken

    _check_format(form)
    wanted = _dtype(dtype, _DTYPES)
    reader, _ = _reader(source, find_live)
    place = _new_store(target)
    total = convert_views.data_bytes(reader.manifest)
    is_watched = sys.stderr.isatty() and not as_json
    try:
        with convert_views.byte_bar("exporting", total, is_shown=is_watched) as on_bytes:
            done = export_hf(
                reader, place, dtype=wanted, shard_bytes=shard_bytes, on_bytes=on_bytes
            )
    except TargetTaken as error:
        raise UsageFault(str(error)) from error
    if as_json:
        print_json(convert_views.export_json(done, place.url))
    else:
        _print_lines(convert_views.export_text(done, place.url))


@app.command("import")
def import_model(
    source: Annotated[str, typer.Argument(metavar="DIR", help="A Hugging Face model directory.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new store.")],
    form: FormatOption,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="fp32 or fp64. Default: what is exact.")
    ] = None,
    job: Annotated[str, typer.Option(help="Name of the job that the store holds.")] = "import",
    as_json: JsonOption = False,
) -> None:
    """Make a store of a Llama from Hugging Face, from which train --init-from begins."""
    from keepstep import convert_views
    from keepstep.ckpt.hf_import import import_hf
    from keepstep.ckpt.hf_source import open_hf
    from keepstep.ckpt.names import check_job
    from keepstep.ckpt.writer import TargetTaken

    _check_format(form)
    wanted = _dtype(dtype, {"fp32": "F32", "fp64": "F64"})
    try:
        check_job(job)
        model = open_hf(Path(source))
        place = _new_store(target)
        total = sum(weight.stored.end - weight.stored.start for weight in model.weights.values())
        is_watched = sys.stderr.isatty() and not as_json
        with convert_views.byte_bar("importing", total, is_shown=is_watched) as on_bytes:
            done = import_hf(model, place, job=job, by=_self(), dtype=wanted, on_bytes=on_bytes)
    except (TargetTaken, BadName) as error:
        raise UsageFault(str(error)) from error
    except OSError as error:
        raise UsageFault(f"{error.filename or source}: {error.strerror}") from error
    if as_json:
        print_json(convert_views.import_json(done, place.url))
    else:
        _print_lines(convert_views.import_text(done, place.url))


def _open(text: str) -> tuple[Store, int | None]:
    """The store and the step that an argument names. An existing path may contain "@"."""
    address = parse_address(text)
    try:
        return open_store(address.store), address.step
    except StoreError as error:
        raise UsageFault(str(error)) from error


def _reader(
    text: str, find: Callable[[Lineage, int | None, str], Committed]
) -> tuple[CheckpointReader, Lineage]:
    """The checkpoint that STORE[@STEP] names, open for reading, and its log's lineage."""
    from keepstep.ckpt.reader import open_checkpoint

    place, step = _open(text)
    lineage = _read(place)
    return open_checkpoint(place, find(lineage, step, place.url)), lineage


def _new_store(text: str) -> Store:
    """The store at `text`, made if there is none."""
    try:
        return open_store(text, create=True)
    except StoreError as error:
        raise UsageFault(str(error)) from error


def _check_format(form: str) -> None:
    if form != "hf":
        raise UsageFault(f"unknown format {form!r}; known is hf (Hugging Face)")


def _dtype(name: str | None, known: dict[str, str]) -> str | None:
    if name is None:
        return None
    if name not in known:
        raise UsageFault(f"unknown dtype {name!r}; expected one of {', '.join(known)}")
    return known[name]


def _self() -> str:
    """This process, for the log's readers."""
    return f"keepstep on {socket.gethostname()}, pid {os.getpid()}"


def _read(store: Store) -> Lineage:
    """The lineage, or, if there is no log, a sentence on what is there instead (exit status 1)."""
    from keepstep.ckpt.inspect import what_else_is_there

    lineage = Log(store).read()
    if lineage.job is None:
        found = what_else_is_there(store)
        if found is not None:
            raise CheckpointError(f"{store.url} is not a store of checkpoints; it holds {found}")
    return lineage


def _nothing_yet(store: Store, lineage: Lineage) -> str:
    if lineage.job is None:
        return f"{store.url} holds no checkpoints: no run has written to it yet"
    if not lineage.commits:
        return f"job {lineage.job} has not committed a checkpoint to {store.url} yet"
    return f"job {lineage.job} has no checkpoint left in {store.url}; see `keepstep show --log`"


def _policy(lineage: Lineage, keep_last: int | None, keep_every: int | None) -> Policy:
    """What was asked for; what was not, as the run itself was configured."""
    own: dict[str, Any] = {}
    if lineage.generation is not None and isinstance(lineage.generation.config.get("run"), dict):
        own = lineage.generation.config["run"]

    def chosen(asked: int | None, key: str, default: int) -> int:
        if asked is not None:
            return asked
        value = own.get(key, default)
        return value if isinstance(value, int) and value >= 0 else default

    return Policy(chosen(keep_last, "keep", 5), chosen(keep_every, "keep_every", 0))


def _print_lines(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
