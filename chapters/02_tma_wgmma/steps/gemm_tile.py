"""A small GEMM, C = A B^T: one warpgroup, one stage, everything waits. Rung 3 is this loop with a softmax in it.

Expect              right for any shape, and slow: copies and products of one CTA never run at the same time
Look for in SASS    UTMALDG (copies), HGMMA (products), SYNCS (mbarrier), WARPGROUP.ARRIVE / DEPBAR (fence, wait); no HMMA

    A (m, k)    k contiguous
    B (n, k)    k contiguous ("K-major"), or n contiguous ("MN-major"): WGMMA reads both, nothing is transposed
    C (m, n)    written by the thread that holds the element

The left operand comes from shared memory, or from registers after ldmatrix.
"""

from typing import Literal

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu as nvgpu
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from fa3_lib.compiler import COMPILE_LOCK

TILE_M, TILE_N, TILE_K = 128, 128, 64  # 64 16-bit elements: one swizzled row of 128 bytes
WGMMA_M = 64
WARPGROUP = 128

BMajor = Literal["K", "MN"]
ASource = Literal["shared", "registers"]
ELEMENTS = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


class GemmTile:
    """One CTA computes one TILE_M x TILE_N tile of C."""

    def __init__(self, dtype: type[cutlass.Numeric], b_major: BMajor, a_source: ASource):
        self.dtype, self.b_major, self.a_source = dtype, b_major, a_source

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
        b_layout = LayoutEnum.ROW_MAJOR if const_expr(self.b_major == "K") else LayoutEnum.COL_MAJOR
        tile = (TILE_M, TILE_N, TILE_K)
        sA_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, 1)
        sB_layout = hopper.make_smem_layout_b(b_layout, tile, self.dtype, 1)
        load = cpasync.CopyBulkTensorTileG2SOp()
        one = (None, None, 0)
        tma_A, mA = cpasync.make_tiled_tma_atom(load, mA, cute.slice_(sA_layout, one), (TILE_M, TILE_K))
        tma_B, mB = cpasync.make_tiled_tma_atom(load, mB, cute.slice_(sB_layout, one), (TILE_N, TILE_K))

        @cute.struct
        class SharedStorage:
            full: cute.struct.MemRange[cutlass.Int64, 1]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sA_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sB_layout)], 1024]

        self.storage = SharedStorage
        self.kernel(tma_A, mA, tma_B, mB, mC, sA_layout, sB_layout).launch(
            grid=[cute.ceil_div(mC.shape[0], TILE_M), cute.ceil_div(mC.shape[1], TILE_N), 1],
            block=[WARPGROUP, 1, 1],
            smem=SharedStorage.size_in_bytes(),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma_A: cute.CopyAtom,
        mA: cute.Tensor,  # (m, k)
        tma_B: cute.CopyAtom,
        mB: cute.Tensor,  # (n, k)
        mC: cute.Tensor,  # (m, n)
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
    ):
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile_m, tile_n, _ = cute.arch.block_idx()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sA = storage.a.get_tensor(sA_layout.outer, swizzle=sA_layout.inner)  # (TILE_M, TILE_K, 1)
        sB = storage.b.get_tensor(sB_layout.outer, swizzle=sB_layout.inner)  # (TILE_N, TILE_K, 1)
        full = storage.full.data_ptr()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)  # one arrival per phase: the thread that announces the bytes
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        gA = cute.local_tile(mA, (TILE_M, TILE_K), (tile_m, None))  # (TILE_M, TILE_K, k step)
        gB = cute.local_tile(mB, (TILE_N, TILE_K), (tile_n, None))
        tAsA, tAgA = partition_tma(tma_A, sA, gA)
        tBsB, tBgB = partition_tma(tma_B, sB, gB)
        tile_bytes = (TILE_M + TILE_N) * TILE_K * self.dtype.width // 8

        mma = self.make_mma()
        thr = mma.get_slice(thread)
        tCsA = thr.partition_A(sA)
        tCrB = mma.make_fragment_B(thr.partition_B(sB))
        if const_expr(self.a_source == "shared"):
            tCrA = mma.make_fragment_A(tCsA)  # no registers: descriptors of the tile's places in shared memory
        else:
            tCrA = cute.make_rmem_tensor(thr.partition_shape_A((TILE_M, TILE_K)), self.dtype)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE_M, TILE_N)), Float32)
        acc.fill(0.0)

        phase = Int32(0)
        for step in cutlass.range(cute.size(gA, mode=[2]), unroll=1):
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes)
                cute.copy(tma_A, tAgA[None, step], tAsA[None, 0], tma_bar_ptr=full)
                cute.copy(tma_B, tBgB[None, step], tBsB[None, 0], tma_bar_ptr=full)
            cute.arch.mbarrier_wait(full, phase)
            phase ^= 1
            if const_expr(self.a_source == "registers"):
                self.load_fragments(mma, thread, sA, tCrA)

            warpgroup.fence()  # the accumulators and fragments that threads wrote, before the tensor cores use them
            for k in cutlass.range_constexpr(TILE_K // 16):
                a = tCrA[None, None, k, 0] if const_expr(self.a_source == "shared") else tCrA[None, None, k]
                cute.gemm(mma, acc, a, tCrB[None, None, k, 0], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            cute.arch.sync_threads()  # all warps have read A and B: the next copy may overwrite them

        # every thread writes the elements that it holds; rows and columns outside C exist in the tile only
        tCcC = thr.partition_C(cute.make_identity_tensor((TILE_M, TILE_N)))
        for i in cutlass.range_constexpr(cute.size(acc)):
            row, column = tile_m * TILE_M + tCcC[i][0], tile_n * TILE_N + tCcC[i][1]
            if row < mC.shape[0] and column < mC.shape[1]:
                mC[row, column] = acc[i].to(self.dtype)

    def make_mma(self) -> cute.TiledMma:
        """acc (TILE_M, TILE_N) += A B^T, one warpgroup, 64 rows per instruction."""
        b_major = OperandMajorMode.K if self.b_major == "K" else OperandMajorMode.MN
        source = warpgroup.OperandSource.SMEM if self.a_source == "shared" else warpgroup.OperandSource.RMEM
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (WGMMA_M, TILE_N), source
        )
        mma.set(warpgroup.Field.ACCUMULATE, True)
        return mma

    @cute.jit
    def load_fragments(self, mma, thread, sA, tCrA):
        """A: shared memory -> registers, four 8 x 8 matrices per ldmatrix."""
        atom = cute.make_copy_atom(nvgpu.warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_A(atom, mma)
        thr = copy.get_slice(thread)
        cute.copy(copy, thr.partition_S(sA[None, None, 0]), thr.retile(tCrA))


def partition_tma(atom, smem, gmem):
    """(smem, gmem) with the tile in one mode, as `cute.copy` of a TMA atom wants them; no multicast."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


def compile_gemm(dtype: torch.dtype, b_major: BMajor = "K", a_source: ASource = "shared", options: str = ""):
    """Compiles for sm_90a without a GPU; one result serves every m, n, k that TMA can read.

    Args:
        dtype: torch.float16 or torch.bfloat16. b_major: which dim of B is contiguous. a_source: where WGMMA finds A.
        options: further options of `cute.compile`.
    """
    element = ELEMENTS[dtype]
    m, n, k = (cute.sym_int() for _ in range(3))

    def matrix(rows, columns, contiguous):
        stride = cute.sym_int64(divisibility=8)
        return make_fake_tensor(
            element, (rows, columns), (stride, 1) if contiguous == 1 else (1, stride), assumed_align=16
        )

    c = make_fake_tensor(element, (m, n), (cute.sym_int64(), 1), assumed_align=2)
    stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
    with COMPILE_LOCK:
        return cute.compile(
            GemmTile(element, b_major, a_source),
            matrix(m, k, 1), matrix(n, k, 1 if b_major == "K" else 0), c, stream,
            options=f"--gpu-arch sm_90a {options}",
        )  # fmt: skip


_compiled: dict = {}


def matmul(a: torch.Tensor, b: torch.Tensor, a_source: ASource = "shared") -> torch.Tensor:
    """a `(m, k)` times the transpose of b `(n, k)`, fp16 or bf16 on a Hopper GPU; b may be K-major or MN-major.

    Raises:
        ValueError, TypeError: naming the argument, when shapes, dtypes or strides are not what TMA can read.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"want a (m, k) and b (n, k), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype not in ELEMENTS or a.dtype != b.dtype:
        raise TypeError(f"a and b must both be float16 or both bfloat16, got {a.dtype} and {b.dtype}")
    if a_source not in ("shared", "registers"):
        raise ValueError(f'a_source must be "shared" or "registers", got {a_source!r}')
    b_major = "K" if b.stride(1) == 1 else "MN"
    for name, x, last in (("a", a, 1), ("b", b, 1 if b_major == "K" else 0)):
        if x.stride(last) != 1 or x.stride(1 - last) % 8 or x.data_ptr() % 16:
            raise ValueError(
                f"{name} with strides {x.stride()}: TMA wants one contiguous dim, the other stride a multiple of 8 elements"
                f" and a 16-byte aligned address; {name}.clone() has that if the contiguous size is a multiple of 8"
            )
    c = a.new_empty(a.shape[0], b.shape[0])
    if c.numel() == 0 or a.shape[1] == 0:
        return c.zero_()
    key = (a.dtype, b_major, a_source)
    with COMPILE_LOCK:
        if key not in _compiled:
            _compiled[key] = compile_gemm(*key, "--enable-tvm-ffi")
    with torch.cuda.device(a.device):
        _compiled[key](a, b, c)
    return c


def flops(m: int, n: int, k: int) -> float:
    """A multiply and an add per (m, n, k)."""
    return 2.0 * m * n * k
