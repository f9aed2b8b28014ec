"""The cluster as the planner sees it: one kind of GPU, nodes of equal size, two kinds of link.

Rates are what the data sheet gives, one way, per GPU. What is reached of them is in
`Efficiency`, whose few numbers are fitted (`keepstep plan calibrate`) and otherwise the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TypeVar

from keepstep.planner.errors import BadCluster

GIB = float(2**30)
T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """One accelerator, from its data sheet (dense peak, no sparsity).

    `sustained` is the part of the peak that its power budget lets long matrix work run at, the
    A100's being 1; `flash_share` what a fused attention kernel reaches of a matrix product's rate.
    """

    name: str
    peak_flops: float
    memory_bytes: float
    hbm_bytes_per_s: float
    sms: int
    link_bytes_per_s: float
    sustained: float = 1.0
    flash_share: float = 0.45


@dataclass(frozen=True)
class Efficiency:
    """What of the data-sheet rates is reached. The constants of the model, all of them.

    gemm: of the peak, by a matrix product that fills every wave; gemm_knee: the inner size K at
    which half of it is lost to filling the pipeline; hbm, link, nic: of the memory, in-node and
    across-node rate; link_latency_s and nic_latency_s: per hop; host_s: what one process needs to
    launch one layer's pass, below which no pass can go; overlap_tax: seconds by which one second
    of hidden data-axis traffic slows the compute over it; step_host_s: what a process needs for a
    step besides (reductions, optimizer calls); call_s: to make one collective or one transfer to
    another stage. The last two matter where ranks share cores, and are else in the latencies.
    """

    gemm: float = 0.78
    gemm_knee: float = 64.0
    hbm: float = 0.74
    link: float = 0.80
    nic: float = 0.92
    link_latency_s: float = 2.5e-6
    nic_latency_s: float = 6e-6
    host_s: float = 0.5e-3
    overlap_tax: float = 0.1
    step_host_s: float = 0.0
    call_s: float = 0.0


CORES = Efficiency(
    gemm=0.5,
    link=0.2,
    link_latency_s=1e-4,
    host_s=2e-4,
    step_host_s=5e-3,
    call_s=1e-3,
)
"""For ranks that share a machine's cores: the orders of magnitude of torch with gloo on x86 cores.
To be fitted; where few runs leave a constant open, it stays near its value here."""


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal machines of `gpus_per_node`, joined by `nic_bytes_per_s` per node, one way.

    `cores_per_node` > 0 says that all ranks of a node share that many compute units (a machine
    without GPUs): then ranks that wait leave their share to the others.
    """

    name: str
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    nic_bytes_per_s: float
    cores_per_node: int = 0
    host_memory_bytes: float = 2048 * GIB
    dollars_per_gpu_hour: float = 2.0
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def gpus(self) -> int:
        """GPUs in all nodes together."""
        return self.nodes * self.gpus_per_node


GPUS: Mapping[str, Gpu] = {
    "A100": Gpu("A100", 312e12, 80 * GIB, 2.039e12, 108, 300e9),
    "H100": Gpu("H100", 989e12, 80 * GIB, 3.35e12, 132, 450e9, sustained=0.82),
    "H200": Gpu("H200", 989e12, 141e9, 4.8e12, 132, 450e9, sustained=0.82),
    "B200": Gpu("B200", 2250e12, 180e9, 8.0e12, 148, 900e9, sustained=0.79),
}
"""A100-SXM-80G, H100-SXM, H200-SXM, B200-HGX."""

NODE_NIC_BYTES_PER_S: Mapping[str, float] = {
    "A100": 8 * 25e9,
    "H100": 8 * 50e9,
    "H200": 8 * 50e9,
    "B200": 8 * 50e9,
}
"""DGX A100: 8 x HDR 200 Gb/s; DGX H100, H200 and B200: 8 x NDR 400 Gb/s."""

PRICE_PER_HOUR: Mapping[str, float] = {"A100": 1.5, "H100": 2.5, "H200": 3.0, "B200": 5.0}
"""Dollars per GPU hour: an assumption, to be given by whoever pays."""


def cluster_of(gpu: str, gpus: int, gpus_per_node: int = 8) -> Cluster:
    """A cluster of `gpus` GPUs of a known kind, in DGX/HGX nodes.

    Raises BadCluster for an unknown kind, or if the nodes do not come out whole.
    """
    kind = gpu.upper()
    if kind not in GPUS:
        raise BadCluster(f"--gpu {gpu}: unknown; known: {', '.join(GPUS)}. Others: --cluster FILE")
    if gpus < 1:
        raise BadCluster(f"--gpus {gpus}: needs >= 1")
    per_node = min(gpus, gpus_per_node)
    if gpus % per_node:
        raise BadCluster(f"--gpus {gpus} is no multiple of the {per_node} GPUs of a node")
    return Cluster(
        name=f"{gpus} x {kind}",
        gpu=GPUS[kind],
        nodes=gpus // per_node,
        gpus_per_node=per_node,
        nic_bytes_per_s=NODE_NIC_BYTES_PER_S[kind],
        dollars_per_gpu_hour=PRICE_PER_HOUR[kind],
    )


def cluster_from_document(document: Mapping[str, object], name: str) -> Cluster:
    """A cluster from a TOML document: [cluster], optional [gpu] and [efficiency].

    `[cluster] gpu = "H100"` starts from a known kind; [gpu] keys replace its numbers, or describe
    a new one whole. [efficiency] keys replace the defaults, which are those of `CORES` if there are
    `cores_per_node`. Units are in the keys' names. Raises BadCluster naming the key.
    """
    top = dict(_section(document, "cluster"))
    unknown = sorted(set(document) - {"cluster", "gpu", "efficiency"})
    if unknown:
        raise BadCluster(f"{name}: unknown section [{unknown[0]}]; known: cluster, gpu, efficiency")
    kind = top.pop("gpu", None)
    gpu_keys = _section(document, "gpu")
    if isinstance(kind, str) and kind.upper() in GPUS:
        base: dict[str, object] = dict(vars(GPUS[kind.upper()]))
    elif kind is None or gpu_keys:
        base = {"name": kind or "gpu"}
    else:
        raise BadCluster(f"{name}: gpu = {kind!r} is unknown; known: {', '.join(GPUS)}, or a [gpu]")
    gpu = _build(Gpu, {**base, **gpu_keys}, f"{name} [gpu]")
    reached = {**(vars(CORES) if top.get("cores_per_node") else {})}
    reached |= _section(document, "efficiency")
    efficiency = _build(Efficiency, reached, f"{name} [efficiency]")
    values = {"name": name, **top, "gpu": gpu, "efficiency": efficiency}
    cluster = _build(Cluster, values, f"{name} [cluster]")
    for key in ("nodes", "gpus_per_node", "nic_bytes_per_s"):
        if getattr(cluster, key) <= 0:
            raise BadCluster(f"{name} [cluster] {key}: {getattr(cluster, key)}; needs > 0")
    return cluster


def _section(document: Mapping[str, object], key: str) -> Mapping[str, object]:
    section = document.get(key, {})
    if not isinstance(section, Mapping):
        raise BadCluster(f"[{key}] must be a section, found {section!r}")
    return section


def _build(kind: type[T], values: Mapping[str, object], where: str) -> T:
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # all are dataclasses
    for key, value in values.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            raise BadCluster(f"{where} {key}: unknown key{hint}")
        wanted = {"int": (int,), "float": (int, float), "str": (str,)}.get(str(known[key].type))
        if wanted and (not isinstance(value, wanted) or isinstance(value, bool)):
            raise BadCluster(f"{where} {key}: expected {known[key].type}, found {value!r}")
    try:
        return kind(**values)
    except TypeError as error:
        raise BadCluster(f"{where}: {str(error).split('() ')[-1]}") from error
