"""What identifies a request's multimodal items: the bytes that the model gets.

vLLM's own hash of an item may be an id that the caller made up, which says nothing about
content. The processed tensors do; where the engine does not hold them (they travel through
shared memory), the item cannot be identified.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from blake3 import blake3

MAX_ITEMS = 65536
"""Items that are remembered: more than an engine's encoder cache holds."""

_DIGEST_LABEL = b"lmcache-persist item 1"


@dataclass(frozen=True, slots=True)
class Item:
    """A multimodal item in a prompt.

    Attributes:
        digest: 32 bytes, of kind, content and embedded positions.
        offset: the token that it begins at.
        length: tokens that it takes, at least 1.
    """

    digest: bytes
    offset: int
    length: int

    def key(self, chunk_start: int) -> bytes:
        """The item as seen from a chunk: content, signed offset and length."""
        return self.digest + struct.pack("<qQ", self.offset - chunk_start, self.length)

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any of its tokens is in ``[start, end)``."""
        return self.offset < end and self.offset + self.length > start


class Items:
    """The items that requests of one engine brought along.

    The engine keeps an item's embedding under the item's id. An id that came with two
    contents therefore identifies neither from then on.

    Args:
        foreign_embeddings: whether embeddings come from other processes, by id alone; then
            no item is identified.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(self, *, foreign_embeddings: bool = False) -> None:
        self._foreign = foreign_embeddings
        # Id -> digest (None: two contents), and the object that was digested.
        self._known: OrderedDict[str, tuple[bytes | None, ReferenceType[Any] | None]] = (
            OrderedDict()
        )

    def identify(self, features: Sequence[Any]) -> tuple[Item, ...] | None:
        """The items of a request, in its order; None if one cannot be identified."""
        items = []
        for feature in features:
            content = self._content(feature)
            position = feature.mm_position
            if content is None or position.offset < 0 or position.length < 0:
                return None
            digest = blake3(_DIGEST_LABEL)
            for part in (content, feature.modality.encode()):
                digest.update(struct.pack("<Q", len(part)) + part)
            if position.is_embed is not None:
                _add(digest, position.is_embed)
            items.append(Item(digest.digest(), position.offset, max(1, position.length)))
        return tuple(items)

    def _content(self, feature: Any) -> bytes | None:
        data, name = feature.data, feature.identifier
        if self._foreign or not isinstance(name, str) or not name or data is None:
            return None
        if name in self._known:
            digest, reference = self._known[name]
            self._known.move_to_end(name)
            if digest is None or (reference is not None and reference() is data):
                return digest
            same = digest_item(data) == digest
            self._known[name] = (digest, ref(data)) if same else (None, None)
            return digest if same else None
        digest = digest_item(data)
        self._known[name] = digest, ref(data)
        if len(self._known) > MAX_ITEMS:
            self._known.popitem(last=False)
        return digest


def digest_item(data: Any) -> bytes | None:
    """32 bytes over an item's tensors with their names, None if they are not all there."""
    digest = blake3(max_threads=blake3.AUTO)
    try:
        for name in sorted(data):
            digest.update(struct.pack("<Q", len(name.encode())) + name.encode())
            _add(digest, data[name].data)
    except TypeError:
        return None
    return digest.digest()


def _add(digest: Any, value: Any) -> None:
    """Digest a tensor or a nest of tensors.

    Raises:
        TypeError: there is something else, a handle of shared memory for one.
    """
    if isinstance(value, torch.Tensor):
        shape = ",".join(map(str, value.shape))
        _add_text(digest, f"tensor {value.dtype} {shape}")
        for part in _bytes_of(value):
            digest.update(part)
    elif isinstance(value, list | tuple):
        _add_text(digest, f"list {len(value)}")
        for one in value:
            _add(digest, one)
    else:
        raise TypeError(f"{type(value).__name__} is no tensor")


def _add_text(digest: Any, text: str) -> None:
    digest.update(struct.pack("<Q", len(text)) + text.encode())


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise TypeError(f"a tensor on {tensor.device} is not read")
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel():
        yield memoryview(flat.view(torch.uint8).numpy())
