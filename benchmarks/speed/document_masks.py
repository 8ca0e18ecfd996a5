"""Compares attention within real documents with attention over the whole sample, on a CPU.

    python -m benchmarks.speed.document_masks --seq 2048 8192 16384

The documents are the sources of this Python's standard library, in bytes and in the tokens of a BPE
vocabulary that is trained on them here, and their docstrings in the same tokens: many and short. An
end of text follows each. Samples are windows of that stream, as `data.document_mask=true` cuts
them. Time is the mean CPU seconds per sample of one thread, for forward and backward of one layer's
attention in fp32, without projections; both ways take turns. "square" is the share that remains
with a perfect kernel: the sum of the squares of the documents' lengths over the square of the
sample's. "one document" is the time of a sample that is one document, relative to attention without
documents.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from parallel3d.context_parallel.attention import attend_within
from parallel3d.data.keys import DataConfig
from parallel3d.data.loader import Documents, documents_of
from parallel3d.data.sampler import Sampler
from parallel3d.data.sources import find_documents
from parallel3d.models.attention import attend

CPU = torch.device("cpu")
HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts() -> list[bytes]:
    return [
        Path(document.path).read_bytes() for document in find_documents(DataConfig(name="stdlib"))
    ]


def byte_stream(documents: list[bytes]) -> tuple[np.ndarray, int]:
    """Returns all tokens, and the token that ends a document."""
    parts = [np.append(np.frombuffer(d, dtype=np.uint8).astype(np.uint16), 256) for d in documents]
    return np.concatenate(parts), 256


def docstrings(sources: list[bytes]) -> list[bytes]:
    found = []
    for source in sources:
        with suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, HAVE_DOCSTRINGS):
                    found.append((ast.get_docstring(node) or "").encode())
    return [text for text in found if text]


def trained(documents: list[bytes], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<eot>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((d.decode("utf-8", "replace") for d in documents), trainer)
    return tokenizer


def bpe_stream(documents: list[bytes], tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    eot = tokenizer.token_to_id("<eot>")
    assert eot is not None
    spelled = [d.decode("utf-8", "replace") for d in documents]
    encoded = tokenizer.encode_batch(spelled, add_special_tokens=False)
    return np.concatenate([np.append(e.ids, eot) for e in encoded]), eot


def windows(stream: np.ndarray, eot: int, length: int, count: int) -> Iterator[Documents]:
    sampler = Sampler(stream, length, 1, True, eot, False, document_mask=True)
    for i in range(count):
        yield documents_of([sampler.sample(i)], [i], CPU)


def seconds(attention: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> float:
    """Returns the CPU seconds of forward and backward."""
    start = time.process_time()
    torch.autograd.grad(attention(*inputs), inputs, grad)
    return time.process_time() - start


def row(
    name: str, stream: np.ndarray, eot: int, length: int, args: argparse.Namespace
) -> dict[str, float | str]:
    shape = (1, args.heads, length, args.head_dim)
    inputs = [torch.randn(shape).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape)
    full, masked, squares, counts = [], [], [], []
    alone(inputs, grad, length, 1)  # the first call touches memory and starts threads
    for documents in windows(stream, eot, length, args.samples):
        full.append(seconds(lambda q, k, v: attend(q, k, v, is_causal=True), inputs, grad))
        masked.append(seconds(lambda q, k, v, d=documents: attend_within(q, k, v, d), inputs, grad))
        table = documents.blocks.table[0]
        count = int(table[0, 0])
        lengths = table[1 : count + 1, 2].double()
        counts.append(count)
        squares.append(float((lengths / length).square().sum()))
    whole, part = statistics.mean(full), statistics.mean(masked)
    one = alone(inputs, grad, length, args.samples)
    return {
        "tokens": name,
        "seq": length,
        "documents": f"{statistics.mean(counts):.2f}",
        "square": f"{statistics.mean(squares):.1%}",
        "full ms": f"{1000 * whole:.1f}",
        "within ms": f"{1000 * part:.1f}",
        "of full": f"{part / whole:.1%}",
        "one document": f"{one / statistics.median(full):.3f}",
    }


def alone(inputs: list[Tensor], grad: Tensor, length: int, count: int) -> float:
    """Returns the median for samples of one document: the cost of the masked path."""
    (documents,) = windows(np.zeros(length + 1, dtype=np.uint16), 1, length, 1)
    return statistics.median(
        seconds(lambda q, k, v: attend_within(q, k, v, documents), inputs, grad)
        for _ in range(min(count, 5))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=8192)
    args = parser.parse_args()
    torch.set_num_threads(1)
    documents = texts()
    tokenizer, short = trained(documents, args.vocab), docstrings(documents)
    streams = {
        "sources, bytes": byte_stream(documents),
        "sources, BPE": bpe_stream(documents, tokenizer),
        "docstrings, BPE": bpe_stream(short, tokenizer),
    }
    first = True
    for name, (stream, eot) in streams.items():
        count = int((stream == eot).sum())
        print(f"{name}: {count} documents of {len(stream) / count:.0f} tokens", flush=True)
        for length in args.seq:
            found = row(name, stream, eot, length, args)
            if first:
                print("| " + " | ".join(found) + " |\n|" + "---|" * len(found))
                first = False
            print("| " + " | ".join(map(str, found.values())) + " |", flush=True)


if __name__ == "__main__":
    main()
