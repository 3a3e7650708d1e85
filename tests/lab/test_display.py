from __future__ import annotations

import base64
import json
import subprocess
import sys

import ipywidgets as widgets
import pytest

import shared.lab.display as display_module
from shared.lab import engine_map, show
from shared.lab.charts import chart, to_png
from shared.lab.map import ALSO_CALLED, FLOW, PARTS, draw, find_parts


@pytest.fixture
def shown(monkeypatch):
    """The bundles that were displayed."""
    bundles = []

    def keep(data, raw, metadata):
        bundles.append((data, metadata))
    monkeypatch.setattr(display_module, "display", keep)
    return bundles


def test_one_bundle_holds_the_widget_and_its_static_form(shown):
    show(widgets.IntSlider(), html="<p>x</p>", text="A slider.")
    (data, _), = shown
    assert data["text/plain"] == "A slider." and data["text/html"] == "<p>x</p>"
    assert "model_id" in data["application/vnd.jupyter.widget-view+json"]


def test_a_picture_is_encoded_and_described(shown):
    show(png=b"\x89PNG", text="Short.", alt="Long.")
    (data, metadata), = shown
    assert base64.b64decode(data["image/png"]) == b"\x89PNG"
    assert metadata == {"image/png": {"alt": "Long."}}
    assert "application/vnd.jupyter.widget-view+json" not in data


def test_importing_the_instruments_loads_no_heavy_library():
    code = ("import json, sys, shared.lab; heavy = ('torch', 'numpy', 'matplotlib', 'transformers'); "
            "print(json.dumps([name for name in heavy if name in sys.modules]))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_the_map_lights_parts_and_names_them(shown):
    engine_map("kv_cache", "attention")
    (data, metadata), (caption, _) = shown
    assert "Lit: KV cache, attention." in data["text/plain"]
    assert metadata["image/png"]["alt"] == data["text/plain"]
    assert "Lit: KV cache, attention." in caption["text/html"]


def test_the_map_is_small_stable_and_differs_by_what_is_lit():
    plain, lit = draw([]), draw(["kv_cache"])
    assert plain.startswith(b"\x89PNG") and len(plain) < 60_000
    assert plain != lit and lit == draw(["kv_cache"])


def test_an_unknown_part_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="no part 'cache'.*kv_cache"):
        engine_map("cache")


def test_parts_fit_the_drawing_and_boxes_do_not_overlap():
    boxes = [part for part in PARTS.values() if not part.frame]
    for part in PARTS.values():
        assert 0 <= part.x and part.x + part.width <= 100 and 0 <= part.y and part.y + part.height <= 54.6
    for i, a in enumerate(boxes):
        for b in boxes[i + 1:]:
            beside = a.x + a.width <= b.x or b.x + b.width <= a.x
            assert beside or a.y + a.height <= b.y or b.y + b.height <= a.y, (a.label, b.label)


def test_arrows_and_other_names_lead_to_parts():
    assert all(end in PARTS for pair in FLOW for end in pair)
    assert find_parts(tuple(ALSO_CALLED)) == list(ALSO_CALLED.values())
    assert set(ALSO_CALLED.values()) <= set(PARTS)


def test_charts_are_small_and_tell_lines_apart_without_colour():
    figure, axes = chart()
    lines = [axes.plot(range(50), [k * x for x in range(50)])[0] for k in (1, 2, 3)]
    assert len({line.get_marker() for line in lines}) == len({line.get_linestyle() for line in lines}) == 3
    assert len(to_png(figure)) < 60_000 and to_png(figure) == to_png(figure)
