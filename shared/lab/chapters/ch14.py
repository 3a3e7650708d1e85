"""Chapter 14: the checks of the exercises, the quiz. The ladder is in ch14_ladder, the simulator in ch14_curve."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from shared.lab import Check, Question, call, expect, fail
from shared.lab.chapters.ch14_clock import on_virtual_time
from shared.lab.judging import same, short
from shared.load import RequestRecord, SampleRequest, closed_loop
from shared.roofline import Cost, Roofline
from shared.summary import summarize

# Exercise 14.1: one percentile of many servers

FLEETS = {  # bounds of the buckets in ms, requests in each bucket of each server, percent
    "one server": ([10, 50, 100, 500], [[4, 3, 2, 1]], 50),
    "a busy server and an idle one": ([10, 50, 100, 500], [[990, 8, 1, 1], [0, 0, 1, 9]], 99),
    "three servers, one of them slow": ([20, 40, 80, 160], [[50, 0, 0, 0], [45, 5, 0, 0], [0, 0, 0, 20]], 90),
    "exactly as many as the percentile asks for": ([1, 2, 3], [[5, 0, 0], [0, 4, 1]], 90),
    "the slowest of all": ([1, 2, 3], [[5, 4, 0], [0, 0, 1]], 100),
    "a server without requests": ([5, 25, 125], [[0, 0, 0], [6, 3, 1]], 90),
    "no request at all": ([5, 25, 125], [[0, 0, 0], [0, 0, 0]], 99),
}


def fleet_percentile(bounds: Sequence[float], servers: Sequence[Sequence[int]], percent: float) -> float | None:
    totals = [sum(counts) for counts in zip(*servers)]
    below, wanted = 0, percent * sum(totals)
    for bound, count in zip(bounds, totals):
        below += count
        if count and 100 * below >= wanted:
            return bound
    return None


def judge_fleet(fn: Callable) -> None:
    for case, given in FLEETS.items():
        expect(fn, given, fleet_percentile(*given), case=case, mistakes=_fleet_mistakes(*given))
    draw = random.Random(14)
    for _ in range(40):
        bounds = sorted(draw.sample(range(1, 500), 5))
        servers = [[draw.randint(0, 40) for _ in bounds] for _ in range(draw.randint(1, 5))]
        given = bounds, servers, draw.choice([50, 75, 90, 95, 99])
        expect(fn, given, fleet_percentile(*given), mistakes=_fleet_mistakes(*given))


def _fleet_mistakes(bounds: Sequence[float], servers: Sequence[Sequence[int]], percent: float) -> dict[str, object]:
    each = [value for counts in servers if (value := fleet_percentile(bounds, [counts], percent)) is not None]
    if not each:
        return {"nobody is below that bound, since there is nobody": bounds[0]}
    totals = [sum(counts) for counts in zip(*servers)]
    wanted = percent * sum(totals)
    words = {
        "that bound is one too high: exactly as many as were asked for are enough":
            next((bound for i, bound in enumerate(bounds) if 100 * sum(totals[: i + 1]) > wanted), None),
        "that is the average of the servers' percentiles, and every server has an equal say": sum(each) / len(each),
        "that is the worst server's percentile, however few it serves": max(each),
        "each bucket counts its own requests: those below must be added":
            next((bound for bound, count in zip(bounds, totals) if 100 * count >= wanted), None),
    }
    right = fleet_percentile(bounds, servers, percent)
    return {text: value for text, value in words.items() if value != right}


# Exercise 14.2: what a closed loop left out

Log = Sequence[tuple[float, float]]  # when each request was sent, and when it was answered
LOGS: dict[str, tuple[Log, float, float]] = {  # log, interval, end
    "a server that keeps up": ([(0.0, 0.25), (0.5, 0.75), (1.0, 1.25)], 0.5, 1.5),
    "one slow answer, then it catches up": (
        [(0.0, 0.25), (0.5, 2.0), (2.0, 2.25), (2.25, 2.5), (2.5, 2.75), (2.75, 3.0), (3.0, 3.25)], 0.5, 3.5),
    "a run that ends before it has caught up": ([(0.0, 0.5), (1.0, 4.0), (4.0, 4.5)], 1.0, 5.0),
    "a server that hangs after the first answer": ([(0.0, 0.5)], 1.0, 4.0),
    "nothing was ever answered": ([], 2.0, 6.0),
    "an end between two users": ([(0.0, 0.25), (1.0, 1.25)], 1.0, 2.5),
    "a server that is always too slow": ([(0.0, 2.0), (2.0, 4.0), (4.0, 6.0)], 1.0, 6.0),
}


def waits_from_due(log: Log, interval: float, end: float) -> list[float]:
    waits = []
    while (due := len(waits) * interval) < end:
        answered = log[len(waits)][1] if len(waits) < len(log) else end
        waits.append(answered - due)
    return waits


def judge_omission(fn: Callable) -> None:
    for case, given in LOGS.items():
        expect(fn, given, waits_from_due(*given), case=case, mistakes=_omission_mistakes(*given))
    draw = random.Random(15)
    for _ in range(30):
        log, now, interval = [], 0.0, draw.choice([0.5, 1.0, 2.0])
        for i in range(draw.randint(0, 8)):
            now = max(now, i * interval) + draw.choice([0.25, 0.5, 0.75, 3.0])
            log.append((max(i * interval, log[-1][1] if log else 0.0), now))
        end = max(now, draw.randint(1, 12) * 0.5)
        expect(fn, (log, interval, end), waits_from_due(log, interval, end),
               mistakes=_omission_mistakes(log, interval, end))


def _omission_mistakes(log: Log, interval: float, end: float) -> dict[str, list[float]]:
    want = waits_from_due(log, interval, end)
    words = {
        "the last user who was due before `end` is missing": want[:-1],
        "that counts from when a request was sent; its user came earlier": [b - a for a, b in log],
        "the requests that were due and never sent are missing": want[: len(log)],
        "who got no answer did not wait 0 seconds, but until `end`": want[: len(log)] + [0.0] * (len(want) - len(log)),
        "who would have come at `end` or later was not due any more": [*want, end - len(want) * interval],
    }
    return {text: value for text, value in words.items() if value != want}


# Exercise 14.b: a benchmark that lies


class FakeServer:
    """Its clock moves by what a request costs: set-up once, each prompt token that is not cached, each token made."""

    SETUP, PROMPT, TOKEN = 8.0, 0.01, 0.05

    def __init__(self, stops: Sequence[int]):
        self.now, self.is_set_up, self.stops = 0.0, False, list(stops)
        self.cached: set[tuple[int, ...]] = set()

    def clock(self) -> float:
        return self.now

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The answer's tokens: as many as the model has to say, at most max_tokens."""
        self.now += 0.0 if self.is_set_up else self.SETUP
        self.now += 0.0 if tuple(prompt) in self.cached else self.PROMPT * len(prompt)
        self.is_set_up = True
        self.cached.add(tuple(prompt))
        tokens = [7] * min(max_tokens, self.stops[sum(prompt) % len(self.stops)])
        self.now += self.TOKEN * len(tokens)
        return tokens


BENCHES = {  # tokens that answers may have, prompts
    "answers end by themselves": ([5, 3, 9], [[1] * 20, [2] * 41, [3] * 60, [4] * 10]),
    "all answers are cut at max_tokens": ([64], [[1] * 20, [2] * 40, [3] * 60]),
    "one prompt": ([4], [[9] * 100]),
}
SPARE = [5] * 30


def measured_rate(server: FakeServer, prompts: Sequence[Sequence[int]], spare: Sequence[int], max_tokens: int) -> float:
    server.generate(spare, max_tokens)
    started = server.clock()
    answers = [server.generate(prompt, max_tokens) for prompt in prompts]
    return sum(map(len, answers)) / (server.clock() - started)


def judge_benchmark(fn: Callable) -> None:
    for case, (stops, prompts) in BENCHES.items():
        where = f"Case {case!r}:"
        got = call(fn, FakeServer(stops), prompts, list(SPARE), 16, case=where)
        want = measured_rate(FakeServer(stops), prompts, SPARE, 16)
        if same(got, want, 1e-6):
            continue
        lies = [words for words, value in _lies(stops, prompts).items() if same(got, value, 1e-6)]
        why = f" {lies[0]}" if lies else ""
        said = f"{got:.2f}" if isinstance(got, float) else short(got)
        fail(f"{where} your benchmark says {said}; a user gets {want:.2f} tokens a second.{why}")


def _lies(stops: Sequence[int], prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """What each fault makes of the rate."""
    def run(warm: Sequence[Sequence[int]], asked: bool, timed: Sequence[Sequence[int]] = ()) -> float:
        server = FakeServer(stops)
        for prompt in warm:
            server.generate(prompt, 16)
        started = server.clock()
        for prompt in timed:
            server.generate(prompt, 16)
        made = sum(len(server.generate(prompt, 16)) for prompt in prompts)
        return (16 * len(prompts) if asked else made) / (server.clock() - started)

    def mean_of_rates() -> float:
        server = FakeServer(stops)
        server.generate(SPARE, 16)
        times = [(server.clock(), len(server.generate(prompt, 16)), server.clock()) for prompt in prompts]
        return sum(made / (after - before) for before, made, after in times) / len(times)

    both = "It found the measured prompts in the prefix cache, and counted tokens that were never made."
    return {
        "It counts the tokens that were asked for, not those that were made.": run([SPARE], True),
        "The prompts were in the prefix cache: the warm-up had sent the same ones.": run(prompts, False),
        "The first prompt was in the prefix cache: the warm-up had sent it.": run(prompts[:1], False),
        "The set-up, paid once, was measured with the requests.": run([], False),
        "The warm-up is inside the measured time.": run([], False, timed=[SPARE]),
        "It averages the rates of single requests: the quick ones count too much.": mean_of_rates(),
        both: run(prompts, True),
    }


CHECKS = {"14.1": Check(judge_fleet), "14.2": Check(judge_omission), "14.b": Check(judge_benchmark)}


# Quiz


def closed_loop_wait() -> str:
    """Seconds that each of four users waits for a server that takes half a second for each request in turn."""
    import asyncio

    def make(clock: Callable[[], float]):
        turn = asyncio.Lock()

        async def client(request: SampleRequest):
            async with turn:
                await asyncio.sleep(0.5)
                yield 1

        return closed_loop(client, [SampleRequest([5], 1)] * 20, 4, clock)

    return f"{on_virtual_time(make)[-1].ttft:g}"


def goodput_of_four() -> str:
    """Four requests in two seconds, limits TTFT 500 ms and TPOT 50 ms."""
    times = [(0.4, 0.06), (0.6, 0.02), (0.3, 0.04), (0.1, None)]
    records = []
    for first, gap in times:
        arrivals = [(first, 1)] if gap is None else [(first, 1), (first + gap, 1)]
        records.append(RequestRecord(8, 0.0, arrivals, finished=2.0))
    return f"{summarize(records, goodput={'ttft': 500, 'tpot': 50})['request_goodput']:g}"


def most_tokens() -> str:
    """Eight requests decode together; the step reads 500 MB at 25 GB/s."""
    step = Roofline(25e9, 1e15).seconds(Cost(500_000_000, 10**9))
    return f"{8 / step:g}"


QUIZ = [
    Question(
        "A server takes half a second for each request, one after another. Four users in a closed loop keep it "
        "busy. When each of them has had a first answer, how many seconds does each wait for every further one?",
        {
            "0.5": "That is how long the server works on a request. Three others are always in front.",
            "2": "Little's law: 4 requests are open and 2 a second are answered, so each is open for 2 seconds.",
            "4": "Four requests are open, but two of them are answered every second.",
            "8": "The rate is 2 a second; the wait is the number of users divided by it, not multiplied.",
        },
        compute=closed_loop_wait,
    ),
    Question(
        "Limits: TTFT 500 ms, TPOT 50 ms. In 2 seconds four requests are answered, with (TTFT, TPOT) of (400, 60), "
        "(600, 20), (300, 40) and (100, none: it has one token). What is the goodput, in requests a second?",
        {
            "0.5": "The request of one token has no TPOT, so it cannot break that limit. It counts.",
            "1": "Two requests meet both limits, in two seconds.",
            "1.5": "A request must meet both limits. The second is late, the first is slow.",
            "2": "That is the throughput. Goodput leaves out who was served too late or too slowly.",
        },
        compute=goodput_of_four,
    ),
    Question(
        "A decode step reads 500 MB of weights at 25 GB/s, and eight requests share it. How many output tokens a "
        "second can memory allow at most?",
        {
            "50": "So many steps are possible. Each of them makes one token for each of the eight requests.",
            "400": "20 ms for a step, and eight tokens from each.",
            "3200": "The weights are read once for all eight, but a step still takes 20 ms.",
            "6.25": "Eight requests share one reading of the weights. They don't read them one after another.",
        },
        compute=most_tokens,
    ),
]
