"""Model identity: what decides the meaning of KV bytes, and its fingerprint. Pure.

An identity is a plain JSON object. It is digested as canonical JSON, so that two starts
of one configuration always agree, and kept in the manifest as text, so that ``inspect``
can name the field in which two identities differ. ``None`` is a value like any other and
matches only ``None``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NewType

from blake3 import blake3

from lmcache_persist.errors import IdentityUnknown

Fingerprint = NewType("Fingerprint", str)
"""64 hex digits: the digest of identity, geometry and every rank's layout."""

IDENTITY_FORMAT = 1
"""Bumped when the same configuration would yield another identity."""

REQUIRED_FIELDS = (
    "connector",
    "connector_format",
    "model",
    "revision",
    "weights",
    "config",
    "kv_dtype",
    "quantization",
    "max_model_len",
    "parallel",
)
"""Fields that every identity has; their values may be null, their absence is refused."""

COSMETIC_CONFIG_KEYS = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
    }
)
"""Top-level keys of a model's config that cannot change KV bytes. A key not named here counts."""

MAX_IDENTITY_BYTES = 256 * 1024
"""Bytes of an identity or a layout as canonical JSON."""

_MAX_DEPTH = 32


def canonical_json(value: Any) -> str:
    """``value`` as JSON with one spelling: keys sorted, no spaces, ASCII only.

    Floats that JSON has no spelling for become ``{"float": "inf"}`` and the like.

    Raises:
        IdentityUnknown: a value has no JSON form, or nests too deeply.
    """
    try:
        return json.dumps(
            _plain(value, 0),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=True,
            allow_nan=False,
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise IdentityUnknown(f"identity has no canonical form: {error}") from error


def _plain(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key is not text")
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} is no JSON value")


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Decode an identity or layout that came over the wire.

    Raises:
        IdentityUnknown: too large, no JSON object, or nested too deeply.
    """
    if len(data) > MAX_IDENTITY_BYTES:
        raise IdentityUnknown(
            f"{what} has {len(data)} bytes, expected at most {MAX_IDENTITY_BYTES}"
        )
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IdentityUnknown(f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise IdentityUnknown(f"{what} is a {type(value).__name__}, expected a JSON object")
    canonical_json(value)
    return value


def check_identity(identity: Mapping[str, Any]) -> None:
    """Refuse an identity that leaves a field open.

    Raises:
        IdentityUnknown: names the fields that are absent or cannot be empty.
    """
    absent = [name for name in REQUIRED_FIELDS if name not in identity]
    if absent:
        raise IdentityUnknown(
            f"identity lacks {', '.join(absent)}",
            hint="every field has to be given, null where there is no value",
        )
    empty = [name for name in ("connector", "model", "weights", "config") if not identity[name]]
    if empty:
        raise IdentityUnknown(
            f"identity has no value for {', '.join(empty)}",
            hint="KV of a model whose weights or config cannot be identified is not cached",
        )


def without_cosmetic_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's raw text config without :data:`COSMETIC_CONFIG_KEYS`."""
    return {key: value for key, value in config.items() if key not in COSMETIC_CONFIG_KEYS}


def fingerprint(
    identity: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    layouts: Sequence[Mapping[str, Any]],
) -> Fingerprint:
    """Digest of everything that must match before a byte is reused.

    Args:
        identity: as :func:`check_identity` wants it.
        groups: the geometry as plain JSON, in order.
        layouts: one per rank, in rank order.

    Raises:
        IdentityUnknown: something has no canonical form or is absent.
    """
    check_identity(identity)
    whole = {
        "identity_format": IDENTITY_FORMAT,
        "identity": identity,
        "groups": list(groups),
        "layouts": list(layouts),
    }
    return Fingerprint(blake3(canonical_json(whole).encode("ascii")).hexdigest())


def differing_fields(left: Any, right: Any, path: str = "") -> list[str]:
    """Dotted paths at which two plain JSON values differ, in order; empty if equal."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        paths: list[str] = []
        for key in sorted(set(left) | set(right)):
            where = f"{path}.{key}" if path else key
            if key not in left or key not in right:
                paths.append(where)
            else:
                paths.extend(differing_fields(left[key], right[key], where))
        return paths
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return [
            found
            for index, (one, other) in enumerate(zip(left, right, strict=True))
            for found in differing_fields(one, other, f"{path}[{index}]")
        ]
    # True == 1 in Python, but not in an identity.
    return [] if type(left) is type(right) and left == right else [path]
