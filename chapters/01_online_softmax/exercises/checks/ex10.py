import numpy as np

from fa3_course.checker import Exercise

EXERCISE = Exercise(
    "01.10",
    "ex10_roofline.py",
    functions={"forward_cost": 2, "attainable": 1},
    hints=(
        "Q K^T and P V: 2 * sq * sk * d operations each, per batch and query head.",
        "Q and O have batch * sq * heads * d elements each, K and V batch * sk * kv_heads * d each. "
        "S has batch * heads * sq * sk.",
        "Time is at least max(operations / peak, moved / bandwidth); the speed is operations / time.",
    ),
)


def draw(t):
    kv_heads = int(t.rng.integers(1, 5))
    sizes = dict(zip(("batch", "seqlen_q", "seqlen_k"), map(int, t.rng.integers(1, 300, 3)), strict=True))
    return sizes | {
        "heads": kv_heads * int(t.rng.integers(1, 5)),
        "kv_heads": kv_heads,
        "head_dim": 8 * int(t.rng.integers(1, 33)),
        "element_bytes": int(t.rng.choice([1, 2, 4])),
    }


def truth(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, element_bytes, fused):
    """Counted on the arrays' shapes, one array at a time."""
    q = o = (batch, seqlen_q, heads, head_dim)
    k = v = (batch, seqlen_k, kv_heads, head_dim)
    s = p = (batch, heads, seqlen_q, seqlen_k)
    transfers = [q, k, v, o] + ([] if fused else [s, s, p, p])
    moved = sum(element_bytes * int(np.prod(shape)) for shape in transfers)
    moved += fused * 4 * int(np.prod(q[:3]))
    products = 2  # Q K^T and P V, each s-many dot products of head_dim multiply-adds
    return products * int(np.prod(s)) * head_dim * 2, moved


def compare(t, forward_cost, sizes, fused):
    got, want = tuple(forward_cost(*sizes.values(), fused)), truth(**sizes, fused=fused)
    for value, expected, what in zip(got, want, ("operations", "bytes"), strict=True):
        t.expect(value == expected, f"{what}: {value:,}, expected {expected:,} for {sizes}, fused {fused}")


@EXERCISE.holds("operations and bytes of the fused kernel", "four operands and 4 bytes of LSE per query and head")
def _(t, forward_cost, attainable):
    for _ in range(5):
        compare(t, forward_cost, draw(t), True)


@EXERCISE.holds("operations and bytes of the eager form", "S and P are each written once and read once")
def _(t, forward_cost, attainable):
    for _ in range(5):
        compare(t, forward_cost, draw(t), False)


@EXERCISE.holds("grouped heads share K and V", "K and V have kv_heads heads; S and P have one matrix per query head")
def _(t, forward_cost, attainable):
    sizes = draw(t) | {"heads": 8, "kv_heads": 2}
    for fused in (True, False):
        compare(t, forward_cost, sizes, fused)


@EXERCISE.holds(
    "fused bytes grow linearly with the length, eager bytes with its square", "compare 1024 with 2048 tokens by hand"
)
def _(t, forward_cost, attainable):
    length = int(t.rng.integers(2_000, 4_000))
    for fused, low, high in ((True, 1.99, 2.01), (False, 3.8, 4.0)):
        one, two = (forward_cost(1, n, n, 4, 4, 64, 2, fused)[1] for n in (length, 2 * length))
        t.expect(low <= two / one <= high, f"twice the length: {two / one:.2f} times the bytes, fused {fused}")


@EXERCISE.holds(
    "the roofline is the lower of its two ceilings",
    "bytes bound it below the ridge peak / bandwidth, the arithmetic above",
)
def _(t, forward_cost, attainable):
    for _ in range(5):
        operations, moved, peak, bandwidth = np.exp(t.rng.uniform(5, 12, 4))
        truth = 1 / max(1 / peak, moved / bandwidth / operations)
        t.close(attainable(operations, moved, peak, bandwidth), truth, "operations per second", tolerance=1e-12)
