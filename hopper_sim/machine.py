"""The numbers of the machine, in one place and with their source. Nothing else in the package holds a constant of time.

Sources
    [guide]   NVIDIA, CUDA C++ Programming Guide, throughput table for compute capability 9.0
    [paper]   FlashAttention-3 (arXiv 2407.08608), section 2.2: 989 TFLOP/s of dense fp16 and 3.9 T special-function op/s on H100 SXM5
    [derived] arithmetic on the above
    [ncu]     measured with ncu, H200, 2026-11-29, fa3_lib's forward (and FA3's): profiles of whole kernels, not microbenchmarks
    [assumed] our estimate, of the size that public microbenchmarks of Hopper report; replaced when a measured timeline says otherwise
"""

from dataclasses import dataclass, fields, replace

from hopper_sim.faults import misuse


@dataclass(frozen=True)
class Machine:
    """One SM of a Hopper card, and how many of them the card has. Times are cycles of the SM clock.

    `replace(HOPPER, tma_latency=1500)` gives another machine; `validate()` refuses impossible values by name.
    """

    # capacity
    smem_bytes: int = 232_448  # shared memory of one CTA, 227 KB [guide]
    sm_smem_bytes: int = 233_472  # of all CTAs that share an SM, 228 KB [guide]
    cta_smem_bytes: int = 1024  # of them, what the system keeps of each CTA [guide]
    registers: int = 65_536  # 32-bit registers of an SM [guide]
    threads: int = 2048  # threads of an SM [guide]
    named_barriers: int = 16  # hardware barriers of a CTA; 0 belongs to sync_threads() [guide]

    # throughput per cycle
    tensor_flops_16bit: float = 4096.0  # bf16 / fp16 [derived: 989e12 / (132 SMs x 1.83e9)]
    tensor_flops_8bit: float = 8192.0  # e4m3 / e5m2, twice the 16-bit rate [derived]
    mufu: float = 16.0  # exp2 and other special functions [guide]
    fma: float = 128.0  # fp32 multiply, add, fused [guide]
    alu: float = 64.0  # fp32 min/max and conversions [guide]
    issue: float = 128.0  # lanes of the four warp schedulers [derived: 4 x 32]
    smem_bandwidth: float = 128.0  # bytes: 32 banks of 4 bytes [guide]
    tma_bandwidth: float = 64.0  # bytes from L2 into one SM [assumed]

    # what is left of those rates in a real instruction stream; a unit's busy cycles count its work at the full rate
    tensor_efficiency: float = (
        0.87  # FLOP rate over the share of cycles in which the tensor pipe counts as active: 0.84 to 0.90 [ncu]
    )
    math_efficiency: float = 0.63  # fma, alu, mufu: 64 x 128 exponentials take a warpgroup 1,300 cycles at 1.6 warpgroups per MUFU, not 820 [ncu]

    # latency in cycles
    tma_latency: float = 700.0  # issue of a load to its completion on the mbarrier, L2 hit [assumed]
    store_latency: float = 500.0  # TMA store: issue to shared memory read and data in L2 [assumed]
    global_latency: float = 500.0  # ordinary global loads and stores [assumed]
    wgmma_latency: float = 60.0  # last product to the result that a wait_group sees [assumed]
    math_latency: float = 30.0  # one dependent chain of register instructions [assumed]
    barrier_latency: float = 20.0  # last arrival to the wake-up of a waiter [assumed]
    setmaxnreg_latency: float = 20.0  # [assumed]
    launch_latency: float = 800.0  # start of a CTA: barriers, descriptors, first instructions [assumed]
    jitter: float = 0.2  # each latency is drawn from latency x (1 - jitter .. 1 + jitter)

    # sharing
    quantum: float = 64.0  # cycles that a unit serves one warpgroup before it looks at the next [assumed]
    wgmma_issue: float = 32.0  # cycles from one k-step's issue to the next one of the same warpgroup: 12 in 390 [ncu]

    # the card
    sms: int = 132  # H100 SXM5 and H200 [paper]
    clock_ghz: float = 1.83  # the clock of the paper's 989 TFLOP/s; a card under load runs slower [paper]

    def validate(self) -> "Machine":
        """Returns self, or raises `Fault` (kind "bad use") that names the value and the rule."""
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name.endswith("latency") or field.name == "jitter"
            if not (value >= 0 if may_be_zero else value > 0):
                rule = "must not be negative" if may_be_zero else "must be positive"
                raise misuse(f"machine: {field.name} = {value} {rule}")
            if field.name.endswith("efficiency") and value > 1:
                raise misuse(f"machine: {field.name} = {value} must be at most 1")
        if self.jitter > 1:
            raise misuse(f"machine: jitter = {self.jitter} must be at most 1: latencies would turn negative")
        return self

    def with_(self, **changes: float) -> "Machine":
        """A checked copy with some values changed; an unknown name is refused."""
        unknown = set(changes) - {field.name for field in fields(self)}
        if unknown:
            raise misuse(f"machine: no value is called {', '.join(sorted(unknown))}")
        return replace(self, **changes).validate()

    def efficiency(self, unit: str) -> float:
        """The fraction of its full rate at which a unit works."""
        if unit == "tensor core":
            return self.tensor_efficiency
        return self.math_efficiency if unit in ("mufu", "fma", "alu") else 1.0

    def resident_ctas(self, threads: int, registers: int, smem_bytes: int) -> int:
        """How many CTAs of one kernel share an SM; 0 when not even one fits.

        Args:
            threads: of a CTA. registers: per thread at launch (allotted in eights). smem_bytes: shared memory of a CTA.
        """
        if min(threads, registers, smem_bytes) < 1:
            raise misuse(f"resident_ctas({threads}, {registers}, {smem_bytes}): all three must be at least 1")
        if smem_bytes > self.smem_bytes:
            return 0
        by_registers = self.registers // (threads * (-(-registers // 8) * 8))
        by_smem = self.sm_smem_bytes // (smem_bytes + self.cta_smem_bytes)
        return min(by_registers, by_smem, self.threads // threads)

    def tflops(self, flops: float, cycles: float) -> float:
        """TFLOP/s of the whole card when every SM does `flops` in `cycles`."""
        return flops / cycles * self.sms * self.clock_ghz * 1e-3


HOPPER = Machine()
