"""A mail server that keeps what it is given."""

from __future__ import annotations

import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from email.policy import default

from tests.control_plane.harness import serving


@dataclass
class Mailbox:
    address: str = ""
    messages: list[Message] = field(default_factory=list)
    recipients: list[str] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)


@contextmanager
def mail_server() -> Iterator[Mailbox]:
    box = Mailbox()

    class Handler(socketserver.StreamRequestHandler):
        def say(self, text: str) -> None:
            self.wfile.write(text.encode() + b"\r\n")

        def handle(self) -> None:
            self.say("220 here")
            for raw in self.rfile:
                line = raw.decode().strip()
                word = line.split(" ")[0].upper()
                if word in ("EHLO", "HELO"):
                    self.say("250-here\r\n250 AUTH PLAIN")
                elif word == "AUTH":
                    box.logins.append(line.split(" ")[-1])
                    self.say("235 welcome")
                elif word == "RCPT":
                    box.recipients.append(line.split("<")[1].split(">")[0])
                    self.say("250 so be it")
                elif word == "DATA":
                    self.say("354 go on")
                    lines = []
                    while (more := self.rfile.readline()) != b".\r\n":
                        lines.append(more)
                    box.messages.append(message_from_bytes(b"".join(lines), policy=default))
                    self.say("250 taken")
                elif word == "QUIT":
                    self.say("221 bye")
                    return
                else:
                    self.say("250 so be it")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        box.address = f"127.0.0.1:{server.server_address[1]}"
        with serving(server):
            yield box
