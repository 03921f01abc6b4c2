"""The comparisons that properties are written with; they report values, not just a verdict."""

import numpy as np


class Refused(Exception):
    """An answer lacks a property; the message says what was seen and what was expected."""


class Trial:
    """What a property works with: a random generator and comparisons that report values.

    Args:
        seed: of the generator; each property of one check gets its own generator with the same seed.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal numbers, fp64."""
        return self.rng.standard_normal(shape)

    def refill(self, array: np.ndarray) -> np.ndarray:
        """New normal numbers in the same memory: what was remembered by address, shape or identity is now wrong."""
        array.flags.writeable = True
        array[...] = self.normal(*array.shape)
        return array

    def expect(self, holds: bool, message: str) -> None:
        """Refuses with `message` unless `holds`."""
        if not holds:
            raise Refused(message)

    def close(
        self, got, truth, what: str = "result", same_precision: np.ndarray | None = None, tolerance: float = 1e-9
    ) -> None:
        """Compares an answer with the fp64 truth; infinities must match exactly and NaN never passes.

        Args:
            got: array-like of truth's shape.
            truth: fp64 array.
            what: name of the value in the report.
            same_precision: a plain computation in the answer's own precision. If given, the answer may be at most twice
                as far from the truth, plus the rounding noise of its precision (FlashAttention-3's own test rule).
            tolerance: absolute error allowed otherwise, times max(1, largest |truth|). Inputs are fp64 then, so that
                rounding stays far below it and a wrong algorithm far above.
        """
        got, truth = np.asarray(got), np.asarray(truth, dtype=np.float64)
        self.expect(got.dtype.kind in "fiu", f"{what} has dtype {got.dtype}, expected numbers")
        self.expect(got.shape == truth.shape, f"{what} has shape {got.shape}, expected {truth.shape}")
        if not truth.size:
            return
        finite = np.isfinite(truth)
        values = got.astype(np.float64)
        error = np.where(values == truth, 0.0, np.inf)  # right where both are the same infinity
        error[finite] = np.abs(values[finite] - truth[finite])
        error[np.isnan(error)] = np.inf
        allowed = tolerance * max(1.0, np.abs(truth[finite]).max(initial=0.0))
        if same_precision is not None:
            allowed = _same_precision_bound(truth, same_precision)
        worst = np.unravel_index(error.argmax(), error.shape)
        if error[worst] > allowed:
            at = f" at [{', '.join(map(str, worst))}]" if worst else ""
            bad = f"{np.isnan(values).sum()} of {values.size} values are NaN; " if np.isnan(values).any() else ""
            wrong = f"allowed error {allowed:.1e}" if finite[worst] else "infinities must match"
            raise Refused(f"{bad}{what}{at}: {values[worst]:.6g}, expected {truth[worst]:.6g} ({wrong})")


def _same_precision_bound(truth: np.ndarray, same_precision: np.ndarray) -> float:
    """2 * max|same_precision - truth| + 2 * max|(truth + 0.3 - 0.3) - truth| in that precision, over finite values."""
    finite = np.isfinite(truth)
    exact = truth[finite]
    rounded = exact.astype(same_precision.dtype)
    third = rounded.dtype.type(0.3)
    noise = np.abs((rounded + third - third).astype(np.float64) - exact).max(initial=0.0)
    plain = np.abs(same_precision[finite].astype(np.float64) - exact).max(initial=0.0)
    return float(2 * plain + 2 * noise)
