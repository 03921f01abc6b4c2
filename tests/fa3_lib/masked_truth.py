"""How far masked, capped and sunk attention may be from the fp64 truth: kernel_facts' rule, as `tests.tolerance` has it.

At most twice a same-precision PyTorch computation's error, three times with softcap (its tanh runs on the MUFU, whose error
is 2^-11), and rounding noise.
"""

import math

import torch

from fa3_lib import reference
from tests.tolerance import about_empty_rows, assert_at_most, largest_error, lse_error_and_allowed, rounding_noise

TANH_ERROR = 2.0**-11  # relative, of the MUFU's tanh


def same_precision(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, sinks=None):
    """Attention as plain PyTorch in the tensors' own dtype: every intermediate is rounded to it."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    qt, kt, vt = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scores = qt @ (kt * scale).transpose(-1, -2)
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    allowed = reference.attention_mask(q.shape[1], k.shape[1], causal, window_size, q.device)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        column = sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[1]]
    return (weights @ vt).transpose(1, 2)


def assert_close_to_truth(out, lse, q, k, v, **mask) -> None:
    """Raises AssertionError with both errors if out or lse misses the truth, or if anything is NaN or unwritten.

    mask: softmax_scale, causal, window_size, softcap and sinks, as `fa3_lib.reference.attention` takes them.
    """
    true_out, true_lse = reference.attention(q, k, v, **mask)
    assert out.dtype == q.dtype and out.shape == true_out.shape
    assert lse.dtype == torch.float32 and lse.shape == true_lse.shape
    allowed_pairs = reference.attention_mask(
        q.shape[1], k.shape[1], mask.get("causal", False), mask.get("window_size", (-1, -1)), q.device
    )
    claims = [*about_empty_rows(out, lse, true_lse, ~allowed_pairs.any(1)[:, None])]
    if out.numel():
        softcap = mask.get("softcap", 0.0)
        allowed = (3 if softcap else 2) * largest_error(same_precision(q, k, v, **mask), true_out)
        claims += [
            ("out: error", largest_error(out, true_out), allowed + 2 * rounding_noise(true_out, q.dtype)),
            ("lse: error", *lse_error_and_allowed(lse, true_lse, 2 * softcap * TANH_ERROR)),
        ]
    assert_at_most(claims)


def random_mask(sq: int, sk: int, heads: int, device: str = "cpu") -> dict:
    """causal, window_size, softcap and sinks, each of them present or not at random."""

    def draw(n):
        return int(torch.randint(n, ()))

    mask = {"causal": bool(draw(2)), "softcap": (0.0, 0.0, 15.0, 2.0)[draw(4)]}
    if draw(3):
        longest = max(sq, sk) + 2
        mask["window_size"] = tuple((-1, draw(longest), draw(math.isqrt(longest) + 1))[draw(3)] for _ in range(2))
    if draw(2):
        mask["sinks"] = 3 * torch.randn(heads, device=device)
    return mask
