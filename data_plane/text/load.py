"""Tokenizer and chat template of a model, without its weights."""

from __future__ import annotations

from pathlib import Path

from data_plane.loading.settings import Settings
from data_plane.text.chat_template import ChatTemplate, compile_template, source_in_folder
from data_plane.text.tokenizer import TextTokenizer, from_folder, from_gguf


def load_text(path: Path) -> tuple[TextTokenizer, ChatTemplate | None]:
    """Raises ModelUnreadable or UnsupportedModel."""
    if path.is_dir():
        tokenizer, source = from_folder(path), source_in_folder(path)
    else:
        from data_plane.loading.gguf import GGUFFile

        fields = GGUFFile(path).fields
        tokenizer = from_gguf(fields, path)
        source = Settings(fields, str(path), "tokenizer.").text("chat_template", "")
    return tokenizer, compile_template(source, tokenizer) if source else None
