"""A job: everything that all ranks of a run are given, made and checked before any rank starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from keepstep.ckpt.address import Address, parse_address
from keepstep.ckpt.layout import BadLayout, Layout, parse_layout
from keepstep.storage.errors import StoreError
from keepstep.storage.locate import check_location
from keepstep.trainer.check import check
from keepstep.trainer.config import Config, config_tree, load_config, replace
from keepstep.trainer.corpus import standard_library
from keepstep.trainer.dataset import Corpus, open_corpus
from keepstep.trainer.errors import ConfigError
from keepstep.trainer.rundir import RunDir
from keepstep.trainer.tokenfile import TokenFile, index_path, write_token_file
from keepstep.trainer.tokenizer import ByteTokenizer, TokenizerInfo, padded_vocab_size


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a person asked for on the command line; None: as the configuration says."""

    config: Path | None = None
    run_dir: Path = Path("runs/demo")
    store: str | None = None
    steps: int | None = None
    layout: str | None = None
    checkpoint_every: int | None = None
    hosts: int | None = None
    ranks_per_host: int | None = None
    init_from: str | None = None
    weights_only: bool = False
    settings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of a run are given.

    Attributes:
        config: with the vocabulary's size resolved.
        run_dir: the run directory.
        store_url: where checkpoints go.
        corpus: the open token file; a fork shares its pages.
        init_from: the checkpoint of another run to begin from.
        weights_only: leave that one's optimizer state.
    """

    config: Config
    run_dir: Path
    store_url: str
    corpus: Corpus
    init_from: Address | None
    weights_only: bool

    @property
    def layout(self) -> Layout:
        """The layout as checkpoints name it."""
        parallel = self.config.parallel
        return Layout(parallel.dp, parallel.tp, parallel.pp, parallel.dp_replicate)

    @property
    def tokenizer(self) -> TokenizerInfo:
        """Which tokenizer made the corpus."""
        return self.corpus.training.tokens.info

    def tree(self) -> dict[str, Any]:
        """The configuration as manifests keep it: with the digest of the data."""
        tree = config_tree(self.config)
        tree["data"]["digest"] = self.corpus.training.tokens.digest
        return tree

    def tokenizer_tree(self) -> dict[str, Any]:
        """The tokenizer's description as JSON values."""
        tree = msgspec.to_builtins(self.tokenizer)
        assert isinstance(tree, dict)
        return tree


def make_config(arguments: Arguments) -> Config:
    """The configuration that the arguments mean.

    Raises:
        ConfigError: as `load_config`; a layout that cannot be read; flags that contradict; a
            location that no store can be at.
    """
    config = load_config(arguments.config, arguments.settings)
    if arguments.steps is not None:
        config = replace(config, "run", steps=arguments.steps)
    if arguments.checkpoint_every is not None:
        config = replace(config, "run", checkpoint_every=arguments.checkpoint_every)
    if arguments.hosts is not None:
        config = replace(config, "hosts", count=arguments.hosts)
    if arguments.ranks_per_host is not None:
        config = replace(config, "hosts", ranks_per_host=arguments.ranks_per_host)
    if min(config.run.steps, config.run.checkpoint_every) < 0:
        raise ConfigError("--steps and --checkpoint-every: expected 0 or more")
    if arguments.layout is not None:
        try:
            layout = parse_layout(arguments.layout)
        except BadLayout as error:
            raise ConfigError(str(error)) from error
        sizes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp}
        config = replace(config, "parallel", dp_replicate=layout.dp_replicate, **sizes)
    if arguments.weights_only and arguments.init_from is None:
        raise ConfigError("--weights-only says what --init-from takes: give both")
    _check_locations(arguments)
    return config


def _check_locations(arguments: Arguments) -> None:
    locations = [arguments.store] if arguments.store else []
    if arguments.init_from:
        locations.append(parse_address(arguments.init_from).store)
    try:
        for location in locations:
            check_location(location)
    except StoreError as error:
        raise ConfigError(str(error)) from error


def check_config(config: Config, world_size: int | None = None) -> None:
    """Refuse what cannot work, before anything is started.

    Raises:
        ConfigError: one sentence each, naming both numbers.
    """
    model = config.model
    if model.vocab_size == 0:  # not resolved yet: judge the rest with one that always divides
        model = dataclasses.replace(model, vocab_size=config.parallel.tp)
    problems = check(model, config.parallel, config.batch, world_size)
    if problems:
        raise ConfigError("; ".join(problems))


def open_job(arguments: Arguments, config: Config, run_dir: RunDir, *, verify: bool = True) -> Job:
    """Open the corpus (building the default one if it is not there yet) and settle the vocabulary.

    Args:
        arguments: of the command line.
        config: from them.
        run_dir: held by this process, or by another rank's for it.
        verify: compare the digest of all tokens, if the configuration asks for it.

    Raises:
        DataError: about the corpus.
        ConfigError: the model's vocabulary does not fit the corpus's, or the layout.
    """
    path = Path(config.data.path) if config.data.path else run_dir.corpus_path
    if not config.data.path and not index_path(path).exists():
        write_token_file(path, ByteTokenizer(), standard_library())
    corpus = open_corpus(
        path,
        seq_len=config.model.seq_len,
        seed=config.run.seed,
        heldout_fraction=config.data.heldout_fraction,
        batch=config.batch.global_batch,
    )
    tokens = corpus.training.tokens
    if config.data.verify and verify:
        tokens.verify()
    config = _settle_vocabulary(config, tokens)
    check_config(config)
    return Job(
        config=config,
        run_dir=run_dir.path,
        store_url=arguments.store or run_dir.store_url,
        corpus=corpus,
        init_from=parse_address(arguments.init_from) if arguments.init_from else None,
        weights_only=arguments.weights_only,
    )


def _settle_vocabulary(config: Config, tokens: TokenFile) -> Config:
    needed = padded_vocab_size(tokens.info.vocab_size, config.data.vocab_multiple)
    if config.model.vocab_size == 0:
        return replace(config, "model", vocab_size=needed)
    if config.model.vocab_size < tokens.info.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is less than the {tokens.info.vocab_size} "
            f"ids of {tokens.path} ({tokens.info.name}); set it to {needed}, or to 0"
        )
    return config
