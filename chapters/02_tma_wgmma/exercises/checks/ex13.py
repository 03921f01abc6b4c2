import contextlib
import functools
from dataclasses import replace
from unittest import mock

from fa3_course import rungs
from fa3_course.checker import Exercise, protocol
from fa3_course.checker import truth as exact
from fa3_course.checker.trial import Refused

EXERCISE = Exercise(
    "02.13",
    "ex13_pv.py",
    functions={"pv": 0},
    modules=("cutlass",),
    hints=(
        "Read `qk` of steps/rung04_ring.py: the same six calls, with K in place of V.",
        "Registers first (convert P, shrink O), then consumer_wait, fence, the loop of gemms, commit_group, wait_group(0), "
        "consumer_release. The fence comes after the last ordinary use of tOrP and acc_O.",
        "`for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])): cute.gemm(mma_pv, acc_O, tOrP[None, None, k], "
        "tOrV[None, None, k, state.index], acc_O)`",
    ),
    seconds=120.0,  # the first compile loads MLIR
)


def kernel(own):
    """Rung 4's kernel with the learner's method."""
    if not hasattr(own, "__wrapped__"):
        raise Refused("pv is not decorated with @cute.jit: keep the stub's decorator")
    return type("Learner", (rungs.find("4").module().Attention,), {"pv": own})


def compiled(pv):
    """(machine code report, traces) of rung 4 in bf16, causal, head dim 64, with the learner's method.

    A trace is the order in which a call of the method calls what it is told to use; the kernel has the method twice.
    """
    return _compiled(pv.__wrapped__)  # without the checker's guard, which is a new one for each property


def course():
    """The report of rung 4 itself."""
    return _compiled(None)[0]


@functools.lru_cache(maxsize=8)
def _compiled(own):
    import cutlass.cute as cute
    import torch
    from cutlass import pipeline
    from cutlass.cute.nvgpu import warpgroup

    from fa3_course import device_softmax, rung_host, sass

    rung4 = rungs.find("4").module()
    traces, config = [], replace(rung4.make_config(64, True), tile_n=64)
    base = kernel(own) if own else rung4.Attention

    class Listening(base):
        def pv(self, *arguments):
            traces.append([])
            base.pv(self, *arguments)
            traces.append([])  # what follows is not the method's

    def listen(stack, owner, name, note):
        original = getattr(owner, name)

        def heard(*arguments, **options):
            if traces:
                traces[-1].append(note(*arguments, **options))
            return original(*arguments, **options)

        stack.enter_context(mock.patch.object(owner, name, heard))

    def compile_fn(options):
        return rung_host.compile_kernel(Listening, config, torch.bfloat16, options)

    with contextlib.ExitStack() as stack:
        listen(stack, warpgroup, "fence", lambda **_: "fence")
        listen(stack, warpgroup, "commit_group", lambda **_: "commit_group")
        listen(stack, warpgroup, "wait_group", lambda n, **_: f"wait_group({n})")
        listen(stack, cute, "gemm", lambda *_, **__: "gemm")
        listen(stack, device_softmax, "scale_rows", lambda *_, **__: "scale_rows")
        ring = pipeline.PipelineTmaAsync
        listen(stack, ring, "consumer_wait", lambda *_, **__: "consumer_wait")
        listen(stack, ring, "consumer_release", lambda *_, **__: "consumer_release")
        listen(stack, pipeline.PipelineState, "advance", lambda *_, **__: "advance")
        try:
            (report,) = sass.compile_report(compile_fn)
        except Exception as error:
            raise Refused(f"it does not compile: {type(error).__name__}: {str(error)[:600]}") from None
    return report, traces[::2]


RIGHT = ["consumer_wait", "fence", "gemm", "commit_group", "wait_group(0)", "consumer_release"]


def without_repeats(trace):
    """A trace with each run of gemm calls as one."""
    return [call for i, call in enumerate(trace) if call != "gemm" or trace[i - 1] != "gemm"]


def in_order(said):
    """Whether the calls are those of RIGHT."""
    ordered = [call for call in said if call != "scale_rows"]
    # the fence orders register accesses, the wait shared memory: either may come first
    return ordered in (RIGHT, [RIGHT[1], RIGHT[0], *RIGHT[2:]])


def count(report, name):
    """Instructions whose name begins so."""
    return sum(n for opcode, n in report.opcodes.items() if opcode.split(".")[0] == name)


@EXERCISE.holds("it compiles for sm_90a, and nothing spills", "the message is CuTe's or the compiler's own")
def _(t, pv):
    report, _ = compiled(pv)
    t.expect(not report.problems(), "; ".join(report.problems()))


@EXERCISE.holds("one WGMMA per 16 keys", "loop over cute.size(tOrP, mode=[2]) with range_constexpr; k selects the step")
def _(t, pv):
    (report, traces), ours = compiled(pv), course()
    got, want = report.count("HGMMA"), ours.count("HGMMA")
    t.expect(
        got == want, f"{got} HGMMA in the kernel, expected {want}; gemm calls per block: {traces[0].count('gemm')}"
    )


@EXERCISE.holds(
    "who waits for whom: wait, fence, products, commit, wait, release", "see hint 2; each call once per block"
)
def _(t, pv):
    for trace in compiled(pv)[1]:
        said = without_repeats(trace)
        t.expect(in_order(said), f"your calls: {', '.join(said)}; expected {', '.join(RIGHT)}")
        late = "scale_rows" in said and said.index("scale_rows") > said.index("fence")
        t.expect(not late, "scale_rows touches acc_O after the fence: the tensor cores may see old registers")


@EXERCISE.holds(
    "P is rounded to 16 bits, and O shrinks", "as many conversions (F2FP) and multiplications (FMUL) as in rung 4"
)
def _(t, pv):
    (report, _), ours = compiled(pv), course()
    for name, what in (("F2FP", "conversions"), ("FMUL", "multiplications")):
        got, want = count(report, name), count(ours, name)
        t.expect(abs(got - want) <= 0.05 * want, f"{got} {what} ({name}) in the kernel, rung 4 has {want}")


@EXERCISE.holds(
    "on a Hopper: the numbers match the fp64 truth", "checked on the card only; elsewhere this property is empty"
)
def _(t, pv):
    if not rungs.has_hopper():
        return
    import torch

    from fa3_course import rung_host

    # a stage that is never waited for or never freed hangs the card, and with it this process: such a kernel is not launched
    right = all(in_order(without_repeats(trace)) for trace in compiled(pv)[1])
    t.expect(right, "not launched: with its calls out of order (see above) the kernel might never end")
    own = kernel(pv.__wrapped__)
    for causal, (sq, sk) in ((False, (130, 300)), (True, (200, 333))):
        q, k, v = (torch.from_numpy(t.normal(1, n, 1, 64)).half().cuda() for n in (sq, sk, sk))
        config = rungs.find("4").module().make_config(64, causal)
        out, lse = rung_host.run(own, config, q, k, v, 0.125, causal)
        q, k, v = (x.cpu().numpy()[0, :, 0] for x in (q, k, v))
        mask = exact.allowed(sq, sk, causal)
        true_out, true_lse = exact.attention(q, k, v, 0.125, mask)
        what = f"{sq} queries, {sk} keys{', causal' if causal else ''}"
        t.close(
            out.cpu().numpy()[0, :, 0],
            true_out,
            f"out, {what}",
            same_precision=protocol.half_attention(q, k, v, 0.125, mask),
        )
        t.close(lse.cpu().numpy()[0, 0], true_lse, f"LSE, {what}", tolerance=1e-4)
