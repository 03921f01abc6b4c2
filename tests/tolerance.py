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
    claims = [*about_empty_rows(out, lse, true_lse, (true_lse == -torch.inf).transpose(1, 2))]
    if out.numel():
        noise = rounding_noise(true_out, q.dtype)
        plain = same_precision(q, k, v, softmax_scale, causal)
        claims += [
            ("out: error", largest_error(out, true_out), 2 * largest_error(plain, true_out) + 2 * noise),
            ("lse: error", *lse_error_and_allowed(lse, true_lse)),
        ]
    assert_at_most(claims)


def about_empty_rows(out, lse, true_lse, empty):
    """Claims for `assert_at_most`. empty: (b, sq, h) or what broadcasts to it, the rows that see no key."""
    yield "rows without keys that are not exactly 0", (out.ne(0) & empty[..., None]).sum(), 0
    yield (
        "rows without keys (or sinks) that lse tells otherwise",
        ((lse == -torch.inf) != (true_lse == -torch.inf)).sum(),
        0,
    )


def rounding_noise(true_out, dtype) -> torch.Tensor:
    rounded = true_out.to(dtype)
    return ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max()


def largest_error(x, truth) -> torch.Tensor:
    """NaN where something is NaN or unwritten, which is not at most anything."""
    return (x.double() - truth).abs().max()


def lse_error_and_allowed(lse, true_lse, more: float = 0.0):
    seen = true_lse > -torch.inf
    error, size = (torch.where(seen, x.abs(), 0.0).max() for x in (lse.double() - true_lse, true_lse))
    return error, 1e-5 * size.clamp(min=1.0) + 1e-5 + more


def assert_at_most(claims) -> None:
    """claims: (what, measured, allowed). They come from the card at once: one that many processes share lets each of them wait
    for every answer."""
    claims = list(claims)
    numbers = torch.stack(
        [torch.as_tensor(x).double().to(claims[0][1].device) for claim in claims for x in claim[1:]]
    ).tolist()
    for (what, *_), measured, allowed in zip(claims, numbers[::2], numbers[1::2], strict=True):
        assert measured <= allowed, f"{what} {measured:.3e}, allowed {allowed:.3e}"


def assert_repeats_are_bit_equal(call, repeats: int) -> None:
    """`call(run)` gives the same bits (no NaN among them) in every run: a race shows as bits that change. They are compared on the
    card; runs follow each other without a pause."""
    first = call(0)
    changed = torch.zeros((), dtype=torch.bool, device=first[0].device)
    for run in range(repeats):
        for again, expected in zip(call(run), first, strict=True):
            changed |= again.ne(expected).any()
    assert not changed
