# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which requests come in over all transports of a server: who may send them, how many, what they hold, their wait."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from xpuruntime.serving.messages import InferRequest, ServingError, Status
from xpuruntime.serving.protocol.datatypes import INLINE_BYTES, NotInline

if TYPE_CHECKING:
    from xpuruntime.serving.messages import InferResponse, ModelService

_Read = TypeVar("_Read")


def is_loopback(host: str) -> bool:
    """Return whether an address or name is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")


@dataclass(frozen=True, slots=True)
class Access:
    """What clients may do.

    Parameters
    ----------
    token : str, optional
        All routes but those of health ask for it, as ``Authorization: Bearer TOKEN``.
    admin_token : str, optional
        Routes that change the repository ask for it in place of `token`.
    repository : bool
        Whether clients may list, load and unload models of the repository.
    """

    token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    repository: bool = False

    def check(self, authorization: str, *, admin: bool = False) -> None:
        """Raise unless a caller with this ``Authorization`` may call, also what changes the repository."""
        token = self.admin_token if admin and self.admin_token is not None else self.token
        if token is None:
            return
        scheme, _, credential = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(credential.strip().encode(), token.encode()):
            which = "the key of the administrator" if token is self.admin_token else "a token"
            sent = ", and another was sent" if scheme.lower() == "bearer" else ""
            raise ServingError(
                Status.UNAUTHENTICATED, f"this server asks for {which}{sent}. Fix: send Authorization: Bearer TOKEN"
            )

    def check_site(self, origin: str, site: str, host: str, *, local: bool, admin: bool) -> None:
        """Raise where a browser sent a request for a page of another site, which a user only looked at.

        Parameters
        ----------
        origin, site, host : str
            The headers ``Origin``, ``Sec-Fetch-Site`` and ``Host``.
        local, admin : bool
            Whether it came to an address that only this machine reaches, and changes the repository: a name that was
            rebound to that address is foreign.
        """
        foreign = site not in ("", "same-origin", "none")
        try:
            own = urlsplit(f"//{host}")
            foreign = foreign or (origin != "" and urlsplit(origin).netloc.lower() != own.netloc.lower())
            if self.token is None and local and host and (origin or site or admin):
                foreign = foreign or not is_loopback(own.hostname or "")
        except ValueError:
            foreign = True
        if foreign:
            raise ServingError(
                Status.PERMISSION_DENIED,
                "the request is of a page of another site. Fix: send it from a program, to the server's address",
            )

    def check_repository(self) -> None:
        """Raise unless the repository is open to clients."""
        if not self.repository:
            raise ServingError(
                Status.PERMISSION_DENIED,
                "the model repository is closed to clients, as it is by default. "
                "Fix: start the server with --repository, or repository: true under admin",
            )


class BodyBudget:
    """How many bytes of bodies and messages are held at a time, of all requests of a server together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def check(self, size: int) -> None:
        """Raise where all requests together would hold too much with so many bytes more."""
        if self.used + size > self.limit:
            raise ServingError(
                Status.RESOURCE_EXHAUSTED,
                f"the bodies and messages of all requests together have more than {self.limit} bytes. "
                "Fix: send fewer at a time, or raise max_buffered of the server",
                retry_after=1.0,
            )


class HeldBytes:
    """The bytes that one request holds; a context manager that gives them back."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._size = budget, 0

    def take(self, size: int) -> None:
        """Hold more. Raises as `BodyBudget.check`."""
        self._budget.check(size)
        self.keep(size)

    def keep(self, size: int) -> None:
        """Hold more, which is there already."""
        self._budget.used += size
        self._size += size

    def give_back(self, size: int) -> None:
        """Hold so many bytes less."""
        self._budget.used -= size
        self._size -= size

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.used -= self._size
        self._size = 0


class Gate:
    """A count of the requests that are being answered; a context manager around each. For one event loop."""

    def __init__(self, max_buffered: int) -> None:
        self.budget = BodyBudget(max_buffered)
        self.active = 0
        self.closed = False
        self._empty: asyncio.Event | None = None
        self._decoding, self._compressing = asyncio.Semaphore(1), asyncio.Semaphore(2)
        #: Held by the thread that decodes a long request or encodes a long response: the event loop shares the
        #: interpreter with one of them.
        self._long = threading.Lock()

    def __enter__(self) -> None:
        if self.closed:
            raise ServingError(
                Status.UNAVAILABLE, "the server is stopping. Fix: send the request to another one", retry_after=1.0
            )
        self.active += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.active -= 1
        if self._empty is not None and self.active == 0:
            self._empty.set()

    async def decoded(self, read: Callable[..., _Read], *args: Any) -> _Read:
        """Return what a decoder makes of its arguments: at once where that takes no time, else in a thread."""
        with contextlib.suppress(NotInline):  # no error is raised beside it, which would hold it and so the arguments
            return read(*args, inline=True)

        def read_alone() -> _Read:
            with self._long:
                return read(*args)

        return await _in_thread(self._decoding, read_alone)

    def encoder(self, write: Callable[[InferResponse], Any]) -> Callable[[InferResponse], Any]:
        """Return what writes responses where they are made, long ones not beside each other and decoding."""
        loop_thread = threading.get_ident()

        def encode(response: InferResponse) -> Any:
            size = sum(tensor.data.nbytes for tensor in response.outputs)
            if size <= INLINE_BYTES or threading.get_ident() == loop_thread:
                return write(response)
            with self._long:
                return write(response)

        return encode

    async def compressed(self, call: Callable[..., _Read], *args: Any) -> _Read:
        """Return what compression or its inverse makes of its arguments, in a thread."""
        return await _in_thread(self._compressing, call, *args)

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait for those that were accepted; return whether all were answered in time."""
        self.closed = True
        if self.active == 0:
            return True
        self._empty = asyncio.Event()
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            return False
        return True


async def _in_thread(turns: asyncio.Semaphore, call: Callable[..., _Read], *args: Any) -> _Read:
    """Return what a function returns that takes long, in a thread, when it has its turn."""
    # One decoder runs at a time: it may have the interpreter for milliseconds before the event loop has its turn, and
    # several of them that long each. Futures of executors are in a cycle with what they have: what is made of a body,
    # or is raised while it is read, is passed beside them, and so is gone with the request. Parts of a refused body are
    # freed in the thread.
    results: list[_Read] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call(*args))
        except ServingError as error:
            errors.append(error.with_traceback(None))
        except BaseException as error:
            errors.append(error)

    async with turns:
        await asyncio.get_running_loop().run_in_executor(None, run)
    if errors:
        raise errors.pop()
    return results.pop()


#: How long a request is waited for before its connection is watched: most are answered by then.
_PATIENCE = 0.01


#: Takes a request, and returns its response where it was answered at once; see `Models.respond`.
Respond: TypeAlias = "Callable[[InferRequest], InferResponse | Future[InferResponse]]"
#: Takes what was read of a request that a transport refused, and why.
Refuse: TypeAlias = "Callable[[InferRequest, ServingError], None]"


class ClientGone(Exception):  # noqa: N818 - a state, and no error of ours
    """The client has closed the connection, so nobody reads the response."""


def respond_of(service: ModelService) -> Respond:
    """Return the method `respond` of a service that has one, such as `Models`, else `infer`."""
    respond: Respond | None = getattr(service, "respond", None)
    return respond or service.infer


def refuse_of(service: ModelService) -> Refuse:
    """Return the method `refused` of a service that has one, such as `Models`, else one that does nothing."""
    refuse: Refuse = getattr(service, "refused", lambda request, error: None)  # noqa: ARG005 - what both are
    return refuse


async def response_of(
    future: InferResponse | Future[InferResponse], gone: Callable[[], Awaitable[None]] | None = None
) -> InferResponse:
    """Wait for a response."""
    if not isinstance(future, Future):
        return future
    if future.done():
        return future.result()
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    future.add_done_callback(lambda _: _call(loop, waiter))
    watch: asyncio.Task[None] | None = None

    async def watched() -> None:
        assert gone is not None
        await gone()
        if not waiter.done():
            waiter.set_exception(ClientGone())

    def begin() -> None:
        nonlocal watch
        watch = loop.create_task(watched())

    timer = None if gone is None else loop.call_later(_PATIENCE, begin)
    try:
        await waiter
    except BaseException:
        future.cancel()
        raise
    finally:
        if timer is not None:
            timer.cancel()
        if watch is not None:
            watch.cancel()
    return future.result()


def _call(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    try:
        loop.call_soon_threadsafe(wake)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return
