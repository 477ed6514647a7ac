"""Token ids to text, a piece at a time, and never half a character."""

from __future__ import annotations

import codecs

from data_plane.text.tokenizer import TextTokenizer


class Detokenizer:
    """Incremental UTF-8 over the bytes of tokens.

    Bytes of an unfinished character are held back; invalid bytes that the model wrote become U+FFFD, and a character
    that the end cuts short is dropped.
    """

    def __init__(
        self, tokenizer: TextTokenizer, shown: dict[int, bytes] | None = None, *, continues: bool = False
    ) -> None:
        """shown: control tokens that are to be seen, with how they are spelled.

        continues: the text goes on from a prompt, so the space that some tokenizers put before a text's first word is
        one of its own.
        """
        self._bytes_of = tokenizer.bytes_of
        self._shown = shown or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.strips_first_space and not continues

    def feed(self, token_id: int) -> str:
        text = self._decoder.decode(self._shown.get(token_id) or self._bytes_of(token_id))
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
