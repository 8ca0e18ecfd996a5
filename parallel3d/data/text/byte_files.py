"""Bytes as a tokenizer.json: token i < 256 is byte i, for those who read such files.

GPT-2's letters stand for bytes that do not print (A. Radford et al., "Language Models are
Unsupervised Multitask Learners", 2019, the code beside it), and no two letters are ever joined.
"""

from __future__ import annotations

import json
from typing import Any

END, END_TOKEN = "<|endoftext|>", 256
PRINTED = (range(33, 127), range(161, 173), range(174, 256))  # bytes that are their own letters


def byte_tokenizer() -> str:
    """The content of a tokenizer.json of 257 tokens, which puts the end of a text before one."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level |= {"use_regex": False}
    special = {"SpecialToken": {"id": END, "type_id": 0}}
    end: dict[str, Any] = {"id": END_TOKEN, "content": END, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                *(special, {"Sequence": {"id": "A", "type_id": 0}}),
                *(special, {"Sequence": {"id": "B", "type_id": 0}}),
            ],
            "special_tokens": {END: {"id": END, "ids": [END_TOKEN], "tokens": [END]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())} | {END: END_TOKEN},
            "merges": [],
        },
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _letters() -> list[str]:
    """The letter of each byte; those that do not print have the letters from U+0100 on."""
    letters, more = [], 256
    for byte in range(256):
        printed = any(byte in own for own in PRINTED)
        letters.append(chr(byte if printed else more))
        more += not printed
    return letters


def byte_files() -> dict[str, bytes]:
    """File name → content of a folder that is bytes to transformers."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    return {
        "tokenizer.json": byte_tokenizer().encode(),
        "tokenizer_config.json": f"{json.dumps(config, indent=2)}\n".encode(),
    }


def are_bytes(content: bytes) -> bool:
    """Whether a tokenizer.json is the one above, so that bytes come back as bytes."""
    return content == byte_tokenizer().encode()
