"""Tiny random models of each family, a toy tokenizer and a scripted runner: what the runtime tests stand on."""
from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from shared.batch import ModelRunner, num_wanted_rows
from shared.block_manager import BlockManager
from shared.engine import Engine
from shared.kv_cache import KVCache
from shared.model import Transformer
from shared.request import RequestLimits
from shared.scheduler import Scheduler
from shared.trace import Trace

VOCAB = 128
EOS = 2
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=1, eos_token_id=EOS,
    initializer_range=0.2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
VARIANTS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama3-rope": ("Llama", dict(rope_parameters=LLAMA3_ROPE)),
    "llama-rope-theta": ("Llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    "llama-head-dim-null": ("Llama", dict(head_dim=None)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "qwen2.5": ("Qwen2", dict(tie_word_embeddings=False)),
    "qwen2.5-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", dict(tie_word_embeddings=True)),
}


def make_hf(variant: str, seed: int = 0):
    """A random transformers model in float32; norms and biases are random too, so that none is forgotten."""
    import transformers

    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save_hf(variant: str, folder: Path, seed: int = 0) -> Path:
    make_hf(variant, seed).save_pretrained(folder)
    return folder


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer: three special tokens, then one token for each printable ASCII character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from shared.bpe import byte_alphabet

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    character = {byte: text for text, byte in byte_alphabet().items()}
    plain = [character[byte] for byte in (10, *range(32, 127))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(special + plain)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": special[EOS], "bos_token": special[1], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class ToyTokenizer:
    """Token i is the character chr(i); ids below 3 are special and invisible."""

    eos_token_ids = (EOS,)
    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{i}>" if i < 3 and not skip_special_tokens else "" if i < 3 else chr(i) for i in ids)

    def detokenizer(self, skip_special_tokens: bool = True) -> ToyDetokenizer:
        return ToyDetokenizer(self, skip_special_tokens)


class ToyDetokenizer:
    def __init__(self, tokenizer: ToyTokenizer, skip_special_tokens: bool):
        self.tokenizer, self.skip = tokenizer, skip_special_tokens

    def push(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], self.skip)

    def flush(self) -> str:
        return ""


class ScriptedRunner:
    """A model whose arg-max follows a script of output tokens, the same for every request."""

    def __init__(self, script: Sequence[int], vocab_size: int = VOCAB, after: int = EOS):
        self.script, self.vocab_size, self.after = list(script), vocab_size, after
        self.rows_seen: list[int] = []

    def execute(self, scheduled, block_size):
        rows = []
        for item in scheduled:
            count, prompt = num_wanted_rows(item), item.request.num_prompt_tokens
            end = item.start + item.num_tokens
            rows += [position + 1 - prompt for position in range(end - count, end)]
        self.rows_seen.append(len(rows))
        logits = torch.zeros(len(rows), self.vocab_size)
        for row, index in enumerate(rows):
            logits[row, self.script[index] if 0 <= index < len(self.script) else self.after] = 10.0
        return logits


def make_engine(
    model: Transformer | None = None, *, runner=None, allocator=None, num_blocks: int = 64, block_size: int = 4,
    max_model_len: int = 200, max_num_seqs: int = 8, max_num_batched_tokens: int = 64, chunked: bool = True,
    policy="fcfs", tokenizer=None, trace: bool = True, seed: int = 0, sampler=None, poison: float | None = None,
    clock=time.perf_counter,
) -> Engine:
    """An engine around a tiny model or a stub runner, every part of it open to the test."""
    allocator = allocator or BlockManager(num_blocks, block_size)
    scheduler = Scheduler(allocator, max_num_seqs, max_num_batched_tokens, chunked, policy)
    if runner is None:
        cache = KVCache(model.config, allocator.num_blocks * allocator.block_size, torch.float32)
        if poison is not None:
            cache.keys.fill_(poison)
            cache.values.fill_(poison)
        runner = ModelRunner(model, cache)
    limits = RequestLimits(model.config.vocab_size if model else VOCAB, max_model_len)
    return Engine(
        runner, scheduler, tokenizer or ToyTokenizer(), limits, sampler=sampler, trace=Trace() if trace else None,
        seed=seed, clock=clock,
    )


def drain(engine: Engine, check: bool = True) -> dict:
    """Step until nothing is left, checking the invariants after every step; the final outputs by id."""
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        if check:
            engine.scheduler.check()
    return done


def run(engine: Engine, prompts, params) -> list[list[int]]:
    """Token ids of the answers to prompts, all added at once."""
    params = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
    for i, (prompt, p) in enumerate(zip(prompts, params)):
        engine.add_request(str(i), prompt, p)
    done = drain(engine)
    return [done[str(i)].outputs[0].token_ids for i in range(len(prompts))]
