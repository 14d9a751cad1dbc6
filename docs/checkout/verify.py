"""Verifies an address that Payfold sent a payer back to, and signs launch links. Python 3.8 and later, no packages. As a command:
PAYFOLD_SIGNING_SECRET=psec_… python3 verify.py return 'https://agency.example/pay/done?…' [NOW]

return or cancel: the kind of the address. NOW: Unix seconds instead of the clock, to try the test vectors of the guide.
"""
import hashlib
import hmac
import json
import os
import sys
import time
from urllib.parse import parse_qsl, quote, urlsplit

TOLERANCE_SECONDS = 300


def sign(secret, kind, address, pairs):
    """kind: return, cancel, link or intake. pairs: (name, value) tuples, decoded; sig among them is left out."""
    url = urlsplit(address)
    encoded = sorted((quote(name, safe="-._~"), quote(value, safe="-._~")) for name, value in pairs if name != "sig")
    query = "&".join(f"{name}={value}" for name, value in encoded)
    text = f"v1\n{kind}\n{url.scheme}://{url.netloc}{url.path or '/'}\n{query}"
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def verify(secrets, kind, address, now=None):
    """The parameters of the address; raises ValueError that says what is wrong. secrets: one, or two while you change it."""
    # Blank values count, and + is a space: both are defaults to look at.
    pairs = parse_qsl(urlsplit(address).query, keep_blank_values=True, encoding="utf-8", errors="strict")
    given = dict(pairs).get("sig", "")
    if not any(hmac.compare_digest(sign(secret, kind, address, pairs), given) for secret in secrets):
        raise ValueError("the signature does not match")
    if abs((time.time() if now is None else now) - int(dict(pairs).get("t", 0))) > TOLERANCE_SECONDS:
        raise ValueError("the signature is too old")
    return dict(pairs)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or "PAYFOLD_SIGNING_SECRET" not in os.environ:
        sys.exit(__doc__.strip())
    try:
        now = float(sys.argv[3]) if len(sys.argv) == 4 else None
        print(json.dumps(verify([os.environ["PAYFOLD_SIGNING_SECRET"]], sys.argv[1], sys.argv[2], now)))
    except ValueError as error:
        sys.exit(str(error))
