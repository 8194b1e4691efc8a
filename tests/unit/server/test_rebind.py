"""The time of a rebind, which keeps bindings apart."""

from __future__ import annotations

import pytest

from lmcache_persist.server import rebind
from support.manifest import binding

NOW = "2026-05-05T05:05:05.000005+00:00"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("2026-05-05T05:05:05.000004+00:00", NOW),
        ("2026-05-05T05:05:05.000004Z", NOW),
        (NOW, "2026-05-05T05:05:05.000006+00:00"),
        ("2027-01-01T00:00:00.000000Z", "2027-01-01T00:00:00.000001+00:00"),
        ("before times", NOW),
        ("2026-05-05T05:05:05", NOW),
    ],
)
def test_a_new_binding_never_equals_an_old_one(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    """Also if the clock stands still or was set back, the next binding is another one."""
    monkeypatch.setattr(rebind, "utc_now", lambda: NOW)
    old = binding(544, bound_at=before)
    new = rebind._successor(old, 544)
    assert new.bound_at == after
    assert new.binding_id != old.binding_id
    assert (new.boundary_id, new.store_uuid) == (old.boundary_id, old.store_uuid)
