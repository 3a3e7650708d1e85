"""Chapter 05: the checks of the exercises, the quiz, the measurement. The figures are in ch05_figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch

from shared.lab import Check, Question, Score, call, expect, fail
from shared.lab.machine import Measurement, timed
from shared.sampling import Sampler, keep_top_k, probabilities, uniform
from shared.sampling_params import SamplingParams

# Exercises

MIXED = [0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03]
TIED = [0.4, 0.3, 0.3, 0.0]
OPTIONS = {  # name of the case: probabilities, min_p, top_k, top_p
    "no filter": ([0.1, 0.6, 0.3], 0.0, 0, 1.0),
    "top_k alone": ([0.1, 0.6, 0.3], 0.0, 2, 1.0),
    "top_p alone": ([0.1, 0.6, 0.3], 0.0, 0, 0.7),
    "min_p alone": ([0.5, 0.3, 0.15, 0.05], 0.4, 0, 1.0),
    "two tokens tie for the last place of top_k": (TIED, 0.0, 2, 1.0),
    "all tokens tie": ([0.25] * 4, 0.0, 3, 1.0),
    "top_k, then top_p of what it left": (MIXED, 0.0, 4, 0.82),
    "min_p, then top_p of what it left": ([0.3, 0.25, 0.2, 0.15, 0.1], 0.6, 0, 0.7),
    "top_k 1 with a small top_p": (MIXED, 0.0, 1, 0.1),
    "top_p smaller than the likeliest token": ([0.2, 0.7, 0.1], 0.0, 0, 0.5),
    "top_k larger than the vocabulary": ([0.2, 0.7, 0.1], 0.0, 50, 0.95),
    "all three": (MIXED, 0.13, 4, 0.9),
}


def judge_survivors(fn: Callable) -> None:
    for name, options in OPTIONS.items():
        probs, min_p, top_k, top_p = options
        case = f"Case {name!r}, probs = {probs}, min_p = {min_p:g}, top_k = {top_k}, top_p = {top_p:g}:"
        expect(fn, options, survivors(*options), case=case, keeps_arguments=True)


def survivors(probs: Sequence[float], min_p: float, top_k: int, top_p: float) -> list[int]:
    """What the sampler itself keeps."""
    params = SamplingParams(min_p=min_p, top_k=top_k, top_p=top_p)
    kept = probabilities(torch.tensor(probs, dtype=torch.float64).log()[None], [params])[0]
    return kept.nonzero().flatten().tolist()


class Counted(Sequence):
    """A list of weights that counts how often one is read."""

    def __init__(self, weights: Sequence[float], reads: list[int]):
        self.weights, self.reads = list(weights), reads

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index):
        found = self.weights[index]
        self.reads[0] += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[float]:
        return (self[i] for i in range(len(self)))


SHARDS = {
    "one shard": [[1.0, 3.0, 2.0]],
    "two shards": [[0.1, 0.2, 0.05, 0.15], [0.3, 0.1, 0.05, 0.05]],
    "weights that do not add up to 1": [[4.0, 1.0], [2.0, 9.0], [5.0, 3.0]],
    "a heavy shard of many light tokens": [[0.02] * 40, [0.2]],
    "a shard whose tokens were all filtered out": [[0.0, 0.0, 0.0], [0.5, 0.0, 0.5]],
}


def judge_shards(fn: Callable) -> Score:
    reads, total = [0], 0
    for case, shards in SHARDS.items():
        for seed in range(40):
            counted = [Counted(shard, reads) for shard in shards]
            got = call(fn, counted, noise_of(seed), case=f"Case {case!r}:")
            total += sum(map(len, shards))
            want = winner(shards, noise_of(seed))
            if got != want:
                blame = [words for words, token in losers(shards, noise_of(seed)).items() if token == got]
                words = blame[0] if len(blame) == 1 else ""
                fail(f"Case {case!r}: your function chose token {got!r}{words}; token {want} wins the race.")
    if reads[0] < total:
        fail("Some weights were never read, so a likely token can be missed.")
    return Score("weights read", reads[0], best=total)


def noise_of(seed: int) -> Callable[[int], float]:
    """One exponential number for each token id, the same on every shard."""
    return lambda token: -torch.log1p(torch.tensor(-uniform(seed, token), dtype=torch.float64)).item()


def winner(shards: Sequence[Sequence[float]], noise: Callable[[int], float]) -> int:
    weights = [weight for shard in shards for weight in shard]
    return max(range(len(weights)), key=lambda token: weights[token] / noise(token))


def losers(shards: Sequence[Sequence[float]], noise: Callable[[int], float]) -> dict[str, int]:
    """Who comes out of the likely mistakes."""
    weights = [weight for shard in shards for weight in shard]
    places = [(weight / noise(place), place) for shard in shards for place, weight in enumerate(shard)]
    shares = [weight / (sum(shard) or 1.0) for shard in shards for weight in shard]
    ids = range(len(weights))
    return {
        ", counting ids from 0 in each shard": max(places)[1],
        ", as if each shard's weights added up to 1": max(ids, key=lambda token: shares[token] / noise(token)),
        ", the heaviest, as if there were no race": max(ids, key=weights.__getitem__),
        ", multiplying by the noise": max(ids, key=lambda token: weights[token] * noise(token)),
    }


HOT = [0.5, 0.3, 0.15, 0.05]


def judge_min_p(fn: Callable) -> None:
    for temperature, min_p in ((1.0, 0.4), (2.0, 0.6), (5.0, 0.9), (0.5, 0.1), (1.0, 0.0), (1.5, 1.0)):
        logits = torch.tensor(HOT).log()
        probs = (logits.double() / temperature).softmax(-1)
        want = (probs >= min_p * probs.max() * (1 - 1e-9)).nonzero().flatten().tolist()
        case = f"temperature {temperature:g}, min_p {min_p:g}, probabilities {HOT} before the temperature"
        expect(fn, (logits, temperature, min_p), want, case=case)


CHECKS = {"05.1": Check(judge_survivors), "05.2": Check(judge_shards), "05.b": Check(judge_min_p)}

# Quiz


def chance_of_first() -> float:
    probs = probabilities(torch.tensor([HOT]).log(), [SamplingParams(min_p=0.4)])
    return round(float(probs[0, 0]), 3)


def tokens_kept_of_tied() -> int:
    return int(torch.isfinite(keep_top_k(torch.tensor([TIED]).log(), [2])).sum())


QUIZ = [
    Question(
        "Four tokens have the probabilities 0.5, 0.3, 0.15, 0.05. With `min_p=0.4` and nothing else, how "
        "likely is the first one drawn?",
        {
            "0.5": "That is its probability before the filter. What the dropped tokens held is shared out.",
            "0.526": "That is 0.5 / 0.95: only the last token dropped. The limit is 0.4 × 0.5 = 0.2, which "
                     "0.15 does not reach either.",
            "0.625": "The limit is 0.4 × 0.5 = 0.2, so 0.5 and 0.3 stay, and 0.5 / 0.8 = 0.625.",
            "1.0": "That takes 0.4 as the limit itself. It is 0.4 times the largest probability.",
        },
        compute=chance_of_first,
    ),
    Question(
        "The probabilities are 0.4, 0.3, 0.3, 0. How many different tokens can come out with `top_k=2`?",
        {
            "1": "`top_k=2` leaves two places, and a tie is no reason to leave one of them empty.",
            "2": "The first, and of the two that tie the one with the lower id. k means k.",
            "3": "That is what comes of keeping everything that is not below the second best score.",
            "4": "The last token has probability 0, so it could not come out even without a filter.",
        },
        compute=tokens_kept_of_tied,
    ),
    Question(
        "A request with `seed=7` runs alone, then again beside three others that bring no seed. Our sampler "
        "gives it the same random numbers both times. Why?",
        {
            "Each number follows from the seed and the count of tokens so far":
                "`uniform(seed, index)` has no memory, so nobody else can use up one of its numbers.",
            "All requests of the batch share one generator, which is seeded with 7":
                "Then the others would take numbers out of its row, and it would get others than alone.",
            "A seeded request is drawn before the others":
                "That helps in the first step at most. A shared generator is further on in the second.",
            "Seeded requests are greedy":
                "A seed fixes the random numbers. Greedy decoding uses none.",
        },
        answer="Each number follows from the seed and the count of tokens so far",
    ),
]  # fmt: skip

# Measurements

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "temperature, top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "temperature, min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "temperature, top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
}


def sampler_times(logits: torch.Tensor, sampler: Callable | None = None, n: int = 15) -> list[Measurement]:
    """Milliseconds to choose one token from logits [vocab_size], for each kind of options."""
    sampler, results = sampler or Sampler(), []
    for kind, params in KINDS.items():
        state = SimpleNamespace(sampling_params=params, seed=0, prompt_token_ids=[], output_token_ids=[],
                                stop_token_ids=())
        results.append(timed(kind, lambda state=state: sampler(logits[None], [state]), n))
    return results


def step_time(model, n: int = 15) -> Measurement:
    """Milliseconds of one decode step with 40 cached tokens."""
    from shared.kv_cache import KVCache, cached_logits

    cache = KVCache(model.config, 64, torch.float32)
    cached_logits(model, cache, list(range(40)), 0)
    return timed("the model, one decode step", lambda: cached_logits(model, cache, [40], 40), n)


def main() -> None:
    """Measure and save: `python -m shared.lab.chapters.ch05`."""
    from shared.decode import next_token_logits
    from shared.lab.evidence import save_evidence
    from shared.weights import load_model

    model = load_model()
    results = [step_time(model), *sampler_times(next_token_logits(model, list(range(40))))]
    what = "time to choose one token of 49,152, beside the model's decode step that scores them"
    print(save_evidence("05_sampling", what, "python -m shared.lab.chapters.ch05", results).name)


if __name__ == "__main__":
    main()
