"""Data parallel training: every rank holds the whole model and a part of the batch; gradients are averaged.

Four variants, which differ in how gradients are grouped into messages and when these are sent:

- `NaiveDDP(module)`: one message for each parameter, one after another, when backward is over.
- `FlatDDP(module)`: one message for all parameters of a dtype, when backward is over.
- `DDP(module)`: one for each parameter, sent as soon as its gradient is there, while backward goes on.
- `DDP(module, bucket_size_mb=25)`: buckets of about that size, each sent when its last gradient is there.

    model = DDP(model, bucket_size_mb=25)
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

How it works. A bucket is one flat tensor; the gradients of its parameters are views into it, so that nothing is copied
that autograd left there. Behind the gradients stands a flag for each parameter, 1 where this rank has a gradient: the
sum over ranks tells a parameter that nobody used, whose gradient stays None, from one that others used.

Every rank sends the same buckets in the same order, whatever order its gradients come in, and `finish` sends what
backward did not: a rank that did not use a parameter sends zeros for it. So ranks cannot wait for each other in vain.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from cs336_systems.parallel.collectives import broadcast, by_kind, pack, require_same, views

MIB = 1 << 20


class DataParallel(nn.Module, ABC):
    """What the variants share: one model on all ranks, buckets, and `no_sync`."""

    def __init__(self, module: nn.Module):
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError(f"{type(self).__name__} needs a process group; call dist.init_process_group first")
        self.module = module
        self._start()
        require_same(module)
        with torch.no_grad():
            broadcast([*module.parameters(), *module.buffers()])

    def _start(self) -> None:
        """Set what belongs to this process and not to the model."""
        self._buckets: list[Bucket] = []
        self._trained: tuple[bool, ...] | None = None
        self._synchronizes = True
        self._due = False
        """Whether a forward pass or a gradient has come since gradients were last averaged."""
        self._next = 0
        """The bucket that is sent next."""
        self._in_backward = False
        self._synchronized, self._added = False, False
        """Whether, since gradients were last averaged, a forward was to be synchronised, and one after it was not."""
        self._hooks: list[Any] = []

    # A copy, or a pickled one, is a wrapper of its own: it makes its own buckets when it is used.
    def __getstate__(self) -> dict[str, Any]:
        runtime = {"_buckets", "_trained", "_synchronizes", "_due", "_next", "_in_backward", "_synchronized", "_added"}
        return {name: value for name, value in self.__dict__.items() if name not in {*runtime, "_hooks"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own: a checkpoint does not know how it was trained."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._before_forward()
        return self.module(*args, **kwargs)

    @torch.compiler.disable
    def _before_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._in_backward:
            self._drop_failed_backward()
        self._update_buckets()
        if self._synchronizes:
            buffers = _persistent_buffers(self.module)
            with torch.no_grad():
                broadcast(buffers)
        self._due = True
        self._added |= self._synchronized and not self._synchronizes
        self._synchronized |= self._synchronizes

    def _update_buckets(self) -> None:
        """Make buckets of the parameters that are trained, again when other ones are."""
        parameters = list(self.module.parameters())  # each tied parameter once
        trained = tuple(p.requires_grad for p in parameters)
        if trained == self._trained:
            return
        self._trained = trained
        self._next = 0
        self._buckets = [Bucket(group) for group in self._groups([p for p in parameters if p.requires_grad])]
        self._remove_hooks()
        places = [(bucket, i) for bucket in self._buckets for i in range(len(bucket.parameters))]
        self._hooks = [hook for bucket, i in places for hook in _hook(self, bucket, i)]

    def _remove_hooks(self) -> None:
        for hook in self.__dict__.get("_hooks", ()):
            hook.remove()

    __del__ = _remove_hooks

    @abstractmethod
    def _groups(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        """Which parameters share a bucket; in the order in which buckets are sent."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up on this rank; the next one outside, or `finish`, averages the sum."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the mean over ranks. For all ranks, after backward and before the update."""
        if not self._due:
            return
        if self._in_backward:
            self._drop_failed_backward()
            raise RuntimeError("the last backward raised an error; what it left is dropped on this rank: run it again")
        self._update_buckets()
        self._finish()
        self._reset()

    def _reset(self) -> None:
        self._next = 0
        self._in_backward = self._due = self._synchronized = self._added = False

    def _finish(self) -> None:
        """Send and receive, one after another."""
        for bucket in self._buckets:
            bucket.send()
            bucket.receive()

    def _gradient_came(self, bucket: "Bucket", i: int) -> None:
        self._due = True
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Called by autograd, if backward did not raise."""
        self._in_backward = False

    @torch.no_grad()
    def _drop_failed_backward(self) -> None:
        """Send what is left, as other ranks may be waiting for it, and drop all of it.

        What is left is sent as NaN: where backward failed on this rank alone, others must not take for the mean what
        lacks a part.
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
    """One all-reduce for each parameter, after backward, each waited for before the next."""

    def _groups(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        return ([p] for p in parameters)


class FlatDDP(DataParallel):
    """One all-reduce for each dtype, after backward."""

    def _groups(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        return by_kind(parameters)


class DDP(DataParallel):
    """All-reduces that begin as gradients become ready, while backward goes on."""

    def __init__(self, module: nn.Module, bucket_size_mb: float | None = None):
        if bucket_size_mb is not None and not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be above 0, got {bucket_size_mb!r}; leave it out for no buckets")
        self.bucket_size_mb = bucket_size_mb
        super().__init__(module)

    def _groups(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        """Backward comes to the last parameters first."""
        backwards = parameters[::-1]
        if self.bucket_size_mb is None:
            return ([p] for p in backwards)
        limit = self.bucket_size_mb * MIB
        groups = [group for kind in by_kind(backwards) for group in pack(kind, limit)]
        place = {id(p): i for i, p in enumerate(backwards)}
        return sorted(groups, key=lambda group: place[id(group[-1])])  # full, as backward goes, when its last one is

    def _gradient_came(self, bucket: "Bucket", i: int) -> None:
        super()._gradient_came(bucket, i)
        if i not in bucket.missing:
            bucket.stale = True
        if not self._synchronizes:
            return
        bucket.missing.discard(i)
        # One order on all ranks: a bucket waits for those before it.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._buckets[self._next].send()
            self._next += 1

    def _finish(self) -> None:
        # Where gradients may have been added to after they were sent, all are averaged again: to which of them differs
        # over ranks, and what is averaged already stays as it is.
        added = self._added or any(bucket.stale for bucket in self._buckets[: self._next])
        again = self._buckets if added else []
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
        """Parameters whose gradients have not come in this backward."""
        self.stale = False
        """Whether gradients were added to after the bucket was sent."""

    def send(self, *, poisoned: bool = False) -> None:
        """Begin to average. Divided before they are added, so that fp16 does not overflow."""
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
        """Wait for the mean, and give it to parameters that only other ranks have used."""
        self.wait()
        if any(p.grad is None for p in self.parameters):
            for p, view, used in zip(self.parameters, self._views, self._used.tolist(), strict=True):
                if p.grad is None and used:
                    p.grad = view
        self.missing = set(range(len(self.parameters)))
        self.stale = False


def _hook(wrapper: DataParallel, bucket: Bucket, i: int) -> tuple[Any, Any]:
    """Before and after autograd adds to a parameter's gradient. A wrapper that is dropped must not live on in them."""
    reference = weakref.ref(wrapper)

    def before(grad: Tensor) -> None:
        bucket.wait()  # it would add to what is being averaged

    def after(parameter: Tensor) -> None:
        wrapper = reference()
        if wrapper is not None:
            wrapper._gradient_came(bucket, i)

    parameter = bucket.parameters[i]
    return parameter.register_hook(before), parameter.register_post_accumulate_grad_hook(after)


def _persistent_buffers(module: nn.Module) -> list[Tensor]:
    """Those that a checkpoint keeps. The others are constants that each rank computes for itself, like RoPE's."""
    return [
        buffer
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]
