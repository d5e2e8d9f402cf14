"""The parts of a multiprocessor with state: global and shared memory, barriers, the copy engine, warpgroups."""

import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ADDRESSES = 1 << 64


class EmulationError(Exception):
    """The kernel did what the hardware does not allow, or what gives a random result."""


class Aborted(BaseException):
    """Ends the threads of the other warpgroups after an error."""


def anything(dtype: torch.dtype) -> float:
    """Return a value that shows in results where a kernel uses what is undefined."""
    return math.nan if dtype.is_floating_point else -(1 << 30)


# -- global memory ----------------------------------------------------------------------------------------------------


class Memory:
    """Global memory: the tensors that a kernel was given."""

    def __init__(self) -> None:
        self._parts: dict[int, Tensor] = {}
        """Address -> all bytes of the storage there."""

    def add(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage.nbytes():
            self._parts[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)

    def _part(self, low: int, high: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """Return the memory with the elements from address `low` to `high`, as a tensor of `dtype`, and its address."""
        high += dtype.itemsize
        for start, part in self._parts.items():
            if start <= low and high <= start + part.numel():
                return part[: part.numel() // dtype.itemsize * dtype.itemsize].view(dtype), start
        raise EmulationError(f"access outside of all tensors, at {low:#x} to {high:#x}")

    def locate(self, addresses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the memory with these addresses, as a tensor of `dtype`, and their indices in it."""
        numbers, start = self._part(int(addresses.min()), int(addresses.max()), dtype)
        inside = addresses - start
        if bool((inside % dtype.itemsize).any()):
            raise EmulationError(f"an address of {dtype} is not a multiple of {dtype.itemsize}")
        return numbers, inside // dtype.itemsize

    def region(self, tile: "Tile", dtype: torch.dtype) -> Tensor:
        """Return a view of the elements of a tile."""
        last = tile.address + sum((n - 1) * s for n, s in zip(tile.shape, tile.strides, strict=True)) * dtype.itemsize
        numbers, start = self._part(min(tile.address, last), max(tile.address, last), dtype)
        return numbers.as_strided(tile.shape, tile.strides, (tile.address - start) // dtype.itemsize)

    def load(self, addresses: Tensor, mask: Tensor, other: float | None, dtype: torch.dtype) -> Tensor:
        """Return the elements there; `other` where the mask is false, or anything if it is None."""
        found = torch.full(addresses.shape, anything(dtype) if other is None else other, dtype=dtype)
        if bool(mask.any()):
            numbers, indices = self.locate(addresses[mask], dtype)
            found[mask] = numbers[indices]
        return found

    def store(self, addresses: Tensor, mask: Tensor, values: Tensor) -> None:
        if bool(mask.any()):
            numbers, indices = self.locate(addresses[mask], values.dtype)
            numbers[indices] = values[mask]


class Tile(NamedTuple):
    """The part of a tile of the copy engine that is inside its tensor."""

    address: int
    strides: list[int]
    """In elements."""
    rows: tuple[slice, ...]
    """Its place in the tile."""

    @property
    def shape(self) -> list[int]:
        return [own.stop - own.start for own in self.rows]


class Descriptor:
    """A tensor as the copy engine knows it: address, shape and strides in elements, and the shape of its tiles."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block: list[int], layout: Any) -> None:
        self.dtype, self.layout, self.block_shape = base.dtype, layout, block
        self._address = base.data_ptr()
        self._shape, self._strides = shape, strides
        steps = [s * self.dtype.itemsize for n, s in zip(shape[:-1], strides[:-1], strict=True) if n > 1]
        if self._address % 16 or any(step % 16 for step in steps) or strides[-1] != 1:
            raise EmulationError(f"the copy engine takes multiples of 16 bytes, got {self._address:#x} and {steps}")

    @property
    def bytes(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize

    def require_filling(self, buffer: "Shared") -> None:
        if math.prod(buffer.shape) != math.prod(self.block_shape):
            raise EmulationError(f"a tile {self.block_shape} does not fill a buffer {buffer.shape}")

    def tile(self, place: Sequence[int]) -> Tile | None:
        """Return what the tensor has of the tile at these coordinates; None if all of it is outside."""
        if len(place) != len(self._shape):
            raise EmulationError(f"{len(place)} coordinates for {len(self._shape)} dimensions")
        rows = tuple(
            slice(min(max(-at, 0), block), max(min(size - at, block), 0))
            for at, size, block in zip(place, self._shape, self.block_shape, strict=True)
        )
        if any(own.start >= own.stop for own in rows):
            return None
        first = sum((at + r.start) * s for at, r, s in zip(place, rows, self._strides, strict=True))
        address = (self._address + first * self.dtype.itemsize + ADDRESSES // 2) % ADDRESSES - ADDRESSES // 2
        return Tile(address, self._strides, rows)


# -- shared memory ----------------------------------------------------------------------------------------------------


class Shared:
    """A buffer in shared memory, or a part of one."""

    def __init__(self, data: Tensor, unfenced: Tensor, layout: Any) -> None:
        self.data = data
        self.unfenced = unfenced
        """True for elements that a thread has stored without a fence after it."""
        self.layout = layout

    @classmethod
    def allocate(cls, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> "Shared":
        data = torch.full(tuple(shape), anything(dtype), dtype=dtype)
        return cls(data, torch.zeros(tuple(shape), dtype=torch.bool), layout)

    shape = property(lambda self: tuple(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    key = property(lambda self: self.data.data_ptr())

    def _view(self, view: Callable[[Tensor], Tensor]) -> "Shared":
        return type(self)(view(self.data), view(self.unfenced), self.layout)

    def index(self, i: Any) -> "Shared":
        i = int(i)
        if not 0 <= i < self.shape[0]:
            raise EmulationError(f"buffer {i} of {self.shape[0]}")
        return self._view(lambda x: x[i])

    def slice(self, start: Any, length: int, dim: int = 0) -> "Shared":
        return self._view(lambda x: x.narrow(dim, int(start), length))

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return self._view(lambda x: x.view(tuple(shape)))

    def permute(self, order: Sequence[int]) -> "Shared":
        return self._view(lambda x: x.permute(tuple(order)))

    def read(self) -> Tensor:
        """Return the content, as the copy engine and the tensor cores see it."""
        if bool(self.unfenced.any()):
            raise EmulationError("the copy engine or a matmul reads what a thread stored, without a fence between them")
        return self.data.clone()


class Barrier:
    """An mbarrier: a phase ends when all arrivals have come and all announced bytes are there."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0
        self.filled = False
        """True if bytes have arrived and nothing has waited for them yet."""

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        self.pending -= count
        self.bytes += expected
        if self.pending < 0:
            raise EmulationError(f"more than {self.count} arrivals at a barrier in one phase")
        self._end_phase()

    def deliver(self, count: int) -> None:
        self.bytes -= count
        self.filled = True
        if self.bytes < 0:
            raise EmulationError(f"{-self.bytes} bytes more than announced arrived at a barrier")
        self._end_phase()

    def _end_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


# -- what runs --------------------------------------------------------------------------------------------------------


class Product:
    """A matmul that was started: `start` + a b. Its result is there after a wait."""

    def __init__(self, a: Any, b: Shared, start: Any) -> None:
        self._operands, self._start = (a, b), start
        self._product: Tensor | None = None
        self.result: Tensor | None = None

    def multiply(self) -> None:
        """Read the operands."""
        if self._product is None:
            a, b = (x.read() if isinstance(x, Shared) else x for x in self._operands)
            self._product = a.float() @ b.float()

    def finish(self) -> None:
        if self.result is None:
            self.multiply()
            start = self._start
            if isinstance(start, Product):
                start.finish()
                start = start.result
            self.result = self._product if start is None else start + self._product


class Warpgroup:
    """A thread that runs one partition of a program, and what it has started."""

    def __init__(self, name: str, run: Callable[[], None], machine: "Machine") -> None:
        self.name, self.machine = name, machine
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = ""
        self.done = False
        self.error: BaseException | None = None
        self.unfenced: list[Shared] = []
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        """Copies to global memory that were started and have not read shared memory yet."""
        self.stores_unawaited = False
        self._go = threading.Semaphore(0)
        self._run = run
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self.machine.aborted:
                self.machine.local.warpgroup = self
                self._run()
                self.finish()
        except Aborted:
            pass
        except BaseException as error:  # for the thread that waits
            self.error = error
        self.done = True
        self.machine.back.release()

    def finish(self) -> None:
        if self.stores_unawaited:
            raise EmulationError("a copy to global memory that nothing waits for: its source may be overwritten")
        if any(product.result is None for product in self.products):
            raise EmulationError("the program ends before a matmul that nothing waited for")

    def resume(self) -> None:
        """Run until the next pause; called by the scheduler."""
        self._go.release()
        self.machine.back.acquire()

    def pause(self, ready: Callable[[], bool], waits_for: str) -> None:
        """Let others run until `ready`; called by the thread itself."""
        self.ready, self.waits_for = ready, waits_for
        self.machine.back.release()
        self._go.acquire()
        if self.machine.aborted:
            raise Aborted

    def flush_stores(self) -> None:
        for store in self.stores:
            store()
        self.stores.clear()

    def await_stores(self) -> None:
        self.flush_stores()
        self.stores_unawaited = False


class Machine:
    """A multiprocessor that runs one program at a time."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.local = threading.local()
        self.back = threading.Semaphore(0)
        self.aborted = False
        self.random = random.Random(0)
        self.last: Callable[[], None] | None = None
        """What happens only when nothing else can: a warpgroup that goes on, or a copy that arrives."""
        self.program, self.programs = 0, 1
        self._barriers: dict[int, Barrier] = {}
        self._buffers: list[Shared] = []
        self._copies: list[Callable[[], None]] = []
        """Copies from global memory that are on their way."""

    def run(self, body: Callable[[], None], program: int, programs: int, seed: int) -> None:
        """Run one program of a kernel."""
        self.random.seed(f"{seed} {program}")
        self.program, self.programs = program, programs
        self._barriers, self._buffers, self._copies = {}, [], []
        self.local.warpgroup = None
        body()
        if self._copies or any(barrier.filled for barrier in self._barriers.values()):
            raise EmulationError("a copy that nothing waits for: it may arrive after the end of the program")

    def specialize(self, partitions: dict[str, Callable[[], None]]) -> None:
        """Run warpgroups until all are done."""
        self.aborted = False
        groups = [Warpgroup(name, run, self) for name, run in partitions.items()]
        self.last = self.random.choice([None, self._deliver, *(group.resume for group in groups)])
        try:
            while not all(group.done for group in groups):
                ready: list[Callable[[], None]] = [g.resume for g in groups if not g.done and g.ready()]
                if self._copies:
                    ready.append(self._deliver)
                if not ready:
                    stuck = ", ".join(f"{g.name} waits for {g.waits_for}" for g in groups if not g.done)
                    raise EmulationError(f"deadlock of program {self.program}: {stuck}")
                if len(ready) > 1 and self.last in ready:
                    ready.remove(self.last)
                self.random.choice(ready)()
                for group in groups:
                    if group.error is not None:
                        raise group.error
        finally:
            self.aborted = True
            for group in groups:
                if not group.done:
                    group.resume()
                group.thread.join()

    def _deliver(self) -> None:
        self._copies.pop(self.random.randrange(len(self._copies)))()

    def _maybe_pause(self) -> None:
        if self.last == self.warpgroup.resume or self.random.random() < 0.5:
            self.warpgroup.pause(lambda: True, "nothing")

    @property
    def warpgroup(self) -> Warpgroup:
        found: Warpgroup | None = getattr(self.local, "warpgroup", None)
        if found is None:
            raise EmulationError("only a specialised warpgroup may do that")
        return found

    # Shared memory and barriers

    def keep(self, buffer: Shared) -> None:
        """Keep a buffer until the program's end, so that no other gets its address: barriers are found by theirs."""
        self._buffers.append(buffer)

    def init_barrier(self, at: Shared, count: int) -> None:
        if at.key in self._barriers:
            raise EmulationError("a barrier is initialised twice")
        self._barriers[at.key] = Barrier(count)

    def barrier(self, at: Shared) -> Barrier:
        if at.key not in self._barriers:
            raise EmulationError("a barrier is used before its initialisation")
        return self._barriers[at.key]

    def wait(self, at: Shared, phase: int) -> None:
        if phase not in (0, 1):
            raise EmulationError(f"a wait for phase {phase} of a barrier, which has the phases 0 and 1")
        barrier = self.barrier(at)
        if barrier.phase == phase:
            self.warpgroup.pause(lambda: barrier.phase != phase, f"phase {phase} of a barrier of {barrier.count}")
        else:
            self._maybe_pause()
        barrier.filled = False

    def arrive(self, at: Shared, count: int = 1, expected: int = 0) -> None:
        self.barrier(at).arrive(count, expected)
        self._maybe_pause()

    # Copies

    def load_tile(self, source: Descriptor, place: Sequence[int], at: Shared, into: Shared) -> None:
        barrier, tile = self.barrier(at), source.tile(place)
        source.require_filling(into)
        into.data.fill_(math.nan)  # anything, until it is there

        def deliver() -> None:
            found = torch.zeros(source.block_shape, dtype=source.dtype)
            if tile is not None:
                found[tile.rows] = self.memory.region(tile, source.dtype)
            into.data.copy_(found.view(into.shape))
            barrier.deliver(source.bytes)

        self._copies.append(deliver)
        self._maybe_pause()

    def store_tile(self, target: Descriptor, place: Sequence[int], source: Shared, *, add: bool = False) -> None:
        tile = target.tile(place)
        target.require_filling(source)

        def store() -> None:
            values = source.read().reshape(target.block_shape)
            if tile is not None:
                region = self.memory.region(tile, target.dtype)
                region.copy_(region + values[tile.rows] if add else values[tile.rows])

        self._now_or_later(store)

    def _now_or_later(self, store: Callable[[], None]) -> None:
        self.warpgroup.stores_unawaited = True
        if self.random.random() < 0.5:
            self.warpgroup.flush_stores()
            store()
        else:
            self.warpgroup.stores.append(store)

    def fence(self) -> None:
        group = getattr(self.local, "warpgroup", None)
        if group is not None:
            for part in group.unfenced:
                part.unfenced.fill_(False)
            group.unfenced.clear()

    def store_shared(self, into: Shared, values: Tensor) -> None:
        if tuple(values.shape) != into.shape:
            raise EmulationError(f"a store of {tuple(values.shape)} to a buffer of {into.shape}")
        if values.dtype != into.dtype:
            raise EmulationError(f"a store of {values.dtype} to a buffer of {into.dtype}")
        into.data.copy_(values)
        group = getattr(self.local, "warpgroup", None)
        if group is not None and into.dtype.is_floating_point:
            into.unfenced.fill_(True)
            group.unfenced.append(into)

    # Matmuls

    def start_product(self, a: Any, b: Shared, start: Any) -> Product:
        product = Product(a, b, start)
        if self.random.random() < 0.5:
            product.multiply()
        self.warpgroup.products.append(product)
        return product

    def wait_products(self, pending: int) -> None:
        """Wait for all but the last `pending` matmuls."""
        products = self.warpgroup.products
        finished = len(products) - pending
        for product in products[: max(finished, 0)]:
            product.finish()
        del products[: max(finished, 0)]
        self._maybe_pause()
