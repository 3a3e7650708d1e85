"""A notebook that uses every instrument, for the tests that need a kernel or a browser."""

from __future__ import annotations

import nbformat

CHAPTER = '''
import sys, types
from shared.lab import *
from shared.lab import markup, views
from tests.lab.records import RECORDS

def judge_total(fn):
    expect(fn, ([1, 2, 3],), 6)

chapter = types.ModuleType("shared.lab.chapters.ch99")
chapter.CHECKS = {"99.1": Check(judge_total), "99.2": Check(lambda fn: Score("blocks read", fn(), best=8))}
chapter.QUIZ = [
    Question("How many positions run for `20` prompt tokens and 100 new ones, with a cache?",
             {"119": "20 in the prefill, then one for each token but the last.",
              "6950": "That is the loop without a cache.", "120": "The last token is never run."},
             compute=lambda: 20 + 99),
    Question("Which tensors of earlier tokens does a new token read?",
             {"Their keys and values": "Its own query meets each earlier key and weighs each value.",
              "Their queries, keys and values": "Nobody asks for an old query again, because each query is "
              "used once, for its own position.",
              "Their hidden states": "A layer reads the hidden state of its own position only."},
             answer="Their keys and values"),
    Question("What happens to a request that is preempted?",
             {"It ends": "It keeps its tokens and waits.", "It waits and runs its tokens again":
              "Its blocks went to others, so their contents are computed again.",
              "It keeps its blocks": "Then nobody would gain from preempting it."},
             answer="It waits and runs its tokens again"),
]
sys.modules[chapter.__name__] = chapter
'''
STEPPER = '''
from shared.lab.form import whole

def make(inputs, seed):
    for number in range(min(inputs["steps"], len(RECORDS))):
        yield RECORDS[: number + 1]

def render(records, index):
    return markup.join([views.timeline(records, ["a", "b", "c"], lit=records[-1].step),
                        views.block_grid(records[-1], cached=[1], columns=4),
                        views.reasons_table(records[-1])])

stepper = Stepper(make, render, [Field("steps", "Steps to run", "5", whole(1, 5), help="Between 1 and 5.")],
                  title="Three requests, four blocks")
stepper.show(steps=(0, 2, -1))
'''
EXPLORER = '''
def cost(inputs):
    layers, heads, size = inputs["layers"], inputs["heads"], inputs["size"]
    return markup.table(["tokens", "bytes"], [[n, n * layers * heads * size * 4] for n in (1, 1024)])

Explorer(cost, [Slider("layers", "Layers", 30, 1, 80), Slider("heads", "KV heads", 3, 1, 64),
                Choice("size", "Head size", 64, [64, 128])], title="What a token costs").show()
'''
CHART = '''
from shared.lab.charts import chart, to_png
figure, axes = chart(title="Positions run")
for power in (1, 2):
    axes.plot(range(1, 9), [n**power for n in range(1, 9)], label=f"n^{power}")
axes.set(xlabel="new tokens", ylabel="positions")
axes.legend(frameon=False)
show(png=to_png(figure), text="Two curves: n and n squared.")
'''
CELLS = [
    CHAPTER,
    'engine_map("kv_cache", "attention")',
    'predict("99.positions", ["100", "119", "2000", "6950"], "How many positions?")',
    'reveal("99.positions", 119)',
    STEPPER,
    EXPLORER,
    CHART,
    'show(html=markup.panel(markup.tokens(["The", " cat", " sat", "\\n", "<b>"], [504, 2644, 3288, 198, 45], '
    'lit=[1]), views.step_table(RECORDS, lit=3)), text="Tokens and steps.")',
    'def total(numbers):\n    raise NotImplementedError\n\ncheck("99.1", total)',
    'check("99.1", len)\ncheck("99.1", sum)\ncheck("99.2", lambda: 12)',
    'quiz("99")',
    'show(html=progress_table(), text="Progress.")',
]


def build() -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell(source.strip(), id=f"cell-{i}") for i, source in enumerate(CELLS)]
    return nbformat.v4.new_notebook(cells=cells, metadata={
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
