"""Sends OTLP traces over HTTP to a collector, Langfuse or Phoenix."""

from __future__ import annotations

import base64
import io
import json
import re
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from ajet_sdk.addresses import public
from ajet_sdk.errors import ConfigError

_IDS = re.compile(rb'"(traceId|spanId|parentSpanId)": "([0-9a-f]+)"')


class Collector(io.RawIOBase):
    """A stream that posts each line of OTLP JSON to `url` (`…/v1/traces`), with the credentials of
    the URL.

    Requests are protobuf if `opentelemetry-proto` is installed (Phoenix accepts nothing else),
    otherwise JSON. Raises ConfigError for a rejected trace; earlier traces have been sent.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._shown = public(url)
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        login = unquote(parts.netloc.rpartition("@")[0]).encode()
        self._headers = (
            {"authorization": f"Basic {base64.b64encode(login).decode()}"} if login else {}
        )

    def write(self, line: bytes) -> int:  # type: ignore[override]
        body, kind = _encoded(line)
        try:
            with urlopen(
                Request(self._url, body, {**self._headers, "content-type": kind}), timeout=30
            ):
                return len(line)
        except HTTPError as error:
            more = (
                "; it may need protobuf: pip install opentelemetry-proto"
                if kind.endswith("json")
                else ""
            )
            raise ConfigError(
                f"{self._shown} answered {error.code} {error.read(200).decode(errors='replace')!r}"
                f" to {kind}{more}"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot send to {self._shown}: {error}") from error


def _encoded(line: bytes) -> tuple[bytes, str]:
    """Encode a request; returns its body and content type."""
    try:
        from google.protobuf.json_format import ParseDict
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )
    except ImportError:
        return line, "application/json"
    # ids are hexadecimal in OTLP JSON, and base64 in protobuf's JSON
    converted = _IDS.sub(
        lambda m: b'"%b": "%b"' % (m[1], base64.b64encode(bytes.fromhex(m[2].decode()))), line
    )
    return (
        ParseDict(json.loads(converted), ExportTraceServiceRequest()).SerializeToString(),
        "application/x-protobuf",
    )
