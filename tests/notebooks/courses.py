"""Small courses in a temporary folder, for the tests of the tool: a chapter with no fault, to be spoiled."""

from __future__ import annotations

import json
from pathlib import Path

KV_CACHE = '''"""Keys and values, kept."""
from __future__ import annotations

import math
from dataclasses import dataclass

SLOTS = 4
BLOCKS: int = 2


# what one token costs
@dataclass
class KVCache:
    """Slots."""

    slots: int = SLOTS


def size(cache):
    return math.prod((cache.slots, 2))
'''
STUB = '''def halve(x: int) -> int:
    raise NotImplementedError


check("04.{n}", halve)'''
DETAILS = '''<details><summary>Hint 1</summary>Think.</details>
<details><summary>Hint 2</summary>Divide.</details>
<details><summary>Solution</summary>

```python
import operator


def halve(x: int) -> int:
    return operator.floordiv(x, 2)
```
</details>'''
PROSE = [
    "# 04 · KV cache\n\nWhat is computed once is kept.",
    "## The problem, seen failing\n\nSlow.",
    "## You will be able to\n\n- count",
    "## Build it\n\nNow.",
    "## Look inside\n\nHere.",
    "## Prove it\n\nEqual.",
]
QUIZ = "QUIZ = [Question(1), Question(2), Question(3)]\nCHECKS = {}\n"


def code(source: str, *outputs: dict, tags: tuple[str, ...] = ()) -> dict:
    metadata = {"tags": list(tags)} if tags else {}
    return {"cell_type": "code", "metadata": metadata, "source": source, "outputs": list(outputs)}


def markdown(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def printed(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": text}


def chapter() -> list[dict]:
    """The cells of a chapter 04 that breaks no rule."""
    promise, problem, aims, build, look, prove = map(markdown, PROSE)
    shared = "# shared/kv_cache.py\n"
    cells = [
        promise,
        code('from shared.lab import check, engine_map, predict, quiz\nengine_map("kv_cache")'),
        problem,
        code("print(len(range(4)))", printed("4\n")),
        aims,
        markdown("## Predict"),
        code('predict("04.x", ["1", "2"])'),
        build,
        code("import math\nfrom dataclasses import dataclass"),
        code(shared + KV_CACHE[KV_CACHE.index("SLOTS") : KV_CACHE.index("\n\n\n# what")], tags=("shared",)),
        code(shared + KV_CACHE[KV_CACHE.index("# what") :].rstrip("\n"), tags=("shared",)),
        look,
        prove,
        markdown("## Exercises"),
    ]
    for n in (1, 2):
        unattempted = printed(f"Exercise 04.{n}: not attempted yet.\n")
        cells += [markdown(f"### Exercise 04.{n} · Halve · 5 min · ●○○"), code(STUB.format(n=n), unattempted)]
        cells += [markdown(DETAILS)]
    cells += [markdown("## Break it"), markdown("## Measure"), markdown("## Quiz"), code('quiz("04")')]
    cells += [markdown("## What people get wrong")]
    cells += [markdown("## What you now have, and what is still bad\n\n[Next](05_sampling.ipynb)")]
    return cells


def write_course(root: Path, cells: list[dict], name: str = "beginner/04_kv_cache.ipynb", **metadata) -> Path:
    """A course of one chapter below `root`; cells get ids and run counts unless they have them. Its path."""
    number = 0
    for index, cell in enumerate(cells):
        cell.setdefault("id", f"cell-{index}")
        if cell["cell_type"] == "code":
            number += 1
            cell.setdefault("execution_count", number)
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, **metadata}
    content = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    write(root, "shared/kv_cache.py", KV_CACHE)
    write(root, f"shared/lab/chapters/ch{Path(name).name[:2]}.py", QUIZ)
    return write(root, name, json.dumps(content))


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
