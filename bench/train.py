"""Our train step against the same model composed by hand from the same torch parts.

    python -m bench.train                      2x2x2 on 8 gloo ranks, and one process
    python -m bench.train --blocks 3 --steps 3     a quick trial

By hand: the same model file under `parallelize_module` with torch's own styles and `loss_parallel`,
`fully_shard`, `Schedule1F1B`, `get_total_norm` with one all-reduce over the pipeline, fused AdamW,
and the mean loss on every rank; no byte counts, no gate, no numbers beside. Blocks of steps of both
alternate in the same processes, the order turning with each round, so that the machine's drift hits
both alike; the ratio is the median over rounds of (ours / by hand). cpu_ratio compares the CPU
time of all ranks, which other work on the machine disturbs less. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.kit.proof import git_commit
from tests.kit.ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from keepstep.trainer.init import initialize
from keepstep.trainer.layout import stage_layers
from keepstep.trainer.mesh import make_grid
from keepstep.trainer.model import Llama
from keepstep.trainer.model_config import (
    BatchConfig,
    ModelConfig,
    NumericsConfig,
    OptimConfig,
    ParallelConfig,
)
from keepstep.trainer.train_step import Batch, build

BAR = 1.05
APART = 1e-4  # relative: both must compute the same, or the times do not compare
LR = 1e-3
LAYOUTS = {"2x2x2": ParallelConfig(dp=2, tp=2, pp=2), "1": ParallelConfig()}
Step = Callable[[Batch], float]


@dataclass(frozen=True)
class Options:
    """Sizes of the model and of the measurement."""

    blocks: int = 10
    steps: int = 5
    dim: int = 128
    layers: int = 4
    seq_len: int = 128
    global_batch: int = 16
    micro_batch: int = 2
    seed: int = 0

    def config(self, parallel: ParallelConfig) -> NumericsConfig:
        """The numerics of one layout."""
        model = ModelConfig(
            vocab_size=256,
            dim=self.dim,
            layers=self.layers,
            heads=4,
            kv_heads=2,
            ffn_dim=3 * self.dim,
            seq_len=self.seq_len,
        )
        batch = BatchConfig(self.global_batch, self.micro_batch)
        optim = OptimConfig(
            lr=LR, beta2=0.999, weight_decay=0.0, clip_norm=1.0
        )  # torch's, no decay
        return NumericsConfig(model, parallel, batch, optim, seed=self.seed)


class ByHand:
    """The step that one writes without this package, for pp of 1 or 2 and no replicas."""

    def __init__(self, config: NumericsConfig) -> None:
        self.config = config
        sizes = (config.parallel.pp, config.parallel.dp, config.parallel.tp)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
        here, count = self.mesh.get_local_rank("pp"), config.parallel.pp
        layers = stage_layers(config.model.layers, count)[here]
        self.first, self.last = here == 0, here == count - 1
        self.stage = Llama(config.model, layers, first=self.first, last=self.last)
        if config.parallel.tp > 1:
            parallelize_module(self.stage, self.mesh["tp"], _plan(self.stage))
        if config.parallel.dp > 1:
            _shard(self.stage, self.mesh["dp"])
        initialize(self.stage, config.model, config.seed)
        self.optimizer = torch.optim.AdamW(
            self.stage.parameters(), lr=LR, weight_decay=0.0, fused=True
        )
        self.valid = torch.ones(())
        self.schedule = self._schedule(here) if count > 1 else None

    def _schedule(self, here: int) -> Schedule1F1B:
        config, model = self.config, self.config.model
        size, tp = config.batch.micro_batch, config.parallel.tp
        tokens = torch.empty(size, model.seq_len, dtype=torch.int64, device="meta")
        stream = torch.empty(
            size, model.seq_len // tp, model.dim, device="meta", requires_grad=True
        )
        logits = stream.new_empty(size, model.seq_len, model.vocab_size // tp)
        stage = PipelineStage(
            self.stage,
            here,
            config.parallel.pp,
            torch.device("cpu"),
            input_args=tokens if self.first else stream,
            output_args=logits if self.last else stream,
            group=self.mesh.get_group("pp"),
        )
        micro_batches = config.batch.micro_batches(config.parallel.dp)
        return Schedule1F1B(stage, micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.config.parallel.tp > 1:
            logits = DTensor.from_local(logits, self.mesh["tp"], [Shard(-1)], run_check=False)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / self.valid

    def __call__(self, batch: Batch) -> float:
        """One step; the mean loss over all ranks."""
        self.valid = torch.tensor(float(batch.labels.numel()))
        if self.config.parallel.dp > 1:
            dist.all_reduce(self.valid, group=self.mesh.get_group("dp"))
        with loss_parallel() if self.config.parallel.tp > 1 else nullcontext():
            mean = self._run(batch)
        gradients = [p.grad for p in self.stage.parameters() if p.grad is not None]
        norm = get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.config.parallel.pp > 1:
            squared = norm.square()
            dist.all_reduce(squared, group=self.mesh.get_group("pp"))
            norm = squared.sqrt()
            dist.all_reduce(mean, group=self.mesh.get_group("pp"))
        if self.config.parallel.dp > 1:
            dist.all_reduce(mean, group=self.mesh.get_group("dp"))
        clip_grads_with_norm_(self.stage.parameters(), 1.0, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean.item()

    def _run(self, batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        if self.schedule is not None:
            inputs = (batch.inputs,) if self.first else ()
            target = batch.labels if self.last else None
            self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
            losses = [_whole(part.detach()) for part in losses]
        else:
            size = self.config.batch.micro_batch
            for x, y in zip(batch.inputs.split(size), batch.labels.split(size), strict=True):
                part = self._loss(self.stage(x), y)
                part.backward()
                losses.append(part.detach())
        return torch.stack(losses).sum() if losses else torch.zeros(())


def _whole(part: Tensor) -> Tensor:
    return part.full_tensor() if isinstance(part, DTensor) else part


def _plan(stage: Llama) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for i in stage.layers:
        block = f"layers.{i}"
        for part, columns, row in (
            ("attention", ("wq", "wk", "wv"), "wo"),
            ("feed_forward", ("w1", "w3"), "w2"),
        ):
            plan[f"{block}.{part}"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            plan |= {f"{block}.{part}.{column}": ColwiseParallel() for column in columns}
            plan[f"{block}.{part}.{row}"] = RowwiseParallel(output_layouts=Shard(1))
        plan[f"{block}.attention_norm"] = SequenceParallel()
        plan[f"{block}.ffn_norm"] = SequenceParallel()
    if stage.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if stage.output is not None:
        plan["norm"] = SequenceParallel()
        plan["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1))
    return plan


def _shard(stage: Llama, mesh: DeviceMesh) -> None:
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _batches(config: NumericsConfig, place: int, count: int) -> list[Batch]:
    each = config.batch.global_batch // config.parallel.dp
    generator = torch.Generator().manual_seed(config.seed)
    found = []
    for _ in range(count):
        shape = (config.batch.global_batch, config.model.seq_len + 1)
        tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        part = tokens[place * each : (place + 1) * each]
        found.append(Batch(part[:, :-1].contiguous(), part[:, 1:].contiguous()))
    return found


def _block(step: Step, batches: Sequence[Batch]) -> tuple[float, float, list[float]]:
    """A block's median step time and this rank's CPU time per step, both in s, and its losses."""
    times, losses = [], []
    cpu = time.process_time()
    for batch in batches:
        start = time.perf_counter()
        losses.append(step(batch))
        times.append(time.perf_counter() - start)
    return statistics.median(times), (time.process_time() - cpu) / len(times), losses


def measure(rank: int, world: int, config: NumericsConfig, options: Options) -> dict[str, Any]:
    """Alternating blocks of ours and by hand on one rank."""
    warnings.filterwarnings("ignore", module="torch")
    grid = make_grid(config.parallel, torch.device("cpu"))
    trainable, by_hand = build(config, grid), ByHand(config)
    steps: dict[str, Step] = {
        "ours": lambda batch: trainable.step(batch, LR).loss,
        "by_hand": by_hand,
    }
    losses: dict[str, list[float]] = {name: [] for name in steps}
    rounds: list[dict[str, float]] = []
    for number in range(options.blocks + 1):  # the first warms up
        batches = _batches(config, grid.place.dp, options.steps)
        order = list(steps) if number % 2 else list(reversed(steps))
        found = {}
        for name in order:
            dist.barrier()
            found[name], found[f"{name}_cpu"], block_losses = _block(steps[name], batches)
            losses[name] += block_losses
        if number:
            rounds.append(found)
    return {"rounds": rounds, "losses": losses}


def report(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a layout, by rank 0's clock."""
    rounds, losses = results[0]["rounds"], results[0]["losses"]
    ratio = statistics.median(one["ours"] / one["by_hand"] for one in rounds)
    cpu = {
        name: statistics.median(
            sum(result["rounds"][k][f"{name}_cpu"] for result in results)
            for k in range(len(rounds))
        )
        for name in ("ours", "by_hand")
    }
    apart = max(abs(a - b) / b for a, b in zip(losses["ours"], losses["by_hand"], strict=True))
    return {
        "ours_s": statistics.median(one["ours"] for one in rounds),
        "by_hand_s": statistics.median(one["by_hand"] for one in rounds),
        "ratio": ratio,
        "cpu_ratio": cpu["ours"] / cpu["by_hand"],
        "losses_apart": apart,
        "rounds": rounds,
        "passed": ratio <= BAR and apart <= APART,
    }


def main() -> int:
    """Measure the layouts asked for and print JSON; 0 if all are within the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in asdict(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    given = vars(parser.parse_args())
    layouts = given.pop("layouts")
    options = Options(**given)
    found = {}
    for layout in layouts:
        config = options.config(LAYOUTS[layout])
        world = config.parallel.world_size
        found[layout] = report(run_ranks(world, measure, config, options, timeout_s=1200))
    figures = {
        "bench": "train",
        "options": asdict(options),
        "git_commit": git_commit(),
        "torch": torch.__version__,
        "cpus": len(os.sched_getaffinity(0)),
        "bar": BAR,
        "layouts": found,
        "passed": all(one["passed"] for one in found.values()),
    }
    print(json.dumps(figures, indent=1))
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
