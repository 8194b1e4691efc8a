"""What the two sides do with a decoded message before anything is touched: pure code only."""

from __future__ import annotations

from functools import singledispatch

from lmcache_persist import geometry, identity, protocol
from lmcache_persist.binding import Binding
from lmcache_persist.connector import replies
from lmcache_persist.server.wire import error_reply
from lmcache_persist.shm import PoolPaths

BOOT = "a" * 32
POOL_BYTES = 1 << 20
OBJECT_BYTES = [4096, 0, 8192]


def judge_request(message: protocol.Request) -> None:
    """Judge a request as a server does. ``PersistError`` for a refusal."""
    _request(message)


@singledispatch
def _request(message: object) -> None:
    """Nothing to judge."""


@_request.register
def _(message: protocol.Bind) -> None:
    groups = [spec.group() for spec in message.groups]
    geometry.plan(groups, message.base or 256, geometry.DEFAULT_MAX_CHUNK_SIZE)
    geometry.check_compatible(640, groups)


@_request.register
def _(message: protocol.Register) -> None:
    groups = [spec.group() for spec in message.groups]
    geometry.check_groups(groups)
    claimed = identity.parse_object(message.identity, "identity")
    layout = identity.parse_object(message.layout, "layout")
    identity.check_identity(claimed)
    identity.fingerprint(claimed, [group.to_json() for group in groups], [layout])


@_request.register
def _(message: protocol.Lookup) -> None:
    chunks = len(protocol.split_hashes(message.hashes))
    groups = geometry.groups_from_sizes([640])
    found = geometry.restorable_prefix(groups, 640, message.num_tokens, [1] * chunks)
    if not 0 <= found < max(1, message.num_tokens):
        raise AssertionError(f"prefix of {found} in {message.num_tokens} tokens")


@_request.register
def _(message: protocol.Reserve) -> None:
    protocol.split_hashes(message.hashes)


def judge_reply(reply: protocol.Reply) -> None:
    """Judge a reply as a client does; what passes lies inside of the pool.

    Raises:
        PersistError: a refusal.
        AssertionError: something passed that should not.
    """
    outcome, _ = replies.judge(BOOT, reply)
    if isinstance(outcome, Exception):
        protocol.encode(error_reply(outcome))
        raise outcome
    _reply(reply)


@singledispatch
def _reply(reply: object) -> None:
    """Nothing to judge."""


def _check_binding(binding: Binding | None) -> None:
    if binding is not None and not 0 < binding.chunk_size < 2**31:
        raise AssertionError(f"binding with chunk size {binding.chunk_size}")


@_reply.register
def _(reply: protocol.Welcome) -> None:
    _check_binding(replies.decode_binding(reply.binding))
    if reply.pool is not None:
        paths = PoolPaths.said(reply.pool.path)
        if paths.clients.parent != paths.pool.parent:
            raise AssertionError(f"locks of {paths.pool} would be made elsewhere")


@_reply.register
def _(reply: protocol.BindReply) -> None:
    _check_binding(replies.decode_binding(reply.binding))


@_reply.register
def _(reply: protocol.Found) -> None:
    result = replies.check_found(reply, chunk_size=64, num_tokens=6401, pool_bytes=POOL_BYTES)
    for run in result.runs:
        for offset in run.offsets:
            if not 0 <= offset <= POOL_BYTES - run.object_bytes:
                raise AssertionError(f"slot at {offset} with {run.object_bytes} bytes passed")


@_reply.register
def _(reply: protocol.Reserved) -> None:
    masks = [5] * 100
    for grant in replies.check_grants(reply, masks, OBJECT_BYTES, POOL_BYTES).grants:
        for offset, group in zip(grant.offsets, (0, 2), strict=True):
            if not 0 <= offset <= POOL_BYTES - OBJECT_BYTES[group]:
                raise AssertionError(f"slot at {offset} of group {group} passed")
