"""Host time of one eager call: what the caller's thread spends before the kernel is in the queue.

    python -m bench.host                      # fa3_lib and the peers that are installed
    python -m bench.host --kernels fa3_lib

Rows of `bench.forward` hold the same figure (`host_us`) for every head_dim and mask.
"""

import argparse
import sys

import torch

from bench import timing
from bench.cases import paper
from bench.kernels import candidates, chosen, inputs
from bench.worker import reason


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", help="comma-separated names; all attention kernels of the card if left out")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error(
            "host time is the cost of enqueueing on a card, and torch sees no CUDA device here (`fa3 doctor` says why)"
        )
    try:
        kernels = chosen(candidates(args.dtype), args.kernels)
    except ValueError as error:
        parser.error(str(error))
    case = paper(128, False, 512).tiny()
    print(f"microseconds of host time per eager call, {case}, median of batches")
    with torch.no_grad():
        for kernel in kernels:
            if kernel.direction != "fwd" or kernel.device != "cuda":
                continue
            try:
                call = kernel.bind(case)
                print(
                    f"{kernel.label:<28}{timing.host_us(call, inputs(case, kernel.dtype, 'cuda', seed=0)):8.1f}",
                    flush=True,
                )
            except Exception as error:  # a peer that is not installed, or that refuses the card
                print(f"{kernel.label:<28}       - {reason(error)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
