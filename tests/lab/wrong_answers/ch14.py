"""Answers to chapter 14's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations


def one(bounds, counts, percent):
    below, total = 0, sum(counts)
    for bound, count in zip(bounds, counts):
        below += count
        if total and 100 * below >= percent * total:
            return bound
    return None


def average_of_percentiles(bounds, servers, percent):
    each = [value for counts in servers if (value := one(bounds, counts, percent)) is not None]
    return sum(each) / len(each) if each else None


def worst_server(bounds, servers, percent):
    return max((value for counts in servers if (value := one(bounds, counts, percent)) is not None), default=None)


def strictly_more(bounds, servers, percent):
    totals = [sum(counts) for counts in zip(*servers)]
    below = 0
    for bound, count in zip(bounds, totals):
        below += count
        if 100 * below > percent * sum(totals):
            return bound
    return None


def first_bound_of_nobody(bounds, servers, percent):
    totals = [sum(counts) for counts in zip(*servers)]
    below = 0
    for bound, count in zip(bounds, totals):
        below += count
        if 100 * below >= percent * sum(totals):
            return bound
    return None


def buckets_alone(bounds, servers, percent):
    totals = [sum(counts) for counts in zip(*servers)]
    return next((bound for bound, count in zip(bounds, totals) if 100 * count >= percent * sum(totals)), None)


def from_sending(log, interval, end):
    return [answered - sent for sent, answered in log]


def only_what_was_sent(log, interval, end):
    return [answered - i * interval for i, (_, answered) in enumerate(log)]


def lost_ones_wait_nothing(log, interval, end):
    waits = only_what_was_sent(log, interval, end)
    while len(waits) * interval < end:
        waits.append(0.0)
    return waits


def one_too_many(log, interval, end):
    waits = only_what_was_sent(log, interval, end)
    while len(waits) * interval <= end:
        waits.append(end - len(waits) * interval)
    return waits


def whole_intervals(log, interval, end):
    return [(log[i][1] if i < len(log) else end) - i * interval for i in range(int(end / interval))]


def as_it_was(server, prompts, spare, max_tokens):
    for prompt in prompts:
        server.generate(prompt, max_tokens)
    started = server.clock()
    for prompt in prompts:
        server.generate(prompt, max_tokens)
    return max_tokens * len(prompts) / (server.clock() - started)


def warm_prompts(server, prompts, spare, max_tokens):
    for prompt in prompts:
        server.generate(prompt, max_tokens)
    started = server.clock()
    made = sum(len(server.generate(prompt, max_tokens)) for prompt in prompts)
    return made / (server.clock() - started)


def asked_for(server, prompts, spare, max_tokens):
    server.generate(spare, max_tokens)
    started = server.clock()
    for prompt in prompts:
        server.generate(prompt, max_tokens)
    return max_tokens * len(prompts) / (server.clock() - started)


def cold_start(server, prompts, spare, max_tokens):
    started = server.clock()
    made = sum(len(server.generate(prompt, max_tokens)) for prompt in prompts)
    return made / (server.clock() - started)


def warm_up_on_the_clock(server, prompts, spare, max_tokens):
    started = server.clock()
    server.generate(spare, max_tokens)
    made = sum(len(server.generate(prompt, max_tokens)) for prompt in prompts)
    return made / (server.clock() - started)


def mean_of_rates(server, prompts, spare, max_tokens):
    server.generate(spare, max_tokens)
    rates = []
    for prompt in prompts:
        started = server.clock()
        rates.append(len(server.generate(prompt, max_tokens)) / (server.clock() - started))
    return sum(rates) / len(rates)


WRONG_ANSWERS = {
    "14.1": [
        (average_of_percentiles, "average of the servers' percentiles"), (worst_server, "worst server's percentile"),
        (strictly_more, "exactly as many as were asked for are enough"), (first_bound_of_nobody, "there is nobody"),
        (buckets_alone, "those below must be added"),
    ],
    "14.2": [
        (from_sending, "from when a request was sent"), (only_what_was_sent, "never sent are missing"),
        (lost_ones_wait_nothing, "did not wait 0 seconds"), (one_too_many, "was not due any more"),
        (whole_intervals, "the last user who was due"),
    ],
    "14.b": [
        (as_it_was, "counted tokens that were never made"), (warm_prompts, "in the prefix cache"),
        (asked_for, "asked for"), (cold_start, "set-up"), (warm_up_on_the_clock, "inside the measured time"),
        (mean_of_rates, "averages the rates"),
    ],
}
