"""The start page's figure: the model of one step, and the map of the files."""

from __future__ import annotations

import pytest

from shared.lab.chapters import ch00


def test_one_step_reads_every_weight_once_and_does_two_operations_each():
    machine = ch00.Machine("test", gigabytes_per_second=10, gigaflops=100, source="")
    reading, arithmetic = ch00.seconds_per_step(parameters=1e9, bytes_each=2, rows=5, machine=machine)
    assert reading == pytest.approx(0.2)
    assert arithmetic == pytest.approx(0.1)


def test_more_requests_move_the_limit_from_memory_to_arithmetic():
    explorer = ch00.step_explorer()
    assert "memory is the limit" in explorer.frame.value
    explorer.fields["rows"].value = 256
    assert "arithmetic is the limit" in explorer.frame.value


def test_the_machine_can_be_changed_and_is_named_with_its_source():
    explorer = ch00.step_explorer()
    explorer.fields["machine"].value = "one H100 (HBM3, bfloat16)"
    assert "data sheet" in explorer.frame.value
    assert "not a measurement" in explorer.frame.value


def test_the_map_lists_every_taught_file_with_its_own_first_line():
    import course

    assert {name for name in course.CHAPTER_OF_MODULE if (ch00.RUNTIME / f"{name}.py").exists()} == set(ch00.CHAPTERS)
    page = ch00.map_of_files()
    for name in ch00.CHAPTERS:
        assert f"{name}.py" in page
        assert course.CHAPTER_OF_MODULE[name] == ch00.CHAPTERS[name]
