import functools
from dataclasses import replace

import numpy as np

from fa3_course import rungs
from fa3_course.checker import Exercise, protocol
from fa3_course.checker import truth as exact
from fa3_course.checker.trial import Refused

EXERCISE = Exercise(
    "02.14",
    "ex14_tiles.py",
    functions={"choose": 2},
    modules=("cutlass",),
    hopper=True,
    hints=(
        "Write the sums down first: shared memory is Q (128 x d) and stages x (K + V), 2 bytes per element, at most 227 KB.",
        "One stage makes the producer wait for the consumers of the slot. More than two helps only when copies are late.",
        "Two stages; tile_n 128 for head dims 64 and 128, 80 for 256: two stages of 96 keys would need more than 227 KB.",
    ),
    seconds=180.0,  # compiles two kernels
)
SHAPES = {64: (2, 4096, 16), 128: (2, 4096, 8), 256: (2, 4096, 4)}  # head dim: batch, tokens, heads


def configuration(choose, head_dim):
    """The learner's choice in rung 5's configuration; Refused with the budget when it breaks a rule."""
    stages, tile_n = choose(head_dim)
    try:
        return replace(rungs.find("5").module().make_config(head_dim, False), stages=stages, tile_n=tile_n).validate()
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"head dim {head_dim}: {error}") from None


def attend(config, q, k, v):
    from fa3_course import rung_host

    return rung_host.run(rungs.find("5").module().Attention, config, q, k, v)


def draw(t, batch, tokens, heads, d):
    import torch

    generator = torch.Generator("cuda").manual_seed(int(t.rng.integers(10**6)))
    shape = (batch, tokens, heads, d)
    return (torch.randn(shape, device="cuda", dtype=torch.float16, generator=generator) for _ in range(3))


@EXERCISE.holds("every choice fits", "ForwardConfig.validate() prints the sum that is too large")
def _(t, choose):
    for d in SHAPES:
        configuration(choose, d)


@EXERCISE.holds("nothing spills", "fewer keys per step: S and P need 3/4 register per key and thread")
def _(t, choose):
    import torch

    from fa3_course import sass

    for d in SHAPES:
        config = configuration(choose, d)
        (report,) = sass.compile_report(lambda o, c=config: rungs.find("5").module().compile_rung(c, torch.float16, o))
        t.expect(not report.problems(), f"head dim {d}: {'; '.join(report.problems())}")


@EXERCISE.holds("the numbers match the fp64 truth", "a kernel that is wrong is not fast")
def _(t, choose):
    for d in SHAPES:
        q, k, v = draw(t, 1, int(t.rng.integers(100, 500)), 1, d)
        out, lse = attend(configuration(choose, d), q, k, v)
        q, k, v = (x.cpu().numpy()[0, :, 0] for x in (q, k, v))
        true_out, true_lse = exact.attention(q, k, v, d**-0.5)
        t.close(
            out.cpu().numpy()[0, :, 0],
            true_out,
            f"out, head dim {d}",
            same_precision=protocol.half_attention(q, k, v, d**-0.5),
        )
        t.close(lse.cpu().numpy()[0, 0], true_lse, f"LSE, head dim {d}", tolerance=1e-4)


@EXERCISE.holds("as fast as rung 5's own choice, within 10 %", "measured in turns in one run; use the Try it cell")
def _(t, choose):
    import triton

    for d, shape in SHAPES.items():
        q, k, v = draw(t, *shape, d)
        ours = rungs.find("5").module().make_config(d, False)
        times = {name: [] for name in ("yours", "rung 5's")}
        for _ in range(3):  # in turns, since the clock drifts
            for name, config in (("yours", configuration(choose, d)), ("rung 5's", ours)):
                call = functools.partial(attend, config, q, k, v)
                times[name].append(triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median"))
        mine, other = (float(np.median(values)) for values in times.values())
        t.expect(mine <= 1.1 * other, f"head dim {d}: yours takes {mine:.3f} ms, rung 5's own choice {other:.3f} ms")
