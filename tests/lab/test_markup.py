from __future__ import annotations

from html.parser import HTMLParser

from shared.lab import markup

ATTACK = "<script>alert('x')</script>"


class Balance(HTMLParser):
    """Collects unclosed and wrongly closed tags."""

    def __init__(self):
        super().__init__()
        self.open, self.faults = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)


def assert_balanced(html: str) -> None:
    parser = Balance()
    parser.feed(html)
    assert not parser.open and not parser.faults


def test_text_is_escaped_once_and_markup_is_kept():
    assert markup.esc("<b>") == "&lt;b&gt;"
    assert markup.esc(markup.esc("<b>")) == "&lt;b&gt;"
    assert markup.esc(7) == "7"


def test_every_helper_escapes_what_a_reader_can_type():
    parts = [markup.rich(f"{ATTACK} `{ATTACK}`"), markup.table([ATTACK], [[ATTACK]], caption=ATTACK),
             markup.tokens([ATTACK], [1]), markup.note(ATTACK), markup.mono(ATTACK), markup.bar(0.5, ATTACK),
             markup.tag("div", ATTACK, title=f'"{ATTACK}')]
    for part in parts:
        assert "<script" not in part and "&lt;script" in part
        assert_balanced(part)


def test_backticks_become_code():
    assert ">len(x)</code>" in markup.rich("call `len(x)` now")


def test_lit_rows_and_tokens_are_marked_without_colour():
    assert "▸ " in markup.table(["a"], [["x"], ["y"]], lit=[1])
    assert "font-weight:700" in markup.tokens(["x"], lit=[0])


def test_whitespace_of_tokens_is_visible():
    assert markup.visible(" a\n\tb") == "·a⏎⇥b"
    assert "∅" in markup.tokens([""])


def test_a_bar_stays_inside_its_frame():
    assert "width:160px" in markup.bar(7.0) and "width:0px" in markup.bar(-1.0)


def test_text_colours_come_from_the_page():
    drawn = markup.panel(markup.table(["a"], [["x"]]), markup.note("n"), markup.tokens(["x"]))
    colours = [style for style in drawn.split('style="')[1:] if ";color:" in style.split('"')[0]]
    assert colours and all("color:var(--jp-content-font-color1, inherit)" in style for style in colours)
