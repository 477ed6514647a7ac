"""A real HTTP proxy before a server that behaves like AWS, which adds what that one lacks.

- RunInstances by ClientToken: the same request again has the same answer, another one under the same token is refused.
- Faults, as they are ordered by `Fault`: errors, answers that are lost after the call took effect, and silence.
- Machines: an instance's user data runs as processes of this machine, at the instance's address (which therefore is a
  loopback one), with IMDSv2 and a `shutdown` of its own; what terminates it ends them.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.contract.providers.aws_machines import Machines
from tests.control_plane.harness import serving

_UPSTREAM_SECONDS = 20
_MOST_SILENCE = 20.0
_HOP = frozenset({"connection", "transfer-encoding", "content-length", "date", "server"})
_ERROR = "<Response><Errors><Error><Code>%s</Code><Message>%s</Message></Error></Errors></Response>"
_NOTHING = b"<DescribeInstancesResponse><requestId>r</requestId><reservationSet/></DescribeInstancesResponse>"
_JSON_ERROR = '{"__type": "%s", "message": "%s"}'
_S3_ERROR = "<Error><Code>%s</Code><Message>%s</Message></Error>"


@dataclass
class Fault:
    """Meets the next `times` calls of `action` whose parameters have `where`.

    `code` is answered with `status`, and nothing done. With `drop` it is done and the answer lost; with `silent`
    nothing is done, nor answered; with `cut` the same, at once. With `blind` no instances are found, as of those that
    were just made. `before` comes before it is done.
    Of `rewrite` the first is told as the second; `headers` are in the answer, and those of before with the same names
    aren't.
    """

    action: str
    code: str = ""
    status: int = 400
    times: int = 1
    drop: bool = False
    silent: bool = False
    blind: bool = False
    cut: bool = False
    rewrite: tuple[str, str] | None = None
    before: Callable[[], object] | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    action: str
    parameters: Mapping[str, str]
    body: bytes
    error: str
    """How its service says that something is wrong: a form for code and message."""


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class AwsProxy:
    """`url` is where it listens once `running`; `calls` are all that came."""

    def __init__(self, upstream: str, machines: Machines) -> None:
        self._upstream = urllib.parse.urlsplit(upstream).netloc
        self.machines = machines
        self.calls: list[Call] = []
        self._faults: list[Fault] = []
        self._answers: dict[str, tuple[Mapping[str, str], Answer]] = {}
        self._changing = threading.Lock()
        self._running = threading.Lock()
        self.quiet = threading.Event()
        self._left: int | None = None
        self.url = ""

    def fail(self, fault: Fault) -> None:
        with self._changing:
            self._faults.append(fault)

    def forgive(self) -> None:
        with self._changing:
            self._faults.clear()
            self.calls.clear()
            self._left = None

    def cut_after(self, calls: int) -> None:
        """So many take effect, of which the last has no answer; then nothing comes through, until all is forgiven."""
        with self._changing:
            self._left = calls

    def of(self, action: str) -> list[Call]:
        return [call for call in list(self.calls) if call.action == action]

    @contextmanager
    def running(self) -> Iterator[None]:
        proxy = self

        class Handler(_Handler):
            through = proxy

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = self.machines.url = f"http://127.0.0.1:{server.server_port}"
        with serving(server):
            try:
                yield
            finally:
                self.quiet.set()
                self.machines.end_all()
        server.server_close()

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer | None:
        """None where the connection is to be closed without one."""
        call = _call(method, path, headers, body)
        fault = self._take(call)
        if fault is not None and fault.cut:
            return None
        if fault is not None and fault.silent:
            self.quiet.wait(_MOST_SILENCE)
            return None
        if fault is not None and fault.code:
            return Answer(fault.status, [*fault.headers.items()], (call.error % (fault.code, "as ordered")).encode())
        if fault is not None and fault.blind:
            return Answer(200, [("Content-Type", "text/xml")], _NOTHING)
        if fault is not None and fault.before is not None:
            fault.before()
        if call.action == "RunInstances":
            with self._running:
                made = self._run(call, method, path, headers, body)
        else:
            if call.action == "TerminateInstances":
                for name, value in call.parameters.items():
                    if name.startswith("InstanceId"):
                        self.machines.end(value)
            made = self._forward(method, path, headers, body)
        if fault is not None and fault.rewrite is not None:
            before, after = (text.encode() for text in fault.rewrite)
            made.body = made.body.replace(before, after)
        if fault is not None and fault.headers:
            made.headers = [(name, value) for name, value in made.headers if name.lower() not in fault.headers]
            made.headers += fault.headers.items()
        return None if fault is not None and fault.drop else made

    def _take(self, call: Call) -> Fault | None:
        with self._changing:
            self.calls.append(call)
            if self._left is not None:
                self._left -= 1
                if self._left <= 0:
                    return Fault("", drop=self._left == 0, cut=self._left < 0)
            for fault in self._faults:
                if fault.action == call.action and fault.where.items() <= call.parameters.items():
                    fault.times -= 1
                    if fault.times <= 0:
                        self._faults.remove(fault)
                    return fault
        return None

    def _run(self, call: Call, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        token = call.parameters["ClientToken"]
        if token in self._answers:
            before, answer = self._answers[token]
            if before == call.parameters:
                return answer
            message = "the token was used for another request"
            return Answer(400, [], (_ERROR % ("IdempotentParameterMismatch", message)).encode())
        answer = self._forward(method, path, headers, body)
        if answer.status == 200:
            self._answers[token] = (call.parameters, answer)
            text = answer.body.decode()
            instance = re.search(r"<instanceId>(i-[0-9a-f]+)</instanceId>", text)
            address = re.search(r"<privateIpAddress>([0-9.]+)</privateIpAddress>", text)
            assert instance is not None
            assert address is not None
            script = base64.b64decode(call.parameters["UserData"]).decode()
            self.machines.boot(instance[1], address[1], script)
        return answer

    def _forward(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection(self._upstream, timeout=_UPSTREAM_SECONDS)
        with contextlib.closing(connection):
            kept = {name: value for name, value in headers.items() if name.lower() not in ("connection", "expect")}
            connection.request(method, path, body or None, kept)
            answer = connection.getresponse()
            found = answer.read()
            return Answer(answer.status, answer.getheaders(), found)


class _Handler(BaseHTTPRequestHandler):
    through: AwsProxy
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        body = self._body()
        machines = self.through.machines
        if self.path.startswith(machines.PREFIX):
            status, text = machines.answer(self.command, self.path, dict(self.headers))
            answer: Answer | None = Answer(status, [], text.encode())
        else:
            answer = self.through.answer(self.command, self.path, dict(self.headers), body)
        if answer is None:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        lengths = [value for name, value in answer.headers if name.lower() == "content-length"]
        self.send_header("Content-Length", lengths[0] if self.command == "HEAD" and lengths else str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve  # the names that http.server calls

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def handle_expect_100(self) -> bool:
        return True

    def log_message(self, format: str, *args: object) -> None:
        pass


def _call(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Call:
    """EC2 names what it does in a form, others in a header; S3's are a method and a key."""
    low = {name.lower(): value for name, value in headers.items()}
    if "x-amz-target" in low:
        return Call(low["x-amz-target"].rpartition(".")[2], {}, body, _JSON_ERROR)
    if low.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        form = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
        return Call(form.get("Action", ""), form, body, _ERROR)
    kind = urllib.parse.urlsplit(path).path.split("/")[2:3]
    return Call(f"{method} {''.join(kind)}", {}, body, _S3_ERROR)
