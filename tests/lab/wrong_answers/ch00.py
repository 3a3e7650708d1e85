"""Plausible wrong answers to the exercises of the start page, and a word that the check must say."""

from __future__ import annotations


def forgets_the_bytes(parameters, bytes_each, gigabytes_per_second):
    return gigabytes_per_second * 1e9 / parameters


def forgets_the_billions(parameters, bytes_each, gigabytes_per_second):
    return gigabytes_per_second / (parameters * bytes_each)


def seconds_instead_of_speed(parameters, bytes_each, gigabytes_per_second):
    return parameters * bytes_each / (gigabytes_per_second * 1e9)


WRONG_ANSWERS = {
    "00.1": [
        (forgets_the_bytes, "expected"),
        (forgets_the_billions, "expected"),
        (seconds_instead_of_speed, "seconds"),
    ]
}
