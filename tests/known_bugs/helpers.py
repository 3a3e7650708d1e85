"""Tiny models, scripted answers and a loop without any cache: what the tests of known faults compare with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import settings

from shared.decode import next_token_logits
from shared.engine import Engine
from shared.kv_cache import KVCache
from shared.model import ModelConfig, Transformer
from shared.output import CompletionOutput, RequestOutput
from shared.prefix_cache import PrefixCachingBlockManager
from shared.sampling import Sampler
from shared.sampling_params import SamplingParams
from tests.runtime.tiny import EOS, VOCAB, ScriptedRunner, make_engine

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=40)

PIECES = ["<pad>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<special>"]
PAD, START, END, EOT, SPECIAL = range(5)  # END is the end token of every scripted model
LETTERS = [chr(97 + i) for i in range(26)]


@functools.cache
def tiny(vocab_size: int = VOCAB, qk_norm: bool = False, seed: int = 0) -> Transformer:
    """A random model: two layers, four query heads over two key-value heads, head_dim not hidden / heads."""
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=vocab_size, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=10000.0,
        rope_scaling=None, max_position_embeddings=4096, tie_word_embeddings=False,
        qkv_bias=not qk_norm, qk_norm=qk_norm,
    )  # fmt: skip
    model = Transformer(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return model


def cached_engine(
    model: Transformer | None = None, num_blocks: int = 64, block_size: int = 4, **parts
) -> Engine:
    """An engine whose blocks outlive their requests."""
    return make_engine(model, allocator=PrefixCachingBlockManager(num_blocks, block_size), **parts)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


# The oracle


@dataclass
class Solo:
    """What the sampler must know of a request, kept by hand."""

    sampling_params: SamplingParams
    prompt_token_ids: list[int]
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset({EOS})
    output_token_ids: list[int] = field(default_factory=list)


def oracle(
    model: Transformer, prompt: Sequence[int], params: SamplingParams, seed: int | None = None
) -> list[int]:
    """Recompute everything for each token: no cache, batch or engine. Stop strings are not looked at."""
    seed = (params.seed or 0) if seed is None else seed
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset({EOS}))
    solo = Solo(params, list(prompt), seed, ends)
    while len(solo.output_token_ids) < params.max_tokens:
        logits = next_token_logits(model, solo.prompt_token_ids + solo.output_token_ids)
        solo.output_token_ids.append(Sampler()(logits[None], [solo])[0].token_id)
        if solo.output_token_ids[-1] in ends and len(solo.output_token_ids) >= params.min_tokens:
            break
    return solo.output_token_ids


def greedy(max_tokens: int = 10, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **options})


# Scripted answers


class PieceTokenizer:
    """Token i is the text pieces[i]; the first five are special, and invisible unless asked for."""

    def __init__(self, pieces: Sequence[str], eos_token_ids: Sequence[int] = (END,)):
        self.pieces, self.eos_token_ids = list(pieces), tuple(eos_token_ids)

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(character) for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids if not (skip_special_tokens and i < len(PIECES)))

    def detokenizer(self, skip_special_tokens: bool = True) -> PieceDetokenizer:
        return PieceDetokenizer(self, skip_special_tokens)


class PieceDetokenizer:
    def __init__(self, tokenizer: PieceTokenizer, skip_special_tokens: bool):
        self.tokenizer, self.skip = tokenizer, skip_special_tokens

    def push(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], self.skip)

    def flush(self) -> str:
        return ""


def saying(*texts: str, eos_token_ids: Sequence[int] = (END,), after: str = PIECES[END], **parts) -> Engine:
    """An engine whose model says these pieces, one a token, and then `after` for ever."""
    pieces = list(dict.fromkeys([*PIECES, *LETTERS, *texts, after]))
    script = ScriptedRunner([pieces.index(text) for text in texts], VOCAB, pieces.index(after))
    return make_engine(runner=script, tokenizer=PieceTokenizer(pieces, eos_token_ids), **parts)


@dataclass
class Asked:
    """Everything an engine reported of one request."""

    steps: list[RequestOutput]

    @property
    def last(self) -> CompletionOutput:
        return self.steps[-1].outputs[0]

    @property
    def text(self) -> str:
        return self.last.text

    @property
    def ids(self) -> list[int]:
        return self.last.token_ids

    @property
    def why(self) -> str | None:
        return self.last.finish_reason

    @property
    def deltas(self) -> list[str]:
        return [step.outputs[0].new_text for step in self.steps]


def ask(engine: Engine, prompt: Sequence[int] = (5, 6), **options) -> Asked:
    """One request alone; greedy unless asked otherwise. What was streamed is what is returned."""
    engine.add_request("asked", list(prompt), SamplingParams(**{"temperature": 0, **options}))
    steps = []
    while engine.has_unfinished_requests():
        steps += engine.step()
        engine.scheduler.check()
    asked = Asked(steps)
    shown = ""
    for step in steps:
        shown += step.outputs[0].new_text
        assert step.outputs[0].text == shown, "text was taken back, or not streamed"
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    return asked


def forced(*token_ids: int, others: float = 0.0) -> ForcedRunner:
    return ForcedRunner(token_ids, others)


class ForcedRunner:
    """A model that always wants these tokens, the first most; everything else scores `others`."""

    def __init__(self, token_ids: Sequence[int], others: float = 0.0, vocab_size: int = VOCAB):
        self.row = torch.full((vocab_size,), others)
        for rank, token in enumerate(token_ids):
            self.row[token] = 10.0 - rank

    def execute(self, scheduled, block_size):
        return self.row.repeat(sum(item.samples for item in scheduled), 1)


def plain_stop(text: str, stops: Sequence[str], ruled_out: int = 0, include: bool = False) -> str | None:
    """The text up to the stop string that is complete first (the longest of those, if several end there).

    Stop strings that are complete within the first `ruled_out` characters do not count; None without any.
    """
    for end in range(ruled_out + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: end if include else min(starts)]
    return None


def free_blocks(engine: Engine) -> int:
    return engine.scheduler.allocator.num_free_blocks


def poisoned(cache: KVCache, value: float = float("nan")) -> KVCache:
    """Every slot holds rubbish, so that reading one before it was written shows."""
    cache.keys.fill_(value)
    cache.values.fill_(value)
    return cache
