"""Mistakes that a reader could make in chapter 05, and a word of the message that each gets."""

from __future__ import annotations


def _order(probs):
    return sorted(range(len(probs)), key=lambda i: -probs[i])


def keeps_ties(probs, min_p, top_k, top_p):
    kth = sorted(probs, reverse=True)[min(top_k, len(probs)) - 1] if top_k else 0.0
    order = [i for i in _order(probs) if probs[i] >= kth and probs[i] >= min_p * max(probs)]
    return _nucleus(probs, order, top_p)


def cuts_jointly(probs, min_p, top_k, top_p):
    order = _order(probs)
    before = [sum(probs[j] for j in order[:place]) for place in range(len(order))]
    kept = [i for i, share in zip(order, before) if share < top_p - 1e-12 and probs[i] >= min_p * max(probs)]
    return sorted(i for i in kept[: top_k or None] if probs[i] > 0)


def min_p_is_a_probability(probs, min_p, top_k, top_p):
    order = [i for i in _order(probs) if probs[i] >= min_p][: top_k or None]
    return _nucleus(probs, order, top_p)


def may_keep_nothing(probs, min_p, top_k, top_p):
    order = [i for i in _order(probs) if probs[i] >= min_p * max(probs)][: top_k or None]
    total, share, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        share += probs[i]
        if share <= top_p * total + 1e-12 and probs[i] > 0:
            kept.append(i)
    return sorted(kept)


def _nucleus(probs, order, top_p):
    total, before, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if kept and before >= top_p * total - 1e-12:
            break
        kept.append(i)
        before += probs[i]
    return sorted(i for i in kept if probs[i] > 0)


def heaviest_shard_first(shards, noise):
    totals = [sum(shard) for shard in shards]
    heavy = totals.index(max(totals))
    start = sum(len(shard) for shard in shards[:heavy])
    weights = list(shards[heavy])
    return start + max(range(len(weights)), key=lambda i: weights[i] / noise(start + i))


def local_ids(shards, noise):
    best = (-1.0, 0)
    for shard in shards:
        for i, weight in enumerate(shard):
            best = max(best, (weight / noise(i), i))
    return best[1]


def normalises_each_shard(shards, noise):
    best, start = (-1.0, 0), 0
    for shard in shards:
        weights = list(shard)
        total = sum(weights) or 1.0
        quotients = [(weight / total / noise(start + i), start + i) for i, weight in enumerate(weights)]
        best = max([best, *quotients])
        start += len(weights)
    return best[1]


def limit_without_temperature(logits, temperature, min_p):
    probs = (logits / temperature).softmax(-1)
    return (probs >= min_p * logits.softmax(-1).max()).nonzero().flatten().tolist()


def temperature_forgotten(logits, temperature, min_p):
    probs = logits.softmax(-1)
    return (probs >= min_p * probs.max()).nonzero().flatten().tolist()


def limit_is_min_p(logits, temperature, min_p):
    return ((logits / temperature).softmax(-1) >= min_p).nonzero().flatten().tolist()


WRONG_ANSWERS = {
    "05.1": [
        (keeps_ties, "tie"),
        (cuts_jointly, "top_p = 0.82"),
        (min_p_is_a_probability, "min_p"),
        (may_keep_nothing, "top_p"),
    ],
    "05.2": [
        (heaviest_shard_first, "race"),
        (local_ids, "ids from 0 in each shard"),
        (normalises_each_shard, "added up to 1"),
    ],
    "05.b": [
        (limit_without_temperature, "temperature 2"),
        (temperature_forgotten, "temperature"),
        (limit_is_min_p, "min_p"),
    ],
}
