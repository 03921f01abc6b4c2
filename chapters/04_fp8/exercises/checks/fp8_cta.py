"""Runs CTAs of rung 10 on the simulated SM with somebody's roles, on fresh inputs, and compares with the fp64 truth."""

from dataclasses import replace

import numpy as np

from fa3_course import rungs, simulated
from fa3_course.checker import protocol, truth
from fa3_lib.config import ForwardConfig

fp8 = rungs._module("chapters/04_fp8/steps/fp8_numerics.py")
transposer = rungs._module("chapters/04_fp8/steps/transposer.py")


def make_problem(
    t,
    *,
    sq=64,
    sk=96,
    consumers=1,
    stages=2,
    tile_n=32,
    d=64,
    heads=1,
    kv_heads=1,
    causal=False,
    ping_pong=False,
    two_level=True,
    transposed=True,
):
    """Fresh e4m3 inputs with a factor per (batch, KV head); V as a pre-pass leaves it, or, not `transposed`, as it comes."""
    config = ForwardConfig(
        d, d, 64 * consumers, tile_n, stages=stages, causal=causal, ping_pong=ping_pong, element_bytes=1
    ).validate()
    q, k, v = (t.normal(1, n, h, d) for n, h in ((sq, heads), (sk, kv_heads), (sk, kv_heads)))
    v *= t.rng.uniform(0.5, 4, (1, 1, kv_heads, 1))  # heads differ in loudness
    p = simulated.make_problem("11" if two_level else "10", q, k, v, causal, config=config)
    return p if transposed else transposer.untransposed(p)


def fresh(p):
    """The same inputs, outputs that nobody has written yet."""
    return replace(
        p, out=type(p.out).output("O", p.out.shape, "bf16"), lse=type(p.lse).output("LSE", p.lse.shape, "f32")
    )


def run(p, build, seed):
    """All query tiles: the report. Raises Fault."""
    return simulated.run("11" if p.two_level else "10", p, seed=seed, build=build).report


def rounded_attention(q, k, v, scale, mask):
    """What a plain computation gives whose P is rounded to e4m3 (it reaches 256) and whose result to bf16."""
    scores = np.where(mask, scale * (q.astype(np.float32) @ k.astype(np.float32).T), -np.inf)
    row_max = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - np.where(np.isneginf(row_max), 0, row_max))
    out = fp8.to_grid(256 * p, fp8.E4M3) @ v / np.maximum(256 * p.sum(axis=1, keepdims=True), 1e-30)
    bits = out.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).view(np.float32)


def check(t, build, **sizes):
    """Runs `build(sm, problem, tile)` on fresh inputs; refuses a verdict or wrong numbers. The report."""
    p = make_problem(t, **sizes)
    what = ", ".join(f"{name} {value}" for name, value in sizes.items() if name != "transposed") or "one tile"
    report = protocol.clean(lambda: run(p, build, int(t.rng.integers(10**6))), what)
    seqlen_q, seqlen_k = p.seqlens
    mask = truth.allowed(seqlen_q, seqlen_k, p.config.causal)
    scale = p.config.head_dim**-0.5
    v = (transposer.untransposed(p) if p.v.name == "Vt" else p).v.numpy()
    for h in range(p.q.shape[2]):
        kv = p.kv_head(h)
        factors = (x[0, kv] for x in (p.q_descale, p.k_descale, p.v_descale))
        tensors = (p.q.numpy()[0, :, h], p.k.numpy()[0, :, kv], v[0, :, kv])
        one = tuple(x.astype(np.float64) * factor for x, factor in zip(tensors, factors, strict=True))
        out, lse = truth.attention(*one, scale, mask)
        t.close(p.out.numpy()[0, :, h], out, f"out, {what}", same_precision=rounded_attention(*one, scale, mask))
        t.close(p.lse.numpy()[0, h], lse, f"LSE, {what}", tolerance=2e-3)
    return report
