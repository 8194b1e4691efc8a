"""Which models a word means: one rule for every verb, on a live server and on files. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from lmcache_persist.errors import ConfigError

MIN_PREFIX_CHARS = 6
"""Hex digits by which a fingerprint may be named."""

MAX_CANDIDATES = 8
"""Models that an error names."""

_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_PREFIX_CHARS},64}}", re.ASCII)
_EXPECTED = f"expected a name, or the first {MIN_PREFIX_CHARS} or more digits of a fingerprint"


def meant(names: Mapping[str, str], stored: Iterable[str], wanted: str) -> list[str]:
    """The fingerprints of the models that are meant.

    Args:
        names: of the models that the manifest knows, by fingerprint.
        stored: fingerprints of which there are objects, known to the manifest or not.
        wanted: a name, which means each fingerprint that has it; or the beginning of one
            fingerprint. A name counts first.

    Raises:
        ConfigError: there is none, or the beginning is that of several.
    """
    by_name = [fingerprint for fingerprint, name in names.items() if name == wanted]
    if by_name:
        return by_name
    found: list[str] = []
    prefix = wanted.strip().lower()
    if _PREFIX.fullmatch(prefix):
        known = dict.fromkeys([*names, *stored])
        found = [fingerprint for fingerprint in known if fingerprint.startswith(prefix)]
    if not found:
        raise _unknown(wanted, sorted(set(names.values())))
    if len(found) > 1:
        raise _ambiguous(wanted, found, names)
    return found


def checked_prefix(text: str) -> str:
    """The beginning of a fingerprint, as :func:`meant` takes it and no name.

    Raises:
        ConfigError: it is too short, or holds other than hex digits.
    """
    prefix = text.strip().lower()
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"{text!r} is no beginning of a fingerprint, expected its first {MIN_PREFIX_CHARS}"
            " or more digits",
            hint="inspect --json lists them in full",
        )
    return prefix


def _unknown(wanted: str, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
    hint = "no model was served from this data dir"
    if near:
        hint = f"the nearest name is {near[0]!r}"
    if len(known) > 1:
        hint += f"; known: {_listed(known)}"
    return ConfigError(f"model {wanted!r} is unknown to this data dir, {_EXPECTED}", hint=hint)


def _ambiguous(wanted: str, found: Sequence[str], names: Mapping[str, str]) -> ConfigError:
    digits = next(n for n in range(12, 65) if len({one[:n] for one in found}) == len(found))
    candidates = [f"{one[:digits]} ({names.get(one, 'unknown model')})" for one in sorted(found)]
    return ConfigError(
        f"fingerprint {wanted!r} is the beginning of {len(found)} models, expected of one",
        hint=f"give more digits: {_listed(candidates)}",
    )


def _listed(items: Sequence[str]) -> str:
    more = len(items) - MAX_CANDIDATES
    return ", ".join(items[:MAX_CANDIDATES]) + (f" and {more} more" if more > 0 else "")
