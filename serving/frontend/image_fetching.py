"""Fetching of images that clients name by web addresses, without reaching what only we can reach.

A server stands where its clients do not: beside databases, and beside the address that tells a
machine of a cloud its secrets. So a host's name is resolved here, every address it has must be a
public one, and the connection goes to an address that was checked, not to the name again, whose
meaning may have changed by then. Each redirect is a new address and is checked like the first.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from serving.config import ImageOptions

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE_BYTES = 2**16

_NOT_PUBLIC = tuple(
    ipaddress.ip_network(text)
    for text in (
        "100.64.0.0/10",  # Shared by a provider's customers; metadata services, too.
        "168.63.129.16/32",  # A cloud's platform, at an address that looks public.
        "192.88.99.0/24",  # Relays to IPv6.
        "fec0::/10",  # Site-local, as it once was.
    )
)
"""What the standard library does not take for private everywhere."""

_EMBEDDING = tuple(ipaddress.ip_network(text) for text in ("64:ff9b::/96", "::/96"))
"""Addresses of IPv6 whose last four bytes are one of IPv4."""


class FetchError(Exception):
    """Why an image is not fetched; the message goes on from the name of the image.

    `index` is its number among those that were to be fetched together.
    """

    index = 0


def is_public(text: str) -> bool:
    """Whether everybody may reach an address: no private, loopback, link-local, multicast,
    metadata or reserved one, however it is written or wrapped into IPv6.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address.teredo is not None:
            inner = address.teredo[1]
        if any(address in network for network in _EMBEDDING):
            inner = ipaddress.IPv4Address(address.packed[-4:])
        if inner is not None:
            return is_public(str(inner))
    if any(address in network for network in _NOT_PUBLIC if network.version == address.version):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def fetch_images(urls: Sequence[str], limits: ImageOptions) -> list[bytes]:
    """The files at web addresses, in their order; all of them within `limits.fetch_s`.

    Call it in a thread: it waits.

    Raises:
        FetchError: an address is refused, or what is there cannot be had within the limits.
    """
    with _Deadline(limits.fetch_s) as deadline:
        files: list[bytes] = []
        for index, url in enumerate(urls):
            try:
                files.append(_fetch(url, limits, deadline))
            except FetchError as error:
                error.index = index
                raise
        return files


class _Deadline:
    """Closes the connection in use when the time is over, whatever it waits for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_over = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def watch(self, connected: socket.socket) -> None:
        self._socket = connected
        if self.is_over:
            self._end()

    def _end(self) -> None:
        self.is_over = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _fetch(url: str, limits: ImageOptions, deadline: _Deadline) -> bytes:
    for _ in range(limits.fetch_redirects_max + 1):
        try:
            found = _get(_parsed(url), limits, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if deadline.is_over:
                break
            # What exactly is wrong there would tell clients about our network.
            raise FetchError(f"cannot be fetched ({type(error).__name__})") from None
        if deadline.is_over:
            break
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    else:
        raise FetchError(f"is redirected more than {limits.fetch_redirects_max} times")
    raise FetchError(f"did not arrive within {deadline.seconds:g} s")


def _parsed(url: str) -> SplitResult:
    parts = urlsplit(url.strip())
    if parts.scheme not in _PORTS or not parts.hostname:
        raise FetchError("is no web address; expected http:// or https:// with a host")
    if parts.username is not None or parts.password is not None:
        raise FetchError("has a user in its address; expected none")
    return parts


def _get(parts: SplitResult, limits: ImageOptions, deadline: _Deadline) -> bytes | str:
    """The file at an address, or where it redirects to."""
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    address = _checked_address(host, port, deadline)
    connection = _Connection(parts.scheme, host, port, address, deadline)
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(
            "GET", path, headers={"accept": "image/*", "accept-encoding": "identity"}
        )
        response = connection.getresponse()
        if response.status in _REDIRECTS:
            location = response.getheader("location")
            if not location:
                raise FetchError("is redirected to nowhere")
            return location
        if response.status != 200:
            raise FetchError(f"cannot be fetched (status {response.status})")
        return _body(response, limits.bytes_max)
    finally:
        connection.close()


def _body(response: http.client.HTTPResponse, bytes_max: int) -> bytes:
    parts, size = [], 0
    while piece := response.read(_PIECE_BYTES):
        size += len(piece)
        if size > bytes_max:
            raise FetchError(f"has more than {bytes_max} bytes; expected at most those")
        parts.append(piece)
    return b"".join(parts)


def _checked_address(host: str, port: int, deadline: _Deadline) -> str:
    """An address of a host, all of whose addresses are public."""
    found: list[str] = []

    def resolve() -> None:
        with suppress(OSError, UnicodeError):
            for *_, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found.append(str(where[0]))

    # A resolver may take longer than anybody waits.
    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(deadline.seconds)
    if not found:
        raise FetchError("names a host that cannot be found")
    if not all(is_public(address) for address in found):
        raise FetchError("names a host that is not public; expected one that everybody can reach")
    return found[0]


class _Connection(http.client.HTTPConnection):
    """A connection to an address, in the name of a host."""

    def __init__(
        self, scheme: str, host: str, port: int, address: str, deadline: _Deadline
    ) -> None:
        super().__init__(host, port, timeout=deadline.seconds)
        self._is_secure = scheme == "https"
        self._address = address
        self._deadline = deadline
        if self._is_secure:
            self.default_port = _PORTS["https"]

    def connect(self) -> None:
        connected = socket.create_connection((self._address, self.port), self.timeout)
        self._deadline.watch(connected)
        if self._is_secure:
            context = ssl.create_default_context()
            connected = context.wrap_socket(connected, server_hostname=self.host)
            self._deadline.watch(connected)
        self.sock = connected
