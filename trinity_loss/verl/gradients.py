"""This rank's parts of the parameters' gradient, in every engine, and how two gradients compare over all ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

#: Kinds of parameters by their names, in Hugging Face's, Megatron's and PEFT's spelling; the first that matches.
PARAMETER_GROUPS = (
    ("router", re.compile(r"router|\.gate\.|shared_expert_gate")),
    ("experts", re.compile(r"expert")),
    ("norms", re.compile(r"norm|\bln_")),
    ("embedding", re.compile(r"embed|\bwte\b|\bwpe\b")),
    ("head", re.compile(r"lm_head|output_layer|\bscore\b|v_head")),
    ("attention", re.compile(r"attn|attention|qkv")),
    ("mlp", re.compile(r"mlp|feed_forward|ffn")),
)
_CHUNK = 2**22  # Elements that are compared at once: what a comparison needs beside the gradients stays small.
_SUMS = ("reference", "other", "product", "difference", "distance", "length", "nonzero", "halves")


def parameter_group(name: str) -> str:
    """The kind of a parameter.

    Example:
        >>> [parameter_group(f"layers.0.{n}.weight") for n in ("mlp.gate", "mlp.gate_proj", "self_attn.q_norm")]
        ['router', 'mlp', 'norms']
    """
    return next((group for group, pattern in PARAMETER_GROUPS if pattern.search(name)), "other")


@dataclass(frozen=True)
class ParameterShare:
    """This rank's part of one parameter's gradient.

    Attributes:
        name: Of the parameter, as its module calls it.
        elements: Of the part.
        weight: One over the number of ranks that hold each of its elements.
        read: The part as it is at the moment of the call, flat; None: nothing has reached it.
    """

    name: str
    elements: int
    weight: float
    read: Callable[[], Tensor | None]

    @property
    def group(self) -> str:
        """The kind of the parameter, of :data:`PARAMETER_GROUPS`."""
        return parameter_group(self.name)


def gradient_shares(engine: Any) -> list[ParameterShare]:
    """The parts of the gradient that this rank holds, of FSDP2, FSDP1, Megatron, or parameters that are whole."""
    if isinstance(engine.module, list):
        return [share for chunk in engine.module for share in _of_megatron(chunk)]
    flat = [(n, m) for n, m in engine.module.named_modules() if isinstance(m, FullyShardedDataParallel)]
    if flat:
        return [share for name, module in flat for share in _of_flat_parameter(name, module)]
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    world = torch.distributed.get_world_size()
    read = lambda p: None if p.grad is None else _local(p.grad)  # noqa: E731
    return [ParameterShare(name, _local(p).numel(), _pieces(p) / world, partial(read, p)) for name, p in named]


def _pieces(parameter: Any) -> int:
    """Among how many ranks one copy of a parameter is split."""
    places = enumerate(getattr(parameter, "placements", ()))
    return math.prod(parameter.device_mesh.size(dim) for dim, place in places if not place.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor itself."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().flatten()


def _of_flat_parameter(prefix: str, module: Any) -> Iterator[ParameterShare]:
    handle, world = module._handle, torch.distributed.get_world_size()
    if handle is None:
        return
    flat = handle.flat_param
    ranks = handle.process_group.size() if handle.uses_sharded_strategy else 1
    for name, info in zip(flat._fqns, flat._shard_param_infos, strict=True):
        if info.in_shard and flat.requires_grad:
            part = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
            read = lambda part=part: None if flat.grad is None else flat.grad.flatten()[part]  # noqa: E731
            yield ParameterShare(f"{prefix}.{name}", info.numel_in_shard, ranks / world, read)


def _of_megatron(chunk: Any) -> Iterator[ParameterShare]:
    """Of each bucket a data-parallel rank has reduced all, or with the distributed optimizer one equal piece."""
    from megatron.core import parallel_state as mpu

    names = {parameter: name for name, parameter in chunk.module.named_parameters()}
    for buffers, tensor_ranks in (
        (chunk.buffers, mpu.get_tensor_model_parallel_world_size()),
        (chunk.expert_parallel_buffers, mpu.get_expert_tensor_parallel_world_size()),
    ):
        for buffer in buffers:
            ranks, pieces, rank = buffer.data_parallel_group.size(), 1, 0
            if chunk.ddp_config.use_distributed_optimizer:
                pieces, rank = ranks, buffer.data_parallel_group.rank()
                ranks *= chunk.ddp_config.num_distributed_optimizer_instances
            for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
                if getattr(parameter, "shared", False):  # The embedding's copy on the last stage.
                    continue
                bucket = buffer.buckets[bucket_id]
                size = bucket.grad_data.numel() // pieces
                first = bucket.offset + rank * size
                part = slice(max(start, first) - bucket.offset, min(end, first + size) - bucket.offset)
                if part.start < part.stop:
                    split = 1 if getattr(parameter, "tensor_model_parallel", False) else tensor_ranks
                    read = lambda bucket=bucket, part=part: bucket.grad_data[part]  # noqa: E731
                    yield ParameterShare(names[parameter], part.stop - part.start, pieces / ranks / split, read)


@dataclass(frozen=True)
class Distance:
    """How far a vector is from the one it is compared with.

    Attributes:
        norm: Of the reference.
        ratio: Of the norms, this over the reference.
        cosine: Between the two.
        error: Norm of the difference over that of the reference.
        mean: Mean absolute difference over the mean absolute value.
        largest: Largest absolute difference over the largest absolute value.
        halves: Share of the elements that a bfloat16 holds exactly.
    """

    norm: float
    ratio: float
    cosine: float
    error: float
    mean: float
    largest: float
    halves: float = 0.0


@dataclass
class Comparison:
    """Sums over pairs of vectors, by name, that add up over ranks.

    Attributes:
        names: Of the pairs, the same on every rank.
    """

    names: Sequence[str]

    def __post_init__(self) -> None:
        self.sums, self.maxima = (torch.zeros(len(self.names), n, dtype=torch.float64) for n in (len(_SUMS), 2))

    def add(self, name: str, reference: Tensor, other: Tensor, weight: float = 1.0) -> None:
        """Adds a pair of flat vectors; the comparison is made where ``other`` lives.

        Args:
            name: One of ``names``.
            reference: [n].
            other: [n].
            weight: Of every element.
        """
        row = self.names.index(name)
        for mine, theirs in zip(reference.split(_CHUNK), other.split(_CHUNK), strict=True):
            if not mine.numel():
                continue
            b = theirs.to(torch.float64)
            a = mine.to(b.device, torch.float64)
            d = b - a
            exact = b.to(torch.bfloat16).to(torch.float64) == b
            parts = (a * a, b * b, a * b, d * d, d.abs(), a.abs(), b != 0, exact & (b != 0))
            self.sums[row] += torch.stack([part.sum().to(torch.float64) for part in parts]).cpu() * weight
            largest = torch.stack([d.abs().max(), a.abs().max()]).cpu()
            self.maxima[row] = torch.maximum(self.maxima[row], largest)


def joined(parts: Sequence[Comparison]) -> dict[str, Distance]:
    """How far each pair is apart, and ``all`` of them together, over the parts of all ranks."""
    sums = torch.stack([part.sums for part in parts]).sum(0)
    maxima = torch.stack([part.maxima for part in parts]).amax(0)
    found = {n: _distance(s, m) for n, s, m in zip(parts[0].names, sums, maxima, strict=True) if s[:2].any()}
    return found | {"all": _distance(sums.sum(0), maxima.amax(0))}


def _distance(sums: Tensor, maxima: Tensor) -> Distance:
    s = dict(zip(_SUMS, sums.tolist(), strict=True))
    norm, other = math.sqrt(s["reference"]), math.sqrt(s["other"])
    apart, highest = maxima.tolist()

    def share(part: float, whole: float) -> float:
        return part / whole if whole else (math.inf if part else 0.0)

    return Distance(
        norm=norm,
        ratio=share(other, norm) if norm or other else 1.0,
        cosine=share(s["product"], norm * other) if norm and other else float(norm == other),
        error=share(math.sqrt(s["difference"]), norm),
        mean=share(s["distance"], s["length"]),
        largest=share(apart, highest),
        halves=share(s["halves"], s["nonzero"]),
    )


def off(run: Mapping[str, Any], name: str = "all") -> float:
    """Relative deviation of a pass: of the gradient (``all``), or of what the model or the loss gave by its name."""
    found = run["gradient" if name == "all" else "tokens"].get(name)
    return 0.0 if found is None else math.inf if math.isnan(found["error"]) else float(found["error"])


def noise(runs: Sequence[Mapping[str, Any]], name: str = "all") -> float:
    """:func:`off` where the same was computed again, in the pass ``repeat``; 0 where it was not."""
    return max((off(run, name) for run in runs if run["name"] == "repeat"), default=0.0)
