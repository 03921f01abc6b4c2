"""Every exercise of every chapter: the solution passes, the stub does not, and wrong answers are refused.

A wrong answer is a solution with one realistic fault. `WRONG` gives the fault as a replacement in the solution's text, and a
property that must see it; `GENERIC` spoils the results of any exercise.
"""

import json
import os
import runpy
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fa3_course.checker import catalogue, runner, stubs, submission

SEED = int(os.environ.get("FA3_TEST_SEED", secrets.randbelow(2**20)))
EXERCISES = {exercise.number: exercise for exercise in catalogue.exercises()}

# exercise: {fault: (text of the solution, its replacement, part of the name of a property that must refuse it)}
WRONG = {
    "01.1": {
        "no maximum": ("np.exp(scores - shift)", "np.exp(scores)", "no overflow"),
        "maximum of the whole array": ("scores.max(axis=-1, keepdims=True)", "scores.max()", "1e4"),
        "no guard for empty rows": ("np.where(np.isneginf(row_max), 0, row_max)", "row_max", "a row with no keys"),
        "widened to fp64": ("np.exp(scores - shift)", "np.exp(scores - np.float64(shift))", "fp16"),
        "exp2": ("np.exp(scores - shift)", "np.exp2(scores - shift)", "fp64 truth"),
    },
    "01.2": {
        "missing rescale": ("row_sum * np.exp(row_max - shift)", "row_sum", "any split"),
        "inverse rescale": ("np.exp(row_max - shift)", "np.exp(shift - row_max)", "any split"),
        "old maximum in the exponent": ("np.exp(scores - shift[:, None])", "np.exp(scores - row_max[:, None])", "1e4"),
        "maximum of the tile only": ("np.maximum(row_max, scores.max(axis=-1))", "scores.max(axis=-1)", "falling"),
        "no guard for empty rows": ("np.where(np.isneginf(new_max), 0, new_max)", "new_max", "a tile of -inf"),
    },
    "01.3": {
        "missing rescale": ("row_sum * np.exp(row_max - shift)", "row_sum", "block size"),
        "average of averages": ("old_weight[:, None] * out + p", "out + p", "block size"),
        "no guard for empty rows": ("np.where(np.isneginf(new_max), 0, new_max)", "new_max", "a row with no keys"),
        "division by zero": ("np.where(row_sum == 0, 1, row_sum)[:, None]", "row_sum[:, None]", "a row with no keys"),
        "whole row at once": ("new_max = np.maximum(row_max, ", "np.exp(scores)\n        new_max = np.maximum(row_max, ", "no array"),
    },
    "01.4": {
        "acc_O not rescaled": ("rescale[:, None] * acc_O", "acc_O", "block size"),
        "row_sum not rescaled": ("rescale * row_sum", "row_sum", "block size"),
        "lse in base 2": ("row_max + np.log(np.where(seen, row_sum, 1))", "row_max * np.log2(np.e) + np.log2(np.where(seen, row_sum, 1))", "lse match"),
        "lse without the maximum": ("row_max + np.log(", "np.log(", "lse match"),
        "lse without the scale": ("lse = np.where(seen, row_max +", "lse = np.where(seen, row_max / softmax_scale +", "lse match"),
        "empty lse is 0": ("-np.inf)\n    return out", "0.0)\n    return out", "without keys"),
        "normalised in the loop": ("p @ v_tile\n", "p @ v_tile\n        acc_O = acc_O / row_sum[:, None] * row_sum[:, None]\n", "normalised once"),
        "all scores at once": ("scores = softmax_scale * (q @ k_tile.T)", "scores = softmax_scale * (q @ k.T)[:, start : start + tile_n]", "never in memory"),
    },
    "01.5": {
        "exp instead of exp2": ("np.exp2(", "np.exp(", "probabilities match"),
        "e^x by exp": ("np.exp2(scores * scale_log2 - shift[:, None])", "np.exp(softmax_scale * scores - shift[:, None] / np.log2(np.e))", "exp2 only"),
        "two multiplies": ("scores * scale_log2 -", "scores * softmax_scale * np.log2(np.e) -", "one multiply"),
        "lse in base 2": ("np.log(np.where", "np.log2(np.where", "LSE is natural"),
        "lse without the scale": ("row_max * softmax_scale + np.log", "row_max + np.log", "LSE is natural"),
        "log2(e) left in the lse": ("row_max * softmax_scale + np.log", "row_max * softmax_scale * np.log2(np.e) + np.log", "LSE is natural"),
        "no guard for empty rows": ("np.where(np.isneginf(row_max), 0, row_max)", "row_max", "a row with no keys"),
    },
    "01.6": {
        "plain mean": ("np.exp(lse_a - shift), np.exp(lse_b - shift)", "np.exp(0 * lse_a), np.exp(0 * lse_b)", "two halves"),
        "no maximum": ("np.where(np.isneginf(top), 0, top)", "0 * np.where(np.isneginf(top), 0, top)", "1e4"),
        "empty part is read": ("np.where(weight_a[:, None] > 0, (weight_a / divisor)[:, None] * out_a, 0)", "(weight_a / divisor)[:, None] * out_a", "not read"),
        "base 2": ("np.exp(lse_a - shift), np.exp(lse_b - shift)", "np.exp2(lse_a - shift), np.exp2(lse_b - shift)", "two halves"),
        "lse of one part": ("np.where(seen, shift + np.log(divisor), -np.inf)", "top", "any random split"),
        "empty lse is 0": ("np.log(divisor), -np.inf)", "np.log(divisor), 0.0)", "two parts without keys"),
    },
    "01.7": {
        "first query sees one key too few": ("first + 1 + seqlen_k", "first + seqlen_k", "ragged"),
        "last query sees one key too few": ("last + 1 + seqlen_k", "last + seqlen_k", "ragged"),
        "top-left": ("seen_by_last = min(max(last + 1 + seqlen_k - seqlen_q, 0)", "seen_by_last = min(max(last + 1, 0)", "bottom-right"),
        "unmasked counts the diagonal tile": ("seen_by_first // tile_n", "-(-seen_by_first // tile_n)", "square"),
        "negative counts": ("max(last + 1 + seqlen_k - seqlen_q, 0)", "last + 1 + seqlen_k - seqlen_q", "more queries"),
        "rounded down": ("-(-seen_by_last // tile_n)", "seen_by_last // tile_n", "ragged"),
    },
    "01.8": {
        "mask before tanh": (
            "    if softcap > 0:",
            "    scores = np.where(np.tri(*scores.shape, scores.shape[1] - scores.shape[0]) + (not causal) > 0, scores, -np.inf)\n    causal = False\n    if softcap > 0:",
            "stays masked",
        ),
        "scale in both places": ("scale_log2 = softcap * np.log2(np.e)", "scale_log2 = softcap * softmax_scale * np.log2(np.e)", "softcap alone"),
        "cap of raw scores": ("(softmax_scale / softcap)", "(1 / softcap)", "softcap alone"),
        "softcap ignored": ("if softcap > 0:", "if softcap > 1e9:", "softcap alone"),
        "left bound exclusive": ("distance < -left", "distance <= -left", "every window"),
        "right bound one too far": ("distance > right", "distance > right + 1", "every window"),
        "-1 taken as a bound": ("if left >= 0:", "if left >= -1:", "every window"),
        "top-left": ("[:, None] + seqlen_k - seqlen_q", "[:, None]", "every window"),
        "causal lost in a window": ("    if causal:", "    if causal and right < 0:", "every window"),
        "two multiplies": ("scores * (softmax_scale / softcap)", "scores * softmax_scale / softcap", "one multiply"),
    },
    "01.9": {
        "no delta": ("(dout @ v[keys].T - delta[:, None])", "(dout @ v[keys].T)", "match autograd"),
        "delta from p and dp of the tile": ("ds = p * (dout @ v[keys].T - delta[:, None])", "dp = dout @ v[keys].T\n        ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))", "block size"),
        "dk without the scale": ("dk[keys] = softmax_scale * (ds.T @ q)", "dk[keys] = ds.T @ q", "match autograd"),
        "dq of the last tile only": ("dq = dq + softmax_scale", "dq = softmax_scale", "block size"),
        "lse in base 2": ("lse[:, None])", "lse[:, None] * np.log2(np.e))", "match autograd"),
        "mask before the exponential": (
            "p = np.exp(softmax_scale * (q @ k[keys].T) - lse[:, None])",
            "s = softmax_scale * (q @ k[keys].T)\n        if causal:\n            s[position[None, :] > np.arange(sq)[:, None] + sk - sq] = -np.inf\n        causal = False\n        p = np.exp(s - lse[:, None])",
            "a row with no keys",
        ),
        "mask by multiplication": (
            "np.where(position[None, :] <= np.arange(sq)[:, None] + sk - sq, p, 0)",
            "p * (position[None, :] <= np.arange(sq)[:, None] + sk - sq)",
            "1e4",
        ),
        "top-left mask": ("np.arange(sq)[:, None] + sk - sq", "np.arange(sq)[:, None]", "bottom-right"),
        "diagonal hidden": ("position[None, :] <= np", "position[None, :] < np", "bottom-right"),
        "all scores at once": ("(q @ k[keys].T)", "(q @ k.T)[:, keys]", "never in memory"),
    },
    "01.10": {
        "one product": ("2 * 2 * batch * heads", "2 * batch * heads", "fused kernel"),
        "S and P moved once": ("4 * element_bytes * queries", "2 * element_bytes * queries", "eager form"),
        "K and V with all heads": ("keys = batch * seqlen_k * kv_heads", "keys = batch * seqlen_k * heads", "grouped heads"),
        "elements instead of bytes": ("moved = element_bytes * head_dim", "moved = head_dim", "fused kernel"),
        "no LSE": ("4 * queries if fused", "0 if fused", "fused kernel"),
        "the higher ceiling": ("min(peak, ", "max(peak, ", "roofline"),
        "intensity upside down": ("operations / moved * bandwidth", "moved / operations * bandwidth", "roofline"),
    },
    "01.11": {
        "missing rescale of acc_O": ("acc_O * rescale[:, None]", "acc_O", "new maximum"),
        "missing rescale of row_sum": ("row_sum * rescale", "row_sum", "new maximum"),
        "padding keys count": ("tl.where(keys[None, :] < seqlen_k, tl.dot(q, k), float(\"-inf\"))", "tl.dot(q, k)", "ragged"),
        "exp instead of exp2": ("p = tl.math.exp2(", "p = tl.math.exp(", "fp64 truth"),
        "maximum never kept": ("        row_max = new_max\n", "", "new maximum"),
    },
    "02.1": {
        "no swizzle": ("return b ^ ((b >> 3) & 0x70)", "return b", "rows 0 to 7"),
        "row not taken modulo 8": ("& 0x70", "& 0x1F0", "repeats"),
        "the column is swizzled, not the byte": ("b = 128 * row + element_bytes * column\n    return b ^ ((b >> 3) & 0x70)", "return 128 * row + element_bytes * (column ^ (row % 8 << 3))", "8-bit and 32-bit"),
        "turns count accesses, not words": ("words = {a // 4 + i for a in addresses for i in range(4)}", "words = [a // 4 + i for a in addresses for i in range(4)]", "read once"),
        "16 banks": ("[w % 32 for w in words]", "[w % 16 for w in words]", "fullest bank"),
    },
    "02.2": {
        "rows of a thread are neighbours": ("row % 8 * 4 +", "row % 16 // 2 * 4 +", "threads of the first"),
        "column before row": ("row % 16 // 8 * 2 + column % 2", "row % 16 // 8 + column % 2 * 2", "registers of"),
        "8 rows of a warp only": ("register % 4 // 2 * 8 +", "", "way back"),
        "the whole warp": ("first, first + 1, first + 2, first + 3", "*range(thread // 32 * 32, thread // 32 * 32 + 32)", "partners"),
        "oneself among the partners": (" - {thread}", "", "partners"),
    },
    "02.3": {
        "bytes of what exists": ("return tile, tile.nbytes", "return tile, int(np.count_nonzero(tile)) * tile.itemsize", "same bytes"),
        "Python's negative indices": ("low = [max(a, 0) for a in at]", "low = list(at)", "near edge"),
        "always 2 bytes": ("return tile, tile.nbytes", "return tile, 2 * tile.size", "one to five"),
        "no bytes when nothing exists": ("    return tile, tile.nbytes", "    return tile, tile.nbytes if tile.any() else 0", "nothing of the box"),
        "converted": ("np.zeros(box, tensor.dtype)", "np.zeros(box)", "inside the tensor"),
    },
    "02.4": {
        "strides in elements": ("s * element_bytes % 16 == 0", "s % 16 == 0", "strides count in bytes"),
        "innermost stride forgotten": ("not strides or strides[-1] == 1", "True", "strides count in bytes"),
        "box below 256": ("1 <= b <= 256", "1 <= b < 256", "boxes"),
        "swizzle as a multiple": ("row_bytes <= swizzle_bytes", "row_bytes % swizzle_bytes == 0", "TMA takes"),
        "last rule first": ("for answer, holds in rules if", "for answer, holds in reversed(rules) if", "first of the table"),
        "address forgotten": ("address % 16 == 0", "True", "attention tensors"),
        "empty tensors": ("1 <= n <= 2**32", "n <= 2**32", "dimensions and extents"),
    },
    "02.5": {
        "the bit flips at every load": ("return slot, (use + 1) % 2, use % 2", "return slot, (i + 1) % 2, i % 2", "once per round"),
        "the producer waits in the first round": ("(use + 1) % 2, use % 2", "use % 2, use % 2", "first round"),
        "never flips": ("(use + 1) % 2, use % 2", "1, 0", "one slot"),
        "parity of the open phase": ("(completed - 1) % 2 == bit", "completed % 2 == bit", "parity"),
        "starts anew after 64 loads": ("slot, use = i % stages, i // stages", "slot, use = i % stages, i % 63 // stages", "hundreds"),
        "one load less": ("return freed + stages", "return freed + stages - 1", "how far"),
    },
    "02.6": {
        "contiguous is MN": ('"K" if c == contraction else "MN"', '"MN" if c == contraction else "K"', "Q K^T"),
        "the last letter is contiguous": ("for c in contiguous)", "for c in (a[-1], b[-1]))", "P V"),
        "16 bits, too": (" and element_bytes == 1", "", "P V"),
        "B in registers": ('raise ValueError("WGMMA reads B from shared memory only")', "pass", "refused"),
        "the contraction is the second letter": ("(contraction,) = {*a, *b} - {*result}", "contraction = a[1]", "any product"),
    },
    "02.7": {
        "no wait for K": ("        await t.k_full[0].wait(i % 2)\n", "", "one key block"),
        "the phase never flips": ("t.v_full[0].wait(i % 2)", "t.v_full[0].wait(0)", "several key blocks"),
        "O not rescaled": ("        await parts.rescale(wg, acc_O, shrink)\n", "", "several key blocks"),
        "scores add up": ("accumulate=False, ", "", "one key block"),
        "no wait for the products": ("        await wg.wait_group(0)\n", "", "one key block"),
        "no fence": ("        wg.wgmma_fence()\n", "", "one key block"),
        "scores of the first block for all": ("rows.step(acc_S.read(), n)", "rows.step(acc_S.read(), 0)", "ragged"),
    },
    "02.8": {
        "no wait for a free slot": ("        await t.k_empty[slot].wait(phase ^ 1)\n", "", "many rounds"),
        "the producer waits for its own phase": ("t.v_empty[slot].wait(phase ^ 1)", "t.v_empty[slot].wait(phase)", "one slot"),
        "one arrival for four warps": ("t.k_empty[slot].arrive(parts.WARPS)", "t.k_empty[slot].arrive()", "many rounds"),
        "K is freed before the product is done": ("        await wg.wait_group(0)\n        t.k_empty[slot].arrive(parts.WARPS)", "        t.k_empty[slot].arrive(parts.WARPS)\n        await wg.wait_group(0)", "any timing"),
        "the bit flips per load": ("slot, phase = i % c.stages, i // c.stages % 2", "slot, phase = i % c.stages, i % 2", "many rounds"),
        "K is freed with V": ("        t.k_empty[slot].arrive(parts.WARPS)\n\n", "\n", "one slot"),
        "one slot of many": ("i % p.config.stages, i // p.config.stages % 2", "0, i % 2", "many rounds"),
        "K and V are freed together": ("wait_group(0)\n        t.k_empty[slot].arrive(parts.WARPS)", "wait_group(0)\n        late = t.k_empty[slot]", "one slot"),
    },
    "02.9": {
        "warps of 32 arrivals": ('"warp": 4', '"warp": 32', "arrivals"),
        "any word will do": ('raise ValueError(f"who must be thread, warp or warpgroup, got {who!r}")', 'who = "warp"', "nobody else"),
        "the producer is forgotten": ("65_536 // 128 - producer_registers", "65_536 // 128", "as many as fit"),
        "no multiple of 8": ("left // consumers // 8 * 8", "left // consumers", "splits"),
        "more than 256": ("return min(left // consumers // 8 * 8, 256)", "return left // consumers // 8 * 8", "splits"),
        "P in fp32": ("tile_n / 2 * element_bytes / 4", "tile_n / 2", "accumulators"),
        "no registers left": ("consumer_registers(consumers, producer_registers) - 24", "consumer_registers(consumers, producer_registers)", "widest tile"),
    },
    "02.10": {
        "empty counts one consumer": ('"K empty", c.stages, arrivals=4 * c.consumer_warpgroups', '"K empty", c.stages, arrivals=4', "many rounds"),
        "empty counts threads": ('"V empty", c.stages, arrivals=4 * c.consumer_warpgroups', '"V empty", c.stages, arrivals=128 * c.consumer_warpgroups', "many rounds"),
        "full counts consumers": ('"K full", c.stages, arrivals=1', '"K full", c.stages, arrivals=c.consumer_warpgroups', "one round"),
        "always two consumers": ("range(c.consumer_warpgroups)", "range(2)", "one and three"),
        "both have the same rows": ("consumer, me, p, t, tile)\n    # endregion", "consumer, 0, p, t, tile)\n    # endregion", "one round"),
        "the consumers take no registers": ("    await wg.setmaxnreg(p.config.consumer_registers)\n", "", "registers"),
        "the producer keeps its registers": ("    await warp.setmaxnreg(p.config.producer_registers)\n", "", "registers"),
    },
    "02.11": {
        "no fence": ("    wg.fence_async_proxy()\n", "", "64 rows"),
        "fence before the store": (
            "    await wg.store_shared(staged, acc_O.read() / total[:, None])\n    wg.fence_async_proxy()\n",
            "    wg.fence_async_proxy()\n    await wg.store_shared(staged, acc_O.read() / total[:, None])\n",
            "64 rows",
        ),
        "returns before the store is done": ("    await wg.wait_store(0)\n", "", "64 rows"),
        "no commit": ("    wg.commit_store()\n", "", "64 rows"),
        "lse in base 2": ("np.log(2.0) * log2_sum", "log2_sum", "64 rows"),
        "lse without the maximum": ("np.where(empty, 0, row_max) * scale_log2 + ", "", "large scores"),
        "division by zero": ("np.where(empty, np.float32(1), row_sum)", "row_sum", "without keys"),
        "not normalised": ("acc_O.read() / total[:, None]", "acc_O.read()", "64 rows"),
        "always to row 0": ("(first_row, 0)", "(0, 0)", "two consumers"),
    },
    "02.12": {
        "one product": ("tensor = 2 * 2 *", "tensor = 2 *", "tensor cores"),
        "one consumer": ("rows = 64 * consumers", "rows = 64", "MUFU"),
        "K and V read once for all": ("consumers * (q + k + v) + k + v", "consumers * q + k + v + k + v", "shared memory"),
        "TMA writes nothing": ("(q + k + v) + k + v", "(q + k + v)", "shared memory"),
        "exponentials are free": ("max(tensor + mufu, shared)", "max(tensor, shared)", "without overlap"),
        "everything in turns": ("max(tensor, mufu, shared) if", "tensor + mufu + shared if", "with overlap"),
    },
    "02.13": {
        "O not rescaled": ("    softmax.scale_rows(acc_O, shrink)\n", "", "O shrinks"),
        "no commit": ("    warpgroup.commit_group()\n", "", "who waits"),
        "released before the product is done": ("    warpgroup.wait_group(0)\n    pipe_V.consumer_release(state)", "    pipe_V.consumer_release(state)\n    warpgroup.wait_group(0)", "who waits"),
        "16 keys only": ("cute.size(tOrP, mode=[2])", "1", "one WGMMA"),
        "always fp16": (".to(self.dtype)", ".to(cutlass.Float16)", "rounded to 16"),
    },
    "02.14": {
        "too much shared memory": ("return 2, {64: 128, 128: 128, 256: 80}", "return 8, {64: 128, 128: 128, 256: 80}", "fits"),
        "three stages": ("return 2, {64: 128, 128: 128, 256: 80}", "return 3, {64: 128, 128: 128, 256: 80}", "fits"),
        "100 keys": ("return 2, {64: 128, 128: 128, 256: 80}", "return 2, {64: 100, 128: 100, 256: 80}", "fits"),
    },
    "02.B1": {
        "wrong prediction": ('return "overwrite before free"', 'return "race"', "prediction"),
        "nobody waits for a free slot": ("        await ring.empty[slot].wait(phase ^ 1)\n", "", "many rounds"),
        "the slot is never freed": ("        ring.empty[slot].arrive(4)\n", "", "many rounds"),
        "freed before the product is done": ("        await wg.wait_group(0)\n        ring.empty[slot].arrive(4)", "        ring.empty[slot].arrive(4)\n        await wg.wait_group(0)", "many rounds"),
        "two slots, always": ("slot, phase = i % p.stages, i // p.stages % 2", "slot, phase = i % 2, i // 2 % 2", "one, three and four"),
        "one slot only": ("slot, phase = i % p.stages, i // p.stages % 2", "slot, phase = 0, i % 2", "double buffer"),
    },
    "02.B2": {
        "wrong prediction": ('return "wrong phase"', 'return "deadlock"', "prediction"),
        "never flips": ("        phase ^= slot == 0\n", "", "many rounds"),
        "flips at every step": ("phase ^= slot == 0", "phase ^= 1", "the first round"),
        "flips one step late": ("phase ^= slot == 0", "phase ^= slot == 1", "many rounds"),
        "one slot only": ("slot = (slot + 1) % p.stages", "slot = (slot + 1) % 2", "one to four"),
    },
    "02.B3": {
        "wrong prediction": ('return "wrong transaction bytes"', 'return "element never written"', "prediction"),
        "V is still short": ("arrive_expect_tx(c.v_bytes)", "arrive_expect_tx(min(c.tile_n, p.seqlens[1] - n * c.tile_n) * c.head_dim_v * 2)", "any length"),
        "both announced on K": ("arrive_expect_tx(c.k_bytes)", "arrive_expect_tx(c.k_bytes + c.v_bytes)", "whole blocks"),
        "shorter boxes": ("(1, c.tile_n, 1, c.head_dim)", "(1, min(c.tile_n, p.seqlens[1] - n * c.tile_n), 1, c.head_dim)", "any length"),
    },
    "02.B4": {
        "wrong prediction": ('return "missing proxy fence"', 'return "race"', "prediction"),
        "only consumer 0 fences": ("    wg.fence_async_proxy()\n    if me == 1:", "    if me == 0:\n        wg.fence_async_proxy()\n    if me == 1:", "clean and right"),
        "nobody meets": ("        await both.sync()\n", "", "clean and right"),
        "the store is not waited for": ("        await wg.wait_store(0)\n", "", "any timing"),
        "two stores": ("wg.tma_store(staged, out, (0, 0), (rows, staged.shape[2]))", "wg.tma_store(staged[0], out, (0, 0), (64, staged.shape[2]))\n        wg.commit_store()\n        await wg.wait_store(0)\n        wg.tma_store(staged[1], out, (64, 0), (64, staged.shape[2]))", "one store"),
    },
    "02.B5": {
        "wrong prediction": ('return "overwrite before free"', 'return "operand touched in flight"', "prediction"),
        "the current slot": ("ring.empty[(i - 1) % p.stages].arrive(4)\n    await", "ring.empty[slot].arrive(4)\n    await", "many rounds"),
        "nothing in flight": ("await wg.wait_group(1)", "await wg.wait_group(0)", "idea is kept"),
        "the accumulator is not waited for": ("    await wg.wait_group(0)\n    ring.empty[(p.steps", "    ring.empty[(p.steps", "one and two"),
        "released before the first step is complete": ("        if i > 0:\n            ring", "        if True:\n            ring", "many rounds"),
    },
    "02.B6": {
        "wrong prediction": ('return "roles disagree on the number of tiles"', 'return "deadlock"', "prediction"),
        "top-left": ("blocks = len(p.blocks(m))", "blocks = min(-(-p.seqlens[1] // c.tile_n), -(-(m + 1) * c.tile_m // c.tile_n)) if c.causal else -(-p.seqlens[1] // c.tile_n)", "more keys"),
        "all blocks": ("blocks = len(p.blocks(m))", "blocks = -(-p.seqlens[1] // c.tile_n)", "fewer keys"),
        "no empty tile": ("blocks = len(p.blocks(m))", "blocks = max(len(p.blocks(m)), 1)", "fewer keys"),
        "rounded down": ("blocks = len(p.blocks(m))", "blocks = p.seqlens[1] // c.tile_n if not c.causal else len(p.blocks(m))", "no mask"),
    },
    "03.1": {
        "waits count for nothing": ("        counted += count\n", "        counted += count if kind == \"arrive\" else 0\n", "openings"),
        "the count goes on": ("opened + 1, 0, 0", "opened + 1, counted, 0", "openings"),
        "never too many": ("        if counted > threads:\n            raise ValueError(f\"{counted} threads at a barrier of {threads}\")\n        if counted == threads:", "        if counted >= threads:", "refused"),
        "everybody opens": ("if me == 0 else []", "if True else []", "left with one"),
        "nobody opens": ("[(\"arrive\", 128)] if me == 0 else []", "[]", "left with one"),
        "the last turn is kept": ("opening + turns * [(\"sync\", 128), (\"arrive\", 128)]", "opening + (turns * [(\"sync\", 128), (\"arrive\", 128)])[:-1]", "one wait of the owner"),
    },
    "03.2": {
        "nobody opens the first turn": ("        mine.arrive()\n", "        pass\n", "many blocks"),
        "everybody opens a turn": ("if me == 0:", "if True:", "many blocks"),
        "to myself": ("        next_one.arrive()\n", "        mine.arrive()\n", "many blocks"),
        "two consumers, always": ("(me + 1) % len(t.turns)", "1 - min(me, 1)", "three consumers"),
        "the last turn is not passed on": ("        next_one.arrive()\n", "        if i < len(blocks):\n            next_one.arrive()\n", "many blocks"),
        "held until the products are done": ("        next_one.arrive()\n        await wg.wait_group(0)\n", "        await wg.wait_group(0)\n        next_one.arrive()\n", "as fast"),
        "the products are not waited for": ("        next_one.arrive()\n        await wg.wait_group(0)\n", "        next_one.arrive()\n", "any timing"),
    },
    "03.3": {
        "waits for both": ("wait_group(1 if i > 0 else 0)", "wait_group(0)", "as fast"),
        "waits for one, always": ("wait_group(1 if i > 0 else 0)", "wait_group(1)", "one block"),
        "waits for neither": ("wait_group(1 if i > 0 else 0)", "wait_group(2)", "many blocks"),
        "P written under PV": ("blocks[i])\n        if i > 0:\n            await wg.wait_group(0)\n", "blocks[i])\n            tOrP.write(weights)\n        if i > 0:\n            await wg.wait_group(0)\n", "many blocks"),
        "V freed under PV": ("            await issue_pv(i - 1)\n", "            await issue_pv(i - 1)\n            release(t.v_empty, i - 1)\n", "one slot"),
        "K is never freed": ("            release(t.k_empty, i)\n", "", "one slot"),
        "no last PV": ("        if i > 0:\n            await issue_pv(i - 1)", "        if 0 < i < len(blocks):\n            await issue_pv(i - 1)", "one block"),
    },
    "03.4": {
        "one product": ("2 * 2 * 64", "2 * 64", "calculator"),
        "two consumers' rows": ("64 * tile_n / 16", "128 * tile_n / 16", "calculator"),
        "the MUFU serves all at once": ("consumers * product, consumers * mufu)", "consumers * product, mufu)", "really go round"),
        "no way round": ("max(product + softmax, consumers", "max(consumers", "one consumer"),
        "softmax under the own product": ("max(product + softmax, consumers", "max(product, softmax, consumers", "one consumer"),
        "rounded down": ("consumers * max(product, mufu) < product + softmax", "(consumers + 1) * max(product, mufu) <= product + softmax", "enough"),
        "the MUFU is no limit": ("consumers * max(product, mufu)", "consumers * product", "enough"),
    },
    "03.5": {
        "no output": ("(2 if own_output else 1)", "1", "shared memory"),
        "K only": ("2 * stages * tile_n", "stages * tile_n", "shared memory"),
        "no barriers": (" + 1024\n", "\n", "shared memory"),
        "P in fp32": ("tile_n // 4 if overlap", "tile_n // 2 if overlap", "registers"),
        "P is free": ("(tile_n // 4 if overlap else 0)", "0", "registers"),
        "no spare registers": ("[consumers] - 24", "[consumers]", "widest"),
        "registers only": ("shared_bytes(head_dim, consumers, n, stages, own_output) <= 232_448\n        and ", "", "widest"),
        "shared memory only": ("\n        and registers(head_dim, n, overlap) <= most", "", "widest"),
        "with overlap, always": ("registers(head_dim, n, overlap)", "registers(head_dim, n, True)", "without overlap"),
    },
    "03.6": {
        "every tile anew": ("sum(lengths[:tile]) + block", "block", "as the ring turns"),
        "this tile counted too": ("sum(lengths[:tile])", "sum(lengths[: tile + 1])", "as the ring turns"),
        "no phase": ("count // stages % 2", "0", "one tile"),
        "phase per block": ("count // stages % 2", "count % 2", "one tile"),
        "the slot alone": ("position(stages, lengths, tile, 0) == (0, 0)", "position(stages, lengths, tile, 0)[0] == 0", "single rounds"),
        "the last tile must end a round": ("for tile, length in enumerate(lengths) if length)", "for tile, length in enumerate([*lengths, 1]) if length)", "any lengths"),
        "empty tiles count": (" for tile, length in enumerate(lengths) if length)", " for tile, length in enumerate(lengths))", "any lengths"),
    },
    "03.7": {
        "rounded down": ("-(-tiles // sms)", "tiles // sms", "by dealing"),
        "one more, always": ("-(-tiles // sms)", "tiles // sms + 1", "by dealing"),
        "the last round alone": ("tiles / (rounds(tiles, sms) * sms) if tiles", "((tiles - 1) % sms + 1) / sms if tiles", "SMs at work"),
        "rows of all sequences together": ("sequences * -(-queries // rows)", "-(-queries * sequences // rows)", "done first"),
        "no overhead": ("(rows + overhead)", "rows", "done first"),
        "whole waves": ("rounds(sequences * -(-queries // rows), sms) *", "sequences * -(-queries // rows) / sms *", "done first"),
        "the shortest of equal ones": ("min((192, 128, 64), key=time)", "min((64, 128, 192), key=time)", "tallest"),
    },
    "03.8": {
        "neighbours": ("long = m_blocks - 1 - short", "long = short + 1", "mirror images"),
        "off by one": ("long = m_blocks - 1 - short", "long = m_blocks - short", "mirror images"),
        "short one first": ("dict.fromkeys((long, short))", "dict.fromkeys((short, long))", "mirror images"),
        "the middle one twice": ("dict.fromkeys((long, short))", "(long, short)", "odd number"),
        "rounded down": ("(m_blocks + 1) // 2", "max(m_blocks // 2, 1)", "odd number"),
        "a run of units": ("range(cta, units, ctas)", "range(cta * units // ctas, (cta + 1) * units // ctas)", "order of the course"),
        "from zero": ("range(cta, units, ctas)", "range(0, units, ctas)", "every tile once"),
    },
    "03.9": {
        "acc_O not rescaled": ("acc_O * shrink[:, None]", "acc_O", "any threshold"),
        "row_sum not rescaled": ("row_sum * shrink", "row_sum", "any threshold"),
        "P relative to the block": ("np.exp2(scores - safe[:, None])", "np.exp2(scores - block_max[:, None])", "any threshold"),
        "never lazy": ("row_max + threshold", "row_max", "lazy"),
        "all rows or none": ("block_max > row_max + threshold", "np.repeat((block_max > row_max + threshold).any(), len(row_max)) & (block_max > row_max)", "lazy"),
        "the block's maximum, even if smaller": ("np.where(far, block_max, row_max)", "block_max", "lazy"),
        "too lazy": ("row_max + threshold", "row_max + 2 * threshold", "P stays below"),
        "no guard": ("np.where(np.isneginf(new_max), 0, new_max)", "new_max", "rows without keys"),
        "LSE without the reference": ("(np.where(seen, row_max, 0) + np.log2(total))", "np.log2(total)", "out and LSE"),
        "LSE in base 2": ("np.log(2) * (", "1.0 * (", "out and LSE"),
    },
    "03.10": {
        "no weights": (", w=np.exp2(-f))", ")", "small relative error"),
        "one degree less": ("np.exp2(f), degree,", "np.exp2(f), degree - 1,", "small relative error"),
        "no clamp": ("    x = np.maximum(x, np.float32(-126))\n", "", "masked"),
        "rounded, fraction below zero": ("np.floor(x)", "np.rint(x)", "as given"),
        "lowest power first": ("for c in coefficients:", "for c in coefficients[::-1]:", "as good as"),
        "exponent one bit off": ("<< 23", "<< 22", "as good as"),
        "np.exp2 of the whole part": ("bits = power.view(np.int32) + (n.astype(np.int32) << 23)\n    return bits.view(np.float32)", "return power * np.exp2(n)", "no exponential"),
        "np.exp2": ("    x = np.maximum(x, np.float32(-126))\n", "    return np.exp2(x)\n", "as given"),
    },
    "03.11": {
        "the busiest, always": ("unit if shares[unit] >= near else \"waiting\"", "unit", "nobody binds"),
        "always 90 %": ("shares[unit] >= near", "shares[unit] >= 0.9", "who binds"),
        "the least busy": ("unit = max(shares", "unit = min(shares", "who binds"),
        "sum of the units": ("return 1 / max(shares.values())", "return 1 / sum(shares.values())", "nobody waits"),
        "waiting is gone": ("    waiting = 1 - max(shares.values())\n", "    waiting = 0\n", "the waiting stays"),
        "the busiest unit before": ("max(share * factors.get(unit, 1) for unit, share in shares.items())", "max(shares.values()) * factors.get(max(shares, key=shares.get), 1)", "the waiting stays"),
        "only the changed units": ("share * factors.get(unit, 1) for", "share * factors.get(unit, 0) for", "the waiting stays"),
        "time, not speed": ("return 1 / (waiting + max(share * factors.get(unit, 1) for unit, share in shares.items()))", "return waiting + max(share * factors.get(unit, 1) for unit, share in shares.items())", "the waiting stays"),
    },
    "03.B1": {
        "wrong prediction": ('return "unbalanced named barrier"', 'return "deadlock"', "prediction"),
        "one arrival more": ("        next_one.arrive()\n", "        next_one.arrive()\n        if i == len(blocks):\n            next_one.arrive()\n", "two consumers"),
        "the last turn is not waited for": ("        await mine.sync()\n", "        if i < len(blocks):\n            await mine.sync()\n", "two consumers"),
        "no turns for the last round": ("        await mine.sync()\n        if i > 0:\n", "        if i < len(blocks):\n            await mine.sync()\n        elif me == 0:\n            mine.arrive()\n        if i > 0:\n", "two consumers"),
        "held until the products are done": ("        next_one.arrive()\n        await wg.wait_group(0)\n", "        await wg.wait_group(0)\n        next_one.arrive()\n", "passed on early"),
        "two consumers, always": ("(me + 1) % len(t.turns)", "1 - min(me, 1)", "three consumers"),
    },
    "03.B2": {
        "wrong prediction": ('return "operand touched in flight"', 'return "race"', "prediction"),
        "waits for both": ("wait_group(1 if i > 0 else 0)", "wait_group(0)", "overlap is kept"),
        "rescaled too soon": ("blocks[i])\n        if i > 0:", "blocks[i])\n            await parts.rescale(wg, acc_O, shrink)\n        if i > 0:", "many blocks"),
        "V is never freed": ("            t.v_empty[last_slot].arrive(parts.WARPS)\n", "", "one slot"),
        "never written after the first": ("            tOrP.write(weights)\n", "            if i == 0:\n                tOrP.write(weights)\n", "many blocks"),
        "PV before QK is waited for": ("wait_group(1 if i > 0 else 0)", "wait_group(1)", "one block"),
    },
    "03.B3": {
        "wrong prediction": ('return "overwrite before free"', 'return "operand touched in flight"', "prediction"),
        "waits for both": ("wait_group(1 if i > 0 else 0)", "wait_group(0)", "overlap is kept"),
        "V's slot is freed twice": ("            t.k_empty[slot].arrive(parts.WARPS)\n", "            t.k_empty[slot].arrive(parts.WARPS)\n            if i > 0:\n                t.v_empty[last_slot].arrive(parts.WARPS)\n", "many blocks"),
        "the slot of the next V": ("            t.v_empty[last_slot].arrive(parts.WARPS)\n", "            t.v_empty[slot].arrive(parts.WARPS)\n", "many blocks"),
        "PV is not waited for": ("            await wg.wait_group(0)\n            t.v_empty", "            t.v_empty", "many blocks"),
    },
    "03.B4": {
        "wrong prediction": ('return "two meanings of one barrier id"', 'return "deadlock"', "prediction"),
        "another number": ("sm.named_barrier(1 + len(names), 128", "sm.named_barrier(2, 128", "two consumers"),
        "id 0": ("sm.named_barrier(1 + len(names), 128", "sm.named_barrier(0, 128", "two consumers"),
        "two consumers' threads": ("128 * len(names)", "256", "three consumers"),
        "all threads of the CTA": ("128 * len(names)", "128 * len(names) + 128", "two consumers"),
        "nothing is left over": ("128 if i == 0 else 0", "0", "two consumers"),
        "the one after instead of the one before": ("names[i - 1]", "names[(i + 1) % len(names)]", "three consumers"),
    },
    "03.B5": {
        "wrong prediction": ('return "deadlock"', 'return "wrong phase"', "prediction"),
        "starts anew in every tile": ("tile[0], done, acc_S", "tile[0], 0, acc_S", "two, three and five"),
        "counts tiles": ("done += len(p.blocks(tile[0]))", "done += 1", "two, three and five"),
        "every tile as long as the first": ("done += len(p.blocks(tile[0]))", "done += len(p.blocks(work[0][0]))", "causal"),
        "modulo two": ("done += len(p.blocks(tile[0]))", "done = (done + len(p.blocks(tile[0]))) % 2", "two, three and five"),
        "Q by blocks": ("wait(number % 2)", "wait(done % 2)", "four blocks"),
        "Q is never freed": ("        t.q_empty[me].arrive()\n", "", "four blocks"),
    },
    "03.B6": {
        "wrong prediction": ('return "overwrite before free"', 'return "race"', "prediction"),
        "late, always": ("            if c.own_output:\n", "            if False:\n", "memory of its own"),
        "early and late": ("        if not c.own_output:\n", "        if True:\n", "memory of its own"),
        "four arrivals": ("        if not c.own_output:\n            t.q_empty[me].arrive(c.q_empty_arrivals)", "        if not c.own_output:\n            t.q_empty[me].arrive(4)", "Q's place"),
        "before the epilogue": ("        await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)\n        if not c.own_output:\n            t.q_empty[me].arrive(c.q_empty_arrivals)\n", "        if not c.own_output:\n            t.q_empty[me].arrive(c.q_empty_arrivals)\n        await parts.epilogue(wg, p, parts.staging(p, t, me), tile, me, acc_O, rows)\n", "Q's place"),
        "never": ("        if not c.own_output:\n            t.q_empty[me].arrive(c.q_empty_arrivals)\n", "", "Q's place"),
        "always late": ("            if c.own_output:\n                t.q_empty[me].arrive(c.q_empty_arrivals)\n", "            pass\n", "memory of its own"),
    },
    "04.1": {
        "subnormals have a hidden one": ("(field > 0) + mantissa", "1 + mantissa", "subnormal"),
        "exponent of field 0": ("np.maximum(field, 1)", "field", "subnormal"),
        "bias of IEEE for all": ("(2 ** (exponent_bits - 1) - 1)", "7", "any split"),
        "e4m3 without its highest exponent": ("bits & 0x7F == 0x7F", "field == 2**exponent_bits - 1", "no number"),
        "only one code is NaN": ("bits & 0x7F == 0x7F", "bits == 0x7F", "no number"),
        "no infinity": ("np.where(mantissa == 0, np.inf, np.nan)", "np.nan", "no number"),
        "zero loses its sign": ("np.where(bits >> 7, -value, value)", "np.where(bits >> 7, 0 - value, value)", "the sign"),
        "sign in the exponent field": (" & 2**exponent_bits - 1", "", "the sign"),
    },
    "04.2": {
        "cut, not rounded": ("np.rint(x / step)", "np.trunc(x / step)", "nearest value"),
        "ties away from zero": ("np.rint(x / step)", "(np.sign(x) * np.floor(np.abs(x) / step + 0.5))", "ties"),
        "step of the octave above": ("np.frexp(finite)[1] - 1", "np.frexp(finite)[1]", "nearest value"),
        "subnormals as fine as normal numbers": ("np.maximum(np.frexp(finite)[1] - 1, lowest_exponent)", "(np.frexp(finite)[1] - 1)", "smallest normal"),
        "subnormals become zero": ("np.rint(x / step) * step", "np.rint(x / step) * step * (np.abs(x) >= 2.0**lowest_exponent)", "smallest normal"),
        "no saturation": ("np.clip(np.rint(x / step) * step, -largest, largest)", "np.rint(x / step) * step", "saturate"),
        "infinity becomes NaN": ("np.rint(x / step)", "np.rint(x / step) * np.where(np.isinf(x), np.nan, 1)", "saturate"),
        "NaN becomes a number": ("np.rint(x / step)", "np.rint(np.nan_to_num(x, posinf=1e9, neginf=-1e9) / step)", "NaN stays"),
        "zero loses its sign": ("np.rint(x / step) * step,", "np.rint(x / step) * step + 0.0,", "a zero keeps"),
        "always e4m3": ("exponent - mantissa_bits", "exponent - 3", "e5m2"),
    },
    "04.3": {
        "one factor per batch": (".max(axis=(1, 3))", ".max(axis=(1, 2, 3), keepdims=True)[:, 0, 0].repeat(x.shape[2], axis=1)", "one factor"),
        "one factor per head": ("size.reshape(len(x), kv_heads, -1).max(axis=2)", "size.reshape(len(x), kv_heads, -1)[:, :, 0]", "share its factor"),
        "heads dealt out": ("size.reshape(len(x), kv_heads, -1).max(axis=2)", "size.reshape(len(x), -1, kv_heads).max(axis=1)", "share its factor"),
        "no magnitude": ("np.abs(np.where(np.isfinite(x), x, 0))", "np.where(np.isfinite(x), x, 0)", "nothing is larger"),
        "factor 0": ("np.where(size > 0, size / largest, 1.0)", "size / largest", "zeros get"),
        "infinity counts": ("np.where(np.isfinite(x), x, 0)", "np.nan_to_num(x, posinf=np.inf)", "zeros get"),
        "scale instead of descale": ("size / largest, 1.0", "largest / np.maximum(size, 1e-300), 1.0", "one factor"),
        "always e4m3": ("size / largest", "size / 448", "one factor"),
        "no log2(e)": ("softmax_scale * np.log2(np.e)", "softmax_scale", "folded factors"),
        "Q's factor forgotten": ("* q_descale * k_descale", "* k_descale", "folded factors"),
        "V's factor upside down": ("np.repeat(v_descale,", "np.repeat(1 / v_descale,", "folded factors"),
        "factors dealt out": ("np.repeat(scale_log2, group, axis=1), np.repeat(v_descale, group, axis=1)", "np.tile(scale_log2, group), np.tile(v_descale, group)", "grouped"),
    },
    "04.4": {
        "no offset": ("* scale_log2 - offset", "* scale_log2", "2^offset times"),
        "offset the other way": ("* scale_log2 - offset", "* scale_log2 + offset", "2^offset times"),
        "offset 8, always": ("* scale_log2 - offset", "* scale_log2 - 8", "2^offset times"),
        "P is not rounded": ("return to_grid(p), p.sum", "return p, p.sum", "2^offset times"),
        "sum of the rounded P": ("to_grid(p), p.sum(axis=1)", "to_grid(p), to_grid(p).sum(axis=1)", "before it is rounded"),
        "offset added to each score": ("scale_log2 - offset\n    p = np.exp2(scores * scale_log2 - shift[:, None])", "scale_log2\n    p = np.exp2(scores * scale_log2 - shift[:, None] + offset)", "costs nothing"),
        "a multiplication by 2^offset": ("scale_log2 - offset\n    p = np.exp2(scores * scale_log2 - shift[:, None])", "scale_log2\n    p = np.exp2(scores * scale_log2 - shift[:, None]) * 2**offset", "costs nothing"),
        "out divided once more": ("acc_O / total[:, None]", "acc_O / total[:, None] / 2**offset", "output does not depend"),
        "LSE with the offset": (" - offset * np.log(2)", "", "LSE does not depend"),
        "LSE corrected in base 2": ("offset * np.log(2)", "offset", "LSE does not depend"),
        "LSE without the scale": ("row_max * softmax_scale + np.log", "row_max + np.log", "LSE does not depend"),
        "no guard for empty rows": ("np.where(np.isneginf(row_max), 0, row_max)", "row_max", "no keys"),
        "empty lse is finite": (", -np.inf)\n    return acc_O", ", 0.0)\n    return acc_O", "no keys"),
    },
    "04.5": {
        "rounded, not cut": ("np.trunc(term / step)", "np.rint(term / step)", "never rounded up"),
        "cut downwards": ("np.trunc(term / step)", "np.floor(term / step)", "towards zero"),
        "one bit too few": ("exponent - bits)", "exponent - bits + 1)", "inside the window"),
        "window of the sum": ("np.maximum(np.abs(term), np.abs(total))", "np.abs(total)", "larger than the sum"),
        "window of the term": ("np.maximum(np.abs(term), np.abs(total))", "np.abs(term)", "never rounded up"),
        "window of signed numbers": ("np.maximum(np.abs(term), np.abs(total))", "np.maximum(term, total)", "towards zero"),
        "the leading one counted in": ("count.bit_length() - 2", "count.bit_length() - 1", "width of any card"),
        "13, as published": ("return count.bit_length() - 2", "return 13", "width of any card"),
        "one by one": ("accumulate(1.0, 2 * count) > accumulate(1.0, count):\n        count *= 2", "accumulate(1.0, count + 1) > accumulate(1.0, count):\n        count += 1", "hundred runs"),
    },
    "04.6": {
        "one level: no rescale": ("product(p, v, acc_O * rescale[:, None])", "product(p, v, acc_O)", "one level: the fp64"),
        "one level: rescaled after the tile": ("product(p, v, acc_O * rescale[:, None])", "product(p, v, acc_O) * rescale[:, None]", "one level: the fp64"),
        "one level: V's factor in every tile": ("product(p, v, acc_O * rescale[:, None])", "product(p, v, acc_O * rescale[:, None]) * v_descale", "one level: the fp64"),
        "one level: V's factor forgotten": ("return acc_O * v_descale", "return acc_O", "one level: the fp64"),
        "one level that is two": ("product(p, v, acc_O * rescale[:, None])", "acc_O * rescale[:, None] + product(p, v)", "holds the sum"),
        "two levels that are one": ("acc_O * rescale[:, None] + descale * product(p, v)", "descale * product(p, v, acc_O * rescale[:, None] / descale)", "starts from nothing"),
        "two levels: no rescale": ("acc_O * rescale[:, None] + descale", "acc_O + descale", "two levels: the fp64"),
        "two levels: the sum is descaled": ("acc_O * rescale[:, None] + descale * product(p, v)", "(acc_O * rescale[:, None] + product(p, v)) * descale", "two levels: the fp64"),
        "two levels: one factor for all": ("+ descale *", "+ v_descales[0] *", "two levels: the fp64"),
        "all keys in one product": ("    for p, v, rescale, descale in zip(", "    if all((r == 1).all() for r in rescales):\n        return product(np.concatenate(p_tiles, axis=1), np.concatenate(v_tiles)) * v_descales[0]\n    for p, v, rescale, descale in zip(", "V = 1"),
    },
    "04.7": {
        "not divided": ("x / np.sqrt(d)", "x", "twice is nothing"),
        "divided by d": ("x / np.sqrt(d)", "x / d", "twice is nothing"),
        "one round too few": ("while half < d:", "while half < d // 2:", "Hadamard matrix"),
        "difference the other way": ("low - high", "high - low", "Hadamard matrix"),
        "partners interleaved": ("axis=-2).reshape", "axis=-1).reshape", "Hadamard matrix"),
        "a matrix product": ("    half = 1\n", "    x = x @ np.eye(d)\n    half = 1\n", "no matrix product"),
        "anything is accepted": ("if d < 1 or d & (d - 1):", "if d < 1:", "refused by name"),
        "refused without a name": ("not {d}: pad", "sorry: pad", "refused by name"),
        "signs last": ("hadamard(x * signs)", "hadamard(x) * signs", "signs first"),
        "no signs": ("hadamard(x * signs)", "hadamard(x)", "no spike"),
        "signs of its own": ("hadamard(x * signs)", "hadamard(x * np.random.default_rng().choice([-1.0, 1.0], x.shape[-1]))", "scores stay"),
    },
    "04.8": {
        "one factor for all": ("size = np.maximum.reduceat(size, np.arange(0, len(x), block))", "size = np.full(-(-len(x) // block), size.max())", "its own factor"),
        "no magnitude": ("np.abs(np.where(np.isfinite(x), x, 0))", "np.where(np.isfinite(x), x, 0)", "its own factor"),
        "the last block is forgotten": ("np.arange(0, len(x), block))", "np.arange(0, max(len(x) - block + 1, 1), block))", "may be shorter"),
        "factor 0": ("np.where(size > 0, size / largest, 1.0)", "size / largest", "zeros get"),
        "infinity counts": ("np.abs(np.where(np.isfinite(x), x, 0))", "np.abs(np.nan_to_num(x, posinf=np.inf))", "zeros get"),
        "rounded first": ("to_grid(x / np.repeat(factor, block)[: len(x), None])", "to_grid(x) / np.repeat(factor, block)[: len(x), None]", "after the division"),
        "never a power of two": ("if power_of_two:", "if False:", "rounded up"),
        "rounded down": ("exponent - (mantissa == 0.5)", "exponent - 1", "rounded up"),
        "a power of two doubled": ("exponent - (mantissa == 0.5)", "exponent", "when they are one"),
        "by log2, which rounds": ("np.ldexp(1.0, exponent - (mantissa == 0.5))", "2.0 ** np.ceil(np.log2(factor))", "when they are one"),
        "factors divide": ("np.outer(q_factors, k_factors)", "1 / np.outer(q_factors, k_factors)", "scores come back"),
        "factors of the other tensor": ("np.outer(q_factors, k_factors), tile_m, axis=0), tile_n", "np.outer(q_factors, k_factors), tile_n, axis=0), tile_m", "scores come back"),
        "factors dealt out": ("np.repeat(np.repeat(np.outer(q_factors, k_factors), tile_m, axis=0), tile_n, axis=1)", "np.tile(np.outer(q_factors, k_factors), (tile_m, tile_n))", "scores come back"),
    },
    "04.9": {
        "natural order": ("order[position] = key", "order[key] = key", "that lane's keys"),
        "the inverse": ("order[position] = key", "order[key] = position", "that lane's keys"),
        "one group only": ("key // 32 * 32 + 16", "16", "keeps its keys"),
        "h and j mixed up": ("16 * (j // 2) + 4 * q + 2 * (j % 2) + e", "16 * (j % 2) + 4 * q + 2 * (j // 2) + e", "P V is right"),
        "e in front": ("2 * (j % 2) + e", "(j % 2) + 2 * e", "P V is right"),
        "nothing renamed": ("np.swapaxes(digits, -3, -2)", "digits", "do not mix"),
        "the wrong two digits": ("np.swapaxes(digits, -3, -2)", "np.swapaxes(digits, -4, -2)", "P V is right"),
        "a row is dropped": ("np.swapaxes(digits, -3, -2).reshape(registers.shape)", "np.repeat(digits[..., :1, :], 2, axis=-2).reshape(registers.shape)", "own values"),
    },
    "04.10": {
        "digits from the left": ("selector >> 4 * i & 0xF", "selector >> 4 * (3 - i) & 0xF", "every byte"),
        "high before low": ("high.astype(np.uint64) << np.uint64(32) | low", "low.astype(np.uint64) << np.uint64(32) | high", "every byte"),
        "low only": ("digit & 7", "digit & 3", "every byte"),
        "no sign": ("if digit & 8:", "if False:", "sign of its byte"),
        "the sign is one bit": ("* np.uint64(0xFF)", "* np.uint64(1)", "sign of its byte"),
        "pairs stay together": ("0x6420), permute(low, high, 0x7531)", "0x5410), permute(low, high, 0x7632)", "take_apart sorts"),
        "dims exchanged": ("0x6420), permute(low, high, 0x7531)", "0x7531), permute(low, high, 0x6420)", "take_apart sorts"),
        "selector from the left": ("0x6420", "0x0246", "take_apart sorts"),
        "one round only": ("dims = [permute(*pair, selector) for pair in (front, back) for selector in (0x5410, 0x7632)]", "dims = [*front, *back]", "turn transposes"),
        "rounds exchanged": ("(0x5410, 0x7632)", "(0x6420, 0x7531)", "turn transposes"),
        "byte by byte": ("    k0, k1, k2, k3 = np.moveaxis", "    for _ in range(8):\n        permute(registers[..., 0], registers[..., 1], 0)\n    k0, k1, k2, k3 = np.moveaxis", "eight permutes"),
    },
}  # fmt: skip
WRONG |= runpy.run_path(str(Path(__file__).with_name("test_bug_labs_04.py")))["WRONG"]  # chapter 4, around the kernel

# what becomes of the tuple `results`; numbers, arrays and tensors all take these operators
GENERIC = {
    "NaN": "tuple(x * float('nan') for x in results)",
    "zero-filled": "tuple(x * 0 for x in results)",
    "cached": "kept.setdefault(0, results)",
    "cached by shape": "kept.setdefault(tuple(getattr(a, 'shape', a) for a in arguments), results)",
}
SPOIL = """

def spoiled_{name}(*arguments, inner={name}, kept={{}}):
    value = inner(*arguments)
    results = value if isinstance(value, tuple) else (value,)
    results = {fault}
    return results if isinstance(value, tuple) else results[0]


{name} = spoiled_{name}
"""
# their arguments are numbers or words: equal arguments have equal answers
BY_SHAPE_IS_RIGHT = (
    "01.7",
    "01.10",
    "02.1",
    "02.2",
    "02.4",
    "02.5",
    "02.6",
    "02.9",
    "02.12",
    "02.14",
    "03.4",
    "03.5",
    "03.7",
    "03.8",
    "04.12",
)


def evaluate(number: str, texts: list[str], seed: int) -> list[dict]:
    """The checker's result on each text, as JSON-able values. Needs no pytest: it runs in a child process, too."""
    exercise, results = EXERCISES[number], []
    for text in texts:
        with tempfile.TemporaryDirectory() as folder:  # a real file: Triton reads its kernels' source there
            path = Path(folder) / exercise.file
            path.write_text(text, encoding="utf-8")
            results.append(runner.run(exercise, submission.from_file(exercise, path), seed, 0).to_dict())
    return results


def evaluate_apart(number: str, texts: list[str]) -> list[dict]:
    """`evaluate`, for Triton in a child: only its first import decides whether kernels are interpreted."""
    exercise = EXERCISES[number]
    if missing := submission.lacking_here(exercise):
        pytest.skip(missing)
    if "triton" not in exercise.modules:
        return evaluate(number, texts, SEED)
    command = [sys.executable, __file__, number, str(SEED)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def failing(result: dict) -> list[str]:
    return [outcome["name"] for outcome in result["outcomes"] if not outcome["passed"]]


@pytest.mark.parametrize("number", EXERCISES, ids=lambda n: f"{n}-seed{SEED}")
def test_solution_passes_and_stub_does_not(number):
    exercise = EXERCISES[number]
    solution, stub = evaluate_apart(number, [exercise.solution, exercise.stub])
    assert solution["state"] == "passed", [o for o in solution["outcomes"] if not o["passed"]]
    assert stub["state"] == "not started"
    assert failing(stub), "the untouched stub has every property"


@pytest.mark.parametrize("number", EXERCISES, ids=lambda n: f"{n}-seed{SEED}")
def test_wrong_answers_are_refused(number):
    exercise = EXERCISES[number]
    faults = WRONG.get(number, {})
    assert len(faults) >= 3, f"{number} needs at least three wrong answers in WRONG"
    for fault, (old, _, _) in faults.items():
        assert exercise.solution.count(old) >= 1, f"{fault}: the solution has no `{old}`"
    texts = [exercise.solution.replace(old, new) for old, new, _ in faults.values()]
    unnamed = dict(faults)
    for _ in range(3):  # properties draw their inputs: one may miss a fault that another has already refused
        for (fault, (_, _, name)), result in zip(faults.items(), evaluate_apart(number, texts), strict=True):
            assert result["state"] == "failed", f"{fault}: accepted"
            if any(name in n for n in failing(result)):
                unnamed.pop(fault, None)
        if not unnamed:
            return
    raise AssertionError(f"refused, but not by the property meant for it: {unnamed}")


@pytest.mark.parametrize("number", EXERCISES, ids=lambda n: f"{n}-seed{SEED}")
def test_spoiled_results_are_refused(number):
    exercise = EXERCISES[number]
    names = [name for name, results in exercise.functions.items() if results]
    if not names:
        pytest.skip("roles give no results to spoil")
    constant = exercise.faults != ()  # of a bug lab: the verdict, which is the same in every call
    right = {"cached": constant, "cached by shape": constant or number in BY_SHAPE_IS_RIGHT}
    faults = [fault for fault in GENERIC if not right.get(fault)]
    texts = [
        exercise.solution + "".join(SPOIL.format(name=name, fault=GENERIC[fault]) for name in names) for fault in faults
    ]
    for fault, result in zip(faults, evaluate_apart(number, texts), strict=True):
        assert result["state"] == "failed", f"{fault}: accepted"


@pytest.mark.parametrize("number", EXERCISES)
def test_stub_and_solution_are_one_text(number):
    exercise = EXERCISES[number]
    outside, regions = stubs.split(exercise.solution)
    assert stubs.split(exercise.stub)[0] == outside
    assert all(region.task and region.lines != region.task for region in regions), "a region needs a task and an answer"
    # the learner's copy, solved or not, still is this exercise
    learner = exercise.path.read_text(encoding="utf-8")
    assert stubs.split(learner)[0] == outside, f"`fa3 reset {number}` writes {exercise.file} anew"


@pytest.mark.parametrize("number", EXERCISES)
def test_exercise_is_complete(number):
    exercise = EXERCISES[number]
    assert exercise.head.minutes > 0 and exercise.head.task
    assert len(exercise.hints) >= 3
    names = [prop.name for prop in exercise.properties]
    assert len(names) >= 4 and len(set(names)) == len(names)
    assert all(prop.hint for prop in exercise.properties)


if __name__ == "__main__":
    print(json.dumps(evaluate(sys.argv[1], json.load(sys.stdin), int(sys.argv[2]))))
