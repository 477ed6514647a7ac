"""Tokenizers that the tests make: one in SentencePiece's manner, one byte-level in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = (
    "the quick brown fox jumps over the lazy dog and then the other dog jumps over the fox again while the rain in "
    "spain falls mainly on the plain and the brown bear sleeps in the quiet den by the river "
)


def sentencepiece_fields() -> dict[str, Any]:
    """`tokenizer.ggml.*` of a llama tokenizer: the better a piece, the less its negative score."""
    pieces: dict[str, float] = {}
    words = TEXT.split()
    for length in range(2, 9):
        for word in words:
            padded = "▁" + word
            for start in range(len(padded) - length + 1):
                piece = padded[start : start + length]
                pieces[piece] = pieces.get(piece, 0) + 1
    ranked = sorted((piece for piece, count in pieces.items() if count > 1), key=lambda p: (-pieces[p], p))
    ranked += ["▁▁", "▁▁▁▁"]
    characters = sorted({"▁", *"abcdefghijklmnopqrstuvwxyz.,<>/s|é"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *ranked, *characters, "s>", "<keep>"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(ranked) + len(characters) + 1), 4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(ranked))]
    scores += [-float(len(ranked) + rank) for rank in range(len(characters) + 1)] + [0.0]
    fields = {
        "model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 1,
        "eos_token_id": 2, "add_bos_token": True, "add_space_prefix": True,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
CONTROL = ("<|im_start|>", "<|im_end|>")


def byte_level(vocabulary: int = 300) -> Tokenizer:
    """A trained byte-level BPE with the control tokens of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    return tokenizer


def byte_level_folder(folder: Path, *, extra: list[AddedToken] | None = None, **config: Any) -> Tokenizer:
    """Its files in `folder`, with further added tokens, and the tokenizer itself."""
    tokenizer = byte_level()
    tokenizer.add_tokens(extra or [])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHATML, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def byte_level_fields(size: int) -> dict[str, Any]:
    """Its GGUF fields as `tiny.write_gguf` takes them; words that nothing makes fill the vocabulary to `size`."""
    tokenizer = byte_level()
    state = json.loads(tokenizer.to_str())["model"]
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=lambda token: ids[token])
    types = [3 if token in CONTROL else 1 for token in tokens]
    missing = size - len(tokens)
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "gpt-2",
        "tokenizer__ggml__tokens": [*tokens, *(f"w{n}." for n in range(missing))],
        "tokenizer__ggml__token_type": [*types, *[1] * missing],
        "tokenizer__ggml__merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer__ggml__eos_token_id": ids["<|im_end|>"],
        "tokenizer__chat_template": CHATML,
    }
