"""One tokenizer, from a GGUF file's fields or a folder's tokenizer.json.

Two encoders stand behind it: one that knows the control tokens, for the template's own words, and one that does not,
for what a tenant wrote. So text that spells a control token never becomes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import Regex as TokenRegex

from data_plane.errors import ModelUnreadable, UnsupportedModel
from data_plane.loading.files import read_json
from data_plane.loading.settings import Settings

_LONG_TEXT = 1000
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, str] = {"llama-bpe": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}
_PLAIN = ("gpt-2", "default")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")


@dataclass(frozen=True)
class SpecialTokens:
    bos: str | None
    eos: str | None
    control: tuple[str, ...]


class TextTokenizer:
    """Text to ids and ids to bytes.

    `bytes_of` gives what a token adds to the output, empty for control tokens, so that output is joined as bytes and
    decoded once: no token boundary can break a character.
    """

    def __init__(
        self,
        plain: Tokenizer,
        special: Tokenizer,
        tokens: SpecialTokens,
        *,
        byte_level: bool,
        first_space: bool,
        bos_ids: tuple[int, ...],
        end_ids: tuple[int, ...] = (),
    ) -> None:
        self._plain = plain
        self._special = special
        self.tokens = tokens
        self._byte_level = byte_level
        self.strips_first_space = first_space
        self.bos_ids = bos_ids
        self._end_ids = end_ids
        self._hidden = {id for text in tokens.control if (id := special.token_to_id(text)) is not None}
        # added tokens stand for their own text, whatever alphabet the others are written in
        self._literal = {id: token.content for id, token in special.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self.vocab_size: int = special.get_vocab_size(with_added_tokens=True)
        # the shortest proof that a text is too long: no token stands for more characters than this
        self.longest_token = max((len(token) for token in special.get_vocab()), default=1)

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Ids of `text`; with `control`, spelled control tokens become themselves."""
        encoder = self._special if control else self._plain
        if len(text) > _LONG_TEXT:
            # only the call for batches lets other threads run meanwhile
            batch: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return batch
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids

    def encode_whole(self, text: str) -> list[int]:
        """Ids of a text that stands alone, with the marks that the model expects around one."""
        return [*self.bos_ids, *self.encode(text), *self._end_ids]

    def spells_control(self, text: str) -> bool:
        return any(token in text for token in self.tokens.control)

    def as_json(self) -> str:
        """The whole tokenizer in Hugging Face's tokenizer.json form."""
        text: str = self._special.to_str()
        return text

    def id_of(self, token: str) -> int | None:
        found: int | None = self._special.token_to_id(token)
        return found

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to the output."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._decode(token_id)
        return known

    def _decode(self, token_id: int) -> bytes:
        token = self._special.id_to_token(token_id)
        if token is None or token_id in self._hidden:
            return b""
        if token_id in self._literal:
            return str(self._literal[token_id]).encode()
        if self._byte_level:
            return b"".join(_BYTE_OF[char] if char in _BYTE_OF else char.encode() for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return str(token).replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    shifted = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + place): bytes([byte]) for place, byte in enumerate(shifted)})
    return table


_BYTE_OF = _byte_alphabet()


def from_gguf(fields: dict[str, Any], path: Path) -> TextTokenizer:
    """Build from the `tokenizer.ggml.*` fields. Raises UnsupportedModel or ModelUnreadable."""
    settings = Settings(fields, str(path), "tokenizer.ggml.")
    vocabulary = settings.texts("tokens", [])
    if not vocabulary:
        raise ModelUnreadable(f"{path} holds no tokenizer; fetch it again")
    types = settings.numbers("token_type", [_NORMAL] * len(vocabulary))
    if len(types) != len(vocabulary):
        raise ModelUnreadable(f"{path} has {len(types)} token types for {len(vocabulary)} tokens; fetch it again")
    kind = settings.text("model", "")
    if kind == "gpt2":
        special = _byte_level_bpe(vocabulary, settings.texts("merges", []), settings.text("pre", "default"), path)
        first_space = False
    elif kind == "llama":
        first_space = settings.flag("add_space_prefix", True)
        special = _sentencepiece_bpe(vocabulary, types, settings.numbers("scores", []), first_space, path)
    else:
        raise UnsupportedModel(f"{path} has a {kind!r} tokenizer; gpt2 (byte-level BPE) and llama are supported")

    def of_type(*wanted: int) -> list[str]:
        return [text for text, type in zip(vocabulary, types, strict=True) if type in wanted and text]

    def text_of(key: str) -> str | None:
        ids = settings.token_ids(key)
        return vocabulary[ids[0]] if ids and ids[0] < len(vocabulary) else None

    special.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in of_type(_CONTROL)])
    special.add_tokens([AddedToken(text, special=False, normalized=False) for text in of_type(_USER_DEFINED)])
    return TextTokenizer(
        _without_control(special),
        special,
        SpecialTokens(text_of("bos_token_id"), text_of("eos_token_id"), tuple(of_type(_CONTROL, _UNKNOWN))),
        byte_level=kind == "gpt2",
        first_space=first_space,
        bos_ids=settings.token_ids("bos_token_id") if settings.flag("add_bos_token", kind == "llama") else (),
    )


def _without_control(special: Tokenizer) -> Tokenizer:
    """The same tokenizer, to which a control token is a text like any other."""
    plain = Tokenizer.from_str(special.to_str())
    plain.encode_special_tokens = True
    return plain


def _byte_level_bpe(vocabulary: list[str], merges: list[str], pre: str, path: Path) -> Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    ids = {token: id for id, token in enumerate(vocabulary)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    except Exception as error:
        raise ModelUnreadable(f"{path}: its tokenizer does not fit together ({error}); fetch it again") from error
    if pre in _SPLITS:
        split = pre_tokenizers.Split(TokenRegex(_SPLITS[pre]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    elif pre in _DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _PLAIN:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        known = ", ".join((*_PLAIN, *_DIGITS, *_SPLITS))
        raise UnsupportedModel(f"{path} splits text by {pre!r}, which is unknown; known are {known}")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(
    vocabulary: list[str], types: list[float], scores: list[float], first_space: bool, path: Path
) -> Tokenizer:
    if len(scores) != len(vocabulary):
        raise ModelUnreadable(f"{path} has {len(scores)} scores for {len(vocabulary)} tokens; fetch it again")
    ids = {token: id for id, token in enumerate(vocabulary)}
    # text never merges into a control token, nor into one that stands for a byte
    mergeable = {token: id for token, id in ids.items() if types[id] in (_NORMAL, _USER_DEFINED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, id in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[id], ids[left], ids[right], left, right))
    ranked.sort()
    merges = [(left, right) for *_, left, right in ranked]
    unknown = vocabulary[0]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if first_space else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    return tokenizer


def from_folder(folder: Path) -> TextTokenizer:
    """Build from tokenizer.json and tokenizer_config.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelUnreadable(f"{folder} holds no tokenizer.json; fetch the model again")
    try:
        special = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelUnreadable(f"{path} is not a tokenizer ({error}); fetch the model again") from error
    state = read_json(path)
    added = special.get_added_tokens_decoder().values()
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    byte_level = "ByteLevel" in _dump({"decoder": state.get("decoder"), "pre": state.get("pre_tokenizer")})
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    # files may carry the padding and truncation of somebody's last run
    special.no_padding()
    special.no_truncation()
    before, after = _marks(special)
    return TextTokenizer(
        _without_control(special),
        special,
        SpecialTokens(bos, eos, tuple(str(token.content) for token in added if token.special)),
        byte_level=byte_level,
        first_space=not byte_level and _prepends(state),
        bos_ids=before,
        end_ids=after,
    )


def _marks(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The control tokens that the tokenizer puts before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return tuple(whole[:at]), tuple(whole[at + len(bare) :])
    return (), ()


def _prepends(state: dict[str, Any]) -> bool:
    text = _dump({"normalizer": state.get("normalizer"), "pre": state.get("pre_tokenizer")})
    return '"Prepend"' in text or '"prepend_scheme":"always"' in text or '"prepend_scheme":"first"' in text


def _dump(value: dict[str, Any]) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
