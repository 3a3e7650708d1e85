"""Chapter 04's measurement: one more token at growing lengths, with and without a cache.

    python -m shared.lab.chapters.ch04_measure     writes evidence/04_kv_cache.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.lab.machine import Measurement, timed


def next_token_times(model: Any, lengths: Sequence[int] = (32, 128, 512), n: int = 3) -> list[Measurement]:
    """One more token after `length` tokens, recomputed and from the cache."""
    from shared.decode import next_token_logits
    from shared.kv_cache import KVCache, cached_logits

    results = []
    for length in lengths:
        ids, weight = [100 + i % 1000 for i in range(length)], model.embed_tokens.weight
        cache = KVCache(model.config, length, weight.dtype, weight.device)
        cached_logits(model, cache, ids[:-1], 0)
        plain, cached = f"token {length}, everything again", f"token {length}, from the cache"
        results.append(timed(plain, lambda ids=ids: next_token_logits(model, ids), n))
        results.append(timed(cached, lambda ids=ids, c=cache, t=length: cached_logits(model, c, ids[-1:], t - 1), n))
    return results


def main() -> None:
    from shared.lab.evidence import save_evidence
    from shared.weights import load_model

    what, command = "one more token, recomputed and cached, float32", "python -m shared.lab.chapters.ch04_measure"
    print(save_evidence("04_kv_cache", what, command, next_token_times(load_model("smollm2-135m"), n=5)).name)


if __name__ == "__main__":
    main()
