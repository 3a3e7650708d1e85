"""Chapter 02: measurements of the prefill, the checks of the exercises, the quiz."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shared.lab import Check, Question, call, expect, fail
from shared.lab.chapters.ch02_inside import attention_explorer, record, shape_inspector
from shared.lab.machine import Measurement, timed
from shared.model import CausalAttention, ModelConfig, SelfAttention, Transformer

__all__ = ["CHECKS", "QUIZ", "attention_explorer", "prefill_times", "record", "roofline", "shape_inspector"]

# Measurements


def prefill_times(model: nn.Module, attention: Callable, lengths: Sequence[int],
                  n: int = 5) -> list[Measurement]:
    """Milliseconds for one pass over prompts of these lengths, scoring the next token."""
    return [_timed(model, attention, length, n) for length in lengths]


def _timed(model: nn.Module, attention: Callable, length: int, n: int) -> Measurement:
    device = model.embed_tokens.weight.device
    ids = torch.arange(length, device=device) % model.config.vocab_size
    positions = torch.arange(length, device=device)

    @torch.inference_mode()
    def run() -> float:
        return model.logits(model(ids, positions, attention)[-1:]).max().item()  # item waits for the device

    return timed(f"prefill, length {length}", run, n)


def roofline(intensities: Sequence[float], speeds: Sequence[float], lengths: Sequence[int],
             bandwidth: float, peak: float) -> bytes:
    """The machine's two limits (GB/s and GFLOP/s) and the measured passes below them, as png."""
    from shared.lab.charts import chart, to_png

    figure, axes = chart(height=3.8, title="The roofline: operations for each byte, and the speed they allow")
    low, high = min(intensities) / 2, max(intensities) * 2
    corner = peak / bandwidth
    limits = [bandwidth * low, peak, peak]
    axes.plot([low, corner, high], limits, marker="", label="limit: memory, then arithmetic")
    axes.plot(intensities, speeds, linestyle="", marker="o", label="measured passes, by tokens in the prompt")
    for x, y, length in zip(intensities, speeds, lengths, strict=True):
        axes.annotate(str(length), (x, y), textcoords="offset points", xytext=(6, -11), fontsize=9)
    axes.axvline(corner, linestyle=":", marker="", linewidth=1)
    axes.annotate(f"corner: {corner:.0f}", (corner, bandwidth * low), fontsize=9,
                  textcoords="offset points", xytext=(5, 2))
    axes.set(xscale="log", yscale="log", xlabel="operations for each byte of weights", ylabel="GFLOP/s")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=9)
    return to_png(figure)


def main() -> None:
    """Measure and save: `python -m shared.lab.chapters.ch02`."""
    from shared.lab.evidence import save_evidence
    from shared.lab.machine import measured_bandwidth, measured_flops
    from shared.weights import load_model

    results = [measured_bandwidth(), measured_flops()]
    results += prefill_times(load_model(), CausalAttention(), (1, 4, 16, 64, 256, 512))
    what = "time of prompts of several lengths in smollm2-135m, float32, and the machine's two limits"
    print(save_evidence("02_prefill", what, "python -m shared.lab.chapters.ch02", results).name)


# Exercises

PACKED = {  # lengths of the prompts, query heads, key heads, head_dim
    "one prompt": ([5], 2, 2, 4),
    "two prompts": ([3, 4], 2, 2, 4),
    "shared key heads": ([4, 3], 6, 2, 8),
    "four prompts, one of a single token": ([2, 1, 5, 3], 9, 3, 16),
    "one key head for all": ([3, 2], 4, 1, 4),
}


def judge_packed(fn: Callable) -> None:
    for name, (lengths, heads, kv_heads, head_dim) in PACKED.items():
        generator = torch.Generator().manual_seed(len(name))
        q, k, v = (torch.randn(sum(lengths), count, head_dim, generator=generator) * 2
                   for count in (heads, kv_heads, kv_heads))
        out = call(fn, q.clone(), k.clone(), v.clone(), list(lengths), case=f"Case {name!r}:")
        _judge_output(out, packed(q, k, v, lengths), lengths, f"Case {name!r}:", misread(q, k, v, lengths))


def packed(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    parts = zip(q.split(list(lengths)), k.split(list(lengths)), v.split(list(lengths)), strict=True)
    return torch.cat([CausalAttention()(0, *part) for part in parts])


def misread(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """What comes of the likely mistakes."""
    prompt = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))  # [T]
    own, groups = prompt[:, None] == prompt, q.shape[1] // k.shape[1]

    def attended(q: Tensor, k: Tensor, visible: Tensor, v: Tensor = v) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return out[0].transpose(0, 1)

    return {
        "tokens look back into the prompts before their own": attended(q, k, torch.ones_like(own).tril()),
        "tokens look ahead": attended(q, k, own),
        "a token does not see itself": attended(q, k, own.tril(-1)),
        "tokens look ahead, and into other prompts": attended(q, k, torch.ones_like(own)),
        "query head i uses key head i % kv_heads; heads that share stand side by side":
            attended(q, k.repeat(1, groups, 1), own.tril(), v.repeat(1, groups, 1)),
        "the scores are not divided by the root of head_dim": attended(q * q.shape[-1] ** 0.5, k, own.tril()),
    }


def _judge_output(out: Any, want: Tensor, lengths: Sequence[int], case: str,
                  mistakes: dict[str, Tensor]) -> None:
    if not isinstance(out, Tensor):
        fail(f"{case} your function returned {type(out).__name__}, not a tensor.")
    if out.shape != want.shape:
        fail(f"{case} your function returned the shape {list(out.shape)}; expected {list(want.shape)}.")
    off = ((out - want).abs().amax(-1) > 1e-4) | out.isnan().any(-1)  # [T, heads]
    wrong = off.any(1)
    if wrong.any():
        token = int(wrong.nonzero()[0])
        prompt = next(i for i in range(len(lengths)) if token < sum(lengths[: i + 1]))
        heads = int(off[token].sum())
        where = f"in {heads} of {want.shape[1]} heads"
        found = [words for words, other in mistakes.items() if torch.allclose(out, other, atol=1e-4)]
        blame = f" It is what comes out if {found[0]}." if found else ""
        blame = blame or (" It is not a number: does the token see itself?" if out[token].isnan().any() else "")
        fail(f"{case} the result of token {token}, in prompt {prompt}, is wrong {where}.{blame}")


SHAPES = {
    "a small Llama": dict(),
    "a wide head_dim": dict(head_dim=32),
    "as many key heads as query heads": dict(num_key_value_heads=4),
    "tied embeddings": dict(tie_word_embeddings=True, vocab_size=300),
    "six layers": dict(num_hidden_layers=6, intermediate_size=100),
}


def small_config(**changes: Any) -> ModelConfig:
    shape = dict(vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=12,
                 architectures=["LlamaForCausalLM"])
    return ModelConfig.from_dict({**shape, **changes})


def judge_operations(fn: Callable) -> None:
    for name, changes in SHAPES.items():
        for num_tokens in (1, 7, 100):
            config = small_config(**changes)
            want = prefill_operations(config, num_tokens)
            case = f"{name}, {num_tokens} token{'s' if num_tokens > 1 else ''}"
            expect(fn, (config, num_tokens), want, case=case, tolerance=0.0, mistakes=bills(config, num_tokens))


def prefill_operations(config: ModelConfig, num_tokens: int) -> int:
    """Counted on the model itself: the layers' matrices, attention over the square, one row of the head."""
    with torch.device("meta"):
        layers = Transformer(config).layers
    weights = sum(weight.numel() for weight in layers.parameters() if weight.dim() == 2)
    square = 4 * num_tokens**2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return 2 * num_tokens * weights + square + 2 * config.vocab_size * config.hidden_size


def bills(config: ModelConfig, num_tokens: int) -> dict[str, int]:
    """What comes of the likely mistakes."""
    want, queries = prefill_operations(config, num_tokens), config.num_attention_heads * config.head_dim
    square = 4 * num_tokens**2 * queries * config.num_hidden_layers
    head, each = 2 * config.vocab_size * config.hidden_size, 2 * num_tokens * config.num_hidden_layers

    def changed(**sizes: int) -> int:
        return prefill_operations(replace(config, **sizes), num_tokens)

    return {
        "that counts one operation for a product and its sum, not two": (want + square) // 2,
        "that counts half of everything: a product and a sum are two operations": want // 2,
        "that runs lm_head for every position": want + (num_tokens - 1) * head,
        "that leaves out lm_head": want - head,
        "that leaves out attention": want - square,
        "that counts half of attention: both queries times keys and weights times values are two each":
            want - square // 2,
        "that takes hidden_size / heads for head_dim":
            changed(head_dim=config.hidden_size // config.num_attention_heads),
        "that counts a key head for each query head": changed(num_key_value_heads=config.num_attention_heads),
        "that counts two matrices of SwiGLU, which has three":
            want - each * config.hidden_size * config.intermediate_size,
        "that leaves out o_proj": want - each * config.hidden_size * queries,
    }


TABLES = ((64, 10_000.0), (64, 100_000.0), (32, 10_000.0))


def judge_table(fn: Callable) -> None:
    positions = torch.tensor([0, 1, 5, 255, 256, 257, 1000, 1857, 2047, 4095, 8001])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head_dim, theta in TABLES:
            case = f"Case {str(dtype).removeprefix('torch.')}, head_dim {head_dim}, theta {theta:g}:"
            result = call(fn, positions.clone(), head_dim, theta, dtype, case=case)
            _judge_table(result, positions, head_dim, theta, dtype, case)


def _judge_table(result: Any, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype,
                 case: str) -> None:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        fail(f"{case} your function returned {type(result).__name__}, not a pair of cos and sin.")
    speeds = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions[:, None].double() * speeds  # [T, head_dim / 2]
    for name, got, want in zip(("cos", "sin"), result, (angles.cos(), angles.sin()), strict=True):
        if not isinstance(got, Tensor) or got.shape != want.shape:
            shape = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
            fail(f"{case} {name} has the shape {shape}; expected {list(want.shape)}.")
        if got.dtype != dtype:
            fail(f"{case} {name} is {got.dtype}; expected {dtype}.")
        error = (got.double() - want).abs().nan_to_num(9.9).amax(1)  # [T]
        if (error > 0.01).any():
            first = int((error > 0.01).nonzero()[0])
            fail(f"{case} at position {positions[first]}, {name} is wrong by up to {error[first]:.2f}.")


CHECKS = {"02.1": Check(judge_packed), "02.2": Check(judge_operations), "02.b": Check(judge_table)}


# Quiz


def shape_of_k_proj() -> str:
    config = small_config(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    with torch.device("meta"):
        return str(list(SelfAttention(config, 0).k_proj.weight.shape))


def operations_per_byte(num_tokens: int = 300) -> int:
    """Of a live matrix: a product and a sum for each weight and token, over its bytes."""
    weight = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
    return 2 * num_tokens * weight.numel() // (weight.numel() * weight.element_size())


@torch.inference_mode()
def positions_that_change() -> str:
    """Replace the third of five tokens in a small random model; where does the output differ?"""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(small_config())
        before, after = (model(torch.tensor(ids), torch.arange(5), CausalAttention())
                         for ids in ([5, 6, 7, 8, 9], [5, 6, 70, 8, 9]))
    changed = ((before - after).abs().amax(-1) > 1e-6).nonzero().flatten().tolist()
    return "the " + ", ".join({2: "third", 3: "fourth"}.get(i, "") for i in changed[:-1]) + " and fifth"


QUIZ = [
    Question(
        "A model has hidden size 1,024, 16 query heads, 8 key-value heads and head_dim 128. Which shape does "
        "the weight of its `k_proj` have?",
        {
            "[512, 1024]": "That takes hidden size over heads for head_dim: 64. The config says 128.",
            "[1024, 1024]": "8 key heads of 128 numbers each, made from a vector of 1,024.",
            "[2048, 1024]": "That is `q_proj`, with its 16 heads. Keys have 8.",
            "[128, 1024]": "That is one head. All 8 key heads lie below one another in one matrix.",
        },
        compute=shape_of_k_proj,
    ),
    Question(
        "You replace the third of five prompt tokens by another. At which positions can the scores change?",
        {
            "only the third": "Later tokens look back at it, so what they gather changes too.",
            "the third, fourth and fifth": "It and all who may look at it. Nobody before it can.",
            "all five": "The causal mask hides it from the first two.",
            "only the fifth": "It is the one that we usually read, but the third and fourth have scores too.",
        },
        answer="the third, fourth and fifth", compute=positions_that_change,
    ),
    Question(
        "Weights in bfloat16, two bytes each. A prompt of 300 tokens passes a matrix that is read once. How "
        "many operations is that for each byte of it?",
        {
            "1": "That is one token: two operations for a weight of two bytes.",
            "150": "Half of it. Each weight takes part in a product and in a sum.",
            "300": "Two operations for each token and weight, over two bytes for each weight.",
            "600": "Those are the operations for each weight, and a weight has two bytes.",
        },
        compute=operations_per_byte,
    ),
]

if __name__ == "__main__":
    main()
