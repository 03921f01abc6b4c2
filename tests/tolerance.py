"""How far a kernel may be from the fp64 truth: twice a same-precision PyTorch computation's error (and rounding noise)."""

import torch

from fa3_lib import reference


def same_precision(q, k, v, softmax_scale=None, causal=False) -> torch.Tensor:
    """Attention as plain PyTorch in the tensors' own dtype: every intermediate is rounded to it."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    qt, kt, vt = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scores = qt @ (kt * scale).transpose(-1, -2)
    allowed = reference.attention_mask(q.shape[1], k.shape[1], causal, device=q.device)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ vt).transpose(1, 2)


def assert_close_to_truth(out, lse, q, k, v, softmax_scale=None, causal=False) -> None:
    """Raises AssertionError with both errors if out or lse misses the truth, or if anything is NaN or unwritten."""
    true_out, true_lse = reference.attention(q, k, v, softmax_scale, causal)
    assert out.dtype == q.dtype and out.shape == true_out.shape
    assert lse.dtype == torch.float32 and lse.shape == true_lse.shape
    assert torch.equal(lse == -torch.inf, true_lse == -torch.inf), "rows without keys"
    empty = (true_lse == -torch.inf).transpose(1, 2)  # (b, sq, h)
    assert not out[empty].any(), "rows without keys must be exactly 0"
    if out.numel() == 0:
        return

    rounded = true_out.to(q.dtype)
    noise = ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max()
    allowed = 2 * (same_precision(q, k, v, softmax_scale, causal).double() - true_out).abs().max() + 2 * noise
    error = (out.double() - true_out).abs().max()
    assert error <= allowed, f"out: error {error:.3e}, allowed {allowed:.3e}"

    seen = true_lse > -torch.inf
    if seen.any():
        lse_error = (lse.double() - true_lse)[seen].abs().max()
        lse_allowed = 1e-5 * true_lse[seen].abs().max().clamp(min=1.0) + 1e-5
        assert lse_error <= lse_allowed, f"lse: error {lse_error:.3e}, allowed {lse_allowed:.3e}"
