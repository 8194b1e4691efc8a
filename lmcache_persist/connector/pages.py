"""Moving pages between an engine's KV tensors and slots (torch, any device).

A *page* is what one block id holds of one layer: a contiguous run of bytes, copied as it
is and never looked into. The object of a chunk is, for each layer of the group in order,
for each block of the chunk in order, that block's page.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_persist.errors import UnsupportedGroup

log = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every thread and context. Source: CUDA runtime API."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Pages are moved in the widest words that fit. Source: index_copy_ of uint8 runs at
1.2 GiB/s, of int64 at 7.3 (2 cores, torch 2.13)."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer: ``view`` is ``(num_blocks, words)``, its rows are pages."""

    view: torch.Tensor
    page_bytes: int


class PageSet:
    """The layers of one group on one rank.

    Args:
        tensors: per layer the KV tensor, ``(num_blocks, ...)`` of any dtype. The rest of
            the dimensions of one block may be in any order, but without a gap; between
            blocks there may be gaps (padding, other groups' pages).
        page_size_bytes: what the engine says a page has, to be checked; None: not checked.
        names: the layers' names, for errors.

    Raises:
        UnsupportedGroup: blocks are not contiguous, of another size, or not as many.

    Threads: one at a time per tensor; views are made once, here.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        page_size_bytes: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not tensors:
            raise UnsupportedGroup("group has no layers, expected at least one")
        labels = list(names) if names else [f"layer {index}" for index in range(len(tensors))]
        shapes = [
            _page_shape(tensor, label, page_size_bytes)
            for tensor, label in zip(tensors, labels, strict=True)
        ]
        self.num_blocks = int(tensors[0].shape[0])
        self.device = tensors[0].device
        for tensor, label in zip(tensors, labels, strict=True):
            if tensor.shape[0] != self.num_blocks or tensor.device != self.device:
                raise UnsupportedGroup(
                    f"{label} has {tensor.shape[0]} blocks on {tensor.device},"
                    f" expected {self.num_blocks} on {self.device}"
                )
        width = math.gcd(8, *(number for shape in shapes for number in shape))
        self._word_bytes, self._dtype = width, _WORDS[width]
        self._layers = [
            _Layer(self._rows(tensor, shape), shape.page_bytes)
            for tensor, shape in zip(tensors, shapes, strict=True)
        ]
        self.bytes_per_block = sum(layer.page_bytes for layer in self._layers)
        self._side = None if self.device.type == "cpu" else _SideStream(self.device)

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Per layer, bytes of one page."""
        return tuple(layer.page_bytes for layer in self._layers)

    def object_bytes(self, blocks_per_chunk: int) -> int:
        """Bytes of the object of a chunk of so many blocks."""
        return blocks_per_chunk * self.bytes_per_block

    def gather(self, block_ids: Sequence[int], slot: memoryview, *, wait: bool = True) -> None:
        """Copy the pages of ``block_ids`` into a slot.

        Args:
            block_ids: of one chunk, in order; none of them null.
            slot: writable, :meth:`object_bytes` of ``len(block_ids)`` bytes.
            wait: return when the bytes are there; on an accelerator False returns
                before that, and :meth:`synchronize` is due before the commit.

        Raises:
            ValueError: a block id or the slot's size is wrong.
        """
        self._check(block_ids, slot)
        if not block_ids:
            return
        index = torch.tensor(list(block_ids), dtype=torch.int64)
        if self._side is None:
            for layer, rows in self._parts(len(block_ids), slot):
                torch.index_select(layer.view, 0, index, out=rows)
            return
        with self._side.after_current():
            index = index.to(self.device)
            for layer, rows in self._parts(len(block_ids), slot):
                rows.copy_(layer.view.index_select(0, index), non_blocking=True)
        if wait:
            self.synchronize()

    def scatter(
        self,
        block_ids: Sequence[int],
        slot: memoryview,
        *,
        skip_blocks: int = 0,
        null_block: int | None = None,
        wait: bool = True,
    ) -> int:
        """Copy a slot's pages into blocks: the inverse of :meth:`gather`.

        Args:
            block_ids: of the whole chunk, in order.
            slot: :meth:`object_bytes` of ``len(block_ids)`` bytes.
            skip_blocks: leave so many of the first blocks alone (the engine holds them).
            null_block: leave blocks of this id alone, wherever they are.
            wait: as for :meth:`gather`.

        Returns:
            The number of blocks that were filled.

        Raises:
            ValueError: a block id or the slot's size is wrong.
        """
        self._check(block_ids, slot)
        wanted = [
            at
            for at in range(max(0, skip_blocks), len(block_ids))
            if null_block is None or block_ids[at] != null_block
        ]
        if not wanted:
            return 0
        index = torch.tensor([block_ids[at] for at in wanted], dtype=torch.int64)
        first, last = wanted[0], wanted[-1]
        whole = last - first + 1 == len(wanted)
        picked = None if whole else torch.tensor(wanted, dtype=torch.int64)
        parts = [
            (layer, rows[first : last + 1] if picked is None else rows.index_select(0, picked))
            for layer, rows in self._parts(len(block_ids), slot)
        ]
        if self._side is None:
            for layer, rows in parts:
                layer.view.index_copy_(0, index, rows)
            return len(wanted)
        with self._side.after_current():
            index = index.to(self.device)
            for layer, rows in parts:
                layer.view.index_copy_(0, index, rows.to(self.device, non_blocking=True))
        if wait:
            self.synchronize()
        return len(wanted)

    def synchronize(self) -> None:
        """Wait for all copies that were started; nothing to do on a CPU."""
        if self._side is not None:
            self._side.synchronize()

    # -- inside --------------------------------------------------------------------------

    def _rows(self, tensor: torch.Tensor, shape: _PageShape) -> torch.Tensor:
        width = self._word_bytes
        return torch.empty(0, dtype=self._dtype, device=tensor.device).set_(
            tensor.untyped_storage(),
            shape.offset_bytes // width,
            (self.num_blocks, shape.page_bytes // width),
            (shape.stride_bytes // width, 1),
        )

    def _parts(self, count: int, slot: memoryview) -> list[tuple[_Layer, torch.Tensor]]:
        """Per layer, its part of the slot as ``(count, words)``."""
        whole = torch.frombuffer(slot, dtype=self._dtype)
        parts, at = [], 0
        for layer in self._layers:
            words = count * layer.page_bytes // self._word_bytes
            parts.append((layer, whole[at : at + words].view(count, -1)))
            at += words
        return parts

    def _check(self, block_ids: Sequence[int], slot: memoryview) -> None:
        expected = self.object_bytes(len(block_ids))
        if slot.nbytes != expected or slot.readonly:
            raise ValueError(
                f"slot has {slot.nbytes} bytes, readonly {slot.readonly}, expected {expected}"
                f" writable ones for {len(block_ids)} blocks"
            )
        # Checked here: on an accelerator a wrong index would end the process.
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise ValueError(
                f"block ids go from {min(block_ids)} to {max(block_ids)},"
                f" expected 0 to {self.num_blocks - 1}"
            )


class _PageShape(tuple[int, int, int]):
    """Bytes: of a page, from block to block, of the first block's place in its storage."""

    __slots__ = ()

    @property
    def page_bytes(self) -> int:
        return self[0]

    @property
    def stride_bytes(self) -> int:
        return self[1]

    @property
    def offset_bytes(self) -> int:
        return self[2]


def _page_shape(tensor: torch.Tensor, label: str, page_size_bytes: int | None) -> _PageShape:
    """Where a layer's pages are, once it is sure that they are contiguous."""
    shape, strides, item = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    found = f"{label} has shape {list(shape)} and strides {list(strides)} of {item} bytes"
    if tensor.dim() < 2 or not all(shape):
        raise UnsupportedGroup(f"{found}, expected blocks first, and no empty dimension")
    dense = 1
    for stride, size in sorted(zip(strides[1:], shape[1:], strict=True)):
        if size == 1:
            continue
        if stride != dense:
            raise UnsupportedGroup(
                f"{found}: a block is not one contiguous run of bytes",
                hint="ask the engine for a layout with blocks outermost, then layer, then the rest",
            )
        dense *= size
    page, stride = dense * item, strides[0] * item
    if page_size_bytes is not None and page != page_size_bytes:
        raise UnsupportedGroup(f"{found}: a page of {page} bytes, expected {page_size_bytes}")
    if shape[0] == 1:
        stride = page
    if stride < page:
        raise UnsupportedGroup(f"{found}: blocks overlap")
    offset = tensor.storage_offset() * item
    end = offset + (shape[0] - 1) * stride + page
    if end > tensor.untyped_storage().nbytes():
        raise UnsupportedGroup(f"{found}: blocks go beyond their storage")
    return _PageShape((page, stride, offset))


class _SideStream:
    """A stream of its own on an accelerator, so that copies do not queue behind compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device=device)

    def after_current(self) -> Any:
        """A context in which work runs on this stream, after what was queued so far."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        return self._module.stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


def pin_host_memory(view: memoryview) -> Callable[[], None]:
    """Pin memory that copies of a CUDA or ROCm device go to and come from.

    Copies to and from other memory go through a staging buffer and keep the host waiting;
    they are right all the same, so a driver that will not pin costs a log line.

    Args:
        view: writable, uint8; it must stay mapped until what is returned was called.

    Returns:
        What unpins it.

    Threads: any.
    """
    nbytes, address = view.nbytes, torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    try:
        runtime: Any = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    except (RuntimeError, AttributeError) as problem:
        log.warning("the pool cannot be pinned: %s", problem)
        return lambda: None
    if error:
        log.warning("%d bytes of the pool cannot be pinned: CUDA error %d", nbytes, error)
        return lambda: None

    def unpin() -> None:
        error = int(runtime.cudaHostUnregister(address))
        if error:
            log.warning("%d bytes of a pool cannot be unpinned: CUDA error %d", nbytes, error)

    return unpin
