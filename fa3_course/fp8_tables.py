"""FP8 attention's speeds and errors as Markdown, from the rows that `python -m bench.fp8` stored: for the README."""

from fa3_course.comparison import LONG, mean_ratio
from fa3_course.results import Run

# kernel in the rows: as people read it
WHO = {"fa3_lib": "**fa3_lib**", "fa3_lib one level": "fa3_lib, `two_level=False`", "fa3": "FA3 (C++)"}
PEER = "fa3"
SEQLEN = 16_384  # of the short table
KEYS = (4096, 16_384, 65_536, 262_144)
QUESTIONS = ("V = 1", "V has a mean", "needle")
PAPER = {  # arXiv:2407.08608, table 3: root mean square errors
    "one scale per tensor": 2.4e-2,
    "one scale per tensor, rotated": 9.3e-3,
    "one scale per block": 2.4e-2,
    "one scale per block, rotated": 9.1e-3,
}

Speeds = dict[tuple[int, bool, int], dict[str, float]]  # (head dim, causal, seqlen): TFLOP/s by kernel


def speeds(run: Run) -> Speeds:
    """The shapes that all of `WHO` were measured on."""
    found: Speeds = {}
    for row in run.select(direction="fwd", dtype="fp8"):
        if row.kernel in WHO:
            found.setdefault((row.head_dim, row.causal, row.seqlen), {})[row.kernel] = row.tflops
    return {shape: found[shape] for shape in sorted(found) if len(found[shape]) == len(WHO)}


def errors(run: Run) -> dict[str, dict[str, dict[int, float]]]:
    """question: {who: {keys: error}}; for table 3 and MiniLM, who is the way of quantising."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in run.rows:
        if row.measured and row.error is not None:
            question, _, who = row.kernel.partition(": ")
            found.setdefault(question, {}).setdefault(who, {})[row.seqlen] = row.error
    return found


def markdown(fast: Run | None, exact: Run | None) -> str:
    """Both tables under a heading; empty without rows."""
    parts = [speed_tables(fast) if fast else "", error_tables(exact) if exact else ""]
    return "\n\n".join(["### FP8", *filter(None, parts)]) if any(parts) else ""


def speed_tables(run: Run) -> str:
    table = speeds(run)
    columns = [(d, causal) for d, causal, seqlen in table if seqlen == SEQLEN]
    if not columns:
        return ""
    yardstick = "".join(f"; cuBLAS {row.tflops:.0f}" for row in run.select(direction="gemm", dtype="fp8"))
    lines = [header("", *(f"d{d} {mask(causal)}" for d, causal in columns))]
    for kernel, label in WHO.items():
        lines.append(cells(label, *(f"{table[d, causal, SEQLEN][kernel]:.0f}" for d, causal in columns)))
    lines += [
        "",
        f"FP8 (e4m3), TFLOP/s at sequence length {SEQLEN}, V's transpose included where there is one{yardstick}. {origin(run)} "
        f"Geometric means over FA3's FP8 from {LONG} tokens on: {means(run)}.",
        "",
        "<details><summary>Every shape in FP8 (TFLOP/s)</summary>",
        "",
        header("", *WHO.values(), "fa3_lib to FA3"),
    ]
    for (d, causal, seqlen), row in table.items():
        ratio = f"{row['fa3_lib'] / row[PEER]:.2f}"
        lines.append(cells(f"d{d} {mask(causal)} {seqlen}", *(f"{row[kernel]:.0f}" for kernel in WHO), ratio))
    return "\n".join([*lines, "", "</details>"])


def means(run: Run) -> str:
    """`fa3_lib 0.96 (d64 full 1.06, ...), with two_level=False 1.01`."""
    kinds = sorted({(d, causal) for d, causal, seqlen in speeds(run) if seqlen >= LONG})
    each = ", ".join(f"d{d} {mask(causal)} {mean_ratio(run, 'fa3_lib', PEER, d, (causal,)):.2f}" for d, causal in kinds)
    both, one_level = (mean_ratio(run, kernel, PEER) for kernel in ("fa3_lib", "fa3_lib one level"))
    return f"fa3_lib {both:.2f} ({each}), with `two_level=False` {one_level:.2f}"


def error_tables(run: Run) -> str:
    found = errors(run)
    asked = [question for question in QUESTIONS if question in found]
    if not asked:
        return ""
    lines = [header("error", *(f"{keys // 1024}k keys" for keys in KEYS))]
    for question in asked:
        for who, label in WHO.items():
            values = map(found[question].get(who, {}).get, KEYS)
            lines.append(cells(f"{question}: {label}", *("-" if x is None else f"{100 * x:.2g} %" for x in values)))
    lines += [
        "",
        "Relative errors against fp64 with 64 queries, d128; V = 1: every value is 1, and so is every answer; V has a mean: N(1, 1), as "
        f"real values have one; needle: bits read wrong of one value among the keys. {origin(run)}",
    ]
    if third := {who: x for who, x in found.get("table 3", {}).items() if who in PAPER}:
        (keys,) = {keys for x in third.values() for keys in x}
        lines += ["", header("the paper's table 3", *third)]
        lines.append(cells("paper", *(f"{PAPER[who]:.1e}" for who in third)))
        lines.append(cells("**fa3_lib**", *(f"{x[keys]:.1e}" for x in third.values())))
        lines += [
            "",
            f"Root mean square errors, {keys} keys, d128: Q, K and V of N(0, 1) and one in a thousand of N(0, 100).",
        ]
    return "\n".join(lines)


def mask(causal: bool) -> str:
    return "causal" if causal else "full"


def header(*names: str) -> str:
    return f"{cells(*names)}\n|---|" + "---:|" * (len(names) - 1)


def cells(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def origin(run: Run) -> str:
    commit = f", commit {run.commit[:10]}" if run.commit else ""
    stale = " The source of fa3_lib has changed since, and these rows are the old version's." if run.stale() else ""
    return f"{run.gpu}, {run.date[:10]}{commit}.{stale}"
