from fa3_course.checker import Exercise
from fa3_course.checker.trial import Refused

EXERCISE = Exercise(
    "02.6",
    "ex06_major.py",
    functions={"majors": 2, "to_transpose": 1},
    hints=(
        "The contraction is the letter that both operands have and the result has not.",
        "K and V have their head dim contiguous. In Q K^T the head dim is summed over, in P V it is not.",
        '`(contraction,) = {*a, *b} - {*result}`; "K" where contiguous == contraction, else "MN". '
        "to_transpose collects the MN-major operands when element_bytes is 1.",
    ),
)


def compare(t, majors, to_transpose, product, contiguous, want):
    got = tuple(majors(product, contiguous))
    t.expect(got == want, f"{product} with contiguous {contiguous}: {got}, expected {want}")
    for size in (1, 2):
        wrong = "".join(name for name, major in zip("AB", want, strict=True) if major == "MN" and size == 1)
        said = to_transpose(product, contiguous, size)
        t.expect(said == wrong, f"{product} with contiguous {contiguous}, {size} bytes: {said!r}, expected {wrong!r}")


@EXERCISE.holds("S = Q K^T: both K-major", "the head dim is summed over, and it is contiguous in Q and in K")
def _(t, majors, to_transpose):
    compare(t, majors, to_transpose, "qd,kd->qk", ("d", "d"), ("K", "K"))


@EXERCISE.holds("O = P V: P from registers, V MN-major", "keys are summed over, and V has its head dim contiguous")
def _(t, majors, to_transpose):
    compare(t, majors, to_transpose, "qk,kd->qd", ("", "d"), ("", "MN"))
    compare(t, majors, to_transpose, "qk,kd->qd", ("k", "k"), ("K", "K"))  # V transposed, as the FP8 kernel has it


@EXERCISE.holds("the products of the backward pass", "same rule: dV = P^T dO sums over queries, dQ = dS K over keys")
def _(t, majors, to_transpose):
    compare(t, majors, to_transpose, "qk,qd->kd", ("k", "d"), ("MN", "MN"))
    compare(t, majors, to_transpose, "qk,kd->qd", ("k", "d"), ("K", "MN"))
    compare(t, majors, to_transpose, "qk,qd->kd", ("", "q"), ("", "K"))


@EXERCISE.holds("any product, any letters, any layout", "look at the letters; do not rely on their order")
def _(t, majors, to_transpose):
    for _ in range(12):
        m, n, k = map(str, t.rng.permutation([*"abcdefgh"])[:3])
        a, b, result = ("".join(t.rng.permutation(pair)) for pair in ((m, k), (n, k), (m, n)))
        contiguous = (str(t.rng.choice([m, k, ""])), str(t.rng.choice([n, k])))
        want = tuple("" if not c else "K" if c == k else "MN" for c in contiguous)
        compare(t, majors, to_transpose, f"{a},{b}->{result}", contiguous, want)


@EXERCISE.holds("B in registers is refused", "raise ValueError: the hardware has no such instruction")
def _(t, majors, to_transpose):
    for size in (1, 2):
        try:
            said = to_transpose("qk,kd->qd", ("k", ""), size)
        except ValueError:
            continue
        raise Refused(f"to_transpose answered {said!r} for a B in registers; expected a ValueError")
