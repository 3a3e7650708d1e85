"""The table of tests/README.md names every fault once, and the file where its tests are."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
LATER = ("chapter 11", "chapter 12", "chapter 13")


def rows() -> dict[str, str]:
    text = (HERE.parent / "README.md").read_text()
    return dict(re.findall(r"^\| (B\d\d) \|[^|]*\|([^|]*)\|$", text, re.MULTILINE))


def cases() -> dict[str, set[str]]:
    """Fault -> files with a test that carries its id."""
    found: dict[str, set[str]] = {}
    for file in HERE.glob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE):
            for fault in re.findall(r"b(\d\d)(?=_)", name):
                found.setdefault(f"B{fault}", set()).add(file.name)
    return found


def test_every_fault_is_in_the_table():
    assert list(rows()) == [f"B{i:02}" for i in range(1, 77)]


def test_the_table_names_the_files_that_hold_the_tests():
    for fault, where in rows().items():
        named = set(re.findall(r"test_\w+\.py", where))
        assert named == cases().get(fault, set()), fault
        assert named or any(chapter in where for chapter in LATER), fault


def test_nothing_is_skipped():
    for file in HERE.glob("*.py"):
        assert file.name == "test_table.py" or not re.search(
            r"pytest\.(mark\.)?(skip|xfail)", file.read_text()
        )
