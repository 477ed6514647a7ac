"""A replica behind mutual TLS: a certificate of the authority opens it, and nothing else does."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from control_plane.security.certificates import CertificateAuthority

SERVE = [sys.executable, "-m", "data_plane", "serve"]


def test_only_a_caller_with_a_certificate_is_heard(tiny_path: Path, tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path, 90)
    pair, caller = tmp_path / "pair.pem", tmp_path / "caller.pem"
    for path, usage in ((pair, ExtendedKeyUsageOID.SERVER_AUTH), (caller, ExtendedKeyUsageOID.CLIENT_AUTH)):
        path.write_bytes(authority.issue("test", ["127.0.0.1"], usage=usage, lifetime=600, now=time.time()))
    command = [*SERVE, str(tiny_path), "--port", "0", "--name", "tiny"]
    command += ["--tls-pair", str(pair), "--tls-authority", str(authority.ca_file)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        url = f"https://127.0.0.1:{ready['port']}/v1/chat/completions"
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        context = ssl.create_default_context(cafile=authority.ca_file)
        with httpx.Client(verify=context, trust_env=False, timeout=30) as client, pytest.raises(httpx.TransportError):
            client.post(url, json=body)
        context.load_cert_chain(caller)
        with httpx.Client(verify=context, trust_env=False, timeout=30) as client:
            assert client.post(url, json=body).status_code == 200
    finally:
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("flags", [["--tls-pair", "x"], ["--tls-pair", "x", "--tls-authority", "y"]])
def test_files_that_are_not_there_are_said(tiny_path: Path, flags: list[str]) -> None:
    done = subprocess.run([*SERVE, str(tiny_path), "--port", "0", *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--tls-pair" in done.stderr
