"""The clock, stamped inside chapter 3's kernels on the card: who had the tensor cores when, in the form of the simulator.

    python -m bench.timelines                 # on a Hopper, under a minute
    python -m bench.timelines --dry-run       # compiles the stamped kernels and reports on their machine code; no GPU

Writes `bench/timelines/<kernel>_d<head dim>.json` (`fa3_course.timeline`), which the lesson draws. A rung's own file knows nothing
of stamps: the stamped kernel is its text with lines put between its lines, compiled apart (`stamped`).

One thread of the load warp and one of each consumer, of one CTA, store the SM's clock and go on. A stamp is a predicated store,
no branch, but the compiler moves nothing past it: in rungs 7 and 8 the wait for P V, which it moves up into the softmax
otherwise, stays where the source has it. What all stamps cost together is measured, and stored with the timeline.
"""

import argparse
import itertools
import random
import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Boolean, Int32, Int64

from bench import card, kernels, timing
from bench.cases import paper
from fa3_course import results, rung_host, rungs, timeline
from fa3_course.timeline import Event, Timeline
from fa3_lib.config import HEAD_DIMS, WARPGROUP, WGMMA_M, ForwardConfig, ceil_div
from hopper_sim import HOPPER

FOLDER = results.ROOT / "bench" / "timelines"
SEQLEN = 8192
FILES = {
    "5": "chapters/02_tma_wgmma/steps/rung05_warp_specialised.py",
    "6": "chapters/03_pingpong/steps/rung06_pingpong.py",
    "7": "chapters/03_pingpong/steps/rung07_overlap.py",
    "8": "chapters/03_pingpong/steps/rung08_persistent.py",
}
SHOWN = (("5", 128), ("6", 128), ("7", 128), ("8", 128), ("7", 64))  # rung, head dim
BLOCKS = 7  # key blocks of a stored window: more are no longer readable, and the files stay small
SHORT = 40  # cycles: a wait that finds its barrier open takes about as long, and is not drawn

# --- the stamps: device code -------------------------------------------------------------------------------------------

# mark -> what a warp has done since its last mark, in the simulator's words, and whether that is waiting
CONSUMER = {
    "Q there": ("wait Q full", "wait"),
    "turn": ("turn", "wait"),
    "K there": ("wait K full", "wait"),
    "QK issued": ("issue", "work"),
    "V there": ("wait V full", "wait"),
    "PV issued": ("issue", "work"),
    "S there": ("wait WGMMA", "wait"),
    "asks O": ("softmax", "work"),
    "O there": ("wait WGMMA", "wait"),
    "softmax done": ("softmax", "work"),
    "tile done": ("epilogue", "work"),
}
LOAD_WARP = {
    "K empty": ("wait K empty", "wait"),
    "K started": ("load K", "work"),
    "V empty": ("wait V empty", "wait"),
    "V started": ("load V", "work"),
}
# the buffer: (warpgroups, key blocks of a CTA, marks) of uint32
ROLES, SLOTS, COLUMNS = 4, 2048, 16


class Stamps:
    """What the stamped text of a rung calls; `address` and `cta` are compiled in as numbers, so that no argument is added."""

    address: int  # of the buffer in global memory
    cta: int  # the one that stamps

    @cute.jit
    def stamp(self, mark: cutlass.Constexpr, block: Int32):
        """The SM's clock as a mark of the CTA's key block number `block`, by the first thread of each warpgroup."""
        marks = list(LOAD_WARP if mark in LOAD_WARP else CONSUMER)
        thread = cute.arch.thread_idx()[0]
        writes = (thread % WARPGROUP == 0) & (cute.arch.block_idx()[0] == self.cta) & (block < SLOTS)
        word = ((thread // WARPGROUP) * SLOTS + block) * COLUMNS + marks.index(mark)
        cute.arch.inline_ptx(
            "st.global.u32 [{$r0}], {$r1};",
            read_only_args=[Int64(self.address) + Int64(word) * 4, cute.arch.clock()],
            predicate=Boolean(writes),
        )


# --- where they stand: pieces of the rungs' text, with a line "@ mark, key block" for each stamp ------------------------

LOAD = """
pipe.producer_acquire(state)  # wait until the stage is empty, then announce its bytes
@ "K empty" if pipe is pipe_K else "V empty", state.count
barrier = pipe.producer_get_barrier(state)
"""
LOADED = """
pipe.producer_commit(state)  # nothing left to do for TMA: the last byte completes the phase
@ "K started" if pipe is pipe_K else "V started", state.count
"""
K_STAGE = """
pipe_K.consumer_wait(state)
@ "K there", state.count
"""
V_STAGE = """
pipe_V.consumer_wait(state)
@ "V there", state.count
"""
SOFTMAX_THEN_V = f"""
@ "softmax done", state.count
{V_STAGE.strip()}
"""
S = """
@ "QK issued", state.count
warpgroup.wait_group(0)
@ "S there", state.count
pipe_K.consumer_release(state)
"""
O = """
@ "PV issued", state.count
warpgroup.wait_group(0)
@ "O there", state.count
pipe_V.consumer_release(state)
"""
TURN = """
    self.wait_turn(consumer)
    @ "turn", state.count
warpgroup.fence()
"""
# rung 7: a pair of products, and the first and the last block, which have one each
PAIR = """
    @ "softmax done", state_K.count
    self.wait_turn(consumer)
    @ "turn", state_K.count
self.issue_qk(qk, state_K)
@ "QK issued", state_K.count
self.issue_pv(pv, state_V)
"""
PAIR_S = """
@ "PV issued", state_V.count
warpgroup.wait_group(1)  # groups end in the order of issue: all but the youngest, P V, are done
@ "S there", state_K.count
"""
PAIR_O = """
@ "asks O", state_V.count
warpgroup.wait_group(0)
@ "O there", state_V.count
pv[4].consumer_release(state_V)
"""
FIRST = """
self.issue_qk(qk, state_K)
@ "QK issued", state_K.count
warpgroup.wait_group(0)
@ "S there", state_K.count
pipe_K.consumer_release(state_K)
"""
LAST = """
@ "softmax done", state_K.count
self.issue_pv(pv, state_V)
@ "PV issued", state_V.count
warpgroup.wait_group(0)
@ "O there", state_V.count
pipe_V.consumer_release(state_V)
"""
OVERLAP = (LOAD, LOADED, K_STAGE, V_STAGE, PAIR, PAIR_S, PAIR_O, FIRST, LAST)
# rung 8: the end of a tile and the next one's Q
NEXT_Q = """
cute.arch.mbarrier_wait(q_full, visited & 1)
@ "Q there", done
"""
TILE = """
@ "tile done", done
visited += 1
done += n_blocks
"""
PLACES = {
    "5": (LOAD, LOADED, K_STAGE, SOFTMAX_THEN_V, S, O),
    "6": (LOAD, LOADED, K_STAGE, SOFTMAX_THEN_V, S, O, TURN),
    "7": OVERLAP,
    "8": (*OVERLAP, NEXT_Q, TILE),
}


def change(source: str, piece: str) -> tuple[str, str]:
    """(text of the rung, the same with its stamps) for a piece, at whatever depth it stands in `source`.

    Raises:
        ValueError: when the piece, without its stamps, is not in the source.
    """
    lines = piece.strip("\n").splitlines()
    for depth in range(4, 33, 4):

        def text(lines, depth=depth):
            return "\n" + "".join(f"{' ' * depth}{line}\n" if line else "\n" for line in lines)

        old = text([line for line in lines if not line.lstrip().startswith("@")])
        if old in source:
            return old, text([re.sub(r"@ (.+)$", r"self.stamp(\1)", line) for line in lines])
    raise ValueError(f"the rung has no such lines: {piece}")


def stamped(number: str, address: int, cta: int) -> type:
    """A rung's kernel class with stamps into a buffer (ROLES, SLOTS, COLUMNS) of uint32 at `address`, by CTA number `cta`."""
    path = results.ROOT / FILES[number]
    source = path.read_text(encoding="utf-8")
    module = rung_host.edited(path, *(change(source, piece) for piece in PLACES[number]))
    return type("Stamped", (Stamps, module.Attention), {"address": address, "cta": cta})


# --- from stamps to a timeline -----------------------------------------------------------------------------------------


def chains(buffer: np.ndarray) -> list[list[tuple[int, str, int]]]:
    """The stamps of each role as (cycles, mark, key block), in the order of time; 0 is consumer 0's first stamp."""
    seen = buffer[1][buffer[1] > 0]
    if not seen.size:
        raise ValueError("no stamp in the buffer: the CTA that should stamp has not run")
    # differences of 32 bits, since the counter may have passed 2^32 meanwhile
    first = seen[(seen - seen[0]).view(np.int32).argmin()]
    cycles = (buffer - first).view(np.int32)
    found = []
    for role, (slots, times) in enumerate(zip(buffer, cycles, strict=True)):
        marks = list(CONSUMER if role else LOAD_WARP)
        found.append(sorted((int(times[b, m]), marks[m], int(b)) for b, m in np.argwhere(slots)))
    return found


def products(chain: list[tuple[int, str, int]], role: str) -> list[Event]:
    """QK and PV of one consumer: from the stamp before the issue to the stamp that saw the product finished."""
    found = []
    for i, (_, mark, _) in enumerate(chain):
        name, end = {"QK issued": ("QK", "S there"), "PV issued": ("PV", "O there")}.get(mark, ("", ""))
        seen = next((time for time, later, _ in chain[i + 1 :] if later == end), None)
        if name and i and seen is not None:
            found.append(Event("tensor core", name, chain[i - 1][0], seen, role))
    return found


def in_order(events: list[Event], cycles: float) -> list[Event]:
    """Products as the tensor cores do them, one after the other in the order of issue.

    A product begins when it is issued and the one before is done. One whose warpgroup looked late ended at the latest when the
    next one, which takes `cycles` at the full rate, must have begun.
    """
    events = sorted(events, key=lambda e: e.start)
    for i in range(len(events) - 2, -1, -1):
        latest = max(events[i + 1].end - cycles, events[i].start)
        events[i] = replace(events[i], end=min(events[i].end, latest))
    for i in range(1, len(events)):
        start = max(events[i].start, events[i - 1].end)
        events[i] = replace(events[i], start=min(start, events[i].end))
    return events


def as_timeline(buffer: np.ndarray, config: ForwardConfig) -> Timeline:
    """All stamps of a CTA as a timeline in cycles of the SM's clock.

    Args:
        buffer: (ROLES, SLOTS, COLUMNS) uint32, 0 where nothing was stamped.
        config: the kernel's tiles.
    """
    found = chains(buffer)[: 1 + config.consumer_warpgroups]
    lanes = ["producer", *(f"consumer{c}" for c in range(config.consumer_warpgroups))]
    events, gemms = [], []
    for lane, chain in zip(lanes, found, strict=True):
        marks = CONSUMER if lane != "producer" else LOAD_WARP
        for (start, _, _), (end, mark, _) in itertools.pairwise(chain):
            name, kind = marks[mark]
            if kind == "work" or end - start >= SHORT:
                events.append(Event(lane, name, start, end, lane, kind))
        gemms += products(chain, lane) if lane != "producer" else []
    full_rate = 2 * WGMMA_M * config.tile_n * config.head_dim / HOPPER.tensor_flops_16bit
    events += in_order(gemms, full_rate)
    return Timeline("cycles", ("producer", lanes[1], "tensor core", *lanes[2:]), tuple(events))


def window(whole: Timeline, buffer: np.ndarray, first: int, last: int) -> Timeline:
    """The part from consumer 0's first stamp of key block `first` to that of block `last`, from time 0 on."""
    begin, end = (min(t for t, _, b in chains(buffer)[1] if b == block) for block in (first, last))
    part = whole.cut(begin, end).moved(-begin)
    return replace(part, events=tuple(e for e in part.events if e.end > e.start))


# --- on the card -------------------------------------------------------------------------------------------------------


def record(number: str, head_dim: int, seed: int, sampler: card.Sampler) -> Timeline:
    """Runs a rung with stamps, at the paper's 16k tokens, and returns the window that is stored.

    Raises:
        RuntimeError: when the stamped kernel's output differs from the rung's in any bit.
    """
    rung, case = rungs._module(FILES[number]), paper(head_dim, False, SEQLEN)
    sms = torch.cuda.get_device_properties().multi_processor_count
    config = rung.make_config(head_dim, False)
    blocks = ceil_div(SEQLEN, config.tile_n)
    # a CTA of the second wave, all others being busy; a persistent one between two of its tiles
    cta, middle = (sms // 2, 4 * blocks) if number == "8" else (sms * 3 // 2, blocks // 2)
    buffer = torch.zeros(ROLES, SLOTS, COLUMNS, dtype=torch.int32, device="cuda")
    variants = {"plain": rung.Attention, "stamped": stamped(number, buffer.data_ptr(), cta)}
    q, k, v = kernels.inputs(case, "bf16", "cuda", seed)
    outputs = {name: rung_host.run(kernel, config, q, k, v) for name, kernel in variants.items()}
    if not all(torch.equal(a, b) for a, b in zip(*outputs.values(), strict=True)):
        raise RuntimeError(f"rung {number}, head dim {head_dim}: stamps changed the output")
    timers = {
        name: timing.EventTimer(lambda q, k, v, kernel=kernel: rung_host.run(kernel, config, q, k, v), [(q, k, v)])
        for name, kernel in variants.items()
    }
    samples = {name: [] for name in timers}
    for _ in range(3):
        for name, timer in timers.items():  # the stamped one last: its stamps are those of a warm card
            with sampler.during(name):
                samples[name] += timer.burst(60.0)
    sm_mhz, watts = sampler.take("stamped")
    stamps = buffer.cpu().numpy().view(np.uint32)
    found = window(as_timeline(stamps, config), stamps, middle - BLOCKS // 2, middle - BLOCKS // 2 + BLOCKS)
    source = (FILES[number], *rungs._CUTE_PARTS, "bench/timelines.py")
    ms = {f"ms_{name}": float(f"{statistics.median(values):.5g}") for name, values in samples.items()}
    shape = {key: value for key, value in case.fields.items() if key != "direction"}
    tiles = {"tile_m": config.tile_m, "tile_n": config.tile_n, "cta": cta, "first_block": middle - BLOCKS // 2}
    facts = {"rung": number, "dtype": "bf16", **shape, **tiles, **ms, "sm_mhz": sm_mhz, "watts": watts, "seed": seed}
    digest = {"source": list(source), "source_hash": results.source_hash(source)}
    return replace(found, meta=facts | digest)


def dry_run(shown: Iterable[tuple[str, int]]) -> int:
    """Compiles the kernels with and without stamps and prints what each holds; the number of those with a problem."""
    from fa3_course import sass

    failed = 0
    for number, head_dim in shown:
        rung = rungs._module(FILES[number])
        config = rung.make_config(head_dim, False)
        for name, kernel in (("plain", rung.Attention), ("stamped", stamped(number, 1 << 44, 0))):
            (report,) = sass.compile_report(
                lambda options, kernel=kernel, config=config: rung_host.compile_kernel(
                    kernel, config, torch.bfloat16, options
                )
            )
            failed += bool(report.problems())
            counts = ", ".join(f"{report.count(op)} {op}" for op in ("HGMMA", "MUFU.EX2", "UTMALDG", "STG"))
            problems = "; ".join(report.problems()) or "clean"
            print(
                f"rung {number} d {head_dim} {name:<8} {report.instructions} instructions: {counts}, {problems}",
                flush=True,
            )
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.timelines", description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="*", help=f"rung:head_dim; {' '.join(f'{n}:{d}' for n, d in SHOWN)} if left out")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the timelines")
    parser.add_argument("--seed", type=int, help="of the inputs; drawn anew if left out, and stored")
    parser.add_argument("--dry-run", action="store_true", help="compile and report, stamp nothing; needs no GPU")
    args = parser.parse_args(argv)
    shown = [(n, int(d)) for n, _, d in (text.partition(":") for text in args.which)] if args.which else SHOWN
    if unknown := [f"{n}:{d}" for n, d in shown if n not in FILES or d not in HEAD_DIMS]:
        parser.error(f"{', '.join(unknown)}: rungs are {', '.join(FILES)}, head dims {', '.join(map(str, HEAD_DIMS))}")
    if args.dry_run:
        return 1 if dry_run(shown) else 0
    if not rungs.has_hopper():
        parser.error("needs a Hopper GPU (`fa3 doctor` says what is missing); --dry-run compiles the kernels anywhere")
    seed = random.randrange(2**31) if args.seed is None else args.seed
    commit, dirty = card.git_state()
    wanted = ("gpu", "driver", "cuda", "torch", "cutlass_dsl")
    head = {"date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "commit": commit, "dirty": dirty}
    head |= {key: value for key, value in card.machine().items() if key in wanted}
    args.out.mkdir(parents=True, exist_ok=True)
    with card.Sampler(card.open_nvml()) as sampler, torch.no_grad():
        for number, head_dim in shown:
            found = record(number, head_dim, seed, sampler)
            path = args.out / f"{Path(FILES[number]).stem}_d{head_dim}.json"
            timeline.write(replace(found, meta=found.meta | head), path)
            cost = found.meta["ms_stamped"] / found.meta["ms_plain"] - 1
            print(f"{path}: {len(found.events)} events, {found.span[1]:.0f} cycles, stamps cost {cost:.1%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
