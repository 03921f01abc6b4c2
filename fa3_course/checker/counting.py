"""Counts what a NumPy function does: how often it divides, how many elements it multiplies, how large its arrays get.

This is how a property can say "the output is normalised once per row" or "no array of seqlen x seqlen": the inputs are
`CountingArray`s, and everything computed from them is one too.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Tally:
    """What was seen. `calls` and `elements` are keyed by the ufunc's name ("divide", "multiply", "exp2", "matmul")."""

    calls: Counter = field(default_factory=Counter)
    elements: Counter = field(default_factory=Counter)
    largest: tuple[int, ...] = ()  # shape of the largest array that was made

    def note(self, name: str, result) -> None:
        """Records one operation and its result."""
        for array in result if isinstance(result, tuple | list) else (result,):
            shape = np.shape(array)
            self.calls[name] += 1
            self.elements[name] += int(np.prod(shape))
            if np.prod(shape) > np.prod(self.largest or (0,)):
                self.largest = shape


class CountingArray(np.ndarray):
    """An array that reports every operation on it, and on what comes of it, to `tally`."""

    tally: Tally

    def __array_finalize__(self, source) -> None:
        self.tally = getattr(source, "tally", None) or Tally()

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        # in-place operators hand over `out`; both sides go to NumPy as plain arrays
        plain = {"out": tuple(map(_plain, out))} if out else {}
        result = getattr(ufunc, method)(*map(_plain, inputs), **plain, **_plain_tree(options))
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        self.tally.note(name, result)
        return out[0] if out and len(out) == 1 else self._wrap(result)

    def __array_function__(self, function, types, arguments, options):
        result = function(*_plain_tree(arguments), **_plain_tree(options))
        self.tally.note(function.__name__, result)
        return self._wrap(result)

    def _wrap(self, result):
        if isinstance(result, tuple | list):
            return type(result)(map(self._wrap, result))
        if not isinstance(result, np.ndarray | np.generic):
            return result
        wrapped = np.asarray(result).view(CountingArray)
        wrapped.tally = self.tally
        return wrapped


def _plain(value):
    return value.view(np.ndarray) if isinstance(value, CountingArray) else value


def _plain_tree(value):
    if isinstance(value, tuple | list):
        return type(value)(map(_plain_tree, value))
    if isinstance(value, dict):
        return {key: _plain_tree(item) for key, item in value.items()}
    return _plain(value)


def counting(*arrays: np.ndarray) -> tuple[Tally, list[CountingArray]]:
    """Copies of `arrays` that share one fresh tally."""
    tally = Tally()
    counted = []
    for array in arrays:
        copy = np.array(array).view(CountingArray)
        copy.tally = tally
        counted.append(copy)
    return tally, counted
