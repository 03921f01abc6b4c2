"""The faults of the bug labs in CuTe DSL: rung 4's kernel with one line wrong, run on a Hopper under a watchdog.

    python bug_labs/twins.py B1              what the card does with the fault of 02.B1
    python bug_labs/twins.py B6 --seconds 30

A wrong kernel may hang, and a hung kernel never gives its process back. So each runs in a child process, which the watchdog
ends when its time is up.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fa3_course import rungs

SECONDS = 60.0  # of a child: some 20 go into imports and the compiler
LAUNCHES = 5


@dataclass(frozen=True)
class Twin:
    """One wrong line: `old` in rung 4's file becomes `new`.

    Args:
        shape: query and key length of the launches. causal: with the mask.
    """

    title: str
    old: str
    new: str
    shape: tuple[int, int] = (2048, 2048)
    causal: bool = False

    def module(self):
        """Rung 4 with the wrong line."""
        from fa3_course import rung_host  # imports CuTe DSL

        return rung_host.edited(rungs.paths.checkout() / rungs.find("4").file, (self.old, self.new))


TWINS = {
    "B1": Twin(
        "nobody waits for a free slot",
        "pipe.producer_acquire(state)",
        "pipe.sync_object_full.arrive(state.index, pipe.producer_mask)",
    ),
    "B2": Twin(
        "the consumer's bit for V never flips",
        "pipe_V.consumer_wait(state)",
        "pipe_V.sync_object_full.wait(state.index, 0)",
    ),
    "B3": Twin(
        "half of K's bytes are announced",
        "self.make_ring(storage.k_barriers.data_ptr(), cfg.k_bytes, defer_sync=True)",
        "self.make_ring(storage.k_barriers.data_ptr(), cfg.k_bytes // 2, defer_sync=True)",
    ),
    "B4": Twin(
        "no proxy fence before the output's TMA store",
        '        cute.arch.fence_proxy("async.shared", space="cta")  # TMA must see what the threads wrote\n',
        "",
    ),
    "B5": Twin(
        "V's slot is released before the product is done",
        "        warpgroup.wait_group(0)\n        pipe_V.consumer_release(state)\n",
        "        pipe_V.consumer_release(state)\n        warpgroup.wait_group(0)\n",
    ),
    "B6": Twin(
        "the producer counts causal blocks from the top left",
        "pipe_K, pipe_V, m_block, n_blocks)\n        else:",
        "pipe_K, pipe_V, m_block,\n"
        "                          cutlass.min(n_blocks, ceil_div((m_block + 1) * cfg.tile_m, cfg.tile_n)))\n        else:",
        shape=(1024, 4096),
        causal=True,
    ),
}


def child(name: str) -> None:
    """Launches the twin; prints one line of JSON per launch: "right", or what differs from the fp64 truth."""
    import torch

    from fa3_course.checker import Refused, Trial, protocol, truth

    twin = TWINS[name]
    module, (sq, sk), heads, d = twin.module(), twin.shape, 16, 128
    mask = truth.allowed(sq, sk, twin.causal)
    for launch in range(LAUNCHES):
        q, k, v = (torch.randn(1, n, heads, d, dtype=torch.float16, device="cuda") for n in (sq, sk, sk))
        out, _ = module.attention(q, k, v, causal=twin.causal)
        torch.cuda.synchronize()
        seen = "right"
        for head in (0, heads - 1):
            one = [x[0, :, head].cpu().numpy() for x in (q, k, v)]
            exact, _ = truth.attention(*one, d**-0.5, mask)
            plain = protocol.half_attention(*one, d**-0.5, mask)
            try:
                Trial(0).close(out[0, :, head].cpu().numpy(), exact, f"head {head}", same_precision=plain)
            except Refused as refusal:
                seen = str(refusal)
        print(json.dumps({"launch": launch, "seen": seen}), flush=True)


def watch(command: list[str], seconds: float) -> tuple[list[str], int | None, str]:
    """Runs a command; ends it when its time is up.

    Returns:
        the lines that it printed, its exit status (None when it was ended), and the end of what it complained about.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, complaint = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        printed, complaint = process.communicate()
        status = None
    return printed.splitlines(), status, complaint.strip()[-500:]


def report(name: str, seconds: float = SECONDS) -> str:
    """What the card does with a twin, in one sentence.

    Raises:
        KeyError: no such twin. RuntimeError: no Hopper here.
    """
    twin = TWINS[name]
    if not rungs.has_hopper():
        raise RuntimeError("the twins need a Hopper GPU (H100, H200), and this machine has none")
    lines, status, complaint = watch([sys.executable, str(Path(__file__).resolve()), name, "--child"], seconds)
    seen = [json.loads(line)["seen"] for line in lines if line.startswith("{")]
    wrong = [text for text in seen if text != "right"]
    told = f"02.{name}, {twin.title}: {len(seen)} of {LAUNCHES} launches came back, {len(wrong)} with wrong numbers"
    if wrong:
        told += f" ({wrong[0]})"
    if status is None:
        return f"{told}. No end after {seconds:g} s: ended by the watchdog"
    if status:
        return f"{told}. It failed: {complaint}"
    return told if wrong else f"{told}. That proves nothing: nothing orders the accesses"


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Run a bug lab's CuTe DSL twin on a Hopper, under a watchdog.")
    parser.add_argument("twin", choices=TWINS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit, imports and compiling included")
    parser.add_argument("--child", action="store_true", help="run it here, without a watchdog")
    options = parser.parse_args()
    if options.child:
        child(options.twin)
        return
    try:
        print(report(options.twin, options.seconds))
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
