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


WRONG_ANSWERS = {
    "14.1": [
        (average_of_percentiles, "average of the servers' percentiles"), (worst_server, "worst server's percentile"),
        (strictly_more, "as many as the percentile asks for"), (first_bound_of_nobody, "no request at all"),
    ],
    "14.2": [
        (from_sending, "from when a request was sent"), (only_what_was_sent, "never sent are missing"),
        (lost_ones_wait_nothing, "before it has caught up"), (one_too_many, "keeps up"),
    ],
    "14.b": [
        (as_it_was, "counted tokens that were never made"), (warm_prompts, "in the prefix cache"),
        (asked_for, "asked for"), (cold_start, "set-up"),
    ],
}
