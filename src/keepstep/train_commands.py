"""`keepstep train` and `keepstep data`: arguments in, exit status out.

Imports nothing of the trainer until a command runs: numpy and torch must find OMP_NUM_THREADS=1
when they are imported, so that the process that forks the ranks has one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from keepstep.printing import print_json

data_app = typer.Typer(no_args_is_help=True, help="Build and look at token files.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@contextmanager
def _refusals() -> Iterator[None]:
    """Errors of ours as one line on stderr and an exit status: 2 for what was typed."""
    from keepstep.ckpt.errors import CheckpointError
    from keepstep.trainer.errors import ConfigError, TrainerError
    from keepstep.trainer.signals import StopNow

    try:
        yield
    except StopNow as error:
        sys.stderr.write(f"keepstep: {error}\n")
        sys.exit(error.exit_code)
    except (TrainerError, CheckpointError) as error:
        sys.stderr.write(f"keepstep: {' '.join(str(error).split())}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def train(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file; without it, the embedded default.")
    ] = None,
    run_dir: Annotated[
        Path, typer.Option("--run-dir", metavar="DIR", help="Metrics, events, logs, checkpoints.")
    ] = Path("runs/demo"),
    store: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="Checkpoints; default DIR/store.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=0, help="Stop after this step, and commit it.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="dp=2,tp=2,pp=2", help="How ranks share.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", min=0, metavar="N", help="0: at the end.")
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option("--hosts", min=1, metavar="H", help="Hosts to play on this machine."),
    ] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option("--ranks-per-host", min=1, metavar="R", help="H x R = all ranks.")
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option("--init-from", metavar="STORE@STEP", help="Begin from another run's state."),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Of --init-from, leave the optimizer's state.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key; may repeat."),
    ] = None,
) -> None:
    """Train, checkpoint, and resume: the same command again goes on from the newest state."""
    from keepstep.trainer.launch import use_one_thread

    use_one_thread()
    from keepstep.trainer.command import train as run
    from keepstep.trainer.job import Arguments

    arguments = Arguments(
        config=config,
        run_dir=run_dir,
        store=store,
        steps=steps,
        layout=layout,
        checkpoint_every=checkpoint_every,
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        init_from=init_from,
        weights_only=weights_only,
        settings=settings or (),
    )
    with _refusals():
        run(arguments, Console())


@data_app.command("build")
def build(
    paths: Annotated[
        list[Path], typer.Argument(metavar="INPUT... OUT", help="Text, JSON lines, directories.")
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help='"bytes", or the path of a tokenizer.json.')
    ] = "bytes",
    end_of_document: Annotated[
        str | None,
        typer.Option("--end-of-document", metavar="TOKEN", help="Closes each document."),
    ] = None,
    text_field: Annotated[
        str, typer.Option("--text-field", help="The field of a JSON line that is the text.")
    ] = "text",
    as_json: JsonOption = False,
) -> None:
    """Turn text and JSON-lines files into a token file, OUT.bin with OUT.idx."""
    from keepstep.trainer.corpus import documents
    from keepstep.trainer.tokenfile import write_token_file
    from keepstep.trainer.tokenizer import load_tokenizer

    *inputs, out = paths
    if not inputs:
        sys.stderr.write("keepstep: data build needs at least one INPUT, then OUT\n")
        sys.exit(2)
    with _refusals():
        made = load_tokenizer(tokenizer, end_of_document)
        built = write_token_file(out, made, documents(inputs, text_field))
    if as_json:
        facts = {
            "path": str(built.path),
            "tokens": built.tokens,
            "documents": built.documents,
            "digest": built.digest,
            "tokenizer": msgspec.to_builtins(made.info),
        }
        print_json(facts)
    else:
        _print(f"{built.path}: {built.tokens:,} tokens of {built.documents:,} documents")


@data_app.command("show")
def show(
    path: Annotated[Path, typer.Argument(metavar="NAME", help="NAME.bin with NAME.idx.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all tokens and compare their digest.")
    ] = False,
    document: Annotated[
        int | None, typer.Option("--document", min=0, help="Print the ids of this document.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a token file holds."""
    from keepstep.trainer.tokenfile import TokenFile

    with _refusals():
        tokens = TokenFile(path)
        if verify:
            tokens.verify()
        ids = None if document is None else tokens.document(document)
    facts = {
        "path": str(tokens.path),
        "tokens": tokens.token_count,
        "documents": tokens.document_count,
        "digest": tokens.digest,
        "verified": verify,
        "tokenizer": msgspec.to_builtins(tokens.info),
    }
    if ids is not None:
        facts["ids"] = ids
    if as_json:
        print_json(facts)
        return
    info = tokens.info
    _print(f"{tokens.path}: {tokens.token_count:,} tokens of {tokens.document_count:,} documents")
    _print(
        f"tokenizer {info.name}, {info.vocab_size:,} ids, end of document {info.end_of_document}"
    )
    _print(f"digest {tokens.digest}{' (verified)' if verify else ''}")
    if ids is not None:
        _print(" ".join(map(str, ids)))


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
