from __future__ import annotations

import ipywidgets as widgets
import pytest

from shared.lab import Choice, Explorer, Field, Slider, Stepper, Switch
from shared.lab.form import lines_of, some_text, whole, whole_numbers
from shared.lab.markup import tag


def count(inputs, seed):
    """One live object, yielded again and again."""
    state = {"value": seed}
    yield state
    for _ in range(inputs["n"]):
        state["value"] += 1
        yield state


def render(state, index):
    return tag("p", f"value {state['value']}")


def stepper(**more) -> Stepper:
    return Stepper(count, render, [Field("n", "How many", "3", whole(1, 500))], title="Counter", **more)


def test_it_starts_at_the_first_state_and_computes_no_further():
    seen = []
    s = Stepper(count, lambda state, index: seen.append(index) or "", [Field("n", "N", "3", whole())])
    assert seen == [0] and s.back.disabled and not s.step.disabled


def test_steps_back_and_forward_through_a_live_object():
    s = stepper()
    for value in (1, 2, 3):
        s.step.click()
        assert f"value {value}" in s.frame.value
    s.back.click()
    assert "value 2" in s.frame.value and "Step 2 of 3" in s.status.value
    s.step.click()
    s.step.click()  # beyond the end: stays
    assert "value 3" in s.frame.value and s.step.disabled and s.end.disabled
    assert "Nothing is left to do." in s.status.value
    s.reset.click()
    assert "value 0" in s.frame.value and s.back.disabled


def test_runs_to_the_end_and_the_slider_goes_anywhere():
    s = stepper()
    s.end.click()
    assert "value 3" in s.frame.value and (s.slider.max, s.slider.value) == (3, 3)
    s.slider.value = 1
    assert "value 1" in s.frame.value and s.index == 1


def test_a_run_without_end_stops_at_the_limit():
    s = stepper(max_steps=10)
    s.fields["n"].value = "400"
    s.end.click()
    assert "value 10" in s.frame.value and "(limit)" in s.status.value and s.end.disabled


def test_the_seed_restarts_the_run():
    s = stepper(seed=5)
    s.step.click()
    assert "value 6" in s.frame.value
    s.seed.value = 40
    assert "value 40" in s.frame.value and s.index == 0


def test_a_stepper_without_a_seed_shows_no_seed():
    seeded, without = stepper(seed=0), stepper(seed=None)
    assert seeded.seed in _all(seeded) and without.seed not in _all(without)


def _all(s) -> list[widgets.Widget]:
    def below(box):
        return [box, *(w for child in getattr(box, "children", ()) for w in below(child))]
    return below(s.widget)


@pytest.mark.parametrize("text, words", [("x", "is not a whole number"), ("0", "0 is not between 1 and 500"),
                                         ("", "is not a whole number"), ("<script>", "&lt;script&gt;")])
def test_bad_input_is_explained_beside_the_field_and_good_input_recovers(text, words):
    s = stepper()
    s.fields["n"].value = text
    error = s.fields.error.value
    assert "How many:" in error and words in error and 'role="alert"' in error
    assert "Traceback" not in error and "<script" not in error and s.frame.value == ""
    for control in (s.step, s.back, s.end, s.reset):
        control.click()  # nothing to step through, and nothing raises
    assert "How many:" in s.fields.error.value
    s.fields["n"].value = "2"
    assert s.fields.error.value == "" and "value 0" in s.frame.value


def test_a_run_that_fails_in_the_middle_keeps_what_it_has():
    def fails(inputs, seed):
        yield {"value": 0}
        raise ValueError("the pool has no <b> block left")
    s = Stepper(fails, render)
    s.step.click()
    assert "value 0" in s.frame.value and "no &lt;b&gt; block left" in s.fields.error.value


def test_a_fault_of_the_simulator_is_named_not_hidden():
    def fails(inputs, seed):
        raise KeyError("blocks")
    assert "KeyError" in Stepper(fails, render).fields.error.value


def test_the_static_form_is_the_same_render_of_chosen_steps():
    s = stepper()
    drawn = s.static(steps=(0, 2, -1, 99))
    assert [f"value {v}" in drawn for v in range(4)] == [True, False, True, True]
    assert "Step 2 of 3" in drawn and s.index == 0 and "value 0" in s.frame.value
    assert drawn == stepper().static(steps=(0, 2, -1, 99))


def test_it_displays_with_one_fixed_sentence(capsys):
    stepper().show()
    out = capsys.readouterr().out
    assert "Simulator: Counter." in out and "value 3" in out


def test_every_control_has_a_name():
    kinds = (widgets.Button, widgets.IntSlider, widgets.BoundedIntText, widgets.Text)
    controls = [w for w in _all(stepper()) if isinstance(w, kinds)]
    assert len(controls) == 7 and all(control.tooltip for control in controls)


def test_an_explorer_redraws_and_keeps_the_last_good_figure():
    def draw(inputs):
        if inputs["top"] > 8:
            raise ValueError("at most 8 fit")
        return tag("p", " ".join(str(value) for value in inputs.values()))
    e = Explorer(draw, [
        Slider("top", "Top", 2, 1, 9), Choice("kind", "Kind", "a", ["a", "b"]), Switch("on", "On"),
        Slider("t", "Temperature", 1.0, 0.0, 2.0, 0.1), Field("text", "Text", "x", some_text(5))])
    assert "Top: 2 · Kind: a · On: off · Temperature: 1.0 · Text: x" in e.static()
    assert "2 a False 1.0 x" in e.frame.value and "2 a False 1.0 x" in e.static()
    e.fields["top"].value, e.fields["kind"].value, e.fields["on"].value = 3, "b", True
    assert "3 b True 1.0 x" in e.frame.value
    e.fields["top"].value = 9
    assert "at most 8 fit" in e.fields.error.value and "3 b True" in e.frame.value
    e.fields["top"].value = 8
    assert e.fields.error.value == "" and "8 b True" in e.frame.value
    e.fields["text"].value = "too long"
    assert "Text: give 1 to 5 characters, not 8" in e.fields.error.value
    assert "2 a False" in e.static()  # the static form shows the start, whatever was moved since


def test_an_explorer_displays_with_one_fixed_sentence(capsys):
    Explorer(lambda inputs: "<p>x</p>", [], title="Nothing to set").show()
    assert "Explorer: Nothing to set." in capsys.readouterr().out


def test_parsers():
    assert whole_numbers(0, 9)("1, 2 3") == [1, 2, 3]
    assert lines_of(whole())("1\n\n 2 \n") == [1, 2]
    for parse, text, words in [
        (whole_numbers(0, 9), "1 12", "12 is not between 0 and 9"),
        (whole_numbers(), "", "give 1 to 64"),
        (whole_numbers(at_most=2), "1 2 3", "give 1 to 2 whole numbers, not 3"), (whole(), "-1", "0 or more"),
        (lines_of(whole()), "1\nb", "line 2: 'b' is not"),
        (lines_of(whole(), 1), "1\n2", "1 to 1 lines, not 2"),
        (some_text(3), "", "give 1 to 3 characters, not 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            parse(text)
