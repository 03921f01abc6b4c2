"""The fp64 truth against PyTorch's own attention and against the masks' definition."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fa3_lib.reference import attention, attention_mask


def draw(b, sq, sk, h, hk, d, dv):
    return [torch.randn(s, dtype=torch.float64) for s in ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("shape", ((1, 1), (5, 7), (7, 5), (64, 64)), ids=str)
def test_equals_pytorch(shape, causal):
    q, k, v = draw(2, *shape, 6, 2, 16, 24)
    mask = attention_mask(*shape, causal)
    out, lse = attention(q, k, v, softmax_scale=0.7, causal=causal)
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=0.7, enable_gqa=True
    ).transpose(1, 2)
    some = mask.any(1)
    torch.testing.assert_close(out[:, some], expected[:, some])
    assert not out[:, ~some].any() and (lse[..., ~some] == -torch.inf).all()
    scores = 0.7 * q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(3, 1).transpose(-1, -2)
    torch.testing.assert_close(lse, scores.masked_fill(~mask, -torch.inf).logsumexp(-1))


def test_mask_is_the_documented_rule():
    for _ in range(100):
        sq, sk = torch.randint(0, 9, (2,)).tolist()
        left, right = torch.randint(-1, 9, (2,)).tolist()
        causal = bool(torch.randint(0, 2, ()))
        mask = attention_mask(sq, sk, causal, (left, right))
        assert mask.shape == (sq, sk)
        if causal:
            right = 0
        for i in range(sq):
            p = i + sk - sq
            for j in range(sk):
                assert mask[i, j] == ((left < 0 or j >= p - left) and (right < 0 or j <= p + right))


def test_softcap_bounds_the_scores_before_the_mask():
    q, k, v = draw(1, 9, 9, 1, 1, 8, 8)
    _, lse = attention(1e3 * q, k, v, softcap=2.0)
    assert (lse <= 2.0 + torch.log(torch.tensor(9.0))).all()
    _, lse = attention(1e3 * q, k, v, softcap=2.0, causal=True)
    assert (lse[..., 0].abs() <= 2.0).all()
    torch.testing.assert_close(attention(q, k, v, softcap=1e6)[0], attention(q, k, v)[0], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("sq, sk", ((0, 5), (5, 0), (0, 0)))
def test_nothing_to_attend_to(sq, sk):
    out, lse = attention(*draw(2, sq, sk, 4, 2, 8, 16))
    assert out.shape == (2, sq, 4, 16) and lse.shape == (2, 4, sq)
    assert not out.any() and (lse == -torch.inf).all()


def test_a_sink_is_one_more_key_whose_value_is_zero():
    q, k, v = draw(2, 7, 5, 4, 2, 8, 16)
    sinks = torch.randn(4, dtype=torch.float64)
    out, lse = attention(q, k, v, causal=True, sinks=sinks)
    scores = (8**-0.5 * q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(2, 1).mT).masked_fill(
        ~attention_mask(7, 5, True), -torch.inf
    )
    scores = torch.cat((scores, sinks[:, None, None].expand(2, 4, 7, 1)), -1)
    values = torch.cat((v.transpose(1, 2).repeat_interleave(2, 1), torch.zeros(2, 4, 1, 16, dtype=torch.float64)), -2)
    torch.testing.assert_close(out, (scores.softmax(-1) @ values).transpose(1, 2))
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert torch.equal(lse[:, :, :2], sinks[:, None].expand(2, 4, 2)) and not out[:, :2].any()  # these see no key
    without = attention(q, k, v, causal=True, sinks=torch.full((4,), -torch.inf))
    assert all(torch.equal(a, b) for a, b in zip(without, attention(q, k, v, causal=True), strict=True))
    _, lse = attention(*draw(2, 3, 0, 4, 2, 8, 16), sinks=sinks)
    assert torch.equal(lse, sinks[:, None].expand(2, 4, 3))
