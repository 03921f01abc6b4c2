"""V turned inside the FP8 kernel, without a GPU: the moves of its warps, the rules that choose it, what ptxas made of it."""

import functools
import importlib.util
from dataclasses import replace

import pytest
import torch

from fa3_lib import fp8, interface
from fa3_lib.fp8_config import (
    IN_KERNEL_QUERIES,
    KEY_GROUP,
    SHORT_TWO_LEVEL,
    TURNING_SPLIT,
    TURNING_WARPS,
    fp8_config,
)
from fa3_lib.quantize import transpose_v
from tests.fa3_lib.fp8_truth import E4M3
from tests.fa3_lib.test_fp8 import EVERYTHING, name

needs_dsl = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="CuTe DSL has wheels for Linux only")


# --- moves -----------------------------------------------------------------------------------------------------------


def layouts_and_places(dv, tile_n, sum_rows):
    """What the DSL and `turn_v` say of one stage, in bytes.

    Returns:
        raw, turned: `(dv, tile_n)`, where the DSL's swizzled layouts put a column and key.
        reads, writes: `(warp, move, lane)`, the 16 bytes that each lane names to ldmatrix and to stmatrix.
    """
    import cutlass.cute as cute
    import cutlass.utils.hopper_helpers as hopper
    from cutlass import Float8E4M3FN
    from cutlass.tensor_utils import LayoutEnum

    from fa3_lib.turn_v import COLUMNS, moved, place, read_by, written_by

    found = []

    @cute.jit
    def look():
        majors = LayoutEnum.COL_MAJOR, LayoutEnum.ROW_MAJOR  # contiguous columns, contiguous keys
        for major, named_by in zip(majors, (read_by, written_by), strict=True):
            rows = dv + (sum_rows if named_by is written_by else 0)
            layout = hopper.make_smem_layout_b(major, (64, rows, tile_n), Float8E4M3FN, 2)
            bytes_of = [[cute.crd2idx((c, k, 0), layout) for k in range(tile_n)] for c in range(dv)]
            assert cute.crd2idx((9, 5, 1), layout) == bytes_of[9][5] + cute.cosize(layout) // 2  # the second stage
            named = [
                [
                    functools.reduce(
                        moved, (place(layout, c, 0), place(layout, 0, k)), place(layout, *named_by(t, warp))
                    )
                    for t in range(32)
                ]
                for warp in range(TURNING_WARPS)
                for c in range(0, dv, COLUMNS * TURNING_WARPS)
                for k in range(0, tile_n, KEY_GROUP)
            ]
            found.append((torch.tensor(bytes_of), torch.tensor(named)))

    cute.compile(look, options="--gpu-arch sm_90a")
    (raw, reads), (turned, writes) = found
    return raw, turned, reads, writes


def ldmatrix_trans(memory, addresses):
    """(lane, register) of 4 bytes: register m of lane 4 c + quad is pair c of rows 2 quad and 2 quad + 1 of matrix m."""
    rows = memory[addresses[:, None] + torch.arange(16)].view(4, 4, 2, 8, 2)  # matrix, quad, e, c, byte
    return rows.permute(3, 1, 0, 2, 4).reshape(32, 4, 4)


def prmt(low, high, selector: int):
    both = torch.cat([low, high], dim=-1)
    return torch.stack([both[..., selector >> 4 * i & 7] for i in range(4)], dim=-1)


def stmatrix(memory, addresses, registers):
    """Register m of lane 4 row + quad is 4 bytes of that row of matrix m."""
    rows = registers.view(8, 4, 4, 4).permute(2, 0, 1, 3).reshape(32, 16)  # row, quad, matrix, byte
    memory[addresses[:, None] + torch.arange(16)] = rows


@needs_dsl
@pytest.mark.parametrize("sum_rows", (0, 8))
@pytest.mark.parametrize(  # with each swizzle on each side, of 32 (keys alone), 64 and 128 bytes
    "dv, tile_n", ((64, 32), (64, 64), (64, 128), (128, 96), (128, 128), (128, 192), (192, 64), (192, 128))
)
def test_moves_make_what_transpose_v_makes(dv, tile_n, sum_rows):
    """From the bytes that TMA brings to those that WGMMA reads, without a bank conflict."""
    from fa3_lib.turn_v import EVEN_BYTES, ODD_BYTES, WRITTEN

    raw, turned, reads, writes = layouts_and_places(dv, tile_n, sum_rows)
    v = torch.randint(256, (tile_n, dv), dtype=torch.uint8)
    source, target = (torch.zeros((dv + rows) * tile_n, dtype=torch.uint8) for rows in (0, sum_rows))
    source[raw] = v.T
    lanes = torch.arange(32)[:, None]
    for read, written in zip(reads, writes, strict=True):
        words = ldmatrix_trans(source, read)
        registers = []
        for which, half in WRITTEN:
            low, high = words[:, 2 * half], words[:, 2 * half + 1]
            even, odd = prmt(low, high, EVEN_BYTES), prmt(low, high, ODD_BYTES)
            registers.append(torch.where((lanes >= 16) == bool(which), even, odd))
        stmatrix(target, written, torch.stack(registers, dim=1))
        for addresses in (read, written):  # the eight rows of a matrix: each in other banks
            for matrix in addresses.view(4, 8):
                assert len(set((matrix % 128 // 16).tolist())) == 8 and (matrix % 16 == 0).all()
    expected = transpose_v(v.view(1, tile_n, 1, dv).view(E4M3))[0, 0].view(torch.uint8)
    assert torch.equal(target[turned], expected)


# --- rules -----------------------------------------------------------------------------------------------------------


def test_v_is_turned_inside_where_there_is_room():
    for d in (64, 128, 192, 256):
        for causal in (False, True):
            for queries in (1, 1024, None):
                config = fp8_config(d, d, causal, queries, transposes_v=True)
                registers_left = not causal or d == 64 or (d == 128 and config.tile_m == 128)
                assert config.transposes_v == (d < 256 and registers_left)
                assert replace(config, transposes_v=False) == fp8_config(d, d, causal, queries)
    with pytest.raises(ValueError, match=r"shared memory exceeded.*\+ 2 x V 32768 \+ 1024"):
        replace(fp8_config(256, 256, False), transposes_v=True).validate()


def test_more_registers_than_the_launch_allots_are_refused(monkeypatch):
    monkeypatch.setitem(TURNING_SPLIT, 2, (32, 240))
    with pytest.raises(ValueError, match=r"wait for ever.* = 65536 of 384 x 168 = 64512"):
        fp8_config(192, 192, False, transposes_v=True)


def plan(q, k, v, transposed=False, v_aligned=True, causal=False):
    facts = (*interface._facts(q), *interface._facts(k), *interface._facts(v))
    return fp8._plan(*facts, causal, -1, -1, False, None, False, 0, True, None, False, transposed, v_aligned)


def test_few_queries_of_a_kv_head_turn_v_inside():
    for d, few in IN_KERNEL_QUERIES.items():
        for queries, heads, inside in ((1, 4, True), (few, 1, True), (few // 2, 2, True), (few, 2, False)):
            q, kv = (torch.zeros(1, s, h, d - 16).to(E4M3) for s, h in ((queries, heads), (50, 1)))
            assert plan(q, kv, kv).config.transposes_v == (inside and d < 256)
        for queries, inside in ((2 * few, True), (2 * few + 1, False)):  # causal ones read half as much
            q, kv = (torch.zeros(1, s, 1, d).to(E4M3) for s in (queries, queries))
            assert plan(q, kv, kv, causal=True).config.transposes_v == (inside and d == 64)
        q = kv = torch.zeros(1, SHORT_TWO_LEVEL[128], 1, 128).to(E4M3)
        assert plan(q, kv, kv, causal=True).config.transposes_v


def test_a_v_that_tma_cannot_read_is_transposed_before():
    q = k = v = torch.zeros(2, 100, 4, 64).to(E4M3)
    assert plan(q, k, v).config.transposes_v
    assert plan(q, k, torch.zeros(2, 110, 6, 80).to(E4M3)[:, :100, 1:5, :64]).config.transposes_v
    for other in (
        v.transpose(1, 3).contiguous().transpose(1, 3),  # keys are contiguous
        torch.zeros(2, 100, 4, 72).to(E4M3)[..., :64],  # strides of 72 bytes
        v[:, :1].expand(2, 100, 4, 64),  # one key a hundred times
    ):
        assert not plan(q, k, other).config.transposes_v
    assert plan(
        q[:1, :, :1], k[:1, :, :1], torch.zeros(1, 100, 1, 64).to(E4M3).as_strided((1, 100, 1, 64), (7, 64, 7, 1))
    )
    assert not plan(q, k, v, v_aligned=False).config.transposes_v
    assert not plan(q, k, transpose_v(v), transposed=True).config.transposes_v


# --- machine code ----------------------------------------------------------------------------------------------------


def configurations():
    for d in (64, 128, 192):
        for causal in (False, True):
            if d < 192 or not causal:
                yield fp8_config(d, d, causal, 1024, transposes_v=True)
        yield fp8_config(d, d, False, 512, **EVERYTHING, transposes_v=True)
    yield fp8_config(64, 64, True, 512, two_level=False, transposes_v=True)
    yield fp8_config(128, 128, False, 512, two_level=False, transposes_v=True)
    yield fp8_config(128, 64, True, 64, pack_gqa=8, transposes_v=True)


@needs_dsl
@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize("config", list(configurations()), ids=lambda c: f"{name(c)}-n{c.tile_n}-dynamic{c.dynamic}")
def test_machine_code(config):
    """No spill, no advisory; beside the instructions of the kernel for a transposed V, those of one loop over columns."""
    from fa3_course import sass
    from fa3_lib.forward_fp8_sm90 import compile_forward

    def report_of(config):
        (report,) = sass.compile_report(lambda options: compile_forward(config, options=options))
        assert report.problems() == []
        return report

    assert config.transposes_v
    report, without = report_of(config), report_of(replace(config, transposes_v=False))
    assert report.registers == config.launch_registers  # which setmaxnreg hands about
    assert config.smem_bytes - 1024 < report.smem <= config.smem_bytes
    groups = config.tile_n // KEY_GROUP
    assert report.count("LDSM.16.MT88.4") == report.count("LDSM") == groups
    assert report.count("STSM.16.M88.4") - without.count("STSM") == groups
    assert report.count("PRMT") == 4 * groups  # of 32 keys and 16 columns: 512 bytes
    assert report.count("SHFL") - without.count("SHFL") == config.dynamic  # the scheduler's lane tells its warp
    for same in ("QGMMA", "MUFU.EX2", "BAR.SYNC", "BAR.ARV", "UTMASTG", "USETMAXREG"):
        assert report.count(same) == without.count(same), same
