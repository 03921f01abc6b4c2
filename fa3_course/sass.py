"""What is in a kernel's machine code: registers, spills, shared memory, instruction counts. No GPU is needed.

Works for any sm_90a cubin; `compile_report` gets more out of a CuTe DSL kernel (spilled bytes, shared memory and ptxas'
advisories are not in a cubin). Counts are static: an instruction in a loop counts once.
"""

import contextlib
import io
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path

# SASS instructions that the course talks about, and what each is
LANDMARKS = {
    "HGMMA": "tensor core, fp16/bf16 (WGMMA)",
    "QGMMA": "tensor core, fp8 (WGMMA)",
    "HMMA": "tensor core, as on Ampere (a warp's own, synchronous)",
    "UTMALDG": "TMA load",
    "UTMASTG": "TMA store",
    "LDGSTS": "cp.async load, as on Ampere",
    "USETMAXREG": "setmaxnreg: registers handed between warpgroups",
    "SYNCS": "mbarrier operation",
    "BAR": "named barrier",
    "MUFU.EX2": "exp2 on the special-function unit",
    "STL": "store to local memory (a spill, if not printf)",
    "LDL": "load from local memory",
}

_MAX_SHARED = 232_448  # bytes of shared memory that one CTA may use on sm_90
_SYMBOL_TABLE, _CUDA_INFO = 2, 0x7000_0000  # ELF section types
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # attributes in .nv.info
# /*0a40*/   @!UP0 UTMALDG.4D [UR8], [UR4] ;
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


class ToolMissing(RuntimeError):
    """A tool is not on this machine; the message names the command that brings it."""


@dataclass(frozen=True)
class KernelReport:
    """Static facts about one kernel.

    Args:
        name: symbol name of the kernel.
        registers: 32-bit registers per thread at launch (a warp-specialised kernel redistributes them: USETMAXREG).
        stack: bytes of local memory per thread (spills, or printf's arguments).
        opcodes: how often each SASS instruction stands in the code, by full name ("MUFU.EX2", "HGMMA.64x128x16.F32").
        spill_store, spill_load: bytes spilled and reloaded, from ptxas; None where only a cubin was seen.
        smem: bytes of dynamic shared memory at launch; None where only a cubin was seen.
        advisories: ptxas' performance advisories (C75xx: setmaxnreg ignored, WGMMA serialised, ...).
        listing: the SASS of the kernel's whole cubin, as `disassemble` gives it.
    """

    name: str
    registers: int
    stack: int
    opcodes: Counter = field(repr=False)
    spill_store: int | None = None
    spill_load: int | None = None
    smem: int | None = None
    advisories: tuple[str, ...] = ()
    listing: str = field(default="", repr=False, compare=False)

    @property
    def instructions(self) -> int:
        return self.opcodes.total()

    def count(self, prefix: str) -> int:
        """Instructions named `prefix` or `prefix.*`: `count("HGMMA")`, `count("MUFU.EX2")`."""
        return sum(n for name, n in self.opcodes.items() if name == prefix or name.startswith(prefix + "."))

    def problems(self) -> list[str]:
        """What a finished kernel must not have, in words; empty when it has none of it."""
        found = [f"ptxas advisory: {text}" for text in self.advisories]
        if self.stack or self.count("STL") or self.count("LDL"):
            found.append(f"local memory: {self.stack} bytes of stack, {self.count('STL')} STL, {self.count('LDL')} LDL")
        if self.spill_store or self.spill_load:
            found.append(f"spills: {self.spill_store} bytes stored, {self.spill_load} bytes loaded")
        if self.smem is not None and self.smem > _MAX_SHARED:
            found.append(f"shared memory: {self.smem} bytes, a CTA has {_MAX_SHARED}")
        return found

    def as_dict(self) -> dict:
        """Everything, with the landmark counts by name, ready for JSON."""
        return {
            "name": self.name,
            "registers": self.registers,
            "stack": self.stack,
            "spill_store": self.spill_store,
            "spill_load": self.spill_load,
            "smem": self.smem,
            "instructions": self.instructions,
            "landmarks": {name: self.count(name) for name in LANDMARKS},
            "advisories": list(self.advisories),
            "opcodes": dict(sorted(self.opcodes.items())),
        }


# --- tools -----------------------------------------------------------------------------------------------------------


def nvdisasm() -> str:
    """Path of NVIDIA's disassembler: the wheel's, else the PATH's, else the copy in Triton's wheel.

    Raises:
        ToolMissing: when there is none.
    """
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("nvidia-cuda-nvdisasm") or ():
            if file.name in ("nvdisasm", "nvdisasm.exe"):
                return str(file.locate())
    if found := shutil.which("nvdisasm"):
        return found
    if spec := util.find_spec("triton"):
        copy = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if copy.is_file():
            return str(copy)
    raise ToolMissing("nvdisasm not found: pip install nvidia-cuda-nvdisasm")


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, as nvdisasm prints it (code sections only)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([nvdisasm(), "-c", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"nvdisasm refused the cubin: {done.stderr.strip() or 'no message'}")
    return done.stdout


def program(listing: str) -> list[str]:
    """The opcodes of a listing of one kernel, first to last."""
    return _INSTRUCTION.findall(listing)


# --- reading a cubin -------------------------------------------------------------------------------------------------


def cubin_report(cubin: bytes) -> list[KernelReport]:
    """One report per kernel of an sm_90a cubin (CuTe DSL's, Triton's, nvcc's).

    Raises:
        ValueError: when the bytes are not a cubin.
        ToolMissing: without nvdisasm.
    """
    try:
        resources = _resources(cubin)
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a whole cubin: {error}") from None
    listing = disassemble(cubin)
    return [
        KernelReport(name, found.get(_REGISTERS, 0), found.get(_FRAME_SIZE, 0), counts, listing=listing)
        for name, counts in _count_opcodes(listing).items()
        for found in (resources[name],)
    ]


def _count_opcodes(sass: str) -> dict[str, Counter]:
    """Kernel name -> how often each opcode stands in it."""
    kernels: dict[str, Counter] = {}
    current = None
    for line in sass.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([^,\s]+)", line):
            current = kernels.setdefault(section[1], Counter())
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current[found[1]] += 1
    return kernels


def _resources(cubin: bytes) -> dict[str, dict[int, int]]:
    """Kernel name -> {attribute: value}, from the ELF section .nv.info.

    Its records are (format byte, attribute byte, uint16 size or value); format 4 is followed by `size` bytes, which for
    the attributes read here are (symbol index, value).
    """
    if cubin[:4] != b"\x7fELF":
        raise ValueError("not a cubin: the bytes do not begin with the ELF magic")

    def text(offset: int) -> str:
        return cubin[offset : cubin.index(b"\0", offset)].decode()

    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, entries, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    # name, type, flags, address, offset, size, link of each section
    sections = [struct.unpack_from("<IIQQQQI", cubin, table + i * entry_size) for i in range(entries)]
    names_at = sections[names_index][4]

    symbols: list[str] = []
    for _, kind, _, _, offset, size, link in sections:
        if kind == _SYMBOL_TABLE:
            strings_at = sections[link][4]
            symbols = [
                text(strings_at + struct.unpack_from("<I", cubin, at)[0]) for at in range(offset, offset + size, 24)
            ]

    found: dict[str, dict[int, int]] = {name: {} for name in symbols}
    for name, kind, _, _, offset, size, _ in sections:
        if kind != _CUDA_INFO or text(names_at + name) != ".nv.info":
            continue
        at = offset
        while at < offset + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == 4:
                if attribute in (_FRAME_SIZE, _REGISTERS):
                    symbol, value = struct.unpack_from("<II", cubin, at)
                    found[symbols[symbol]][attribute] = value
                at += length
    return found


# --- compiling a CuTe DSL kernel -------------------------------------------------------------------------------------


def compile_report(compile_fn: Callable[[str], object]) -> list[KernelReport]:
    """Compiles a CuTe DSL kernel and reports on it.

    Args:
        compile_fn: called once with compiler options (a string to append to its own, which name `--gpu-arch sm_90a`);
            returns what `cute.compile` returns.

    Returns:
        One report per kernel, with spilled bytes, shared memory and advisories.
    """
    from fa3_lib.compiler import COMPILE_LOCK

    messages = io.StringIO()
    # a folder per compile: dump names come from argument types, so two variants would overwrite each other
    with tempfile.TemporaryDirectory() as folder, COMPILE_LOCK, contextlib.redirect_stderr(messages):
        compiled = compile_fn(f"--keep-cubin --dump-dir {folder} remarks{{ptx}}")
        cubin = compiled.__cubin__
    remarks = re.sub(r"\x1b\[[0-9;]*m|\n\s+", " ", messages.getvalue())
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    if not spills:
        raise RuntimeError(
            "ptxas' remarks hold no spill counts: this version of nvidia-cutlass-dsl prints them elsewhere"
        )
    shared = _launch_shared_memory(str(compiled.ir_module))
    reports = cubin_report(cubin)
    if len(reports) > 1 and any(int(n) for pair in spills for n in pair):
        raise RuntimeError(f"{len(reports)} kernels in one cubin spill: compile them one by one to tell which")
    return [
        replace(
            r,
            spill_store=sum(int(stores) for stores, _ in spills),
            spill_load=sum(int(loads) for _, loads in spills),
            smem=max(shared, default=None),
            advisories=tuple(text.strip() for text in re.findall(r"\(C7\d{3}\)[^.]*\.", remarks)),
        )
        for r in reports
    ]


def _launch_shared_memory(host_ir: str) -> list[int]:
    """Bytes of dynamic shared memory of each launch, read from the host code's LLVM IR.

    The launch configuration is a struct {3 x i32 grid, 3 x i32 block, i64 shared memory, ...}: the constant stored
    through its field 2 is the answer.
    """
    constants = dict(re.findall(r"(%\S+) = llvm\.mlir\.constant\((\d+) : i64\)", host_ir))
    found = []
    for field_2 in re.finditer(
        r"(%\S+) = llvm\.getelementptr %\S+\[0, 2\][^\n]*array<3 x i32>, array<3 x i32>, i64", host_ir
    ):
        store = re.search(r"llvm\.store (%\S+), " + re.escape(field_2[1]) + r"\b", host_ir[field_2.end() :])
        if store and store[1] in constants:
            found.append(int(constants[store[1]]))
    return found
