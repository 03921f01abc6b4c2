"""# 02.13 The same product in CuTe DSL

*Difficulty 3 of 3, 20 minutes, needs Linux (CuTe DSL compiles without a GPU; with a Hopper the numbers are checked, too)*

O = O * shrink + P V of one key block, as the method `pv` of rung 4: what you wrote for the simulated SM, now for the card.
The check puts your function into rung 4's kernel, compiles it for sm_90a, listens to the order of your calls while CuTe
traces them, and reads the machine code.

| simulated SM | CuTe DSL |
|---|---|
| `await t.v_full[slot].wait(phase)` | `pipe_V.consumer_wait(state)`; `state` knows slot and phase |
| `wg.wgmma_fence()`, `wg.commit()`, `await wg.wait_group(0)` | `warpgroup.fence()`, `warpgroup.commit_group()`, `warpgroup.wait_group(0)` |
| `wg.wgmma(acc_O, tOrP, t.v[slot])` | one `cute.gemm(mma_pv, acc_O, a, b, acc_O)` per 16 keys |
| `t.v_empty[slot].arrive(4)` | `pipe_V.consumer_release(state)` |

`cute.size(tOrP, mode=[2])` steps of 16 keys: `a = tOrP[None, None, k]`, `b = tOrV[None, None, k, state.index]`. A loop that is
unrolled while tracing is `for k in cutlass.range_constexpr(n)`. Keep the decorator.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from fa3_course import device_softmax as softmax


@cute.jit
def pv(self, mma_pv, acc_S, tOrP, tOrV, acc_O, shrink, pipe_V, state):
    """One key block of O += P V; frees the V stage.

    Args:
        self: rung 4's kernel; `self.dtype` is the type of P and V.
        acc_S: P in fp32, as softmax left it; register i of acc_S belongs into register i of tOrP.
        acc_O: the accumulator. shrink: per row, the factor by which it must shrink first:
            softmax.scale_rows(acc_O, shrink).
    """
    # region learner: pass
    # P to 16 bits: tOrP[i] = acc_S[i].to(self.dtype) for all i in
    # cutlass.range_constexpr(cute.size(tOrP)). Shrink O. Then: wait for V, fence, products, commit,
    # wait, release.
    pass
    # endregion
