"""A time limit for code that somebody else wrote."""

import contextvars
import ctypes
import threading
from collections.abc import Callable

import numpy as np


class TimeUp(BaseException):
    """The code ran longer than it may. No Exception, so that `except Exception` in a learner's loop lets it pass."""


def limited(work: Callable[[], None], seconds: float) -> None:
    """Runs `work()` and passes on what it raises; raises TimeUp after `seconds`.

    The work runs in a thread of its own, so that this holds in a notebook, under pytest and on every system. A loop in
    Python is stopped; a call that hangs inside compiled code is left behind, and reported all the same.
    Floating-point warnings are silent: overflow shows in the values that the checks compare.
    """
    raised: list[BaseException] = []

    def target() -> None:
        try:
            with np.errstate(all="ignore"):
                work()
        except BaseException as error:
            raised.append(error)

    # the context carries the notebook cell that prints belong to
    thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    except KeyboardInterrupt:
        _stop(thread)
        raise
    if thread.is_alive():
        _stop(thread)
        raise TimeUp
    if raised:
        raise raised[0]


def _stop(thread: threading.Thread) -> None:
    """Raises TimeUp inside the thread at its next bytecode, and gives it a moment to end."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeUp))
    thread.join(1.0)
