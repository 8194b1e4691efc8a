"""What identifies a multimodal item, and when nothing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmcache_persist.connector.vllm import media
from lmcache_persist.connector.vllm.media import Item, Items, digest_item
from support.identities import feature, item

PIXELS = item(pixels=torch.arange(12.0).reshape(3, 4))
OTHERS = [
    item(pixels=torch.arange(12.0).reshape(4, 3)),
    item(pixels=torch.arange(12).reshape(3, 4)),
    item(pixels=torch.arange(1.0, 13.0).reshape(3, 4)),
    item(others=torch.arange(12.0).reshape(3, 4)),
    item(pixels=[torch.arange(12.0).reshape(3, 4)]),
    item(pixels=torch.arange(12.0).reshape(3, 4), grid=torch.ones(1)),
    item(pixels=[torch.arange(12.0), torch.ones(0)]),
    item(pixels=[[torch.arange(12.0)], torch.ones(0)]),
]


def one(*features: Any) -> Item:
    """The first of a request's items."""
    found = Items().identify(features)
    assert found is not None
    return found[0]


def test_equal_content_is_equal_whatever_its_id_and_strides() -> None:
    """The caller's id is not in the key, only the bytes that the model gets."""
    turned = item(pixels=torch.arange(12.0).reshape(3, 4).t().contiguous().t())
    assert one(feature(turned, name="x")).digest == one(feature(PIXELS, name="y")).digest


def test_other_content_is_another_digest() -> None:
    """Shape, type, values, names, nesting and number of tensors count."""
    digests = {digest_item(data) for data in [PIXELS, *OTHERS]}
    assert len(digests) == 1 + len(OTHERS)
    assert None not in digests


def test_kind_and_embedded_positions_count() -> None:
    """The same tensors as an image, as a video, and in other places of the placeholder."""
    mask = torch.tensor([True, False] * 4)
    digests = {
        one(feature(PIXELS)).digest,
        one(feature(PIXELS, modality="video")).digest,
        one(feature(PIXELS, is_embed=mask)).digest,
        one(feature(PIXELS, is_embed=~mask)).digest,
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    "broken",
    [
        feature(None),
        feature(item(pixels=None)),
        feature(item(address=7, monotonic_id=1, signature=[1])),
        feature(PIXELS, name=""),
        feature(PIXELS, identifier=None),
        feature(PIXELS, offset=-1),
        feature(item(pixels=torch.empty(3, device="meta"))),
    ],
    ids=["absent", "hole", "shared memory", "empty id", "no id", "offset", "device"],
)
def test_id_without_content_is_no_identity(broken: Any) -> None:
    """A request is not cached if one of its items is only a name."""
    assert Items().identify([feature(PIXELS, name="good"), broken]) is None


def test_id_with_two_contents_is_neither() -> None:
    """The engine may still hold the embedding of the first under that id."""
    items = Items()
    assert items.identify([feature(PIXELS)]) is not None
    assert items.identify([feature(OTHERS[0])]) is None
    assert items.identify([feature(PIXELS)]) is None
    assert items.identify([feature(PIXELS, name="other")]) is not None


def test_embeddings_from_elsewhere_are_not_trusted() -> None:
    """Another process looked at the item; here there is only its id."""
    assert Items(foreign_embeddings=True).identify([feature(PIXELS)]) is None
    assert Items(foreign_embeddings=True).identify([]) == ()


def test_known_object_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own cache hands out the same object; its bytes are digested once."""
    items = Items()
    first = items.identify([feature(PIXELS)])
    monkeypatch.setattr(media, "digest_item", lambda data: pytest.fail("read again"))
    assert items.identify([feature(PIXELS)]) == first


def test_the_number_of_known_items_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten first, and one that is asked for again is not old."""
    monkeypatch.setattr(media, "MAX_ITEMS", 2)
    items = Items()
    for name in ("a", "b", "a", "c"):
        items.identify([feature(PIXELS, name=name)])
    assert list(items._known) == ["a", "c"]


@pytest.mark.parametrize(
    ("start", "end", "inside"), [(0, 4, False), (0, 5, True), (11, 20, True), (12, 20, False)]
)
def test_overlap_is_exact(start: int, end: int, inside: bool) -> None:
    """An item of tokens 4 to 11 overlaps what holds one of them."""
    assert Item(b"", 4, 8).overlaps(start, end) is inside
