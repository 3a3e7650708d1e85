"""From scores to a token: the rows of a batch, each by its own options.

The order is fixed and is vLLM's: ban end tokens below min_tokens, logit_bias, penalties, (greedy stops
here), temperature, min_p, top_k, top_p on what top_k left, draw. Logprobs are of the untouched scores.
"""
from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.errors import EngineError
from shared.sampling_params import SamplingParams

SMALLEST_TEMPERATURE = 1e-10  # below it a division could overflow; the draw is the arg-max long before
NO_PENALTIES = (1, 0, 0)  # repetition, presence, frequency


class SamplingState(Protocol):
    """What the sampler must know of a request."""

    sampling_params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: Collection[int]


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token and its rank (1 is the most likely)."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: dict[int, Logprob] | None = None


class Sampler:
    """Choose one token for each row of scores; rows never influence each other."""

    @torch.inference_mode()
    def __call__(self, logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """logits [rows, vocab_size] -> one SampledToken a row."""
        best = logits.max(-1)  # the first of equals
        if not torch.isfinite(best.values).all():
            raise EngineError("logits: a row holds NaN or infinity, so no token can be chosen")
        if all(is_plainly_greedy(state.sampling_params) for state in states):
            return [SampledToken(token) for token in best.indices.tolist()]
        raw = logits.float()
        tokens = self.choose(adjust(raw, states), states)
        wanted = [state.sampling_params.logprobs for state in states]
        logprobs = top_logprobs(raw, tokens, wanted)
        return [SampledToken(token, row) for token, row in zip(tokens, logprobs)]

    def choose(self, logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
        """The arg-max of each greedy row, a draw for the others."""
        tokens = logits.argmax(-1).tolist()
        rows = [i for i, state in enumerate(states) if not state.sampling_params.greedy]
        if rows:
            chosen = [states[i] for i in rows]
            probs = probabilities(logits[rows], [state.sampling_params for state in chosen])
            draws = [uniform(state.seed, len(state.output_token_ids)) for state in chosen]
            for row, token in zip(rows, draw(probs, draws)):
                tokens[row] = token
        return tokens


def is_plainly_greedy(params: SamplingParams) -> bool:
    """Whether the arg-max of the untouched scores is all that is asked for."""
    changed = params.min_tokens or params.logit_bias or penalties_of(params) != NO_PENALTIES
    return params.greedy and params.logprobs is None and not changed


def penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def adjust(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Apply what depends on a request's history: banned end tokens, logit_bias, penalties."""
    adjusted = logits
    for row, state in enumerate(states):
        params, output = state.sampling_params, state.output_token_ids
        held_back = early_ends(state, logits.shape[-1])
        penalised = penalties_of(params) != NO_PENALTIES
        if not (held_back or params.logit_bias or penalised):
            continue
        adjusted = adjusted.clone() if adjusted is logits else adjusted  # logprobs need the raw scores
        adjusted[row, held_back] = -torch.inf
        if params.logit_bias:
            adjusted[row, list(params.logit_bias)] += column(list(params.logit_bias.values()), adjusted)[:, 0]
        if penalised:
            adjusted[row] = penalise(adjusted[row], params, state.prompt_token_ids, output)
    return adjusted


def early_ends(state: SamplingState, vocab_size: int) -> list[int]:
    """End tokens that may not come yet: those below min_tokens, unless no other token would be left."""
    ends = set(state.stop_token_ids)
    early = len(state.output_token_ids) < state.sampling_params.min_tokens
    return sorted(ends) if early and len(ends) < vocab_size else []


def penalise(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """repetition_penalty on tokens of prompt and output (Keskar et al., 2019), the others on the output."""
    counts = count_tokens(output, logits)
    seen = (counts + count_tokens(prompt, logits)) > 0
    penalty = params.repetition_penalty
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(seen, repeated, logits)
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def count_tokens(ids: Sequence[int], like: Tensor) -> Tensor:
    """How often each token of the vocabulary occurs in ids: [vocab_size]."""
    return torch.tensor(list(ids), dtype=torch.long, device=like.device).bincount(minlength=like.shape[-1])


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution that is drawn from: temperature, then min_p, top_k and top_p. [rows, vocab_size]."""
    temperature = column([max(p.temperature, SMALLEST_TEMPERATURE) for p in params], logits)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature  # the largest is 0, so nothing overflows
    kept = keep_min_p(scaled, [p.min_p for p in params])
    kept = keep_top_k(kept, [p.top_k for p in params])
    kept = keep_top_p(kept, [p.top_p for p in params])
    return kept.softmax(-1)


def keep_min_p(scaled: Tensor, min_p: Sequence[float]) -> Tensor:
    """Drop tokens less likely than min_p times the most likely one (Nguyen et al., 2024)."""
    if not any(min_p):
        return scaled
    limit = scaled.amax(-1, keepdim=True) + column(min_p, scaled).log()  # log 0 = -inf drops nothing
    return scaled.masked_fill(scaled < limit, -torch.inf)


def keep_top_k(scaled: Tensor, top_k: Sequence[int]) -> Tensor:
    """Keep exactly the k most likely tokens; among equals the lower ids stay."""
    vocab_size = scaled.shape[-1]
    ks = [min(k, vocab_size) if k else vocab_size for k in top_k]
    largest = max((k for k in ks if k < vocab_size), default=0)
    if not largest:
        return scaled
    k = column(ks, scaled, torch.long)
    tops = scaled.topk(largest, dim=-1).values
    limit = tops.gather(-1, (k - 1).clamp(max=largest - 1))  # [rows, 1], the k-th best score
    above, equal = scaled > limit, scaled == limit
    room = k - above.sum(-1, keepdim=True)  # places left for tokens that tie with the k-th
    kept = above | (equal & (equal.cumsum(-1) <= room)) | (k == vocab_size)
    return scaled.masked_fill(~kept, -torch.inf)


def keep_top_p(scaled: Tensor, top_p: Sequence[float]) -> Tensor:
    """Keep the smallest set of most likely tokens that holds probability top_p (Holtzman et al., 2019)."""
    rows = [i for i, p in enumerate(top_p) if p < 1]
    if not rows:
        return scaled
    scores, order = scaled[rows].sort(dim=-1, descending=True, stable=True)
    probs = scores.softmax(-1)
    before = probs.cumsum(-1) - probs  # probability of all likelier tokens; 0 for the first, which stays
    dropped = before >= column([top_p[i] for i in rows], scaled)
    dropped[:, 0] = False
    kept = scaled.clone()
    kept[rows] = scaled[rows].masked_fill(torch.empty_like(dropped).scatter_(-1, order, dropped), -torch.inf)
    return kept


def column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """One value a row, as [rows, 1]."""
    return torch.tensor(list(values), dtype=dtype or like.dtype, device=like.device)[:, None]


def uniform(seed: int, index: int) -> float:
    """The index-th random number of a seed, in [0, 1).

    A pure function of its arguments: no state to lose when a request is preempted or moved, and the same
    on every device. 48 bits, so that it stays below 1 after rounding.
    """
    digest = hashlib.blake2b(struct.pack("<qq", seed, index), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def draw(probs: Tensor, draws: Sequence[float]) -> list[int]:
    """Lay the probabilities end to end and see where each random number falls. probs [rows, vocab_size]."""
    edges = probs.double().cumsum(-1)
    target = column(draws, edges) * edges[:, -1:]
    return torch.searchsorted(edges, target, right=True).squeeze(-1).tolist()


def top_logprobs(
    logits: Tensor, tokens: Sequence[int], wanted: Sequence[int | None]
) -> list[dict[int, Logprob] | None]:
    """For each row that wants them: the chosen token's logprob, then those of the most likely tokens."""
    rows = [i for i, k in enumerate(wanted) if k is not None]
    results: list[dict[int, Logprob] | None] = [None] * len(wanted)
    if not rows:
        return results
    for row, scores in zip(rows, logits[rows].float().log_softmax(-1)):
        own, count = scores[tokens[row]], min(wanted[row], len(scores))
        found = {tokens[row]: Logprob(float(own), int((scores > own).sum()) + 1)}
        last = scores.topk(max(count, 1)).values[-1]
        likely = (scores >= last).nonzero().squeeze(1)  # with all that tie, so that the lower ids come first
        best = likely[scores[likely].argsort(descending=True, stable=True)[:count]]
        for rank, (token, value) in enumerate(zip(best.tolist(), scores[best].tolist()), 1):
            found.setdefault(token, Logprob(value, rank))
        results[row] = found
    return results
