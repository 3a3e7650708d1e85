"""Chapter 04: the cache filling slot by slot, what fits in a memory, exercises and quiz."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shared.lab import Check, Choice, Explorer, Field, Question, Score, Slider, Stepper, call, expect, fail
from shared.lab.form import some_text
from shared.lab.judging import short
from shared.lab.markup import Html, bar, esc, join, mono, note, strong, table, tag, visible

LIMIT = 24  # tokens of a prompt in the stepper, so that the table stays on the screen


@dataclass(frozen=True)
class Shape:
    """What the cache must know of a published model, from its config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int

    def config(self) -> Any:
        """A ModelConfig of this shape, to build live tensors from."""
        from shared.model import ModelConfig

        return ModelConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
            max_position_embeddings=8192, tie_word_embeddings=True,
        )  # fmt: skip


SHAPES = {
    "SmolLM2-135M": Shape(30, 9, 3, 64, 576, 1536, 49152),
    "Llama-3.2-1B": Shape(16, 32, 8, 64, 2048, 8192, 128256),
    "Llama-3.1-8B": Shape(32, 32, 8, 128, 4096, 14336, 128256),
    "Qwen2.5-0.5B": Shape(24, 14, 2, 64, 896, 4864, 151936),
    "Qwen2.5-7B": Shape(28, 28, 4, 128, 3584, 18944, 152064),
    "Qwen3-0.6B": Shape(28, 16, 8, 128, 1024, 3072, 151936),
}
BYTES = {"float32": 4, "bfloat16": 2}


def token_bytes(shape: Shape, bytes_each: int, kv_heads: int | None = None) -> int:
    return 2 * shape.layers * (kv_heads or shape.kv_heads) * shape.head_dim * bytes_each


def render_capacity(inputs: Mapping[str, Any]) -> Html:
    shape, size = SHAPES[inputs["model"]], BYTES[inputs["dtype"]]
    memory = inputs["memory"] * 2**30
    each, all_heads = token_bytes(shape, size), token_bytes(shape, size, shape.heads)
    tokens = int(memory // each)
    rows = [
        ["keys and values, layers, key-value heads, head_dim, bytes",
         mono(f"2 × {shape.layers} × {shape.kv_heads} × {shape.head_dim} × {size}"), ""],
        ["bytes of one token", f"{each:,}",
         bar(each / all_heads, f"{each / all_heads:.0%} of the bytes if no heads were shared")],
        ["tokens that fit", f"{tokens:,}", ""],
        ["for each request", f"{inputs['length']:,}", ""],
    ]
    count, length = tokens // inputs["length"], f"{inputs['length']:,}"
    answer = f"{count:,} request{'' if count == 1 else 's'} of {length} tokens fit{'s' if count == 1 else ''}."
    return join([tag("div", strong(answer), role="status"),
                 table(["", f"{inputs['model']}, {inputs['dtype']}", ""], rows),
                 note("Exact, for the cache alone; the weights need memory of their own.")])


def capacity_explorer() -> Explorer:
    """What a memory holds, for the shapes of real models."""
    return Explorer(render_capacity, [
        Choice("model", "Model", "SmolLM2-135M", list(SHAPES)),
        Choice("dtype", "Numbers", "bfloat16", list(BYTES)),
        Slider("memory", "GiB for the cache", 4, 1, 80),
        Slider("length", "Tokens of a request", 2048, 256, 8192, 256),
    ], title="What fits")  # fmt: skip


@dataclass(frozen=True)
class Filling:
    """The cache after a step: tokens by slot, how many of them this step wrote, what it read."""

    texts: tuple[str, ...]
    num_new: int
    next_text: str
    positions_total: int

    @property
    def first_new(self) -> int:
        return len(self.texts) - self.num_new


def filling_states(model: Any, tokenizer: Any, cache_class: type, step: Any, prompt: str,
                   max_tokens: int) -> Iterator[Filling]:
    """Run a real generation and yield the cache after each step. `step` is the notebook's cached_logits."""
    ids = tokenizer.encode(prompt)
    if not 1 <= len(ids) <= LIMIT:
        raise ValueError(f"the prompt has {len(ids)} tokens; this figure shows 1 to {LIMIT}")
    weight = model.embed_tokens.weight
    cache = cache_class(model.config, len(ids) + max_tokens, weight.dtype, weight.device)
    known, computed, total = list(ids), 0, 0
    yield Filling((), 0, "", 0)
    for _ in range(max_tokens):
        logits = step(model, cache, known[computed:], computed)
        num_new, total = len(known) - computed, total + len(known) - computed
        computed = len(known)
        known.append(int(logits.argmax()))
        texts = tuple(tokenizer.decode([i]) for i in known[:computed])
        yield Filling(texts, num_new, tokenizer.decode(known[-1:]), total)


def render_filling(state: Filling, index: int) -> Html:
    if not state.texts:
        return join(["The cache is empty. The first step runs the whole prompt."])
    rows = [[slot, mono(visible(text)), "written now" if slot >= state.first_new else "read"]
            for slot, text in enumerate(state.texts)]
    naive = sum(range(len(state.texts) - index + 1, len(state.texts) + 1))
    words = (f"This step ran {state.num_new} position{'s' if state.num_new > 1 else ''} and its last token looked "
             f"at {len(state.texts)} key{'s' if len(state.texts) > 1 else ''}. Next token: ")
    counts = f"Positions so far: {state.positions_total}; without a cache: {naive}."
    return join([esc(words), mono(visible(state.next_text)), note(counts),
                 table(["slot", "token", "key and value"], rows, lit=range(state.first_new, len(rows)))])


def cache_stepper(model: Any, tokenizer: Any, cache_class: type, step: Any) -> Stepper:
    """The notebook's cache, filling while the real model writes."""
    return Stepper(
        lambda inputs, seed: filling_states(model, tokenizer, cache_class, step, inputs["prompt"], inputs["n"]),
        render_filling,
        [Field("prompt", "Prompt", "The capital of France is", some_text(200)), Slider("n", "New tokens", 6, 1, 16)],
        seed=None, title="The cache, slot by slot",
    )  # fmt: skip


def judge_requests_that_fit(fn: Any) -> Score | str | None:
    """Exercise 04.1: head_dim is given, whole requests only."""
    for name, memory, dtype, length in (
        ("SmolLM2-135M", 2**28, "float32", 1000), ("Qwen3-0.6B", 2**30, "bfloat16", 2048),
        ("Qwen2.5-7B", 3 * 2**30, "bfloat16", 1001), ("Llama-3.1-8B", 2**20, "bfloat16", 4096),
    ):  # fmt: skip
        shape = SHAPES[name]
        config = {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
                  "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "hidden_size": shape.hidden}
        size = BYTES[dtype]
        each = token_bytes(shape, size) * length
        guessed = 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * size
        mistakes = {
            "that takes hidden_size / heads for head_dim": memory // (guessed * length),
            "that counts keys without values": memory // (each // 2),
            "that counts one key-value head for each query head":
                memory // (token_bytes(shape, size, shape.heads) * length),
            "that counts one layer": memory // (each // shape.layers),
            "that counts numbers, not their bytes": memory // (each // size),
            "that counts a request that fits in part": -(-memory // each),
            "that leaves a request that fits in part": memory / each,
        }
        case = f"With {memory:,} bytes, {name}, {size} bytes a number and {length:,} tokens each:"
        expect(fn, (memory, config, size, length), memory // each, case=case, mistakes=mistakes)
    return None


class Recorder:
    """A stand-in for model and cache: the next token depends on every id in its right slot."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.positions = 0

    def __call__(self, new_ids: list[int], num_computed: int) -> int:
        if not isinstance(new_ids, (list, tuple)):
            fail(f"Your function ran the model with {new_ids!r}; run takes a list of ids.")
        new_ids = list(new_ids)
        if not new_ids:
            fail("Your function ran the model with no token.")
        if num_computed > len(self.slots):
            fail(f"Your function put tokens after slot {num_computed - 1}, "
                 f"but only {len(self.slots)} slots are filled.")
        self.slots |= {num_computed + i: token for i, token in enumerate(new_ids)}
        self.positions += len(new_ids)
        end = num_computed + len(new_ids)
        return sum((slot + 1) * self.slots[slot] for slot in range(end)) % 97


def judge_generate(fn: Any) -> Score | str | None:
    """Exercise 04.2: the tokens of the naive loop, every position run once."""
    cost = best = 0
    for prompt, max_tokens in (([5, 7, 11], 4), ([42], 6), ([3, 1, 4, 1, 5, 9, 2, 6], 1)):
        known = list(prompt)
        for _ in range(max_tokens):
            known.append(Recorder()(known, 0))
        run = Recorder()
        case = f"For the prompt {prompt} and max_tokens={max_tokens}"
        got = call(fn, run, list(prompt), max_tokens, case=f"{case}:")
        if not isinstance(got, (list, tuple)) or list(got) != known[len(prompt):]:
            fail(f"{case}, your function returned {short(got)}; expected the {max_tokens} new tokens "
                 f"{known[len(prompt):]}.")
        cost, best = cost + run.positions, best + len(prompt) + max_tokens - 1
        if run.positions > best and cost > best:
            fail(f"{case}, the tokens are right, but {run.positions} positions were run where "
                 f"{len(prompt) + max_tokens - 1} are enough.")
    return Score("positions run", cost, best)


def judge_plan(fn: Any) -> Score | str | None:
    """Exercise 04.b: slots, positions and how many keys each new token may see."""
    for computed, new in ((0, 5), (5, 1), (4, 3), (7, 2), (0, 1)):
        case = f"With {computed} tokens computed and {new} new"
        got = call(fn, computed, new, case=f"{case}:")
        if not isinstance(got, (list, tuple)) or len(got) != 3:
            fail(f"{case}, your function returned {short(got)}; expected three lists: slots, positions, keys seen.")
        slots, positions, seen = (list(part) for part in got)
        span = list(range(computed, computed + new))
        if slots != span:
            fail(f"{case}, the slots were {slots}; expected {span}.")
        if positions != span:
            fail(f"{case}, the positions were {positions}; expected {span}: a position counts from the start "
                 "of the request.")
        if seen != [i + 1 for i in span]:
            fail(f"{case}, the new tokens see {seen} keys; expected {[i + 1 for i in span]}: "
                 "all that came before and itself, and nobody looks forward.")
    return None


CHECKS = {"04.1": Check(judge_requests_that_fit), "04.2": Check(judge_generate), "04.b": Check(judge_plan)}

QUIZ = [
    Question(
        "A prompt of 50 tokens, 10 new ones, with a cache. How many positions does the model process?",
        {
            "59": "50 in the first step, then one for each new token but the last, which never goes in.",
            "60": "The last new token is returned, not run: nothing comes after it.",
            "545": "That is the loop of chapter 03, which runs 50, 51, … 59 positions.",
            "10": "Each step runs one position, but the first has to run the whole prompt.",
        },
        compute=lambda: 50 + 10 - 1,
    ),
    Question(
        "Qwen3-0.6B has 28 layers, 16 query heads, 8 key-value heads, head_dim 128 and hidden size 1024. "
        "How many bytes of cache does one token take in bfloat16?",
        {
            "57,344": "That takes head_dim as 1024 / 16 = 64, or forgets the values.",
            "114,688": "2 × 28 × 8 × 128 × 2 bytes.",
            "229,376": "That is one key-value head for each of the 16 query heads, or four bytes a number.",
            "3,670,016": "That counts 512 key-value heads. Heads and hidden size are not multiplied.",
        },
        compute=lambda: f"{token_bytes(SHAPES['Qwen3-0.6B'], 2):,}",
    ),
    Question(
        "With a cache, what still grows with every token of an answer?",
        {
            "The number of positions that go through the feed-forward blocks in one step.":
                "That is one position in each decode step, however long the answer is.",
            "The number of keys that one step's attention reads.":
                "The new query meets the key of every token before it, in every layer.",
            "The bytes that each single token occupies.":
                "Each token takes the same: its keys and values. Their number grows, not their size.",
        },
        answer="The number of keys that one step's attention reads.",
    ),
]
