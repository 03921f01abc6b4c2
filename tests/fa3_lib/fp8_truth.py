"""How far FP8 attention may be from the fp64 truth of the numbers that its operands stand for.

FA3's rule (kernel_facts 7.60 and 7.61): at most twice the error of a plain computation that rounds P to e4m3 as well, three
times with softcap, and the output's rounding. Which plain computation: with a row's own maximum its largest weight is a number
that e4m3 has; with another number near it, as blocks without a maximum have it, that weight is rounded, too. The larger error of
both counts: the former's is unusually small where all weights are nearly the largest, and the latter's anything between. LSE: what the tensor core's 13 bits may do to a score.
"""

import torch

from fa3_lib import fp8, reference
from fa3_lib.fp8_config import SCALE_BLOCK
from tests.fa3_lib.masked_truth import TANH_ERROR
from tests.tolerance import about_empty_rows, assert_at_most, largest_error, lse_error_and_allowed, rounding_noise

E4M3 = torch.float8_e4m3fn


def draw(b, sq, sk, h, hk, d, dv=None, device="cpu", dtypes=(E4M3,) * 3, by_block=False):
    """q, k, v from N(0, 1), and their descales in [0, 2), all different, with strides of their own; by KV head or by block."""
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d if dv is None else dv))
    groups = [(-(-s // SCALE_BLOCK), h, b) for _, s, h, _ in shapes] if by_block else [(hk, b)] * 3
    descales = [torch.rand(*group, 3, device=device)[..., i].mT.movedim(0, -1) * 2 if by_block
                else torch.rand(*group, 3, device=device)[..., i].T * 2 for i, group in enumerate(groups)]  # fmt: skip
    names = ("q_descale", "k_descale", "v_descale")
    tensors = [torch.randn(s, device=device).to(dtype) for s, dtype in zip(shapes, dtypes, strict=True)]
    return tensors, dict(zip(names, descales, strict=True))


def rounded_p(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, sinks=None, own_max=True):
    """Attention of fp32 q, k, v as plain PyTorch, with P, in (0, 256], rounded to e4m3.

    Without own_max the largest weight of a row is any number from 16 to 256, and the divisor is the sum of rounded weights.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    qt, kt, vt = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scores = qt @ kt.transpose(-1, -2) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    allowed = reference.attention_mask(q.shape[1], k.shape[1], causal, window_size, q.device)
    scores = scores.masked_fill(~allowed, -torch.inf)
    top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    largest = 256 * (1 if own_max else 2 ** (-4 * torch.rand_like(top)))
    P = (scores - top).exp() * largest
    rounded = P.to(E4M3).float()
    total = (P if own_max else rounded).sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - top).exp() * largest
    return (rounded @ vt / total).nan_to_num(0.0).transpose(1, 2)


def score_error(q, k, softmax_scale) -> torch.Tensor:
    """What may be wrong in a score, and so in LSE: each step of an FP8 product keeps 13 bits below its largest term.

    On random inputs the cuts of all steps add up to at most 1.6 * 2^-13 of sum |q_i k_i|.
    """
    group = q.shape[2] // k.shape[2]
    largest = (
        q.abs().transpose(1, 2) @ k.abs().transpose(1, 2).repeat_interleave(group, dim=1).transpose(-1, -2)
    ).amax()
    return 2.0**-11 * largest * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) + 1e-4


def assert_right(
    result, q, k, v, q_descale=None, k_descale=None, v_descale=None, out_dtype=torch.bfloat16, **mask
) -> None:
    """Raises AssertionError with both errors if (out, lse) misses the truth, or if anything is NaN or unwritten. lse may be None.

    mask: softmax_scale, causal, window_size, softcap and sinks, as `fa3_lib.reference.attention` takes them.
    """
    out, lse = result
    q, k, v = (fp8.dequantised(x, f) for x, f in ((q, q_descale), (k, k_descale), (v, v_descale)))
    true_out, true_lse = reference.attention(q, k, v, **mask)
    lse = true_lse.float() if lse is None else lse
    assert out.dtype == out_dtype and out.shape == true_out.shape
    assert lse.dtype == torch.float32 and lse.shape == true_lse.shape
    sees = reference.attention_mask(
        q.shape[1], k.shape[1], mask.get("causal", False), mask.get("window_size", (-1, -1)), q.device
    ).any(1)
    claims = [*about_empty_rows(out, lse, true_lse, ~sees[:, None])]
    if out.numel() and k.numel():
        softcap = mask.get("softcap", 0.0)
        factor, noise = 3 if softcap else 2, rounding_noise(true_out, out_dtype)
        plain = [rounded_p(q, k, v, **mask, own_max=own).to(out_dtype).double() - true_out for own in (True, False)]
        largest, mean = (
            torch.stack([measure(error) for error in plain]).amax()
            for measure in (lambda e: e.abs().max(), root_mean_square)
        )
        lse_error, _ = lse_error_and_allowed(lse, true_lse)
        lse_allowed = score_error(q, k, mask.get("softmax_scale")) + 2 * softcap * TANH_ERROR
        claims += [
            ("out: error", largest_error(out, true_out), factor * largest + 2 * noise),
            (
                "out: root mean square of the error",
                root_mean_square(out.double() - true_out),
                0.75 * factor * mean + noise,
            ),
            ("lse: error", lse_error, lse_allowed),
        ]
    assert_at_most(claims)


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean().sqrt()
