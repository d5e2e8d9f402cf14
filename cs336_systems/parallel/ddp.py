"""Data parallel training: every rank holds the whole model and a part of the batch; gradients are averaged.

The four variants differ in how gradients are grouped into all-reduces, and when these start:

- `NaiveDDP(module)`: one for each parameter, one after another, after backward.
- `FlatDDP(module)`: one for all parameters of a dtype, after backward.
- `DDP(module)`: one for each parameter, as soon as its gradient is ready, while backward continues.
- `DDP(module, bucket_size_mb=25)`: one for each bucket of about 25 MiB, when its last gradient is ready.

    model = DDP(model, bucket_size_mb=25)
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

[Note: buckets] A bucket is one flat tensor, and the gradients of its parameters are views into it, so that autograd
accumulates in place. After the gradients the tensor has one flag for each parameter, 1 if this rank has a gradient. The
sum of the flags over ranks tells a parameter that no rank used, whose gradient stays None, from one that others used.

Every rank reduces the same buckets in the same order, whatever the order of its gradients, and `finish` reduces the
buckets that backward did not; a rank that did not use a parameter contributes zeros. So no rank waits for ever.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from cs336_systems.parallel.collectives import Wrapper, broadcast, by_kind, pack, persistent_buffers, views

MIB = 1 << 20


class Gradients(IntEnum):
    """How far the gradients of a step are synchronized; a later state includes the earlier ones."""

    AVERAGED = 0
    """No forward pass and no gradient since the last averaging."""
    LOCAL = 1
    """A forward pass has run, or a gradient was accumulated."""
    SENT = 2
    """A forward pass outside of `no_sync` has run: its backward may have sent buckets."""
    ADDED_TO = 3
    """A forward pass inside of `no_sync` followed: sent gradients may have grown since."""


class DataParallel(Wrapper, ABC):
    """The base class of the variants: buckets and `no_sync`."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self._start()
        with torch.no_grad():
            broadcast([*module.parameters(), *module.buffers()])

    def _start(self) -> None:
        """Set the runtime state, which belongs to this process and not to the model."""
        self._buckets: list[Bucket] = []
        self._trained: tuple[bool, ...] | None = None
        self._synchronizes = True
        """True outside of `no_sync`."""
        self._gradients = Gradients.AVERAGED
        self._next = 0
        """Index of the next bucket to send."""
        self._in_backward = False
        self._hooks: list[Any] = []

    # A copy, or a pickled wrapper, creates its own buckets and hooks when it is used.
    def __getstate__(self) -> dict[str, Any]:
        runtime = {"_buckets", "_trained", "_synchronizes", "_gradients", "_next", "_in_backward", "_hooks"}
        return {name: value for name, value in self.__dict__.items() if name not in runtime}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._before_forward()
        return self.module(*args, **kwargs)

    @torch._disable_dynamo  # torch.compiler.disable would import torch's compiler here: 2 s of CPU
    def _before_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._in_backward:
            self._drop_failed_backward()
        self._update_buckets()
        if self._synchronizes:
            with torch.no_grad():
                broadcast(persistent_buffers(self.module).values())
        if self._synchronizes:
            reached = Gradients.SENT
        else:
            reached = Gradients.ADDED_TO if self._gradients >= Gradients.SENT else Gradients.LOCAL
        self._gradients = max(self._gradients, reached)

    def _update_buckets(self) -> None:
        """Create buckets for the parameters that require gradients, again if these have changed."""
        parameters = list(self.module.parameters())  # a tied parameter appears once
        trained = tuple(p.requires_grad for p in parameters)
        if trained == self._trained:
            return
        self._trained = trained
        self._next = 0
        self._buckets = [Bucket(group) for group in self._groups([p for p in parameters if p.requires_grad])]
        self._remove_hooks()
        entries = [(bucket, i) for bucket in self._buckets for i in range(len(bucket.parameters))]
        self._hooks = [hook for bucket, i in entries for hook in _register_hooks(self, bucket, i)]

    def _remove_hooks(self) -> None:
        for hook in self.__dict__.get("_hooks", ()):
            hook.remove()

    __del__ = _remove_hooks

    @abstractmethod
    def _groups(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        """Group the parameters into buckets, in the order in which buckets are sent."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside; the next backward outside, or `finish`, averages the sum."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the mean over ranks. All ranks call it after backward, before the update."""
        if self._gradients is Gradients.AVERAGED:
            return
        if self._in_backward:
            self._drop_failed_backward()
            raise RuntimeError("the last backward raised an error: its gradients are dropped; run the step again")
        self._update_buckets()
        self._finish()
        self._reset()

    def _reset(self) -> None:
        self._next = 0
        self._in_backward = False
        self._gradients = Gradients.AVERAGED

    def _finish(self) -> None:
        """Average the buckets one after another."""
        for bucket in self._buckets:
            bucket.send()
            bucket.receive()

    def _gradient_is_ready(self, bucket: "Bucket", i: int) -> None:
        self._gradients = max(self._gradients, Gradients.LOCAL)
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Called by autograd unless backward raises."""
        self._in_backward = False

    @torch.no_grad()
    def _drop_failed_backward(self) -> None:
        """Send the remaining buckets, for which other ranks may wait, and drop all gradients.

        They are sent as NaN: if backward failed on this rank alone, the others must not use an incomplete mean.
        """
        if self._synchronizes:
            for bucket in self._buckets[self._next :]:
                bucket.send(poisoned=True)
        for bucket in self._buckets:
            bucket.receive()
            for p in bucket.parameters:
                p.grad = None
        self._reset()


class NaiveDDP(DataParallel):
    """Averages gradients by one all-reduce per parameter after backward, each completed before the next."""

    def _groups(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        return ([p] for p in parameters)


class FlatDDP(DataParallel):
    """Averages gradients by one all-reduce per dtype after backward."""

    def _groups(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        return by_kind(parameters)


class DDP(DataParallel):
    """Averages gradients by all-reduces that start as gradients become ready, while backward continues.

    - `bucket_size_mb`: size of a bucket in MiB (2^20 bytes); None for one all-reduce for each parameter.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float | None = None):
        if bucket_size_mb is not None and not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be above 0, got {bucket_size_mb!r}; leave it out for no buckets")
        self.bucket_size_mb = bucket_size_mb
        super().__init__(module)

    def _groups(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        """Fill buckets from the last parameter on: its gradient is ready first."""
        backwards = parameters[::-1]
        if self.bucket_size_mb is None:
            return ([p] for p in backwards)
        limit = self.bucket_size_mb * MIB
        groups = [group for kind in by_kind(backwards) for group in pack(kind, limit)]
        index = {id(p): i for i, p in enumerate(backwards)}
        return sorted(groups, key=lambda group: index[id(group[-1])])  # by the gradient that completes the bucket

    def _gradient_is_ready(self, bucket: "Bucket", i: int) -> None:
        super()._gradient_is_ready(bucket, i)
        if i not in bucket.missing:
            bucket.stale = True
        if not self._synchronizes:
            return
        bucket.missing.discard(i)
        # The order is the same on all ranks: a bucket waits for those before it.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._buckets[self._next].send()
            self._next += 1

    def _finish(self) -> None:
        # If gradients may have grown after they were sent, all buckets are averaged again: ranks differ in which ones
        # have grown, and the average of averaged gradients changes nothing.
        stale = any(bucket.stale for bucket in self._buckets[: self._next])
        again = self._buckets if stale or self._gradients is Gradients.ADDED_TO else []
        for bucket in self._buckets[self._next :]:
            bucket.send()
        for bucket in again:
            bucket.receive()
            bucket.send()
        for bucket in self._buckets:
            bucket.receive()


# -- buckets ----------------------------------------------------------------------------------------------------------


class Bucket:
    """Gradients of one dtype that are averaged by one all-reduce."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        first, elements = parameters[0], sum(p.numel() for p in parameters)
        self._tensor = torch.zeros(elements + len(parameters), dtype=first.dtype, device=first.device)
        self._views = views(self._tensor, parameters)
        self._used = self._tensor[elements:]
        self._work: dist.Work | None = None
        self.missing = set(range(len(parameters)))
        """Indices of the parameters whose gradients are not ready in this backward."""
        self.stale = False
        """True if a gradient was accumulated after the bucket was sent."""

    def send(self, *, poisoned: bool = False) -> None:
        """Start the all-reduce. Gradients are divided before they are summed, so that fp16 does not overflow."""
        share = 1 / dist.get_world_size()
        used = [p.grad is not None for p in self.parameters]
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.grad is None:
                view.zero_()
            elif p.grad.is_sparse:
                raise ValueError("sparse gradients cannot be averaged in buckets; use nn.Embedding(sparse=False)")
            else:
                torch.mul(p.grad, share, out=view)
                p.grad = view
        if all(used):
            self._used.fill_(1)
        else:
            self._used.copy_(torch.tensor(used))
        if poisoned:
            self._tensor.fill_(math.nan)
        self._work = dist.all_reduce(self._tensor, async_op=True)
        self.stale = False

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def receive(self) -> None:
        """Wait for the mean, and set the gradients of parameters that only other ranks have used."""
        self.wait()
        if any(p.grad is None for p in self.parameters):
            for p, view, used in zip(self.parameters, self._views, self._used.tolist(), strict=True):
                if p.grad is None and used:
                    p.grad = view
        self.missing = set(range(len(self.parameters)))
        self.stale = False


def _register_hooks(wrapper: DataParallel, bucket: Bucket, i: int) -> tuple[Any, Any]:
    """Register hooks before and after a gradient is accumulated; they do not keep the wrapper alive."""
    reference = weakref.ref(wrapper)

    def before(grad: Tensor) -> None:
        bucket.wait()  # autograd must not add to a gradient that is being averaged

    def after(parameter: Tensor) -> None:
        wrapper = reference()
        if wrapper is not None:
            wrapper._gradient_is_ready(bucket, i)

    parameter = bucket.parameters[i]
    return parameter.register_hook(before), parameter.register_post_accumulate_grad_hook(after)
