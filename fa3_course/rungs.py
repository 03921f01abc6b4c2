"""The ladder's registry: every rung that the course has, in order. A later chapter adds a rung by adding a line to RUNGS.

A rung is one file with `attention(q, k, v, softmax_scale=None, causal=False) -> (out, lse)` (see CONTRIBUTING.md). NumPy
rungs take and return NumPy arrays, the others torch tensors; `Rung.run` hides the difference.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fa3_course import paths, results

Needs = Literal["numpy", "triton", "hopper", "torch"]


class RungUnavailable(RuntimeError):
    """The rung cannot run on this machine; the message says why and what would change it."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Args:
        number: "0", "1", ..., "7b"; "lib" is the finished library.
        name: short name, one word or two.
        chapter: the chapter that teaches it; 0 for the library.
        idea: what it adds to the rung before, in one line.
        file: its source, relative to the repository's root.
        needs: "numpy" and "torch" run anywhere (torch: on the GPU where there is one); "triton" runs on a GPU, or in
            Triton's interpreter on Linux without one; "hopper" needs an sm_90 GPU.
    """

    number: str
    name: str
    chapter: int
    idea: str
    file: str
    needs: Needs

    def load(self) -> Callable:
        """The rung's own `attention` callable, imported from its file once.

        Raises:
            CheckoutMissing: without the repository.
            ImportError: when a package that it needs is missing (Triton on macOS, say).
        """
        return _library if self.number == "lib" else self.module().attention

    def module(self):
        """The rung's file as a module (not for the library)."""
        if self.needs == "triton" and not torch.cuda.is_available():
            # Triton reads this once, at its import; without a GPU only the interpreter can run the rung
            os.environ.setdefault("TRITON_INTERPRET", "1")
        return _module(self.file)

    def sources(self) -> list[str]:
        """The files that make this kernel, relative to the root, sorted."""
        if self.number != "lib":
            return sorted([self.file, *(_CUTE_PARTS if self.needs == "hopper" else ())])
        root = paths.checkout()
        return sorted(p.relative_to(root).as_posix() for p in (root / "fa3_lib").rglob("*.py"))

    def source_hash(self) -> str:
        """Hash over `sources()`: what a stored row is compared with."""
        return results.source_hash(self.sources(), paths.checkout())

    def device(self) -> torch.device:
        """The device whose tensors this rung takes here.

        Raises:
            RungUnavailable: when this machine cannot run it.
        """
        if self.needs == "numpy":
            return torch.device("cpu")
        if self.needs == "torch":
            # the library refuses CUDA tensors on other GPUs than Hopper
            usable = has_hopper() if self.number == "lib" else torch.cuda.is_available()
            return torch.device("cuda" if usable else "cpu")
        if self.needs == "triton":
            if importlib.util.find_spec("triton") is None:
                raise RungUnavailable("needs Triton, which has wheels for Linux only")
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if not has_hopper():
            raise RungUnavailable(
                "needs a Hopper GPU (H100, H200): `fa3 sim` runs its protocol on this machine instead"
            )
        return torch.device("cuda")

    def where(self) -> str:
        """In words, what runs this rung here: "CPU (NumPy)", "CPU (interpreter)", "NVIDIA H200", ..."""
        if self.device().type == "cuda":
            return torch.cuda.get_device_name()
        return {"numpy": "CPU (NumPy)", "torch": "CPU (PyTorch)", "triton": "CPU (interpreter)"}[self.needs]

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the rung where this machine can, whatever device the tensors are on.

        Args:
            q: `(batch, seqlen_q, heads, head_dim)`; k, v: `(batch, seqlen_k, kv_heads, head_dim)`; fp16, bf16 or fp32; for rung 10
                float8_e4m3fn.
            softmax_scale: factor on the scores; `head_dim ** -0.5` when None.
            causal: bottom-right aligned causal mask.

        Returns:
            out like q (bf16 for float8) and lse `(batch, heads, seqlen_q)` fp32, both on q's device.

        Raises:
            RungUnavailable: when this machine cannot run it.
        """
        device = self.device()
        attention = self.load()
        if self.needs == "numpy":
            # NumPy has no bfloat16: widen to fp32 (exact), round the answer back
            arrays = [(x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy() for x in (q, k, v)]
            out, lse = (torch.from_numpy(x) for x in attention(*arrays, softmax_scale, causal))
        else:
            out, lse = attention(*(x.to(device) for x in (q, k, v)), softmax_scale, causal)
        return out.to(q.device, out.dtype if q.dtype.itemsize == 1 else q.dtype), lse.to(q.device, torch.float32)


def has_hopper() -> bool:
    """Whether the current GPU is one that the CuTe kernels are compiled for (sm_90)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _library(q, k, v, softmax_scale=None, causal=False):
    from fa3_lib import flash_attn_func

    return flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True)


@functools.cache
def _module(file: str):
    """A rung's file imported as a module. Its folder is not a package: chapter names start with a digit."""
    path = paths.checkout() / file
    name = f"fa3_rungs.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the DSL and Triton look a function's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# what the CuTe rungs import from the course: part of their kernels
_CUTE_PARTS = ("fa3_course/device_softmax.py", "fa3_course/rung_host.py")

_CHAPTER_1 = "chapters/01_online_softmax/steps"
_CHAPTER_2 = "chapters/02_tma_wgmma/steps"
_CHAPTER_3 = "chapters/03_pingpong/steps"

RUNGS = (
    Rung(
        "0",
        "eager",
        1,
        "three calls; all scores in memory",
        f"{_CHAPTER_1}/rung00_eager.py",
        "torch",
    ),
    Rung(
        "1",
        "online softmax",
        1,
        "one pass over key tiles",
        f"{_CHAPTER_1}/rung01_online_softmax.py",
        "numpy",
    ),
    Rung(
        "2",
        "Triton FA2",
        1,
        "the loop as one GPU kernel",
        f"{_CHAPTER_1}/rung02_triton_fa2.py",
        "triton",
    ),
    Rung(
        "3",
        "TMA + WGMMA",
        2,
        "one warpgroup, one stage, everything waits",
        f"{_CHAPTER_2}/rung03_tma_wgmma.py",
        "hopper",
    ),
    Rung("4", "ring", 2, "a producer warp and a ring of stages", f"{_CHAPTER_2}/rung04_ring.py", "hopper"),
    Rung(
        "5",
        "warp-specialised",
        2,
        "two consumer warpgroups, setmaxnreg",
        f"{_CHAPTER_2}/rung05_warp_specialised.py",
        "hopper",
    ),
    Rung(
        "6",
        "ping-pong",
        3,
        "the warpgroups take turns on the tensor cores",
        f"{_CHAPTER_3}/rung06_pingpong.py",
        "hopper",
    ),
    Rung(
        "7",
        "overlap",
        3,
        "softmax runs under the P V before it",
        f"{_CHAPTER_3}/rung07_overlap.py",
        "hopper",
    ),
    Rung(
        "7b",
        "overlap alone",
        3,
        "rung 7 without a producer and without turns: an ablation",
        f"{_CHAPTER_3}/rung07b_overlap_no_warp_specialisation.py",
        "hopper",
    ),
    Rung("8", "persistent", 3, "one CTA per SM walks over tiles", f"{_CHAPTER_3}/rung08_persistent.py", "hopper"),
    Rung("lib", "fa3_lib", 0, "the finished kernel", "fa3_lib/interface.py", "torch"),
)

# It takes e4m3 tensors only, and everything in RUNGS is compared and timed on the same 16-bit ones, so it is not among them:
# `find("10")`, `fa3 sass 10`, chapter 4's sitting b and `bench.forward` know it, `fa3 demo` does not.
RUNG10 = Rung("10", "FP8", 4, "8-bit operands, sums in two levels", "chapters/04_fp8/steps/rung10_fp8.py", "hopper")


def find(number: str) -> Rung:
    """The rung with this number ("2", "7b", "10", "lib"; "02" works too).

    Raises:
        KeyError: naming the rungs that exist.
    """
    every = (*RUNGS, RUNG10)
    for rung in every:
        if number.lstrip("0") == rung.number.lstrip("0"):
            return rung
    raise KeyError(f"no rung {number!r}; there are {', '.join(r.number for r in every)}")
