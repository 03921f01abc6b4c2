from pathlib import Path

import numpy as np

from fa3_course.checker import Exercise, truth
from fa3_course.checker.catalogue import load_source

HELPER = Path(__file__).with_name("which_tests.py")
which = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "which_tests")

EXERCISE = Exercise(
    "04.B5",
    "bug05_whose_factor.py",
    functions={"verdict": 1, "head_attention": 1},
    hints=(
        "head % kv_heads deals the heads out, head // (heads // kv_heads) keeps groups together. For which heads are they the same?",
        "With one KV head, and with as many as query heads, always. Of 8 heads on 2 KV heads: the even ones below 4, the odd ones above. "
        "Only Q's factor is indexed that way.",
        "q_descale[batch, kv_head].",
    ),
    faults=(("    factor = q_descale[batch, kv_head]", "    factor = q_descale[batch, head % kv_heads]"),),
)


def draw(t, heads, kv_heads, batch=2, sq=5, sk=7, d=4):
    q, k, v = (t.normal(batch, n, h, d) for n, h in ((sq, heads), (sk, kv_heads), (sk, kv_heads)))
    # every factor differs from every other one by a fifth or more
    factors = 0.7 * 1.2 ** t.rng.permutation(3 * batch * kv_heads).reshape(3, batch, kv_heads)
    return q, k, v, *factors


def compare(t, inputs, heads, head_attention):
    q, k, v, *factors = inputs
    group = q.shape[2] // k.shape[2]
    for batch in range(len(q)):
        for head in heads:
            got = head_attention(batch, head, *(x.copy() for x in inputs))
            one = (q[batch, :, head], k[batch, :, head // group], v[batch, :, head // group])
            fq, fk, fv = (f[batch, head // group] for f in factors)
            want, _ = truth.attention(one[0] * fq, one[1] * fk, one[2] * fv, q.shape[3] ** -0.5)
            t.close(got, want, f"batch {batch}, head {head} of {q.shape[2]} on {k.shape[2]} KV heads")


def test_mha(t, head_attention):
    compare(t, draw(t, 3, 3), range(3), head_attention)


def test_mqa(t, head_attention):
    compare(t, draw(t, 4, 1), range(4), head_attention)


def test_v(t, head_attention):
    q, k, v, fq, fk, fv = draw(t, 8, 2)
    fq, fk = (np.repeat(f[:, :1], 2, axis=1) for f in (fq, fk))
    compare(t, (q, k, v, fq, fk, fv), range(8), head_attention)


def test_ends(t, head_attention):
    compare(t, draw(t, 8, 2), (0, 7), head_attention)


def test_gqa(t, head_attention):
    compare(t, draw(t, 8, 2), range(8), head_attention)


TESTS = {
    "MHA": test_mha,
    "MQA": test_mqa,
    "GQA, V's factors": test_v,
    "GQA, first and last": test_ends,
    "GQA": test_gqa,
}


@EXERCISE.holds(
    "your prediction is what the five tests say of the function as handed out", "two ways to map 8 heads to 2"
)
def _(t, verdict, head_attention):
    which.expect_prediction(t, EXERCISE, verdict, TESTS)


@EXERCISE.holds("mended: all five tests pass", "one KV head for K, V and all three factors")
def _(t, verdict, head_attention):
    which.all_hold(t, TESTS, head_attention)


@EXERCISE.holds("mended: other groups", "heads // kv_heads heads share a KV head")
def _(t, verdict, head_attention):
    for heads, kv_heads in ((6, 3), (6, 2), (12, 4)):
        compare(t, draw(t, heads, kv_heads, batch=1), range(heads), head_attention)


@EXERCISE.holds("mended: factors of any strides", "index them, do not reshape them")
def _(t, verdict, head_attention):
    q, k, v, *factors = draw(t, 4, 2)
    compare(t, (q, k, v, *(np.asfortranarray(f) for f in factors)), range(4), head_attention)
