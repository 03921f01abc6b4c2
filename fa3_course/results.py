"""Stored measurements: the only reader and writer of `bench/results/*.json`.

A file holds one run: `{"run": {...}, "rows": [{...}, ...]}`. Every speed in a lesson, a plot or a README comes from a
`Row` of a `Run`, and rows are compared only within one run, since cards and clocks differ between runs.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
EXPERIMENTS = "experiments_"  # files of variants that a lesson compares, apart from the runs of whole kernels

# A keyword of Python cannot be the name of a field, so the JSON key "pass" is the attribute `direction`.
_JSON_NAME = {"direction": "pass"}
_FIELD_NAME = {json_name: name for name, json_name in _JSON_NAME.items()}


@dataclass(frozen=True)
class Row:
    """One kernel on one shape, or the reason why it was not measured there.

    Attributes:
        kernel: `cublas`, `cudnn`, `fa2`, `fa3`, `fa4`, `fa3_lib` or the file name of a rung (`rung02_triton_fa2`).
        rung: the rung's number as text (`"2"`, `"7b"`), None for peers and the library.
        direction: JSON key `pass`: `fwd` or `gemm` (the cuBLAS yardstick: `seqlen` cubed, no heads).
        dtype: of the operands: `bf16`, `fp16`, `fp8` or `fp32`.
        head_dim, causal, batch, seqlen, heads: the shape; None in a row whose `skipped` holds for all shapes without a row of their own.
        ms, ms_p25, ms_p75: time of one call in milliseconds: median and quartiles over all repeats of all rounds.
        tflops: 1e12 floating-point operations per second at the median; causal counts half of the full square.
        sm_mhz, watts: medians of the SM clock and the board power, sampled while this kernel ran.
        host_us: host time of one eager call on a tiny shape (enqueue only), in microseconds.
        error: relative error `|out - truth| / |truth|` (Frobenius) on a small shape of the same head_dim and mask.
        timer: `graph` (CUDA graph, inputs rotated past L2), `events` (eager, CUDA events) or `cpu` (wall clock).
        source, source_hash: repository files that make this kernel and the hash over them; empty for peers.
        skipped: why there is no time, None if there is one.
    """

    kernel: str
    direction: str
    dtype: str
    rung: str | None = None
    head_dim: int | None = None
    causal: bool | None = None
    batch: int | None = None
    seqlen: int | None = None
    heads: int | None = None
    ms: float | None = None
    ms_p25: float | None = None
    ms_p75: float | None = None
    tflops: float | None = None
    sm_mhz: float | None = None
    watts: float | None = None
    host_us: float | None = None
    error: float | None = None
    timer: str | None = None
    source: tuple[str, ...] = ()
    source_hash: str | None = None
    skipped: str | None = None

    @property
    def measured(self) -> bool:
        return self.ms is not None

    @property
    def shape(self) -> str:
        """The shape in words: `d128 causal b1 s16384 h16`."""
        if self.seqlen is None:
            return "every other shape"
        if self.direction == "gemm":
            return f"{self.seqlen} cubed"
        mask = "causal" if self.causal else "full"
        return f"d{self.head_dim} {mask} b{self.batch} s{self.seqlen} h{self.heads}"

    def is_stale(self, root: Path = ROOT) -> bool:
        """True if the files that make this kernel are no longer those that were measured."""
        return bool(self.source) and self.source_hash != source_hash(self.source, root)


@dataclass(frozen=True)
class Run:
    """One call of `python -m bench.forward` on one machine: its circumstances and its rows.

    Attributes:
        gpu: name of the card, None for a run on a CPU.
        driver, cuda, cudnn, torch, triton, cutlass_dsl, python: versions, None where absent.
        peers: version of each importable peer, by kernel name.
        commit, dirty: git revision and whether files differed from it; None where git does not know.
        date: UTC, ISO 8601. command: what was typed. grid, dtype, seed: what was asked for.
        power_limit_w, l2_bytes, sms: the card's limits.
        finished: False while the run is going on, or if it was killed.
    """

    date: str
    command: str
    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    torch: str | None = None
    triton: str | None = None
    cutlass_dsl: str | None = None
    python: str | None = None
    peers: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    dirty: bool | None = None
    power_limit_w: float | None = None
    l2_bytes: int | None = None
    sms: int | None = None
    grid: str | None = None
    dtype: str | None = None
    seed: int | None = None
    finished: bool = False
    rows: tuple[Row, ...] = ()
    path: Path | None = None

    def select(self, **wanted: object) -> list[Row]:
        """Measured rows whose fields equal `wanted`, e.g. `run.select(head_dim=128, causal=False, seqlen=16384)`."""
        return select(self.rows, **wanted)

    def one(self, **wanted: object) -> Row | None:
        """The one measured row that matches, None if there is none; ValueError if several match."""
        found = self.select(**wanted)
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} rows match {wanted}: {', '.join(f'{r.kernel} {r.dtype} {r.shape}' for r in found)}"
            )
        return found[0] if found else None

    def stale(self, root: Path = ROOT) -> list[Row]:
        """Measured rows whose kernel has changed since."""
        return [row for row in self.rows if row.measured and row.is_stale(root)]


def source_hash(files: Iterable[str], root: Path = ROOT) -> str:
    """sha256 over the names and bytes of repository files, in the order of their names; a missing file counts as empty.

    Line ends are read as `\\n`, so that the hash does not depend on how git checked the files out.
    """
    digest = hashlib.sha256()
    for name in sorted(files):
        path = root / name
        text = path.read_bytes().replace(b"\r\n", b"\n") if path.is_file() else b""
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def select(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """Measured rows whose fields equal `wanted`; a list or tuple means any of its values. TypeError on an unknown field."""
    known = {f.name for f in fields(Row)}
    if unknown := sorted(set(wanted) - known):
        raise TypeError(f"a row has no field {', '.join(unknown)}; fields are {', '.join(sorted(known))}")

    def matches(row: Row) -> bool:
        for name, value in wanted.items():
            allowed = value if isinstance(value, (list, tuple)) and name != "source" else (value,)
            if getattr(row, name) not in allowed:
                return False
        return True

    return [row for row in rows if row.measured and matches(row)]


def read(path: str | Path) -> Run:
    """The run in one file. ValueError, with the file's name, if it is not a run."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        files = data.get("sources", {})
        rows = tuple(_row({"source": files.get(r.get("source_hash"), ())} | r) for r in data["rows"])
        return Run(**data["run"], rows=rows, path=path)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of bench results: {error}") from error


def load(directory: str | Path = RESULTS) -> list[Run]:
    """All stored runs of `bench.forward`, oldest first; an empty list where none are stored."""
    paths = (path for path in Path(directory).glob("*.json") if not path.name.startswith(EXPERIMENTS))
    return sorted((read(path) for path in paths), key=lambda run: run.date)


def experiments(chapter: str, directory: str | Path = RESULTS) -> Run | None:
    """The newest run of a chapter's experiments ("02": `experiments_02_*.json`), None where none is stored."""
    runs = [read(path) for path in Path(directory).glob(f"{EXPERIMENTS}{chapter}_*.json")]
    return max((run for run in runs if run.gpu), key=lambda run: run.date, default=None)


def latest(runs: Sequence[Run] | None = None, kernel: str | None = None) -> Run | None:
    """The newest run on a GPU (that measured `kernel`, if one is named), or None."""
    runs = load() if runs is None else runs
    good = [run for run in runs if run.gpu and (run.select(kernel=kernel) if kernel else run.select())]
    return max(good, key=lambda run: run.date, default=None)


def write(path: str | Path, run: Run) -> None:
    """Stores a run, one row a line, without empty fields, replacing the file in one step so that a reader never sees half of it.

    The files that make a kernel are named once, under the hash that its rows have.
    """
    path = Path(path)
    head = {k: v for k, v in asdict(run).items() if k not in ("rows", "path")}
    files = {row.source_hash: row.source for row in run.rows if row.source_hash and row.source}
    lines = [json.dumps(_as_json(row, files), allow_nan=False) for row in run.rows]
    rows = "[\n  " + ",\n  ".join(lines) + "\n]" if lines else "[]"
    text = f'{{\n"run": {json.dumps(head, indent=1, allow_nan=False)},\n"sources": {json.dumps(files)},\n"rows": {rows}\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _as_json(row: Row, files: dict[str, tuple[str, ...]]) -> dict:
    """The row's fields that hold something and that `files`, by hash, do not say, under their JSON names."""
    fields = {_JSON_NAME.get(name, name): value for name, value in asdict(row).items() if value not in (None, ())}
    if files.get(row.source_hash) == row.source:
        fields.pop("source", None)
    return fields


def _row(data: dict) -> Row:
    values = {_FIELD_NAME.get(k, k): v for k, v in data.items()}
    if {"kernel", "direction", "dtype"} - set(values):
        raise ValueError(f"a row needs kernel, pass and dtype: {data}")
    values["source"] = tuple(values.get("source", ()))
    row = Row(**values)
    if row.measured == (row.skipped is not None):
        raise ValueError(f"a row has either a time or a reason for having none: {data}")
    return row
