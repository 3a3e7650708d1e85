"""Step records for the views: three requests on four blocks of four tokens, with one preemption."""

from __future__ import annotations

from shared.trace import StepRecord


def record(step: int, **changes) -> StepRecord:
    empty = dict(scheduled={}, waiting=[], running=[], admitted=[], preempted=[], finished={}, reasons={},
                 block_tables={}, computed={}, cache_hits={}, evicted=[], num_free_blocks=4, num_blocks=4,
                 block_size=4, new_tokens={}, seconds=0.0)
    return StepRecord(step=step, **{**empty, **changes})


RECORDS = [
    record(0, scheduled={"a": 5}, waiting=["b"], running=["a"], admitted=["a"], block_tables={"a": [0, 1]},
           computed={"a": 5}, num_free_blocks=2, new_tokens={"a": 9},
           reasons={"b": "waits: 2 blocks free, 3 needed", "a": "runs tokens 0 to 4 of 5"}),
    record(1, scheduled={"a": 1, "b": 3}, running=["a", "b"], admitted=["b"],
           block_tables={"a": [0, 1], "b": [2]}, computed={"a": 6, "b": 3}, num_free_blocks=1,
           new_tokens={"a": 9, "b": 7}),
    record(2, scheduled={"a": 1}, waiting=["b", "c"], running=["a"], preempted=["b"],
           block_tables={"a": [0, 1]}, computed={"a": 7}, num_free_blocks=2, new_tokens={"a": 9}),
    record(3, scheduled={"b": 4, "c": 2}, running=["b", "c"], admitted=["b", "c"], cache_hits={"c": 4},
           block_tables={"b": [2], "c": [2, 3]}, computed={"b": 4, "c": 6}, num_free_blocks=2,
           new_tokens={"b": 8, "c": 1}, finished={"a": "stop"}),
    record(4, scheduled={"b": 1, "c": 1}, new_tokens={"b": 8, "c": 1}, finished={"b": "length", "c": "stop"}),
]
