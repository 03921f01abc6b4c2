"""Runs a persistent CTA of rung 8 with somebody's consumer on fresh inputs."""

from dataclasses import replace

from fa3_course import simulated
from fa3_course.checker import protocol, truth
from fa3_course.simulated import parts, rung08
from fa3_lib.config import WGMMA_M, ForwardConfig


def builder(consumer):
    def build(sm, p, *work):
        c, names = p.config, parts.consumer_names(p.config)
        t = replace(
            parts.make_tiles(sm, p, loader="load_kv", q_loader="load_q"),
            q_empty=[sm.mbarrier(f"Q empty[{i}]", c.q_empty_arrivals, by=(name,)) for i, name in enumerate(names)],
            o=sm.shared("O", (len(names), WGMMA_M, c.head_dim_v), p.out.dtype) if c.own_output else None,
        )
        for name, body in (("load_kv", rung08.load_kv), ("load_q", rung08.load_q)):
            sm.role(name, body, p, t, list(work), threads=parts.WARP, warpgroup="producer")
        for me, name in enumerate(names):
            sm.role(name, consumer, me, p, t, list(work))

    return build


def problem(t, *, sq=192, sk=96, consumers=1, stages=2, heads=1, causal=False, own_output=False, tile_n=32, d=64):
    """Fresh fp16 inputs, one batch."""
    config = ForwardConfig(d, d, 64 * consumers, tile_n, stages=stages, causal=causal, own_output=own_output).validate()
    q, *kv = (t.normal(1, n, heads, d) for n in (sq, sk, sk))
    return simulated.make_problem("8", q, *kv, causal, config=config, dtype="f16")


def fresh(p):
    """The same inputs, outputs that nobody has written yet."""
    return replace(
        p, out=type(p.out).output("O", p.out.shape, "f16"), lse=type(p.lse).output("LSE", p.lse.shape, "f32")
    )


def run(p, consumer, seed):
    """All tiles on one CTA: the report. Raises Fault."""
    return simulated.run("8", p, seed=seed, build=builder(consumer)).report


def check(t, consumer, **sizes):
    """Refuses a verdict or wrong numbers; the report."""
    p = problem(t, **sizes)
    what, seed = ", ".join(f"{k} {v}" for k, v in sizes.items()), int(t.rng.integers(10**6))
    report = protocol.clean(lambda: run(p, protocol.role(consumer), seed), what)
    scale = p.config.head_dim**-0.5
    mask = truth.allowed(*p.seqlens, p.config.causal)
    for h in range(p.q.shape[2]):
        one = tuple(x.numpy()[0, :, h] for x in (p.q, p.k, p.v))
        out, lse = truth.attention(*one, scale, mask)
        t.close(p.out.numpy()[0, :, h], out, f"out, {what}", same_precision=protocol.half_attention(*one, scale, mask))
        t.close(p.lse.numpy()[0, h], lse, f"LSE, {what}", tolerance=1e-4)
    return report
