# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Waiting in an event loop for a response that another thread makes, until the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeAlias

from xpuruntime.serving.messages import InferRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from xpuruntime.serving.batching.inline import Soon
    from xpuruntime.serving.messages import InferResponse, ModelService
    from xpuruntime.serving.status import ServingError

__all__ = ["ClientGone", "Refuse", "Respond", "refuse_of", "respond_of", "response_of"]

#: How long a request is waited for before its connection is watched: most are answered by then.
_PATIENCE = 0.01


class Respond(Protocol):
    """Takes a request, and returns its response where it was answered at once; see `Models.respond`."""

    def __call__(self, request: InferRequest, soon: Soon | None = None, /) -> InferResponse | Future[InferResponse]:
        """Answer or queue a request."""


#: Takes what was read of a request that a transport refused, and why.
Refuse: TypeAlias = "Callable[[InferRequest, ServingError], None]"


class ClientGone(Exception):  # noqa: N818 - a state, and no error of ours
    """The client has closed the connection, so nobody reads the response."""


def respond_of(service: ModelService) -> Respond:
    """Return the method `respond` of a service that has one, such as `Models`, else `infer`."""
    found: Respond | None = getattr(service, "respond", None)
    return found or (lambda request, _=None, /: service.infer(request))


def refuse_of(service: ModelService) -> Refuse:
    """Return the method `refused` of a service that has one, such as `Models`, else one that does nothing."""
    found: Refuse | None = getattr(service, "refused", None)
    return _forget if found is None else found


def _forget(request: InferRequest, error: ServingError) -> None:
    del request, error


async def response_of(
    future: InferResponse | Future[InferResponse], gone: Callable[[], Awaitable[None]] | None = None
) -> InferResponse:
    """Wait for a response.

    Parameters
    ----------
    future : InferResponse or Future
        A future is cancelled when the caller is, or when the client is gone.
    gone : callable, optional
        Returns once the client is gone.

    Raises
    ------
    ClientGone
        It is.
    """
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
