"""Answers to chapter 02's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shared.model import CausalAttention


def prompts_see_each_other(q, k, v, lengths):
    return CausalAttention()(0, q, k, v)


def with_mask(q, k, v, visible, group=True):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=group)[0].transpose(0, 1)


def same_prompt(lengths):
    prompt = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return prompt[:, None] == prompt


def looks_ahead(q, k, v, lengths):
    return with_mask(q, k, v, same_prompt(lengths))


def key_heads_in_turn(q, k, v, lengths):
    groups = q.shape[1] // k.shape[1]
    return with_mask(q, k.repeat(1, groups, 1), v.repeat(1, groups, 1), same_prompt(lengths).tril())


def no_scale(q, k, v, lengths):
    return with_mask(q * q.shape[-1] ** 0.5, k, v, same_prompt(lengths).tril())


def not_itself(q, k, v, lengths):
    return with_mask(q, k, v, same_prompt(lengths).tril(-1))


def heads_first(q, k, v, lengths):
    return with_mask(q, k, v, same_prompt(lengths).tril()).transpose(0, 1)


def as_lists(q, k, v, lengths):
    return with_mask(q, k, v, same_prompt(lengths).tril()).tolist()


def bill(config, num_tokens, each=2, head_rows=1, head_dim=None, kv_heads=None, square=4):
    head_dim = head_dim or config.head_dim
    queries = config.num_attention_heads * head_dim
    keys = (kv_heads or config.num_key_value_heads) * head_dim
    matrices = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    layers = config.num_hidden_layers * (each * num_tokens * matrices + square * num_tokens**2 * queries)
    return layers + each * config.vocab_size * config.hidden_size * head_rows


def head_dim_by_division(config, num_tokens):
    return bill(config, num_tokens, head_dim=config.hidden_size // config.num_attention_heads)


def head_for_every_position(config, num_tokens):
    return bill(config, num_tokens, head_rows=num_tokens)


def one_for_product_and_sum(config, num_tokens):
    return bill(config, num_tokens, each=1)


def as_many_key_heads(config, num_tokens):
    return bill(config, num_tokens, kv_heads=config.num_attention_heads)


def only_what_the_mask_leaves(config, num_tokens):
    return bill(config, num_tokens, square=2)


def tied_head_is_free(config, num_tokens):
    head = 2 * config.vocab_size * config.hidden_size
    return bill(config, num_tokens) - (head if config.tie_word_embeddings else 0)


def table(positions, head_dim, theta, dtype, speeds_in, positions_in, angles_in):
    speeds = (1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)).to(speeds_in)
    angles = (positions[:, None].to(positions_in).float() * speeds.float()).to(angles_in)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rounds_everything(positions, head_dim, theta, dtype):
    return table(positions, head_dim, theta, dtype, dtype, dtype, dtype)


def rounds_the_speeds(positions, head_dim, theta, dtype):
    return table(positions, head_dim, theta, dtype, dtype, torch.float32, torch.float32)


def rounds_the_positions(positions, head_dim, theta, dtype):
    return table(positions, head_dim, theta, dtype, torch.float32, dtype, torch.float32)


def rounds_the_angles(positions, head_dim, theta, dtype):
    return table(positions, head_dim, theta, dtype, torch.float32, torch.float32, dtype)


def always_float32(positions, head_dim, theta, dtype):
    return table(positions, head_dim, theta, torch.float32, torch.float32, torch.float32, torch.float32)


def sine_first(positions, head_dim, theta, dtype):
    return table(positions, head_dim, theta, dtype, torch.float32, torch.float32, torch.float32)[::-1]


def one_table(positions, head_dim, theta, dtype):
    return table(positions, head_dim, theta, dtype, torch.float32, torch.float32, torch.float32)[0]


WRONG_ANSWERS = {
    "02.1": [
        (prompts_see_each_other, "in prompt 1, is wrong in 2 of 2 heads. It is what comes out if tokens look back"),
        (looks_ahead, "if tokens look ahead"), (key_heads_in_turn, "i % kv_heads"),
        (no_scale, "root of head_dim"), (not_itself, "does not see itself"),
        (heads_first, "shape"), (as_lists, "not a tensor"),
    ],
    "02.2": [
        (head_dim_by_division, "hidden_size / heads"), (head_for_every_position, "lm_head for every position"),
        (one_for_product_and_sum, "one operation for a product and its sum"),
        (as_many_key_heads, "a key head for each query head"), (only_what_the_mask_leaves, "half of attention"),
        (tied_head_is_free, "leaves out lm_head"),
    ],
    "02.b": [
        (rounds_everything, "float16"), (rounds_the_speeds, "wrong by"), (rounds_the_positions, "wrong by"),
        (rounds_the_angles, "wrong by"), (always_float32, "expected torch.float16"),
        (sine_first, "cos is wrong"),
        (one_table, "not a pair"),
    ],
}  # fmt: skip
