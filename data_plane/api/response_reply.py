"""Responses' wire shapes: a Response that grows with each delta, and the typed events that tell of it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from data_plane.api.context import Reply, dump
from data_plane.api.logprobs import entries
from data_plane.api.pipeline import Delta
from data_plane.engine.messages import TokenLogprob
from data_plane.errors import RequestError
from data_plane.text.tokenizer import TextTokenizer
from data_plane.text.tool_calls import Call


class ResponseReply(Reply):
    """`keep` is called once, when the reply is whole."""

    operation = "chat"
    done = b""

    def __init__(
        self,
        echo: dict[str, Any],
        tokenizer: TextTokenizer,
        logprobs: bool,
        keep: Callable[[ResponseReply], None] | None,
    ) -> None:
        self.id = f"resp_{secrets.token_hex(16)}"
        self._echo = echo
        self._created = time.time()
        self._tokenizer = tokenizer
        self._wants_logprobs = logprobs
        self._keep = keep
        self._output: list[dict[str, Any]] = []
        self._open = ""
        self._status = "in_progress"
        self._sequence = 0

    def frame(self, body: dict[str, Any]) -> bytes:
        return f"event: {body['type']}\ndata: {dump(body)}\n\n".encode()

    def opening(self) -> list[dict[str, Any]]:
        # the first deltas were turned into events before the headers left: these come before them
        blank = self._response(None) | {
            "status": "in_progress",
            "output": [],
            "incomplete_details": None,
            "completed_at": None,
        }
        return [
            {"type": "response.created", "sequence_number": 0, "response": blank},
            {"type": "response.in_progress", "sequence_number": 1, "response": blank},
        ]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if delta.reasoning:
            events += self._grow("reasoning", delta.reasoning, [])
        if delta.text or (delta.logprobs and self._open == "message"):
            events += self._grow("message", delta.text, delta.logprobs)
        for call in delta.calls:
            events += self._add_call(call)
        if delta.finish is not None:
            if not self._output:
                events += self._begin("message")
            events += self._end()
            self._status = "incomplete" if delta.finish == "length" else "completed"
        return events

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._event(f"response.{self._status}", response=self._finished(usage))]

    def failure(self, error: RequestError) -> dict[str, Any]:
        reason = {"code": "server_error", "message": error.message}
        failed = self._response(None) | {"status": "failed", "error": reason}
        return self._event("response.failed", response=failed)

    def body(self, deltas: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        for delta in deltas:
            self.chunks(delta)
        return self._finished(usage)

    def as_message(self) -> dict[str, Any]:
        """The reply as a chat message, for the next turn."""
        text = "".join(part["text"] for item in self._output if item["type"] == "message" for part in item["content"])
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = [
            {"id": item["call_id"], "type": "function",
             "function": {"name": item["name"], "arguments": _parsed(item["arguments"])}}
            for item in self._output if item["type"] == "function_call"
        ]  # fmt: skip
        return {**message, "tool_calls": calls} if calls else message

    def _finished(self, usage: dict[str, Any]) -> dict[str, Any]:
        if self._keep is not None:
            self._keep(self)
            self._keep = None
        return self._response(
            {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        )

    def _response(self, usage: dict[str, Any] | None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(self._created),
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            **self._echo,
            "output": self._output,
            "usage": usage,
        }

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        # 0 and 1 are the opening's
        return {"type": type, "sequence_number": self._sequence + 1, **fields}

    def _grow(self, kind: str, text: str, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        events = [] if self._open == kind else [*self._end(), *self._begin(kind)]
        item = self._output[-1]
        item["content"][0]["text"] += text
        told = entries(self._tokenizer, logprobs) if self._wants_logprobs else []
        at = {"item_id": item["id"], "output_index": len(self._output) - 1, "content_index": 0}
        if kind == "reasoning":
            return [*events, self._event("response.reasoning_text.delta", delta=text, **at)]
        item["content"][0]["logprobs"] += told
        return [*events, self._event("response.output_text.delta", delta=text, logprobs=told, **at)]

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        self._open = kind
        if kind == "reasoning":
            item: dict[str, Any] = {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item |= {"status": "in_progress", "content": [part]}
        self._output.append(item)
        place = len(self._output) - 1
        added = self._event("response.output_item.added", output_index=place, item={**item, "content": []})
        opened = self._event(
            "response.content_part.added", item_id=item["id"], output_index=place, content_index=0, part=dict(part)
        )
        return [added, opened]

    def _end(self) -> list[dict[str, Any]]:
        """Close the open text item."""
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item, place = self._output[-1], len(self._output) - 1
        item["status"] = "completed"
        part = item["content"][0]
        at = {"item_id": item["id"], "output_index": place, "content_index": 0}
        if kind == "reasoning":
            done = self._event("response.reasoning_text.done", text=part["text"], **at)
        else:
            done = self._event("response.output_text.done", text=part["text"], logprobs=part["logprobs"], **at)
        return [
            done,
            self._event("response.content_part.done", part=part, **at),
            self._event("response.output_item.done", output_index=place, item=item),
        ]

    def _add_call(self, call: Call) -> list[dict[str, Any]]:
        events = self._end()
        item = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        self._output.append(item)
        place = len(self._output) - 1
        at = {"item_id": item["id"], "output_index": place}
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            *events,
            self._event("response.output_item.added", output_index=place, item=begun),
            self._event("response.function_call_arguments.delta", delta=call.arguments, **at),
            self._event("response.function_call_arguments.done", arguments=call.arguments, name=call.name, **at),
            self._event("response.output_item.done", output_index=place, item=item),
        ]


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
