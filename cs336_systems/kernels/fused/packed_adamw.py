"""AdamW in one pass over memory: fp32 weights and moments updated, and the bf16 weights of the next forward written.

    optimizer = PackedAdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
    loss.backward()
    optimizer.step()  # optimizer.grad_norm: the norm of the gradients, on the device
    optimizer.zero_grad()

The parameters of the model become bf16 views of one flat tensor, their gradients and moments views of others. An fp32
master weight is stored as its bf16 value and the remaining 16 bits: 14 bytes per parameter with gradient and moments,
where autocast holds 16 and bf16 copies. An update reads 14 bytes and writes 12.

With `state_dtype=torch.bfloat16` there are no masters, and the moments are bf16: 8 bytes per parameter. The update is
computed in fp32 and rounded to nearest, as torch's AdamW(fused=True) does for bf16 parameters. A change of a weight
below half the distance to the next bf16 number (0.2% to 0.4% of the weight) is lost, and with a beta2 of 0.999 the
second moment cannot decay: training is coarser.

With `update_in_backward` a parameter is updated as soon as its gradient is final, while backward goes on, and gradients
share memory: 2 bytes per parameter less. `step` then counts the step and checks that every parameter was updated. There
is one backward pass per step, no norm, no clipping and no check: a gradient that is not finite is applied.

Nothing here waits for the device, and everything that changes from step to step is in device memory, so that a step can
be captured in a CUDA graph. With `check_finite` or clipping, a step whose gradient norm is not finite changes nothing
and is not counted.
"""

import numbers
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cs336_systems.kernels.fused import pointwise

ALIGNED = 128
"""Alignment of each parameter in elements, as the loads of matmul kernels require."""


class PackedAdamW(torch.optim.Optimizer):
    """AdamW that owns the memory of its parameters: those of two and more dimensions become `dtype` (torch.bfloat16, or
    torch.float32 to keep them), others keep their dtype. Masters start from the given values, fp32 or `dtype`.
    `state_dtype`: dtype of the masters and moments of `dtype` weights.

    Every parameter must get a gradient in every step; parameters that are frozen now are left alone. Load weights by
    `load_masters`: a module's load_state_dict would leave the low 16 bits of the masters as they were. `max_grad_norm`
    clips the norm over all groups (0: no clipping).

    Parameters on the "meta" device get their memory here, on `device`, and their weights one by one by `load_master`:
    fp32 weights beside the packed ones, which a model of many billions has no room for, never exist.

    `update_in_backward`: groups, such as the parameters of one block, that together contain all parameters. Gradients
    of one group exist at the same time; different groups share the memory of gradients.
    """

    clips_itself = True
    """The interface of step/updates.py: `step` clips, and leaves out an update that is not finite."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        max_grad_norm: float = 0.0,
        check_finite: bool = False,
        device: torch.device | None = None,
        update_in_backward: Iterable[Iterable[nn.Parameter]] = (),
    ):
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"PackedAdamW keeps weights as bfloat16 or float32, not {dtype!r}")
        if state_dtype not in (possible := tuple(dict.fromkeys((torch.float32, dtype)))):
            names = " or ".join(map(str, possible))
            raise ValueError(f"PackedAdamW keeps the state of {dtype} weights in {names}, not {state_dtype!r}")
        _require_number("max_grad_norm", max_grad_norm)
        self._is_packed = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            _check_ranges(group)
        self._sharing = [list(group) for group in update_in_backward]
        if self._sharing and (check_finite or max_grad_norm):
            raise ValueError("an update in backward knows no norm: it excludes check_finite and max_grad_norm")
        self._scalars: list[Tensor] = []
        """Scalars of each group for `pointwise.adamw_`, computed once per backward pass that updates parameters."""
        self._updated: set[nn.Parameter] = set()
        """Parameters that this step's backward pass has updated."""
        self.max_grad_norm = max_grad_norm
        self.check_finite = check_finite or max_grad_norm > 0
        self.dtype, self.state_dtype = dtype, state_dtype
        first = self.param_groups[0]["params"][0]
        self.device = device or first.device
        self._steps = torch.zeros((), device=self.device)
        self._rates = torch.zeros(len(self.param_groups), device=self.device)
        self._uploaded: list[float] = []
        self.grad_norm: Tensor | None = None
        """Norm of the gradients over all parameters in the last step, before clipping; None without `check_finite` and
        clipping."""
        self._packs: list[_Pack] = []
        self._places: dict[nn.Parameter, tuple[_Pack, _View]] = {}
        for number in range(len(self.param_groups)):
            self._pack(number)
        self._is_packed = True
        self.upload_rates()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_packed:
            raise RuntimeError("PackedAdamW takes all parameters when it is constructed: they share one flat tensor")
        super().add_param_group(param_group)

    def _pack(self, number: int) -> None:
        params: list[nn.Parameter] = [p for p in self.param_groups[number]["params"] if p.requires_grad]
        dtypes = tuple(dict.fromkeys((self.dtype, torch.float32)))
        if not all(p.dtype in dtypes and (p.is_meta or p.device == self.device) for p in params):
            raise ValueError(f"PackedAdamW needs parameters in fp32 or {self.dtype}, on one device")
        for dtype in dtypes:
            members = [p for p in params if (self.dtype if p.dim() >= 2 else p.dtype) == dtype]
            if not members:
                continue
            if self.device.type == "meta":
                raise ValueError("parameters on the meta device need the `device` that PackedAdamW allocates them on")
            state_dtype = self.state_dtype if dtype == self.dtype else torch.float32
            pack = _Pack.of(number, members, dtype, state_dtype, self.device, self._sharing)
            self._packs.append(pack)
            for view in pack.views:
                state = {"step": self._steps, "exp_avg": view.of(pack.mean), "exp_avg_sq": view.of(pack.square)}
                self.state[view.parameter] = state
                self._places[view.parameter] = pack, view
                view.parameter.grad_memory = view.gradient(pack)  # type: ignore[attr-defined]
                hook = _updating(self) if self._sharing else _move_to_grad_memory
                view.parameter.register_post_accumulate_grad_hook(hook)

    # -- a step -------------------------------------------------------------------------------------------------------

    def upload_rates(self) -> None:
        """Copy the groups' learning rates to the device if they have changed. `step` does so, unless it is captured."""
        rates = [float(group["lr"]) for group in self.param_groups]
        if rates != self._uploaded:
            self._rates.copy_(torch.tensor(rates))
            self._uploaded = rates

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._sharing:
            self._finish_updates()
            return loss
        self._require_gradients()
        self._upload_unless_captured()
        is_finite, factor = self._norm_and_factor()
        self._steps += is_finite
        scalars = self._group_scalars(self._steps, factor, is_finite)
        for pack in self._packs:
            self._update(pack, slice(None), pack.grads, scalars[pack.group])
        return loss

    def _group_scalars(self, step_count: Tensor, factor: Tensor, is_finite: Tensor) -> list[Tensor]:
        """Return each group's `scalars` for pointwise.adamw_."""
        found, steps = [], step_count.double()
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            beta1, beta2 = group["betas"]
            corrections = 1 - beta1**steps, (1 - beta2**steps).sqrt()
            found.append(torch.stack([rate, factor, *corrections, is_finite]).float())
        return found

    def _update(self, pack: "_Pack", span: slice, gradient: Tensor, scalars: Tensor) -> None:
        """Update a range of a pack."""
        group = self.param_groups[pack.group]
        # `data`: autograd would take the update of one weight for a change of all those that backward still reads.
        weights, rest = pack.weights.data[span], None if pack.rest is None else pack.rest[span]
        pointwise.adamw_(
            weights, rest, gradient, pack.mean[span], pack.square[span], scalars,
            group["betas"], group["eps"], group["weight_decay"],
        )  # fmt: skip

    @torch.no_grad()
    def _update_now(self, parameter: nn.Parameter) -> None:
        """Update a parameter whose gradient is final, and drop the gradient."""
        assert parameter.grad is not None
        if parameter in self._updated:
            raise RuntimeError("PackedAdamW with update_in_backward takes one backward pass per step; call step()")
        if not self._scalars:
            self._upload_unless_captured()
            one = torch.ones((), device=self.device)
            self._scalars = self._group_scalars(self._steps + 1, one, one)
        pack, view = self._places[parameter]
        self._update(pack, view.span, parameter.grad.reshape(-1), self._scalars[pack.group])
        self._updated.add(parameter)
        parameter.grad = None

    def _finish_updates(self) -> None:
        """Count a step whose backward pass has updated the parameters."""
        for parameter in self._places:
            if parameter not in self._updated:
                raise _no_gradient(parameter)
        self._steps += 1
        self._scalars.clear()
        self._updated.clear()

    def _upload_unless_captured(self) -> None:
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.upload_rates()

    def _norm_and_factor(self) -> tuple[Tensor, Tensor]:
        """Return 1 if the gradients are finite, else 0, and the factor by which clipping multiplies them."""
        one = torch.ones((), device=self.device)
        if not self.check_finite:
            return one, one
        norms = [torch.linalg.vector_norm(pack.grads, dtype=torch.float32) for pack in self._packs]
        self.grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        factor = (self.max_grad_norm / (self.grad_norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm else one
        return self.grad_norm.isfinite().float(), factor

    def _require_gradients(self) -> None:
        for pack in self._packs:
            for view in pack.views:
                if view.parameter.grad is None:
                    raise _no_gradient(view.parameter)
                _move_to_grad_memory(view.parameter)  # a gradient that the caller has assigned

    # -- weights and state, for checkpoints ---------------------------------------------------------------------------

    @property
    def owned(self) -> list[Tensor]:
        """All parameters: their state is on this rank."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def unlisted_state(self) -> list[Tensor]:
        """The low 16 bits of the masters, which neither the parameters nor `state` hold."""
        return [pack.rest for pack in self._packs if pack.rest is not None]

    @property
    def flat(self) -> list[tuple[str, Tensor, list[tuple[int, nn.Parameter]]]]:
        """Packed tensors: kind, tensor, and the start of each parameter in it; gradients only if they do not share
        memory."""
        found = []
        for pack in self._packs:
            starts = [(view.start, view.parameter) for view in pack.views]
            kinds = {"weight": pack.weights, "low bits": pack.rest}
            kinds |= {} if self._sharing else {"gradient": pack.grads}
            kinds |= {"exp_avg": pack.mean, "exp_avg_sq": pack.square}
            found += [(kind, tensor, starts) for kind, tensor in kinds.items() if tensor is not None]
        return found

    @torch.no_grad()
    def masters(self, device: torch.device | str | None = None) -> dict[nn.Parameter, Tensor]:
        """Return a copy of every parameter's weights in fp32 on `device`, such as the host if the GPU has no room."""
        return {
            view.parameter: view.master(pack).to(device or self.device, torch.float32, copy=pack.rest is None)
            for pack in self._packs
            for view in pack.views
        }

    @torch.no_grad()
    def load_masters(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace the weights of all parameters."""
        for pack in self._packs:
            for view in pack.views:
                if view.parameter not in values:
                    raise ValueError(f"no weights for a parameter of shape {tuple(view.parameter.shape)}")
                view.set_master(pack, values[view.parameter])

    @torch.no_grad()
    def load_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace the weights of one parameter."""
        pack, view = self._places[parameter]
        view.set_master(pack, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of torch's AdamW, where each parameter counts its own steps."""
        found = super().state_dict()
        found["state"] = {number: {**state, "step": state["step"].clone()} for number, state in found["state"].items()}
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of torch's AdamW over the same groups."""
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the optimizer's state belongs to other parameter groups")
        steps = set()
        for theirs, group in zip(groups, self.param_groups, strict=True):
            group.update({name: value for name, value in theirs.items() if name in self.defaults})
            for number, parameter in zip(theirs["params"], group["params"], strict=True):
                if (found := state_dict["state"].get(number)) is not None and parameter in self.state:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter][name].copy_(found[name])
                    steps.add(float(found["step"]))
        if len(steps) > 1:
            raise ValueError(f"parameters in the state differ in their number of steps: {sorted(steps)}")
        self._steps.fill_(steps.pop() if steps else 0.0)
        self.upload_rates()


def _require_number(name: str, value: Any) -> None:
    if not isinstance(value, numbers.Real | Tensor):
        raise TypeError(f"{name} must be a number, got {value!r}")


def _check_ranges(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        _require_number(name, group[name])
        if not group[name] >= 0:
            raise ValueError(f"{name} must be at least 0, got {group[name]}")
    if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
        raise TypeError(f"betas must be two numbers, got {group['betas']!r}")
    for beta in group["betas"]:
        _require_number("each of betas", beta)
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas must be at least 0 and below 1, got {group['betas']}")


def _updating(optimizer: PackedAdamW) -> Callable[[Tensor], None]:
    """Return the hook of parameters that are updated in backward; it does not keep the optimizer alive.

    Autograd calls it after a parameter's last use, also where a fused node has left the gradient in `grad_memory`.
    """
    reference = weakref.ref(optimizer)

    def update(parameter: Tensor) -> None:
        optimizer = reference()
        if optimizer is not None and parameter.grad is not None:
            optimizer._update_now(cast(nn.Parameter, parameter))

    return update


def _no_gradient(parameter: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a parameter of shape {tuple(parameter.shape)} got no gradient; PackedAdamW updates all parameters in every "
        f"step: use torch.optim.AdamW for a model that leaves some unused"
    )


def _move_to_grad_memory(parameter: Tensor) -> None:
    """Copy a gradient that autograd has allocated into the memory that the optimizer reads."""
    memory = parameter.grad_memory  # type: ignore[attr-defined]
    if parameter.grad is not None and parameter.grad is not memory:
        parameter.grad = memory.copy_(parameter.grad)


@dataclass
class _View:
    """The position of a parameter in its pack."""

    parameter: nn.Parameter
    start: int
    gradient_start: int
    """Start in the gradient memory, which groups may share."""

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.parameter.numel())

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.span].view(self.parameter.shape)

    def gradient(self, pack: "_Pack") -> Tensor:
        end = self.gradient_start + self.parameter.numel()
        return pack.grads[self.gradient_start : end].view(self.parameter.shape)

    def master(self, pack: "_Pack") -> Tensor:
        """Return the weight in the precision of the state."""
        if pack.rest is None:
            return self.of(pack.weights)
        return pointwise.united(self.of(pack.weights), self.of(pack.rest))

    def set_master(self, pack: "_Pack", value: Tensor) -> None:
        if pack.rest is None:
            self.of(pack.weights).copy_(value)
        else:
            whole = value.to(pack.weights.device, torch.float32).contiguous()
            pointwise.split_(whole, self.of(pack.weights), self.of(pack.rest))


@dataclass
class _Pack:
    """The parameters of one group and one dtype, packed into flat tensors."""

    group: int
    views: list[_View]
    weights: Tensor
    rest: Tensor | None
    grads: Tensor
    mean: Tensor
    square: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        group: int,
        parameters: list[nn.Parameter],
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
        sharing: Sequence[Sequence[nn.Parameter]],
    ) -> "_Pack":
        sharer = {parameter: number for number, members in enumerate(sharing) for parameter in members}
        if sharing and not all(parameter in sharer for parameter in parameters):
            raise ValueError("update_in_backward must name all parameters")
        views, end, gradient_ends = [], 0, Counter[int]()
        for parameter in parameters:
            own = sharer.get(parameter, 0)
            views.append(_View(parameter, end, gradient_ends[own]))
            size = -(-parameter.numel() // ALIGNED) * ALIGNED
            end, gradient_ends[own] = end + size, gradient_ends[own] + size

        def zeros(of: torch.dtype, size: int = end) -> Tensor:
            return torch.zeros(size, dtype=of, device=device)

        rest = zeros(torch.int16) if dtype != state_dtype else None
        grads = zeros(dtype, max(gradient_ends.values()))
        pack = cls(group, views, zeros(dtype), rest, grads, zeros(state_dtype), zeros(state_dtype))
        for view in views:
            packed = view.of(pack.weights)
            if view.parameter.is_meta:  # the object stays: the module and the groups hold it
                torch.utils.swap_tensors(view.parameter, nn.Parameter(packed))
            else:
                view.set_master(pack, view.parameter)
                view.parameter.data = packed
        return pack
