"""Chapter 4's exercises and bug labs around the kernel: wrong answers, which `test_exercises.py` gives to the checker."""

from fa3_course.checker import catalogue

# exercise: {fault: (text of the solution, its replacement, part of the name of a property that must refuse it)}
WRONG = {
    "04.11": {
        "keys in natural order": ("v[order].T", "v.T", "one block"),
        "the order's inverse": ("v[order].T", "v[np.argsort(order)].T", "one block"),
        "no fence": ("        wg.fence_async_proxy()\n", "", "one block"),
        "fence after the announcement": ("        wg.fence_async_proxy()\n        t.v_full[slot].arrive()\n", "        t.v_full[slot].arrive()\n        wg.fence_async_proxy()\n", "one block"),
        "V's ring with the consumer's bit": ("wait(phase ^ 1)", "wait(phase)", "one block"),
        "the raw ring with the producer's bit": ("raw.full[slot].wait(phase)", "raw.full[slot].wait(phase ^ 1)", "one block"),
        "the phase never flips": ("i // c.stages % 2", "0", "many blocks"),
        "the raw slot is never freed": ("        raw.empty[slot].arrive()\n", "", "many blocks"),
        "freed before it is read": ("        v = await wg.load_shared(raw.tiles[slot])\n        raw.empty[slot].arrive()\n", "        raw.empty[slot].arrive()\n        v = await wg.load_shared(raw.tiles[slot])\n", "many blocks"),
        "V's slot is taken without asking": ("        await t.v_empty[slot].wait(phase ^ 1)\n", "", "many blocks"),
        "two slots, always": ("slot, phase = i % c.stages, i // c.stages % 2", "slot, phase = i % 2, i // 2 % 2", "one slot"),
        "one block too few": ("range(len(p.blocks(tile[0])))", "range(len(p.blocks(tile[0])) - 1)", "one block"),
    },
    "04.12": {
        "P with 16 bits": ("tile_n // 8", "tile_n // 4", "S, P and O"),
        "P in S's place": (" + tile_n // 8", "", "S, P and O"),
        "a row per thread": ("tile_n // 2 + tile_n // 8 + head_dim // 2", "tile_n + tile_n // 4 + head_dim", "S, P and O"),
        "T as wide as O": ("columns // 2\n", "(head_dim // 2 if columns else 0)\n", "as wide as its part"),
        "nothing stays free": ("[consumers] - 24\n    for", "[consumers]\n    for", "widest part"),
        "the narrowest": ("(256, 192, 128, 64)", "(64, 128, 192, 256)", "rung 10's tiles"),
        "parts that do not divide": ("head_dim % columns == 0 and ", "", "widest part"),
        "shared memory only": ("if registers(head_dim, n, columns) <= limit\n        and ", "if ", "widest tile"),
        "registers only": ("\n        and head_dim * (3 * 64 * consumers + 2 * stages * n) + 1024 <= 232_448", "", "widest tile"),
        "the output in Q's place": ("3 * 64 * consumers", "2 * 64 * consumers", "widest tile"),
        "steps of 16": ("range(32, 257, 32)", "range(16, 257, 16)", "widest tile"),
    },
    "04.B1": {
        "wrong prediction": ('return {"random"}', 'return {"random", "V = 1"}', "prediction"),
        "everything fails": ('return {"random"}', 'return {"V = 1", "V = 0 and 1", "equal weights", "first two keys", "random"}', "prediction"),
        "natural order": ("turned[position(len(v))] = v", "turned[:] = v", "five tests"),
        "the order of order": ("turned[position(len(v))] = v", "turned[:] = v[position(len(v))]", "one key at a time"),
        "not transposed": ("turned.T)", "turned)", "five tests"),
        "converted": ("np.empty_like(v)", "np.empty(v.shape)", "bytes are moved"),
        "the first group only": ("turned[position(len(v))] = v", "turned[:] = v\n    turned[position(32)] = v[:32]", "five tests"),
    },
    "04.B2": {
        "wrong prediction": ('return "accumulator touched in flight"', 'return "operand touched in flight"', "prediction"),
        "waits for both": ("wait_group(1 if i > 0 else 0)", "wait_group(0)", "overlap is kept"),
        "the new block's shrink": ("weights, next_shrink = await rows.step(acc_S.read(), blocks[i])", "weights, next_shrink = await rows.step(acc_S.read(), blocks[i])\n            shrink, next_shrink = next_shrink, shrink", "many blocks"),
        "one level": ("wg.wgmma(acc_T, tOrP, t.v[last_slot].T, accumulate=False", "wg.wgmma(acc_T, tOrP, t.v[last_slot].T, accumulate=i > 1", "many blocks"),
        "V is freed before PV ends": ("            await wg.wait_group(0)\n            t.v_empty[last_slot].arrive(parts.WARPS)\n", "            t.v_empty[last_slot].arrive(parts.WARPS)\n            await wg.wait_group(0)\n", "many blocks"),
        "the last T is forgotten": ("            await rung10.fold(wg, acc_O, acc_T, shrink)\n", "            if i < len(blocks):\n                await rung10.fold(wg, acc_O, acc_T, shrink)\n", "one block"),
        "keys in natural order": ("weights[:, order]", "weights", "many blocks"),
    },
    "04.B3": {
        "wrong prediction": ('return {"V = 1", "random"}', 'return {"random"}', "prediction"),
        "blind to nothing": ('return {"V = 1", "random"}', 'return {"V = 1", "random", "two blocks"}', "prediction"),
        "the new block's shrink": ("acc_O * shrink[:, None] + acc_T", "acc_O * (next_shrink if i < len(scores) else 1) [..., None] + acc_T", "five tests"),
        "T shrinks too": ("acc_O * shrink[:, None] + acc_T", "(acc_O + acc_T) * shrink[:, None]", "five tests"),
        "no shrink": ("acc_O * shrink[:, None] + acc_T", "acc_O + acc_T", "five tests"),
        "PV after the softmax": ("        if i > 0:\n            acc_T = p @ v[i - 1]\n", "        last = p\n", "five tests"),
        "no overlap": ("        if i > 0:\n            acc_T = p @ v[i - 1]\n        if i < len(scores):\n", "        last = p\n        if i < len(scores):\n", "five tests"),
        "the row sum is not rescaled": ("row_sum * next_shrink", "row_sum", "five tests"),
    },
    "04.B4": {
        "wrong prediction": ('return "overwrite before free"', 'return "too many arrivals"', "prediction"),
        "everybody speaks": ("        if me == 0:\n            raw.empty", "        if True:\n            raw.empty", "no more blocks"),
        "nobody speaks": ("        if me == 0:\n", "        if me == 3:\n", "many blocks"),
        "the barrier before the read": ("        v = await warp.load_shared(raw.tiles[slot])\n        await together.sync()\n", "        await together.sync()\n        v = await warp.load_shared(raw.tiles[slot])\n", "many blocks"),
        "warp 0 waits for nobody": ("        await together.sync()\n        if me == 0:\n            raw.empty[slot].arrive()\n", "        if me == 0:\n            raw.empty[slot].arrive()\n        await together.sync()\n", "many blocks"),
        "in the first round only": ("        await together.sync()\n", "        if i == 0:\n            await together.sync()\n", "many blocks"),
        "only two of three come": ("        await together.sync()\n", "        if me < 2:\n            await together.sync()\n", "no more blocks"),
        "a group of dims is forgotten": ("range(16 * me, c.head_dim_v, 48)", "range(16 * me, c.head_dim_v - 16, 48)", "no more blocks"),
    },
    "04.B5": {
        "wrong prediction": ('return {"GQA"}', 'return {"GQA", "GQA, first and last"}', "prediction"),
        "a list": ('return {"GQA"}', 'return ["GQA"]', "prediction"),
        "K's factor dealt out": ("k_descale[batch, kv_head]", "k_descale[batch, head % kv_heads]", "five tests"),
        "V's factor dealt out": ("return v_descale[batch, kv_head]", "return v_descale[batch, head % kv_heads]", "five tests"),
        "K itself dealt out": ("k[batch, :, kv_head]", "k[batch, :, head % kv_heads]", "five tests"),
        "the first factor for all": ("q_descale[batch, kv_head]", "q_descale[batch, 0]", "five tests"),
        "no factor for Q": ("q_descale[batch, kv_head] * k_descale", "k_descale", "five tests"),
        "the first batch's": ("q_descale[batch, kv_head]", "q_descale[0, kv_head]", "five tests"),
        "pairs": ("head // (heads // kv_heads)", "min(head // 4, kv_heads - 1) if heads == 8 else head * kv_heads // heads // 2", "other groups"),
    },
    "04.B6": {
        "wrong prediction": ('return "overwrite before free"', 'return "race"', "prediction"),
        "afterwards": ("    await everybody.sync()\n    await parts.epilogue(wg, p, staged, tile, me, acc_O, rows, p.v_descale[kv])\n", "    await parts.epilogue(wg, p, staged, tile, me, acc_O, rows, p.v_descale[kv])\n    await everybody.sync()\n", "two consumers"),
        "only one waits": ("    await everybody.sync()\n", "    if me == 0:\n        await everybody.sync()\n", "two consumers"),
        "arrive, not sync": ("    await everybody.sync()\n", "    if me == 0:\n        await everybody.sync()\n    else:\n        everybody.arrive()\n", "two consumers"),
        "all in slot 0": ("t.v[me].reuse", "t.v[0].reuse", "two consumers"),
        "in Q's place": ("t.v[me].reuse", "t.q[me].reuse", "one consumer"),
        "V's factor forgotten": (", rows, p.v_descale[kv])", ", rows)", "one consumer"),
    },
}  # fmt: skip


def test_every_wrong_answer_belongs_to_an_exercise():
    numbers = [exercise.number for exercise in catalogue.exercises("04")]
    assert set(WRONG) <= set(numbers)
    assert set(WRONG) >= {number for number in numbers if "B" in number}
    assert all(len(faults) >= 3 for faults in WRONG.values())
