"""Tensor parallelism: the matrices of one model, cut over several ranks that compute each step together.

The scheme is Megatron-LM's (Shoeybi et al., 2019). A rank runs the unchanged model with fewer heads, fewer
columns and a part of the vocabulary; the modules whose results are sums or parts are wrapped from outside.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import InvalidRequestError, ModelLoadError
from shared.model import ModelConfig, Transformer
from shared.weights import load_weights, read_config, resolve

CUT = {  # module: which dimension of its weight is cut, and what lies along it
    "q_proj": (0, "heads"), "k_proj": (0, "kv_heads"), "v_proj": (0, "kv_heads"), "o_proj": (1, "heads"),
    "gate_proj": (0, "columns"), "up_proj": (0, "columns"), "down_proj": (1, "columns"),
    "embed_tokens": (0, "vocab"), "lm_head": (0, "vocab"),
}  # fmt: skip


class Group(Protocol):
    """One rank's end of a group; each call is made by all ranks, in the same order, with one shape."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by its sum over all ranks, and return it."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The x of every rank, in the order of ranks."""


def split(field: str, total: int, rank: int, size: int) -> range:
    """A rank's part of `total` things, as even as possible: the first ranks hold one more."""
    if total < size:
        raise InvalidRequestError("tensor_parallel_size", size, f"at most {field}={total}")
    part, more = divmod(total, size)
    start = rank * part + min(rank, more)
    return range(start, start + part + (rank < more))


def split_heads(config: ModelConfig, rank: int, size: int) -> tuple[range, range]:
    """Query heads and key-value heads of a rank. A query head stays with the key-value head that it reads."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group = heads // kv_heads  # query heads that share one key-value head
    if size <= kv_heads:
        own = split("num_key_value_heads", kv_heads, rank, size)
        return range(own.start * group, own.stop * group), own
    copies = size // kv_heads  # ranks that keep a copy of the same key-value head
    if size % kv_heads or copies > group:
        limit = f"at most num_key_value_heads={kv_heads}, or a multiple of it up to num_attention_heads={heads}"
        raise InvalidRequestError("tensor_parallel_size", size, limit)
    kv_head = rank // copies
    own = split("num_attention_heads", group, rank % copies, copies)
    return range(kv_head * group + own.start, kv_head * group + own.stop), range(kv_head, kv_head + 1)


@dataclass(frozen=True)
class Shard:
    """What one rank of `size` holds of a model: ranges of heads, of the MLP's columns and of the vocabulary."""

    full: ModelConfig
    rank: int
    size: int
    heads: range
    kv_heads: range
    columns: range
    vocab: range

    @classmethod
    def of(cls, full: ModelConfig, rank: int, size: int) -> Shard:
        """Raises InvalidRequestError if the model can't be cut into so many."""
        columns = split("intermediate_size", full.intermediate_size, rank, size)
        vocab = split("vocab_size", full.vocab_size, rank, size)
        return cls(full, rank, size, *split_heads(full, rank, size), columns, vocab)

    @property
    def config(self) -> ModelConfig:
        """The same model with this rank's share of heads and columns. Ids and scores still mean all tokens."""
        return replace(
            self.full, num_attention_heads=len(self.heads), num_key_value_heads=len(self.kv_heads),
            intermediate_size=len(self.columns),
        )

    def part(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The slice of a stored tensor that this rank reads; norms, and biases of sums, are read whole."""
        slices = [slice(0, n) for n in shape]
        dim, along = CUT.get(name.split(".")[-2], (len(shape), ""))
        if dim < len(shape):
            own, total = self._span(along)
            if shape[dim] != total:
                raise ModelLoadError(f"tensor {name} has shape {list(shape)}; dimension {dim} must be {total}")
            slices[dim] = slice(own.start, own.stop)
        return tuple(slices)

    def _span(self, along: str) -> tuple[range, int]:
        """This rank's rows along a dimension, and how many there are in all."""
        full, own = self.full, getattr(self, along)
        if along in ("heads", "kv_heads"):
            total = full.num_attention_heads if along == "heads" else full.num_key_value_heads
            return range(own.start * full.head_dim, own.stop * full.head_dim), total * full.head_dim
        return own, full.intermediate_size if along == "columns" else full.vocab_size


class RowParallelLinear(nn.Module):
    """Each rank has some columns of the weight and the matching part of the input: the products add up."""

    def __init__(self, linear: nn.Linear, group: Group):
        super().__init__()
        self.bias, linear.bias = linear.bias, None  # every rank has all of it: added once, after the sum
        self.linear, self.group = linear, group

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        total = self.group.all_reduce(self.linear(x))  # x [T, own columns] -> [T, hidden]
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Module):
    """Each rank has the vectors of some tokens; for all others it adds zero to the sum."""

    def __init__(self, embedding: nn.Embedding, vocab: range, group: Group):
        super().__init__()
        self.embedding, self.vocab, self.group = embedding, vocab, group

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        foreign = (input_ids < self.vocab.start) | (input_ids >= self.vocab.stop)
        vectors = self.embedding((input_ids - self.vocab.start).masked_fill(foreign, 0))  # [T, hidden]
        return self.group.all_reduce(vectors.masked_fill(foreign[:, None], 0))


class VocabParallelHead(nn.Module):
    """Each rank scores its own tokens; the parts are laid side by side, so that all ranks have whole rows."""

    def __init__(self, linear: nn.Linear, sizes: list[int], group: Group):
        super().__init__()
        self.linear, self.sizes, self.group = linear, sizes, group

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.linear(hidden)  # [rows, own tokens]
        scores = F.pad(scores, (0, max(self.sizes) - scores.shape[-1]))  # a collective wants equal shapes
        parts = self.group.all_gather(scores.contiguous())
        return torch.cat([part[..., :n] for part, n in zip(parts, self.sizes)], dim=-1)  # [rows, vocab_size]


def load_shard(
    name: str | Path, rank: int, size: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Transformer, Shard]:
    """A rank's part of a model, its slices alone read from the files; not connected to the others yet."""
    path = resolve(name)
    try:
        full = ModelConfig.from_dict(read_config(path))
    except KeyError as error:
        raise ModelLoadError(f"{path / 'config.json'} lacks {error}") from error
    shard = Shard.of(full, rank, size)
    with torch.device("meta"):
        model = Transformer(replace(shard.config, vocab_size=len(shard.vocab)))
    load_weights(model, path, dtype, device, part=shard.part)
    model.config = shard.config
    return model.eval().requires_grad_(False), shard


def connect(model: Transformer, shard: Shard, group: Group) -> None:
    """Put the modules in place whose results need the other ranks: two sums a layer, embedding and head."""
    for layer in model.layers:
        layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj, group)
        layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, group)
    sizes = [len(split("vocab_size", shard.full.vocab_size, rank, shard.size)) for rank in range(shard.size)]
    model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, shard.vocab, group)
    model.lm_head = VocabParallelHead(model.lm_head, sizes, group)
