from pathlib import Path

import numpy as np

from fa3_course.checker import Exercise
from fa3_course.checker.catalogue import load_source

HELPER = Path(__file__).with_name("which_tests.py")
which = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "which_tests")

EXERCISE = Exercise(
    "04.B1",
    "bug01_key_order.py",
    functions={"verdict": 1, "transpose_v": 1},
    hints=(
        "`turned = v[position]` puts at place i the key position[i]. `turned[position] = v` puts key i at place position[i]. When are they the same?",
        "The binary digits of a key in its group are j1 j0 q1 q0 e, those of its position j1 q1 q0 j0 e: three digits rotate, so twice is not once back. "
        "j1 and e stay: even keys stay even, and keys 0 and 1 stay where they are.",
        "Scatter, do not gather: turned[position(len(v))] = v.",
    ),
    faults=(
        ("    turned = np.empty_like(v)\n", ""),
        ("    turned[position(len(v))] = v", "    turned = v[position(len(v))]"),
    ),
)


def positions(keys):
    key = np.arange(keys)
    return key // 32 * 32 + 16 * (key % 32 // 16) + 4 * (key % 8 // 2) + 2 * (key % 16 // 8) + key % 2


def compare(t, p, v, transpose_v):
    a = np.empty_like(p)
    a[:, positions(p.shape[1])] = p
    turned = np.asarray(transpose_v(v.copy()))
    t.expect(turned.shape == v.shape[::-1], f"transpose_v gave {turned.shape}, expected {v.shape[::-1]}")
    t.close(a @ turned.T, p @ v, "P V")


def sizes(t):
    return 32 * int(t.rng.integers(2, 6)), int(t.rng.integers(1, 9))


def test_ones(t, transpose_v):
    keys, dv = sizes(t)
    compare(t, t.rng.uniform(0, 1, (3, keys)), np.ones((keys, dv)), transpose_v)


def test_odd(t, transpose_v):
    keys, dv = sizes(t)
    compare(t, t.rng.uniform(0, 1, (3, keys)), np.repeat(np.arange(keys)[:, None] % 2.0, dv, axis=1), transpose_v)


def test_equal(t, transpose_v):
    keys, dv = sizes(t)
    compare(t, np.ones((3, keys)), t.normal(keys, dv), transpose_v)


def test_first(t, transpose_v):
    keys, dv = sizes(t)
    compare(
        t, np.where(np.arange(keys) % 32 < 2, t.rng.uniform(0.1, 1, (3, keys)), 0.0), t.normal(keys, dv), transpose_v
    )


def test_random(t, transpose_v):
    keys, dv = sizes(t)
    compare(t, t.rng.uniform(0, 1, (3, keys)), t.normal(keys, dv), transpose_v)


TESTS = {
    "V = 1": test_ones,
    "V = 0 and 1": test_odd,
    "equal weights": test_equal,
    "first two keys": test_first,
    "random": test_random,
}


@EXERCISE.holds("your prediction is what the five tests say of the pre-pass as handed out", "follow keys 0, 1, 2 and 8")
def _(t, verdict, transpose_v):
    which.expect_prediction(t, EXERCISE, verdict, TESTS)


@EXERCISE.holds("mended: all five tests pass", "key i belongs to place position[i]")
def _(t, verdict, transpose_v):
    which.all_hold(t, TESTS, transpose_v)


@EXERCISE.holds("mended: one key at a time", "key 2 belongs to place 4, key 8 to place 2")
def _(t, verdict, transpose_v):
    v = t.normal(64, 2)
    for key in t.rng.permutation(64)[:16]:
        compare(t, np.eye(64)[key : key + 1], v, transpose_v)


@EXERCISE.holds("bytes are moved, not computed with", "dtype and values stay")
def _(t, verdict, transpose_v):
    v = t.rng.integers(0, 256, (96, 16)).astype(np.uint8)
    turned = np.asarray(transpose_v(v.copy()))
    t.expect(turned.dtype == np.uint8, f"dtype {turned.dtype}, expected uint8")
    want = np.empty_like(v)
    want[positions(96)] = v
    t.expect(turned.shape == (16, 96) and np.array_equal(turned, want.T), "bytes are not where they should be")
