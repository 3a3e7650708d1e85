from __future__ import annotations

import re

from shared.block_manager import BlockManager
from shared.lab import views
from shared.request import Request
from shared.sampling_params import SamplingParams
from shared.scheduler import Scheduler
from shared.trace import Trace
from tests.lab.records import RECORDS, record
from tests.lab.test_markup import assert_balanced


def test_the_timeline_names_what_each_request_did_at_each_step():
    assert views.timeline_cells(RECORDS) == {
        "a": ["P5", "D", "D", "–", "–"],
        "b": ["W", "P3", "X", "P4", "D"],
        "c": ["", "", "W", "P2", "D"],
    }


def test_a_chunked_prefill_is_no_decode():
    chunks = [record(0, scheduled={"a": 4}, running=["a"]),
              record(1, scheduled={"a": 1}, new_tokens={"a": 3}),
              record(2, scheduled={"a": 1}, new_tokens={"a": 3})]
    assert views.timeline_cells(chunks)["a"] == ["P4", "P1", "D"]


def test_rows_can_be_fixed_so_that_a_stepped_timeline_does_not_jump():
    assert views.timeline_cells(RECORDS[:1], ["a", "b", "c"]) == {"a": ["P5"], "b": ["W"], "c": [""]}


def test_the_drawn_timeline_shows_letters_legend_and_the_lit_step():
    drawn = views.timeline(RECORDS, lit=2)
    for words in (">P5<", ">X<", ">W<", "▾2", "W waits"):
        assert words in drawn
    assert_balanced(drawn)


def test_blocks_know_their_owners_and_fill():
    assert views.block_owners(RECORDS[3].block_tables) == {2: ["b", "c"], 3: ["c"]}
    assert views.block_fill(RECORDS[3]) == {2: 4, 3: 2}
    assert views.block_fill(RECORDS[0]) == {0: 4, 1: 1}


def test_the_grid_shows_owner_fill_free_and_cached_in_words():
    text = re.sub(r"<[^>]+>", " ", views.block_grid(RECORDS[3], cached=[1], lit=[3]))
    assert "b + c" in text and "4/4" in text and "2/4" in text and "◇ free" in text and "▸ 3" in text
    assert "2 of 4 blocks free, 4 tokens each." in text
    assert_balanced(views.block_grid(RECORDS[3]))


def test_the_step_table_has_a_row_for_each_step_and_hits_only_where_there_are_some():
    drawn = views.step_table(RECORDS, lit=1)
    assert drawn.count("<tr>") == 6 and "cache hits" in drawn and "c: 4" in drawn and "▸ 1" in drawn
    assert "cache hits" not in views.step_table(RECORDS[:2])


def test_reasons():
    assert "waits: 2 blocks free, 3 needed" in views.reasons_table(RECORDS[0])
    assert "Nothing to decide" in views.reasons_table(RECORDS[4])


def test_names_of_requests_are_escaped_in_every_view():
    name = "<script>x</script>"
    attack = record(0, scheduled={name: 1}, running=[name], waiting=[name], admitted=[name],
                    preempted=[name], finished={name: "stop"}, reasons={name: name},
                    block_tables={name: [0]}, computed={name: 1}, cache_hits={name: 1})
    for drawn in (views.timeline([attack]), views.step_table([attack]), views.block_grid(attack),
                  views.reasons_table(attack)):
        assert "<script" not in drawn and "&lt;script" in drawn


def test_views_of_nothing():
    assert_balanced(views.timeline([]) + views.step_table([]))


def engine_without_model(num_blocks: int, max_tokens: int) -> Trace:
    """The real scheduler and block manager, stepped to the end; every sampled token is 7."""
    scheduler, trace = Scheduler(BlockManager(num_blocks, block_size=4), max_num_batched_tokens=32), Trace()
    for name in ("a", "b", "c"):
        scheduler.add(Request(name, [1] * 6, SamplingParams(max_tokens=max_tokens), max_tokens))
    while scheduler.waiting or scheduler.running:
        assert len(trace.steps) < 50
        output = scheduler.schedule()
        scheduler.update(output)
        sampled = [item.request for item in output.scheduled if item.samples]
        done = [request for request in sampled if request.append(7)]
        for request in done:
            scheduler.finish(request, "length")
        trace.record(scheduler, output, {request.request_id: 7 for request in sampled}, sampled, 0.0)
    return trace


def test_the_views_read_what_the_real_scheduler_recorded():
    steps = engine_without_model(num_blocks=5, max_tokens=5).steps
    cells = views.timeline_cells(steps)
    assert list(cells) == ["a", "b", "c"]
    assert cells["a"] == ["P6", "D", "D", "D", "D"] + ["–"] * (len(steps) - 5)
    assert "X" in cells["b"] + cells["c"] and "W" in cells["c"]
    decodes = sum(cell == "D" for row in cells.values() for cell in row)
    prefills = sum(cell.startswith("P") for row in cells.values() for cell in row)
    assert decodes + prefills == sum(len(step.scheduled) for step in steps)
    for step in steps:
        assert sum(views.block_fill(step).values()) == sum(step.computed.values())
        for drawn in (views.timeline(steps), views.block_grid(step), views.reasons_table(step)):
            assert_balanced(drawn)
