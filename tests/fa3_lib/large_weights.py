"""Scores that jump between key blocks: what a softmax that keeps an earlier block's maximum has to survive."""

import math

import torch

from fa3_lib import reference
from fa3_lib.config import ceil_div
from tests.fa3_lib import masked_truth
from tests.tolerance import assert_at_most, largest_error

# nats above the kept maximum at which one weight alone is too large (`fa3_lib.consumer.Consumer.largest_sum`)
LIMITS = {torch.float16: 14 * math.log(2), torch.bfloat16: 40 * math.log(2)}
KINDS = ("near the limit", "hundreds", "rising", "falling", "anywhere")
ROWS = ("one", "every", "8 apart", "random")
COLUMNS = 8  # of the head dim, one for each course that a row's scores may take


def an_integer(end: int) -> int:
    return int(torch.randint(end, ()))


def courses(kind: str, seqlen_k: int, tile_n: int, limit: float) -> torch.Tensor:
    """(n, seqlen_k), n up to 8: what is added to a row's scores, in nats. Key blocks are visited from the last one down."""
    blocks = ceil_div(seqlen_k, tile_n)
    visit = blocks - 1 - torch.arange(seqlen_k) // tile_n  # 0 for the last keys

    def one_key(jump):
        course = torch.zeros(seqlen_k)
        course[an_integer(max(1, (blocks - 1) * tile_n))] = jump
        return course

    def one_block(jump):
        return jump * (visit == 1 + an_integer(max(1, blocks - 1)))

    if kind == "near the limit":
        many = math.log(tile_n / 4)  # a thread adds so many weights of a row
        found = [one_key(limit + delta) for delta in (-4, -1, 0, 1, 4)]
        found += [one_block(limit - many + delta) for delta in (-1, 0, 1)]
    elif kind == "hundreds":  # exp overflows above 88
        found = [one_key(150), one_key(400), one_block(250), one_block(-300), one_key(100) + one_block(120)]
    elif kind in ("rising", "falling"):
        found = [step * limit * visit for step in (0.1, 0.5, 0.97, 1.05)]
        found = [-course for course in found] if kind == "falling" else found
    else:
        steps = torch.tensor((0, 0, 0, limit / 2, 2 * limit, -2 * limit, 100, -100))
        found = [steps[torch.randint(len(steps), (blocks,))].cumsum(0)[visit] for _ in range(COLUMNS)]
    return torch.stack(found)


def add_courses(q: torch.Tensor, k: torch.Tensor, kind: str, rows: str, tile_n: int) -> torch.Tensor:
    """Gives rows of q `(b, sq, h, d)` their courses, by the last 8 columns of q and k (softmax_scale d ** -0.5).

    Returns which rows have one, `(sq, h)`.
    """
    seqlen_q, heads, d = q.shape[1:]
    course = courses(kind, k.shape[1], tile_n, LIMITS[q.dtype])
    q[..., -COLUMNS:] = 0
    k[..., -COLUMNS:] = 0
    k[..., d - COLUMNS : d - COLUMNS + len(course)] = (course.T * d**0.5)[:, None].to(k)
    chosen = torch.zeros(seqlen_q, heads, dtype=torch.bool)
    if rows == "one":
        chosen[an_integer(seqlen_q), an_integer(heads)] = True
    elif rows == "8 apart":  # the two rows of a thread
        chosen[an_integer(8) :: 8] = True
    else:
        chosen[:] = rows == "every" or torch.rand(seqlen_q, heads) < 0.1
    column = d - COLUMNS + torch.randint(len(course), (seqlen_q, heads))
    one_hot = torch.arange(d) == column[..., None]
    q[:, chosen] = torch.where(one_hot[chosen].to(q.device), 1.0, q[:, chosen]).to(q.dtype)
    return chosen


def assert_close_to_truth(out, lse, q, k, v, **mask) -> None:
    """`masked_truth`'s rule, and without softcap a narrower one: three times the error of weights and outputs rounded once.

    Scores of hundreds, rounded to 16 bits, are off by whole nats: `masked_truth`'s same-precision computation then allows much.
    Weights are relative to a maximum of earlier blocks, so that even the largest is rounded: hence the factors.
    """
    masked_truth.assert_close_to_truth(out, lse, q, k, v, **mask)
    if mask.get("softcap") or out.numel() == 0:
        return
    truth, true_lse = reference.attention(q, k, v, **mask)
    group = q.shape[2] // k.shape[2]
    qt, kt, vt = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scores = qt.double() @ kt.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    allowed = reference.attention_mask(
        q.shape[1], k.shape[1], mask.get("causal", False), mask.get("window_size", (-1, -1)), q.device
    )
    weights = (scores - true_lse[..., None]).exp().masked_fill(~allowed, 0.0).nan_to_num(0.0)
    errors = [torch.tensor(2.0**-20, dtype=torch.float64, device=q.device)]
    for factor in (2 ** (torch.arange(8) / 8 + 0.03)).tolist():
        rounded = ((weights * factor).to(q.dtype).float() @ vt.float() / factor).to(q.dtype).transpose(1, 2)
        errors.append(3 * largest_error(rounded, truth))
    allowed = torch.stack(errors).nan_to_num(0.0).amax()
    assert_at_most([("out: error beside weights rounded once", largest_error(out, truth), allowed)])
