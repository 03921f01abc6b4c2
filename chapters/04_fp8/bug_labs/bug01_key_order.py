"""# 04.B1 Once too often

*Difficulty 2 of 3, 12 minutes, needs a laptop*

The pre-pass turns V once for all query tiles, and stores its keys in the order in which P lies in registers. `operand` is what the
tensor core reads of P when every lane packs its own registers, and it is right; so is `position`. Somebody wrote the pre-pass, and
then five tests of `P V`:

    "V = 1"             random P
    "V = 0 and 1"       V is 0 for even keys, 1 for odd ones; random P
    "equal weights"     P = 1, random V
    "first two keys"    P is 0 but for keys 0 and 1 of each 32; random V
    "random"            random P, random V

1. **Predict** which of them fail, and write their names into `verdict`, as a set. For the others, say why they are blind.
2. **Check**: your prediction is compared with what the tests say.
3. **Mend** the pre-pass.
"""

import numpy as np


def verdict() -> set[str]:
    """The tests that see the fault in `transpose_v` as it was handed out."""
    # region learner: return {"?"}
    # Where does the pre-pass put key 2, and where does the tensor core want it? Keys 0 and 1?
    return {"?"}
    # endregion


def position(keys: int) -> np.ndarray:
    """position[key]: where P's registers have this key; `keys` is a multiple of 32."""
    key = np.arange(keys)
    j, q, e = key % 32 // 8, key % 8 // 2, key % 2
    return key // 32 * 32 + 16 * (j // 2) + 4 * q + 2 * (j % 2) + e


def operand(p: np.ndarray) -> np.ndarray:
    """P `(rows, keys)` as the tensor core reads it: column `position[key]` has key's weights."""
    a = np.empty_like(p)
    a[:, position(p.shape[1])] = p
    return a


def transpose_v(v: np.ndarray) -> np.ndarray:
    """The pre-pass.

    Args:
        v: `(keys, dv)`, keys a multiple of 32.

    Returns:
        `(dv, keys)`, its columns in P's order: `operand(p) @ transpose_v(v).T` is `p @ v`.
    """
    # region learner
    # One line moves the keys.
    turned = v[position(len(v))]
    return np.ascontiguousarray(turned.T)
    # endregion
