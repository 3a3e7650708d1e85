"""Judge a reader's function: call it safely, compare its results, say the first fault in words."""

from __future__ import annotations

import copy
import ctypes
import inspect
import math
import re
import reprlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

TIME_LIMIT = 5.0  # seconds for one call


class Wrong(Exception):
    """The first wrong case, in words."""


class _TimeUp(BaseException):
    """Raised inside a call that runs too long; no Exception, so that `except Exception` lets it pass."""


def fail(words: str) -> None:
    """Stop the check with these words."""
    raise Wrong(words)


def expect(fn: Callable, args: tuple, want: object, *, kwargs: Mapping[str, Any] | None = None,
           case: str = "", tolerance: float = 1e-6, keeps_arguments: bool = False,
           mistakes: Mapping[str, Any] | None = None, seconds: float = TIME_LIMIT) -> Any:
    """Call `fn(*args, **kwargs)` on copies; the result if it equals `want`, else `Wrong` with the case.

    `case` names the case ("an empty prompt") where the arguments would not; one that ends in a colon is taken
    as it is. `mistakes` maps words ("that forgets the values") to what comes of the mistake. Floats may differ
    by `tolerance` (relative and absolute); a list equals a tuple, a tensor or array the nested list of its
    numbers. With `keeps_arguments` a function that changes what it was given is wrong.
    """
    where = _where(fn, args, kwargs or {}, case)
    given = _own_copy(args)
    got = call(fn, *given, kwargs=_own_copy(kwargs or {}), case=where, seconds=seconds)
    if not same(got, want, tolerance):
        words = next((words for words, value in (mistakes or {}).items() if same(got, value, tolerance)), None)
        if words:
            raise Wrong(f"{where} your function returned {short(got)}; {words}. Expected {short(want)}.")
        first = _first(got, want, tolerance)
        raise Wrong(f"{where} your function returned {short(got)}; expected {short(want)}.{first}")
    if keeps_arguments and _plain(args) and not same(given, args, 0.0):
        raise Wrong(f"{where} your function changed the arguments it was given.")
    return got


def expect_error(fn: Callable, args: tuple, error: type[BaseException], *, case: str = "",
                 seconds: float = TIME_LIMIT) -> BaseException:
    """Demand that the call raises `error`; return what it raised."""
    where = _where(fn, args, {}, case)
    try:
        got = _limited(lambda: fn(*_own_copy(args)), seconds, where)
    except error as raised:
        if isinstance(raised, NotImplementedError):
            raise
        return raised
    except (NotImplementedError, Wrong):
        raise
    except Exception as raised:
        named = describe_error(raised, fn)
        raise Wrong(f"{where} your function raised {named}; expected {error.__name__}.") from raised
    raise Wrong(f"{where} your function returned {short(got)}; expected it to raise {error.__name__}.")


def call(fn: Callable, *args: Any, kwargs: Mapping[str, Any] | None = None, case: str = "",
         seconds: float = TIME_LIMIT) -> Any:
    """Call the reader's function under a time limit; what it raises becomes `Wrong`, except in a stub."""
    where = _where(fn, args, kwargs or {}, case)
    try:
        return _limited(lambda: fn(*args, **(kwargs or {})), seconds, where)
    except (NotImplementedError, Wrong):
        raise
    except Exception as raised:
        raise Wrong(f"{where} your function raised {describe_error(raised, fn)}.") from raised


def same(got: object, want: object, tolerance: float = 1e-6) -> bool:
    """Equality as `expect` understands it."""
    got, want = _listed(got), _listed(want)
    if isinstance(want, float) or isinstance(got, float):
        return _close(got, want, tolerance)
    if isinstance(want, (list, tuple)):
        return (isinstance(got, (list, tuple)) and len(got) == len(want)
                and all(same(a, b, tolerance) for a, b in zip(got, want, strict=True)))
    if isinstance(want, Mapping):
        return (isinstance(got, Mapping) and got.keys() == want.keys()
                and all(same(got[key], want[key], tolerance) for key in want))
    try:
        return bool(got == want)
    except Exception:  # a reader's class may compare as it likes
        return False


def short(value: object, limit: int = 90) -> str:
    """A value on one line, cut in the middle, without memory addresses."""
    writer = reprlib.Repr()
    writer.maxlist = writer.maxtuple = writer.maxdict = writer.maxset = 12
    writer.maxstring = writer.maxother = limit
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", writer.repr(_listed(value)))
    return " ".join(text.split())


def _where(fn: Callable, args: tuple, kwargs: Mapping[str, Any], case: str) -> str:
    if case:
        return case if case.endswith(":") else f"Case {case!r}:"
    try:
        given = inspect.signature(fn).bind(*args, **kwargs).arguments
        words = [f"{name} = {short(value)}" for name, value in given.items()]
    except (TypeError, ValueError):
        words = [short(value) for value in (*args, *kwargs.values())]
    return f"With {', '.join(words)}:" if words else "Without arguments:"


def _first(got: object, want: object, tolerance: float) -> str:
    """Where two long sequences of one length part."""
    got, want = _listed(got), _listed(want)
    if not isinstance(got, (list, tuple)) or not isinstance(want, (list, tuple)):
        return ""
    if len(got) != len(want):
        return "" if max(len(got), len(want)) <= 6 else f" It has {len(got)} items instead of {len(want)}."
    differ = [i for i, pair in enumerate(zip(got, want, strict=True)) if not same(*pair, tolerance)]
    if len(want) <= 6:
        return ""
    i = differ[0]
    return f" The first difference is item {i}: {short(got[i])} instead of {short(want[i])}."


def describe_error(raised: BaseException, fn: Callable) -> str:
    """`IndexError: list index out of range (line 3 of its cell)`."""
    home = getattr(inspect.unwrap(fn), "__code__", None)
    line, frame = None, raised.__traceback__
    while frame is not None:
        if home is not None and frame.tb_frame.f_code.co_filename == home.co_filename:
            line = frame.tb_lineno
        frame = frame.tb_next
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(str(raised).split()))[:200]
    place = f" (line {line} of its cell)" if line else ""
    return f"{type(raised).__name__}: {text}{place}" if text else f"{type(raised).__name__}{place}"


def _limited(work: Callable[[], Any], seconds: float, where: str) -> Any:
    """Run `work` and stop it after `seconds`, in any thread, on any system; a call into C ends first."""
    thread, lock, state = threading.get_ident(), threading.Lock(), {"done": False, "fired": False}

    def stop() -> None:
        with lock:
            if not state["done"]:
                state["fired"] = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TimeUp))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    try:
        timer.start()
        try:
            return work()
        finally:
            with lock:
                state["done"] = True
            timer.cancel()
            if state["fired"]:  # take back an exception that has not arrived yet
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
    except _TimeUp:
        raise Wrong(f"{where} your function did not return within {seconds:g} seconds.") from None


def _own_copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # locks, generators: handed over as they are
        return value


def _listed(value: object) -> object:
    """Tensors, arrays and their scalars as plain numbers and lists."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _close(got: object, want: object, tolerance: float) -> bool:
    if not isinstance(got, (int, float)) or not isinstance(want, (int, float)):
        return False
    if math.isnan(got) or math.isnan(want):
        return math.isnan(got) and math.isnan(want)
    return math.isclose(got, want, rel_tol=tolerance, abs_tol=tolerance)


def _plain(value: object) -> bool:
    """True if equality of contents means something for `value`."""
    value = _listed(value)
    if isinstance(value, Mapping):
        return all(_plain(item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (str, bytes, int, float))
