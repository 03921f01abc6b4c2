"""The forward kernel for Hopper (sm_90a): TMA, WGMMA, warp specialisation, ping-pong, overlap, persistent CTAs.

One CTA per SM walks over tiles of `tile_m` query rows of one head (`walk.py`). Its roles (counts and bytes are
`ForwardConfig`'s):

    load_kv      warp 0: one thread starts the TMA loads of K(n), V(n), for n from the last key block down  (`loads.py`)
    load_q       warp 1: one thread starts the TMA loads of each consumer's 64 query rows
    scheduler    warp 2: takes the next tile from a counter, if the walk is dynamic
    turner       warps 2 and 3 of some FP8 kernels, in which load_q schedules as well: transpose V on its way (`turn_v.py`)
    consumer     warpgroups 1..: 64 query rows each, S = Q K^T and O += P V by WGMMA, online softmax in registers between
                 them, epilogue (`consumer.py`). Softmax(n) runs while the tensor cores work on the warpgroup's P V of the
                 block before and on the other warpgroups' products

Warpgroup 0 (the loads) hands its registers to the consumers by setmaxnreg. Barriers, all mbarriers in shared memory:

    barrier      one per              full when                        free when
    K ring       stage                1 arrival + k_bytes              one arrival per consumer warp
    V ring       stage                1 arrival + v_bytes, or          one arrival per consumer warp
                                      one per turning warp
    raw V ring   stage                1 arrival + v_bytes              one arrival per turning warp
    Q            consumer             1 arrival + its share of q_bytes q_empty_arrivals of its consumer
    mailbox      CTA                  1 arrival (the scheduler)        one arrival per warp of the other roles, and
                                                                       load_kv has asked for the next tile (1 arrival)
"""

import math

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from fa3_lib.compiler import COMPILE_LOCK
from fa3_lib.config import WARPGROUP, WGMMA_M, ForwardConfig, ceil_div
from fa3_lib.consumer import WARP, Consumer, Scores
from fa3_lib.loads import Loads, Ring, init_rings
from fa3_lib.walk import Mailbox, Walk

WARPS_PER_GROUP = WARPGROUP // WARP
ALIGN_SWIZZLE = 1024  # bytes: 128-byte swizzled tiles start on the 8-row pattern's boundary


class ForwardSm90:
    """Compile-time facts of one configuration; `__call__` is the host function, `kernel` the device function.

    `dtype` is that of Q, K and V, `out_dtype` the output's where it is another.
    """

    consumer_type = Consumer
    turner_type, scheduler_type = None, None  # of kernels that transpose V on its way

    def __init__(
        self, config: ForwardConfig, dtype: type[cutlass.Numeric], out_dtype: type[cutlass.Numeric] | None = None
    ):
        self.config = config.validate()
        if config.own_output == config.direct_output:
            raise ValueError(f"{config}: the output needs memory of its own or none: set own_output or direct_output")
        self.dtype = dtype
        self.dtypes = (dtype,) * 3  # of Q, K and V
        self.out_dtype = out_dtype or dtype

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (b, sq, h, d)
        mK: cute.Tensor,  # (b, sk, hk, d)
        mV: cute.Tensor,  # (b, sk, hk, dv)
        mO: cute.Tensor,  # (b, sq, h, dv)
        mLSE: cute.Tensor | None,  # (b, h, sq) fp32, if wanted
        mSinks: cute.Tensor | None,  # (h,) fp32, with config.sinks
        mCounter: cute.Tensor | None,  # (2,) int32 zeros, with config.dynamic
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        max_ctas: Int32,
        stream,
    ):
        # TMA sees (rows, columns, head, batch); V as (columns, rows, ...): the B operand of PV is (N = dv, K = keys)
        mQ, mK, mO = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mQ, mK, mO))
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0]))
        self.launch(
            mQ, mK, mV, mO, mLSE, mSinks, mCounter, None,
            softmax_scale, softcap, window_left, window_right, max_ctas, stream,
        )  # fmt: skip

    @cute.jit
    def launch(
        self, mQ, mK, mV, mO, mLSE, mSinks, mCounter, descales,
        softmax_scale, softcap, window_left, window_right, max_ctas, stream,
    ):  # fmt: skip
        """mQ `(sq, d, h, b)`, mK `(sk, d, hk, b)`, mV `(dv, sk, hk, b)`, mO `(sq, dv, h, b)`; the rest as in `__call__`.

        descales: (q's, k's, v's), each (b, hk) fp32; None for 16 bit.
        """
        cfg, dtype = self.config, self.dtype
        consumers = cfg.consumer_warpgroups
        seqlen_q, seqlen_k = mQ.shape[0], mK.shape[0]
        if const_expr(cfg.pack_gqa > 1):
            mQ, mO = pack_heads(mQ, cfg.pack_gqa), pack_heads(mO, cfg.pack_gqa)

        # Q has one 64-row tile per consumer; K and V one tile per stage
        row_major = LayoutEnum.ROW_MAJOR
        v_major = LayoutEnum.COL_MAJOR if const_expr(dtype.width == 16) else row_major  # 8 bit: V comes transposed
        sQ_layout = hopper.make_smem_layout_a(row_major, (WGMMA_M, cfg.tile_n, cfg.head_dim), dtype, consumers)
        sK_layout = hopper.make_smem_layout_b(row_major, (WGMMA_M, cfg.tile_n, cfg.head_dim), dtype, cfg.stages)
        v_rows = cfg.head_dim_v + cfg.sum_rows
        sV_layout = hopper.make_smem_layout_b(v_major, (WGMMA_M, v_rows, cfg.tile_n), dtype, cfg.stages)
        sO_layout, tma_O = None, None
        if const_expr(cfg.own_output):
            sO_layout = hopper.make_smem_layout_epi(self.out_dtype, row_major, (WGMMA_M, cfg.head_dim_v), consumers)
        # what TMA makes of V: the consumers' operand or, where warps turn it, tiles as V lies in memory
        raw_layout, loaded_layout = None, self.loaded_part(sV_layout)
        if const_expr(cfg.turning_warps):
            tile = (WGMMA_M, cfg.head_dim_v, cfg.tile_n)
            raw_layout = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, dtype, cfg.raw_stages)
            loaded_layout = raw_layout

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        one_tile = (None, None, 0)
        tma_Q, mQ = cpasync.make_tiled_tma_atom(load, mQ, cute.slice_(sQ_layout, one_tile), (WGMMA_M, cfg.head_dim))
        tma_K, mK = cpasync.make_tiled_tma_atom(load, mK, cute.slice_(sK_layout, one_tile), (cfg.tile_n, cfg.head_dim))
        tma_V, mV = cpasync.make_tiled_tma_atom(
            load, mV, cute.slice_(loaded_layout, one_tile), (cfg.head_dim_v, cfg.tile_n)
        )
        if const_expr(cfg.own_output):
            tma_O, mO = cpasync.make_tiled_tma_atom(
                store, mO, cute.slice_(sO_layout, one_tile), (WGMMA_M, cfg.head_dim_v)
            )

        @cute.struct
        class SharedStorage:
            q_full: cute.struct.MemRange[Int64, consumers]
            q_empty: cute.struct.MemRange[Int64, consumers]
            k_full: cute.struct.MemRange[Int64, cfg.stages]
            k_empty: cute.struct.MemRange[Int64, cfg.stages]
            v_full: cute.struct.MemRange[Int64, cfg.stages]
            v_empty: cute.struct.MemRange[Int64, cfg.stages]
            raw_full: cute.struct.MemRange[Int64, cfg.raw_stages]
            raw_empty: cute.struct.MemRange[Int64, cfg.raw_stages]
            mail_full: Int64
            mail_empty: Int64
            mail_wanted: Int64
            mail: cute.struct.MemRange[Int32, 2]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sQ_layout)], ALIGN_SWIZZLE]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sK_layout)], ALIGN_SWIZZLE]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(sV_layout)], ALIGN_SWIZZLE]
            raw: cute.struct.Align[
                cute.struct.MemRange[dtype, cute.cosize(raw_layout) if cfg.raw_stages else 0], ALIGN_SWIZZLE
            ]
            o: cute.struct.Align[
                cute.struct.MemRange[self.out_dtype, cute.cosize(sO_layout) if cfg.own_output else 0], ALIGN_SWIZZLE
            ]

        self.shared_storage = SharedStorage
        self.check_size(SharedStorage.size_in_bytes())

        # one softmax factor before tanh and one after it, or one in all
        factor = softmax_scale
        scale_log2 = softmax_scale * math.log2(math.e)
        if const_expr(cfg.softcap):
            factor, scale_log2 = softmax_scale / softcap, softcap * math.log2(math.e)
        # one-dimensional: the y and z limits of a grid (65,535) are within reach of heads times batch
        m_blocks = ceil_div(cute.size(mQ.shape[0]), cfg.tile_m)
        tiles_per_unit = 2 if const_expr(cfg.causal and not cfg.dynamic) else 1
        units = ceil_div(m_blocks, tiles_per_unit) * mQ.shape[2] * mQ.shape[3]
        ctas = cutlass.min(units, max_ctas)
        section = Int32(1)
        if const_expr(cfg.dynamic):
            lengths = Int64(seqlen_k), mQ.shape[2], mK.shape[2], mK.shape[3]
            section = Int32(cfg.heads_of_section(*lengths, cutlass.min, cutlass.max))
        self.kernel(
            tma_Q, mQ, tma_K, mK, tma_V, mV, tma_O, mO, mLSE, mSinks, mCounter, descales,
            sQ_layout, sK_layout, sV_layout, raw_layout, sO_layout,
            seqlen_q, scale_log2, factor, window_left, window_right, section,
        ).launch(
            grid=[ctas, 1, 1],
            block=[cfg.threads, 1, 1],
            smem=SharedStorage.size_in_bytes(),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_Q: cute.CopyAtom,
        mQ: cute.Tensor,  # (rows, d, h, b); rows = sq, or (pack_gqa, sq), with h / pack_gqa heads
        tma_K: cute.CopyAtom,
        mK: cute.Tensor,  # (sk, d, hk, b)
        tma_V: cute.CopyAtom,
        mV: cute.Tensor,  # (dv, sk, hk, b)
        tma_O: cute.CopyAtom | None,
        mO: cute.Tensor,  # (rows, dv, h, b)
        mLSE: cute.Tensor | None,  # (b, h, sq)
        mSinks: cute.Tensor | None,  # (h,)
        mCounter: cute.Tensor | None,  # (2,)
        descales: tuple | None,  # three (b, hk)
        sQ_layout: cute.ComposedLayout,
        sK_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        raw_layout: cute.ComposedLayout | None,  # of V as TMA brings it, if not as sV_layout says
        sO_layout: cute.ComposedLayout | None,  # with config.own_output, as tma_O
        seqlen_q: Int32,
        scale_log2: Float32,
        factor: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
    ):
        cfg = self.config
        consumers = cfg.consumer_warpgroups
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in (tma_Q, tma_K, tma_V, tma_O):
                if const_expr(tma is not None):
                    cpasync.prefetch_descriptor(tma)

        storage = cutlass.memory.SmemAllocator().allocate(self.shared_storage)
        q_type, k_type, v_type = self.dtypes
        sQ = storage.q.get_tensor(sQ_layout.outer, sQ_layout.inner, q_type)  # (64, d, consumer)
        sK = storage.k.get_tensor(sK_layout.outer, sK_layout.inner, k_type)  # (tile_n, d, stage)
        sV = storage.v.get_tensor(sV_layout.outer, sV_layout.inner, v_type)  # (dv + sum_rows, tile_n, stage)
        sO = None
        if const_expr(cfg.own_output):
            sO = storage.o.get_tensor(sO_layout.outer, swizzle=sO_layout.inner)  # (64, dv, consumer)
        K = Ring(storage.k_full.data_ptr(), storage.k_empty.data_ptr(), cfg.stages, cfg.k_bytes)
        V = Ring(storage.v_full.data_ptr(), storage.v_empty.data_ptr(), cfg.stages, cfg.v_bytes)
        # what TMA fills, (dv, tile_n, stage)
        loaded_V, loaded_layout, loaded = V, self.loaded_part(sV_layout), storage.v
        if const_expr(cfg.turning_warps):
            loaded_V = Ring(storage.raw_full.data_ptr(), storage.raw_empty.data_ptr(), cfg.raw_stages, cfg.v_bytes)
            loaded_layout, loaded = raw_layout, storage.raw
        s_loaded = loaded.get_tensor(loaded_layout.outer, loaded_layout.inner, v_type)
        q_full, q_empty, q_bytes = storage.q_full.data_ptr(), storage.q_empty.data_ptr(), cfg.q_bytes // consumers
        Q = [Ring(q_full + i, q_empty + i, 1, q_bytes) for i in range(consumers)]
        mail_full, mail_empty, mail_wanted = storage.mail_full.ptr, storage.mail_empty.ptr, storage.mail_wanted.ptr
        mail = storage.mail.get_tensor(cute.make_layout(1)), mail_full, mail_empty, mail_wanted
        if warp == 0:
            with cute.arch.elect_one():
                init_rings((K,), cfg.full_arrivals, cfg.empty_arrivals)
                init_rings((V,), cfg.turning_warps or cfg.full_arrivals, cfg.empty_arrivals)
                if const_expr(cfg.turning_warps):
                    init_rings((loaded_V,), cfg.full_arrivals, cfg.turning_warps)
                init_rings(Q, cfg.full_arrivals, cfg.q_empty_arrivals)
                if const_expr(cfg.dynamic):
                    cute.arch.mbarrier_init(mail_full, 1)
                    cute.arch.mbarrier_init(mail_empty, cfg.mailbox_readers)
                    cute.arch.mbarrier_init(mail_wanted, 1)
        cute.arch.mbarrier_init_fence()
        self.write_constants(storage, sV_layout)
        cute.arch.sync_threads()

        to_walk = cute.size(mQ.shape[0]), mQ.shape[2], mQ.shape[3], section
        walk = Walk(cfg, *to_walk, Mailbox(*mail))
        scores = Scores(cfg, seqlen_q, mK.shape[0], scale_log2, factor, window_left, window_right)
        if warp < WARPS_PER_GROUP:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            # ruff: noqa: SIM102, decided while tracing inside of what is decided while running
            # (roles are made where they are used: the DSL carries named objects through a branch only as runtime values)
            if warp == 0:
                Loads(cfg, walk, scores, K, loaded_V, Q).load_kv(tma_K, mK, sK, tma_V, mV, s_loaded)
            elif warp == 1:
                if const_expr(cfg.turning_warps and cfg.dynamic):
                    Loads(cfg, Walk(cfg, *to_walk, self.scheduler_type(*mail, mCounter)), scores, K, V, Q).load_q(
                        tma_Q, mQ, sQ
                    )
                    self.scheduler_type(*mail, mCounter).finish()
                else:
                    Loads(cfg, walk, scores, K, V, Q).load_q(tma_Q, mQ, sQ)
            elif const_expr(cfg.turning_warps):
                raw, turned = (storage.raw.data_ptr(), raw_layout), (storage.v.data_ptr(), sV_layout)
                self.turner_type(cfg, walk, scores, loaded_V, V, *raw, *turned, warp - 2).run()
            elif warp == 2:
                if const_expr(cfg.dynamic):
                    Mailbox(*mail).serve(mCounter, walk.end)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            me = warp // WARPS_PER_GROUP - 1
            own_Q = Ring(q_full + me, q_empty + me, 1, q_bytes)
            tiles = sQ[None, None, me], sK, sV, sO[None, None, me] if const_expr(cfg.own_output) else None
            consumer = self.consumer_type(
                cfg, self.dtypes, walk, scores, me, own_Q, K, V, *tiles, descales, mLSE is not None
            )
            consumer.run(tma_O, mO, mLSE, mSinks)

    def loaded_part(self, sV_layout: cute.ComposedLayout) -> cute.ComposedLayout:
        """What TMA writes of V's memory, (dv, tile_n, stage)."""
        return sV_layout

    def write_constants(self, storage, sV_layout: cute.ComposedLayout):
        """What lies in V's memory beside V, written once, before the roles begin."""

    def check_size(self, size: int) -> None:
        """1 KB of the configuration's sum is for barriers and alignment: with fewer bytes, one thing lies on another."""
        if not self.config.smem_bytes - 1024 < size <= self.config.smem_bytes:
            raise AssertionError(f"shared storage of {size} bytes. {self.config.budget()}")


def pack_heads(x: cute.Tensor, pack: int) -> cute.Tensor:
    """(sq, d, h, b) as ((pack, sq), d, h / pack, b): the rows of `pack` neighbouring heads, query by query."""
    (sq, d, h, b), (s_q, s_d, s_h, s_b) = x.shape, x.stride
    layout = cute.make_layout(((pack, sq), d, h // pack, b), stride=((s_h, s_q), s_d, s_h * pack, s_b))
    return cute.make_tensor(x.iterator, layout)


def compile_forward(config: ForwardConfig, dtype: torch.dtype, options: str = "", with_lse: bool = True):
    """Compiles one configuration for sm_90a without tensors and without launching; no GPU is needed.

    One result serves every batch, sequence length, head count, stride and head dim up to the configuration's.

    Args:
        config: the tile configuration.
        dtype: torch.float16 or torch.bfloat16.
        options: further options of `cute.compile` (`--enable-tvm-ffi`, `--keep-cubin`, `remarks{ptx}` ...).
        with_lse: whether the kernel writes the log-sum-exp; without it `lse` is None in calls.

    Returns:
        The compiled object; called as `fn(q, k, v, out, lse, sinks, counter, softmax_scale, softcap, window_left,
        window_right, max_ctas)` if compiled with `--enable-tvm-ffi`. `sinks` is fp32 `(heads,)` or None, `counter` two int32
        zeros or None, as the configuration says; the sides of a window are at least 0 and count keys; `max_ctas` is the number
        of SMs: a CTA fills one.
    """
    element = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}[dtype]
    b, sq, sk, h, hk = (cute.sym_int() for _ in range(5))
    d, dv = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)

    def rows(seqlen, heads, columns):  # 16-byte strides, as TMA wants them
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return make_fake_tensor(element, (b, seqlen, heads, columns), (*strides, 1), assumed_align=16)

    lse = make_fake_tensor(Float32, (b, h, sq), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    lse = lse if with_lse else None
    sinks = make_fake_tensor(Float32, (h,), (1,), assumed_align=4) if config.sinks else None
    counter = make_fake_tensor(Int32, (2,), (1,), assumed_align=8) if config.dynamic else None
    stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
    with COMPILE_LOCK:
        return cute.compile(
            ForwardSm90(config, element),
            rows(sq, h, d), rows(sk, hk, d), rows(sk, hk, dv), rows(sq, h, dv), lse, sinks, counter,
            Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), stream,
            options=f"--gpu-arch sm_90a {options}",
        )  # fmt: skip
