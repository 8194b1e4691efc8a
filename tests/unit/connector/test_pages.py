"""Gather and scatter of raw pages, for the geometries that engines have."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="pages need torch")

from lmcache_persist.connector.pages import PageSet, pin_host_memory  # noqa: E402
from lmcache_persist.errors import UnsupportedGroup  # noqa: E402

NUM_BLOCKS = 7
PADDING = 0xEE


def golden_page(group: int, layer: int, block: int, nbytes: int) -> bytes:
    """Bytes that say where they belong: group, layer, block, and a running number."""
    head = bytes([group, layer, block])
    return (head + bytes(index * 7 % 251 for index in range(nbytes)))[:nbytes]


def llama(layer: int) -> torch.Tensor:
    """``[n, 2, block, width]`` bfloat16, dense."""
    return torch.zeros(NUM_BLOCKS, 2, 32, 16, dtype=torch.bfloat16)


def permuted(layer: int) -> torch.Tensor:
    """Heads before tokens in memory, after them in the shape; still one run per block."""
    return torch.zeros(NUM_BLOCKS, 4, 2, 8, dtype=torch.float16).permute(0, 2, 1, 3)


def overlaid(layer: int) -> torch.Tensor:
    """A recurrent state with padding behind each page, as hybrids keep it."""
    page, stride = 2688, 3280
    raw = torch.full((NUM_BLOCKS * stride,), PADDING, dtype=torch.uint8).view(torch.int8)
    return raw.as_strided((NUM_BLOCKS, 1, 1, page), (stride, page, page, 1))


def interleaved(layer: int) -> torch.Tensor:
    """Three layers in one allocation, blocks outermost: the stride spans all of them."""
    whole = torch.zeros(NUM_BLOCKS, 3, 2, 16, dtype=torch.float32)
    return whole[:, layer]


def odd(layer: int) -> torch.Tensor:
    """Pages of 33 bytes."""
    return torch.zeros(NUM_BLOCKS, 3, 11, dtype=torch.uint8)


def even(layer: int) -> torch.Tensor:
    """Pages of 66 bytes, a multiple of 2 only."""
    return torch.zeros(NUM_BLOCKS, 3, 11, dtype=torch.float16)


def fours(layer: int) -> torch.Tensor:
    """Pages of 44 bytes, a multiple of 4 only."""
    return torch.zeros(NUM_BLOCKS, 11, dtype=torch.float32)


def single(layer: int) -> torch.Tensor:
    """Blocks along one more dimension of size 1, with a stride that means nothing."""
    return torch.zeros(NUM_BLOCKS * 64, dtype=torch.int8).as_strided(
        (NUM_BLOCKS, 1, 64), (64, 12345, 1)
    )


GEOMETRIES = [llama, permuted, overlaid, interleaved, odd, even, fours, single]
Make = Callable[[int], torch.Tensor]


def page_of(tensor: torch.Tensor, block: int, nbytes: int) -> torch.Tensor:
    """One block's page as bytes, found without the code under test."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = (tensor.storage_offset() + block * tensor.stride(0)) * tensor.element_size()
    return raw[start : start + nbytes]


def page_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a block."""
    return tensor[0].numel() * tensor.element_size()


def filled(make: Make, layers: int = 3, group: int = 5) -> list[torch.Tensor]:
    """Layers whose pages hold their golden bytes."""
    tensors = [make(layer) for layer in range(layers)]
    for layer, tensor in enumerate(tensors):
        nbytes = page_bytes(tensor)
        for block in range(NUM_BLOCKS):
            golden = bytearray(golden_page(group, layer, block, nbytes))
            page_of(tensor, block, nbytes)[:] = torch.frombuffer(golden, dtype=torch.uint8)
    return tensors


def golden_object(tensors: list[torch.Tensor], blocks: list[int], group: int = 5) -> bytes:
    """The object of these blocks: layer by layer, block by block."""
    return b"".join(
        golden_page(group, layer, block, page_bytes(tensor))
        for layer, tensor in enumerate(tensors)
        for block in blocks
    )


def everything(tensors: list[torch.Tensor]) -> list[bytes]:
    """All storage, padding included."""
    return [
        torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().tobytes()
        for t in tensors
    ]


@pytest.mark.parametrize("make", GEOMETRIES)
@pytest.mark.parametrize("blocks", [[0], [6, 0, 3], list(range(NUM_BLOCKS))])
def test_gather_is_layer_then_block(make: Make, blocks: list[int]) -> None:
    """A gathered object is, for each layer in order, for each block in order, its page."""
    tensors = filled(make)
    pages = PageSet(tensors, page_size_bytes=page_bytes(tensors[0]))
    slot = bytearray(pages.object_bytes(len(blocks)))
    pages.gather(blocks, memoryview(slot))
    assert bytes(slot) == golden_object(tensors, blocks)
    assert pages.page_bytes == (page_bytes(tensors[0]),) * 3


@pytest.mark.parametrize("make", GEOMETRIES)
def test_scatter_is_the_inverse(make: Make) -> None:
    """Scattering writes exactly the named blocks: no other page, no padding."""
    tensors = filled(make)
    blocks = [4, 1, 6]
    slot = bytearray(golden_object(tensors, blocks))
    expected = everything(tensors)
    for tensor in tensors:
        for block in blocks:
            page_of(tensor, block, page_bytes(tensor)).zero_()
    assert everything(tensors) != expected
    assert PageSet(tensors).scatter(blocks, memoryview(slot)) == 3
    assert everything(tensors) == expected


@pytest.mark.parametrize(
    ("skip", "null", "written"),
    [
        (0, None, [2, 0, 5, 0]),
        (1, None, [0, 5, 0]),
        (0, 0, [2, 5]),
        (2, 0, [5]),
        (4, 0, []),
        (9, 0, []),
    ],
)
@pytest.mark.parametrize("make", [llama, overlaid, odd])
def test_scatter_skips(make: Make, skip: int, null: int | None, written: list[int]) -> None:
    """Skipped and null blocks keep what they hold; the others get their own pages."""
    tensors = [make(layer) for layer in range(2)]
    nbytes = page_bytes(tensors[0])
    for tensor in tensors:
        for block in range(NUM_BLOCKS):
            page_of(tensor, block, nbytes).fill_(0x11)
    blocks = [2, 0, 5, 0]
    slot = bytearray(golden_object(tensors, blocks))
    count = PageSet(tensors).scatter(blocks, memoryview(slot), skip_blocks=skip, null_block=null)
    assert count == len(written)
    for layer, tensor in enumerate(tensors):
        for block in range(NUM_BLOCKS):
            found = page_of(tensor, block, nbytes).numpy().tobytes()
            kept = bytes([0x11]) * nbytes
            assert found == (golden_page(5, layer, block, nbytes) if block in written else kept)


def test_layers_of_different_sizes() -> None:
    """Layers of one group may have pages of different sizes and dtypes."""
    tensors = [filled(llama, 1)[0], filled(fours, 1)[0], filled(odd, 1)[0]]
    pages = PageSet(tensors)
    blocks = [3, 2]
    slot = bytearray(pages.object_bytes(2))
    pages.gather(blocks, memoryview(slot))
    expected = b"".join(
        golden_page(5, 0, block, page_bytes(tensor)) for tensor in tensors for block in blocks
    )
    assert bytes(slot) == expected


def test_round_trips_at_random(seed: int) -> None:
    """Whatever is gathered and scattered elsewhere is there, for random blocks."""
    draw = random.Random(seed)
    for make in GEOMETRIES:
        tensors = filled(make)
        pages = PageSet(tensors)
        for _ in range(20):
            count = draw.randint(1, NUM_BLOCKS)
            source = draw.sample(range(NUM_BLOCKS), count)
            target = draw.sample(range(NUM_BLOCKS), count)
            slot = bytearray(pages.object_bytes(count))
            pages.gather(source, memoryview(slot))
            pages.scatter(target, memoryview(slot))
            again = bytearray(len(slot))
            pages.gather(target, memoryview(again))
            assert again == slot


def test_no_blocks() -> None:
    """Nothing to move is nothing done."""
    pages = PageSet(filled(llama))
    pages.gather([], memoryview(bytearray()))
    assert pages.scatter([], memoryview(bytearray())) == 0


@pytest.mark.parametrize("blocks", [[NUM_BLOCKS], [-1], [0, 2**40]])
def test_block_ids_are_checked(blocks: list[int]) -> None:
    """A block id beyond the tensor is refused before anything is moved."""
    pages = PageSet(filled(llama))
    slot = memoryview(bytearray(pages.object_bytes(len(blocks))))
    with pytest.raises(ValueError, match="block ids"):
        pages.gather(blocks, slot)
    with pytest.raises(ValueError, match="block ids"):
        pages.scatter(blocks, slot)


def test_slot_sizes_are_checked() -> None:
    """A slot of another size, or one that cannot be written, is refused."""
    pages = PageSet(filled(llama))
    with pytest.raises(ValueError, match="expected"):
        pages.gather([0], memoryview(bytearray(pages.object_bytes(1) + 8)))
    with pytest.raises(ValueError, match="readonly"):
        pages.gather([0], memoryview(bytes(pages.object_bytes(1))))


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        # K and V in planes of their own: a block is two runs.
        (torch.zeros(2, NUM_BLOCKS, 8, 4).transpose(0, 1), "not one contiguous run"),
        (torch.zeros(NUM_BLOCKS, 8, 8)[:, :, :4], "not one contiguous run"),
        (torch.zeros(NUM_BLOCKS, 1, 8).expand(NUM_BLOCKS, 4, 8), "not one contiguous run"),
        (torch.zeros(1, 64).expand(NUM_BLOCKS, 64), "blocks overlap"),
        (torch.zeros(NUM_BLOCKS), "expected blocks first"),
        (torch.zeros(0, 4), "no empty dimension"),
    ],
)
def test_layouts_without_pages(tensor: torch.Tensor, found: str) -> None:
    """A layout whose blocks are no runs of bytes is refused with its shape and strides."""
    with pytest.raises(UnsupportedGroup, match=found) as caught:
        PageSet([tensor], names=["model.layers.0"])
    assert "model.layers.0 has shape" in caught.value.message


def test_wrong_page_size() -> None:
    """A page of another size than the engine says is refused with both numbers."""
    with pytest.raises(UnsupportedGroup, match=r"page of 2048 bytes, expected 4096"):
        PageSet(filled(llama), page_size_bytes=4096)


def test_layers_that_do_not_fit_together() -> None:
    """No layers at all, or layers of different length, are refused."""
    with pytest.raises(UnsupportedGroup, match="no layers"):
        PageSet([])
    with pytest.raises(UnsupportedGroup, match="layer 1 has 3 blocks"):
        PageSet([llama(0), llama(0)[:3]])


def test_views_share_memory_with_the_engine() -> None:
    """What the engine writes after registration is what is gathered."""
    tensors = filled(llama)
    pages = PageSet(tensors)
    for tensor in tensors:
        tensor.fill_(1.5)
    slot = bytearray(pages.object_bytes(1))
    pages.gather([2], memoryview(slot))
    assert torch.frombuffer(slot, dtype=torch.bfloat16).eq(1.5).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator on this machine")
@pytest.mark.parametrize("make", GEOMETRIES)
def test_accelerator(make: Make) -> None:
    """On an accelerator the same bytes arrive, through a stream of its own."""
    tensors = filled(make)
    there = [_moved(tensor) for tensor in tensors]
    pages = PageSet(there)
    blocks = [5, 0, 2]
    slot = bytearray(pages.object_bytes(3))
    pages.gather(blocks, memoryview(slot), wait=False)
    pages.synchronize()
    assert bytes(slot) == golden_object(tensors, blocks)
    for tensor in there:
        tensor.zero_()
    pages.scatter(blocks, memoryview(slot))
    again = bytearray(len(slot))
    pages.gather(blocks, memoryview(again))
    assert again == slot


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).cuda()
    return torch.empty(0, dtype=tensor.dtype, device="cuda").set_(
        storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


class FakeRuntime:
    """Stands in for CUDA's runtime where there is none: notes what is pinned."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        if not self.error:
            self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_pinned_memory_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole memory is pinned, and what is returned takes that back."""
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = bytearray(4096)
    unpin = pin_host_memory(memoryview(memory))
    assert list(runtime.pinned.values()) == [4096]
    unpin()
    assert runtime.pinned == {}
    memory.clear()  # nobody holds the memory any more


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that will not pin costs a log line, and there is nothing to take back."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(error=2))
    pin_host_memory(memoryview(bytearray(4096)))()
    assert "cannot be pinned: CUDA error 2" in caplog.text

    def absent() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "cudart", absent)
    pin_host_memory(memoryview(bytearray(4096)))()
    assert "cannot be pinned: no driver" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator on this machine")
def test_copies_through_pinned_memory() -> None:
    """On an accelerator a mapping is pinned for real, and copies through it are right."""
    tensors = filled(llama)
    pages = PageSet([_moved(tensor) for tensor in tensors])
    with mmap.mmap(-1, max(mmap.PAGESIZE, pages.object_bytes(2))) as memory:
        whole = memoryview(memory)
        unpin = pin_host_memory(whole)
        assert torch.frombuffer(whole, dtype=torch.uint8).is_pinned()
        slot = whole[: pages.object_bytes(2)]
        pages.gather([4, 1], slot)
        assert bytes(slot) == golden_object(tensors, [4, 1])
        unpin()
        slot.release()
        whole.release()
