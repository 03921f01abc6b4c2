"""`fa3 sim RUNG`: a rung of the ladder on the simulated SM, without a GPU."""

import json as json_module
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

MOST_BLOCKS = 4096  # (query tile, key tile) pairs; more takes minutes in NumPy and shows nothing new


def sim(
    rung: Annotated[str, typer.Argument(help="3, 4, 5, 6, 7, 7b, 8, 9, 10 or 11.")],
    d: Annotated[int, typer.Option("--d", help="Head dim, a multiple of 8 up to 256.")] = 128,
    seqlen: Annotated[int, typer.Option(min=1, help="Queries; also keys, unless --seqlen-k says otherwise.")] = 1024,
    seqlen_k: Annotated[int | None, typer.Option(min=1, help="Keys.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask, aligned at the last key.")] = False,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 1,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads; as many as query heads by default.")] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Slots of the K ring and of the V ring.")] = None,
    tile_n: Annotated[int | None, typer.Option(min=16, help="Keys of one block.")] = None,
    tma_latency: Annotated[float | None, typer.Option(help="Cycles of a TMA load.")] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs and of the drawn latencies.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Write the timeline of the first CTA as a picture (.png, .svg, .pdf).")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write that timeline as JSON.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write it for https://ui.perfetto.dev.")] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Also compare predictions with the stored measurements.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a rung on the simulated Hopper SM: error against fp64, verdict, predicted TFLOP/s and the bound behind it."""
    from fa3_course import simulated
    from hopper_sim import HOPPER, Fault

    changes = {name: value for name, value in (("stages", stages), ("tile_n", tile_n)) if value is not None}
    keys, kv = seqlen_k or seqlen, kv_heads or heads
    try:
        config = simulated.configuration(rung, d, causal, seqlen, **changes)
        machine = HOPPER if tma_latency is None else HOPPER.with_(tma_latency=tma_latency)
        pairs = batch * heads * sum(config.key_blocks(m, seqlen, keys) for m in range(-(-seqlen // config.tile_m)))
        if pairs > MOST_BLOCKS:
            raise ValueError(
                f"{pairs} pairs of query and key tiles; up to {MOST_BLOCKS} are simulated: take a shorter --seqlen"
            )
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal((batch, s, h, d)) for s, h in ((seqlen, heads), (keys, kv), (keys, kv)))
        problem = simulated.make_problem(rung, q, k, v, causal, config=config)
    except (ValueError, Fault) as error:
        raise SystemExit(f"fa3 sim: {error}") from None

    try:
        result = simulated.run(rung, problem, machine=machine, seed=seed)
    except Fault as fault:
        print(
            json_module.dumps({"rung": rung, "verdict": str(fault.kind), "message": str(fault)})
            if json
            else f"verdict    {fault}"
        )
        raise typer.Exit(1) from None

    summary = _summary(rung, problem, result, (q, k, v), d, causal, seqlen, machine)
    try:
        written = _write(rung, result, summary, plot, timeline, perfetto)
    except (OSError, ValueError) as error:  # no such folder, no such picture format
        raise SystemExit(f"fa3 sim: {error}") from None
    if table:
        from fa3_course import results
        from fa3_course.simulated import predict

        summary["table"] = predict.table(results.latest())
    if json:
        print(json_module.dumps(summary | {"written": written}, indent=2))
    else:
        _print(summary, written)


def _summary(rung, problem, result, inputs, d, causal, seqlen, machine) -> dict:
    """Everything that the command says, as plain data."""
    import torch

    from fa3_course import simulated
    from fa3_course.simulated import predict
    from fa3_lib.reference import attention

    if not simulated.rung(
        rung
    ).fp8:  # the truth starts from the rounded inputs; for FP8, rounding them is part of the error
        inputs = tuple(tensor.numpy() for tensor in (problem.q, problem.k, problem.v))
    truth = attention(*(torch.from_numpy(np.asarray(x, dtype=np.float64)) for x in inputs), causal=causal)[0].numpy()
    report, c = result.report, problem.config
    # the same configuration as the library's: a prediction for the whole card; with --stages or --tile-n, the run speaks alone
    standard = c == simulated.configuration(rung, d, causal, seqlen)
    card = predict.predict(rung, d, causal, max(seqlen, c.tile_m), machine=machine) if standard else None
    return {
        "rung": rung,
        "title": simulated.rung(rung).title,
        "config": vars(c),
        "seqlen": seqlen,
        "verdict": "clean",
        "relative_error": float(np.linalg.norm(result.out - truth) / np.linalg.norm(truth)) if truth.any() else 0.0,
        "largest_error": float(np.abs(result.out - truth).max()),
        "cycles": report.cycles,
        "ctas": len(report.cta_ends),
        "resident_ctas": simulated.rung(rung).resident_ctas(c, machine),
        "busy": {unit: round(report.share(unit), 4) for unit in report.busy},
        "bound": card.bound if card else report.bound,
        "predicted_tflops": card.tflops if card else None,
        "cap_tflops": card.cap if card else None,
        "clock_ghz": machine.clock_ghz,
        "sms": machine.sms,
    }


def _print(s: dict, written: dict) -> None:
    c = s["config"]
    print(f"rung {s['rung']}: {s['title']}")
    print(
        f"tiles      {c['tile_m']} queries x {c['tile_n']} keys, head dim {c['head_dim']}, {c['stages']} stage(s){', causal' if c['causal'] else ''}"
    )
    print(f"error      {s['relative_error']:.1e} relative, {s['largest_error']:.1e} at most, against fp64")
    print("verdict    clean: no deadlock, no race, every element written once")
    print(f"time       {s['cycles']:.0f} cycles for {s['ctas']} CTA(s), one after the other on one SM")
    busiest = sorted(s["busy"].items(), key=lambda item: -item[1])[:4]
    print(f"units      {', '.join(f'{unit} {share:.0%}' for unit, share in busiest)} of their full rates")
    if s["predicted_tflops"] is not None:
        print(
            f"predicted  {s['predicted_tflops']:.0f} TFLOP/s on {s['sms']} SMs at {s['clock_ghz']} GHz, {s['resident_ctas']} CTA(s) on each, 16k tokens in sequences of {s['seqlen']}, hidden size 2048"
        )
        print(f"bound      {s['bound']}: {s['cap_tflops']:.0f} TFLOP/s if it never stood still")
    else:
        print(f"bound      {s['bound']} (a prediction for the card needs the library's own stages and tile_n)")
    for what, path in written.items():
        print(f"{what:<10} {path}")
    if "table" in s:
        print(f"\n{s['table']}")


def _write(
    rung: str, result, summary: dict, plot: Path | None, json_path: Path | None, perfetto: Path | None
) -> dict[str, str]:
    """Writes the files that were asked for; returns what and where."""
    from fa3_course import timeline as timelines

    if not (plot or json_path or perfetto):
        return {}
    meta = {name: summary[name] for name in ("rung", "title", "config", "cycles")}
    full = timelines.from_dict(result.report.timeline.as_dict(source="hopper_sim", **meta))
    first = full.cut(0.0, result.report.cta_ends[0])
    written = {}
    if plot:
        import matplotlib

        matplotlib.use("Agg")
        title = f"Rung {rung}, {summary['title']}: tensor core at {summary['busy']['tensor core']:.0%} of its peak"
        timelines.draw(first, title).savefig(plot)
        written["plot"] = str(plot)
    if json_path:
        timelines.write(first, json_path)
        written["timeline"] = str(json_path)
    if perfetto:
        timelines.write_perfetto(first, perfetto)
        written["perfetto"] = str(perfetto)
    return written
