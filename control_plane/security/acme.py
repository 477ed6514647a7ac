"""A client of ACME certificate authorities (RFC 8555). It blocks; every call has a time-out."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from control_plane.security.challenges import AcmeError, Solver
from control_plane.security.files import create_private, private_folder
from control_plane.security.keyring import IN_THE_CLEAR, Keyring

_TIMEOUT = 10.0
_POLL_SECONDS = 0.5
_MOST_POLLS = 60
_NONCE_TRIES = 12
_COORDINATE = 32
_MOST_CERTIFICATE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate's chain, leaf first, and its key, as PEM."""

    chain: bytes
    key: bytes


class AcmeClient:
    """Speaks to the authority whose directory is at `directory`; `solver` shows it that names are ours.

    The account's key is kept in `folder`, sealed. `ca_file` is for an authority whose own certificate isn't publicly
    trusted.
    """

    def __init__(
        self,
        directory: str,
        folder: Path,
        solver: Solver,
        *,
        email: str | None = None,
        ca_file: Path | None = None,
        keyring: Keyring = IN_THE_CLEAR,
    ) -> None:
        self._directory_url = directory
        self._solver = solver
        self._email = email
        trust: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca_file) if ca_file else True
        self._http = httpx.Client(timeout=_TIMEOUT, verify=trust, trust_env=False)
        self._key = _load_key(private_folder(folder) / "account.key", keyring)
        self._account: str | None = None
        self._nonce: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def obtain(self, names: Sequence[str]) -> Issued:
        """A new certificate for `names`. Raises AcmeError."""
        try:
            return self._obtain(names)
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise AcmeError(f"the ACME authority failed ({type(error).__name__})") from error

    def _obtain(self, names: Sequence[str]) -> Issued:
        directory = self._http.get(self._directory_url).raise_for_status().json()
        self._new_nonce_url = directory["newNonce"]
        account = {"termsOfServiceAgreed": True} | ({"contact": [f"mailto:{self._email}"]} if self._email else {})
        self._account = self._post(directory["newAccount"], account).headers["Location"]
        reply = self._post(directory["newOrder"], {"identifiers": [{"type": "dns", "value": name} for name in names]})
        order_url, order = reply.headers["Location"], reply.json()
        for authorization in order["authorizations"]:
            self._prove(authorization)
        order = self._until(order_url, ("ready", "valid"))
        key = ec.generate_private_key(ec.SECP256R1())
        request = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(x509.Name([]))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
            .sign(key, hashes.SHA256())
        )
        self._post(order["finalize"], {"csr": _text(request.public_bytes(serialization.Encoding.DER))})
        order = self._until(order_url, ("valid",))
        chain = self._post(order["certificate"], None).content
        if len(chain) > _MOST_CERTIFICATE:
            raise AcmeError("the ACME authority sent a certificate that is too large")
        return Issued(chain.rstrip() + b"\n", _pem(key))

    def _prove(self, url: str) -> None:
        """Put the proof where the authority looks for it, and let it look."""
        authorization = self._post(url, None).json()
        if authorization["status"] == "valid":
            return
        kind = self._solver.kind
        challenge = next((one for one in authorization["challenges"] if one["type"] == kind), None)
        if challenge is None:
            raise AcmeError(f"the ACME authority offers no {kind} challenge")
        token = challenge["token"]
        with self._solver.shown(authorization["identifier"]["value"], token, f"{token}.{self._thumbprint()}"):
            self._post(challenge["url"], {})
            self._until(url, ("valid",))

    def _until(self, url: str, wanted: Sequence[str]) -> dict[str, Any]:
        for _ in range(_MOST_POLLS):
            state: dict[str, Any] = self._post(url, None).json()
            if state["status"] in wanted:
                return state
            if state["status"] == "invalid":
                problems = [one.get("error", {}).get("detail", "") for one in state.get("challenges", [state])]
                raise AcmeError(f"the ACME authority refused: {'; '.join(filter(None, problems)) or 'invalid'}"[:500])
            time.sleep(_POLL_SECONDS)
        raise AcmeError("the ACME authority took too long")

    def _post(self, url: str, payload: Any) -> httpx.Response:
        """A signed request; `payload` None reads. A nonce that the authority doesn't take is replaced."""
        for _ in range(_NONCE_TRIES):
            nonce = self._nonce or self._http.head(self._new_nonce_url).raise_for_status().headers["Replay-Nonce"]
            body = self._signed(url, nonce, payload)
            reply = self._http.post(url, content=body, headers={"Content-Type": "application/jose+json"})
            self._nonce = reply.headers.get("Replay-Nonce")
            if reply.status_code < 400:
                return reply
            problem = reply.json()
            if problem.get("type") != "urn:ietf:params:acme:error:badNonce":
                raise AcmeError(f"the ACME authority refused: {problem.get('detail', reply.status_code)}"[:500])
        raise AcmeError("the ACME authority takes no nonce")

    def _signed(self, url: str, nonce: str, payload: Any) -> bytes:
        who: dict[str, Any] = {"kid": self._account} if self._account else {"jwk": self._jwk()}
        protected = _text(json.dumps({"alg": "ES256", "nonce": nonce, "url": url, **who}).encode())
        content = "" if payload is None else _text(json.dumps(payload).encode())
        r, s = decode_dss_signature(self._key.sign(f"{protected}.{content}".encode(), ec.ECDSA(hashes.SHA256())))
        signature = _text(r.to_bytes(_COORDINATE, "big") + s.to_bytes(_COORDINATE, "big"))
        return json.dumps({"protected": protected, "payload": content, "signature": signature}).encode()

    def _jwk(self) -> dict[str, str]:
        point = self._key.public_key().public_numbers()
        x, y = (_text(part.to_bytes(_COORDINATE, "big")) for part in (point.x, point.y))
        return {"crv": "P-256", "kty": "EC", "x": x, "y": y}

    def _thumbprint(self) -> str:
        canonical = json.dumps(self._jwk(), sort_keys=True, separators=(",", ":"))
        return _text(hashlib.sha256(canonical.encode()).digest())


def _load_key(path: Path, keyring: Keyring) -> ec.EllipticCurvePrivateKey:
    if path.exists():
        text = path.read_bytes()
    else:
        text = create_private(path, keyring.seal(_pem(ec.generate_private_key(ec.SECP256R1())), path.name))
    pem = keyring.open(text, path.name)
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise AcmeError(f"{path} holds another kind of key")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
