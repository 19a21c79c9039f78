"""AdamW on float32 master weights with float32 gradient accumulation, and the learning-rate schedule."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from sparring.errors import refusal
from sparring.train.blocks import Stretch, block_squares, buckets, norm_of, stretches
from sparring.train.config import TrainConfig
from sparring.train.optimiser_state import STEP, StoredOptimiser
from sparring.train.ranks import ALONE, Ranks

_MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET = 16 << 20
"""Number of elements that are sent between ranks at a time, which bounds the memory of a copy."""


class Optimiser:
    """AdamW (Decoupled weight decay regularization, arXiv 1711.05101, algorithm 2) over named parameters, or over this
    rank's shard of them (ZeRO stage 2, arXiv 1910.02054).

    A shard has a range of elements (stretch) of some parameters; gradients, masters and moments exist only for these
    elements. A contiguous float32 parameter is its own master. Any other parameter gets a contiguous float32 master,
    whose gradients accumulate in float32 over micro-batches; `write_back` updates the parameters, in all ranks.

    Masters, gradients and moments are contiguous, because the fused AdamW on a CPU reads memory in order and ignores
    strides (torch 2.13). Autograd often returns views: parts of a joined product's gradient, or transposes.

    Args:
        parameters: parameters by name; those without `requires_grad` are ignored.
        apart: keep every master in separate memory, even of a float32 parameter; `write_back` is not called then.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainConfig,
        ranks: Ranks = ALONE,
        *,
        apart: bool = False,
    ) -> None:
        self._clip, self._ranks = config.gradient_clip, ranks
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.shards = stretches({name: p.numel() for name, p in self._parameters.items()}, ranks.count)
        self._own = self.shards[ranks.rank]
        make = _apart if apart else _master
        self._masters = {name: make(self._parameters[name], stretch) for name, stretch in self._own.items()}
        matrices = {name for name, p in self._parameters.items() if p.ndim >= 2}
        decayed = [master for name, master in self._masters.items() if name in matrices]
        others = [master for name, master in self._masters.items() if name not in matrices]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters."""
        return list(self._parameters.values())

    @property
    def names(self) -> list[str]:
        """Names of `parameters`, in the same order."""
        return list(self._parameters)

    @property
    def ranges(self) -> dict[str, Stretch]:
        """Range of elements of each parameter in this rank's shard."""
        return dict(self._own)

    @property
    def own(self) -> dict[str, torch.Tensor]:
        """Masters of this rank's shard by parameter, float32: the shard's elements only."""
        return {name: master.detach() for name, master in self._masters.items()}

    def masters(self) -> dict[str, torch.Tensor]:
        """Return all trained weights by name, float32. Whole float32 weights of this process are not copied."""
        whole = {
            name: self._masters[name].detach()
            if self._own.get(name) == (0, p.numel())
            else p.detach()
            if _is_own_master(p)
            else torch.empty(p.shape, device=p.device)
            for name, p in self._parameters.items()
        }
        self._spread({name: tensor for name, tensor in whole.items() if not _is_own_master(self._parameters[name])})
        return whole

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add a micro-batch's gradients, in the order of `parameters`; None stands for a missing gradient."""
        for name, gradient in zip(self._masters, gradients, strict=True):
            if gradient is not None:
                self.add_one(name, gradient)

    def add_one(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient of a parameter's elements in this shard, by copy, because autograd may reuse the tensor."""
        master = self._masters[name]
        if master.grad is None:
            master.grad = torch.empty_like(master).copy_(gradient.view_as(master))
        else:
            master.grad.add_(gradient.view_as(master))

    def step(self, rate: float) -> float:
        """Clip the gradients, update the masters and drop the gradients; return the global gradient norm before
        clipping. If it is not finite, nothing is updated."""
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        squares = block_squares(*gradients)
        every = self._ranks.gather(struct.pack(f"<{len(squares)}d", *squares))
        norm = norm_of(square for data in every for (square,) in struct.iter_unpack("<d", data))
        if math.isfinite(norm):
            if gradients and self._clip and norm > self._clip:  # this shard may have none
                torch._foreach_mul_(gradients, self._clip / norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self.discard()
        return norm

    def discard(self) -> None:
        """Drop all gradients."""
        for master in self._masters.values():
            master.grad = None

    def write_back(self) -> None:
        """Update the parameters of every rank from the masters, cast to the parameters' dtypes."""
        self._spread({name: p.detach() for name, p in self._parameters.items()})

    def state(self) -> dict[str, torch.Tensor]:
        """Return this shard's moments, step counts and those masters that are not the parameter itself, by
        `<kind>/<parameter>`."""
        tensors = {}
        for name, master in self._masters.items():
            if not _is_own_master(self._parameters[name]):
                tensors[f"master/{name}"] = master.detach()
            for kind, value in self._adamw.state.get(master, {}).items():
                tensors[f"{kind}/{name}"] = value
        return tensors

    def load_state(self, state: StoredOptimiser) -> None:
        """Restore this rank's shard from the optimiser's `state`, reading only the shard's elements. Raises BadInput
        for tensors of other parameters or another dtype."""
        self.discard()
        masters = {name for name, p in self._parameters.items() if not _is_own_master(p)}
        stored = {name.removeprefix("master/") for name in state.names if name.startswith("master/")}
        if masters != stored:
            advice = "restore with the dtype it was saved with"
            raise refusal("optimiser state", f"{len(masters)} float32 master weights", str(len(stored)), advice)
        strangers = {name.partition("/")[2] for name in state.names} - self._parameters.keys()
        if strangers:
            advice = "restore the model it was saved from"
            raise refusal("optimiser state", "this model's parameters", f"also {min(strangers)}", advice)
        with torch.no_grad():
            for name in masters & self._masters.keys():
                self._masters[name].copy_(self._stored(state, f"master/{name}"))
        self._adamw.state.clear()
        for name, master in self._masters.items():
            if f"{STEP}/{name}" in state:
                moments = {kind: self._stored(state, f"{kind}/{name}").to(master.device) for kind in _MOMENTS}
                self._adamw.state[master] = {STEP: state.steps(name).to(master.device), **moments}

    def _stored(self, state: StoredOptimiser, key: str) -> torch.Tensor:
        """Return this shard's elements of a stored tensor, in the shape of the parameter's master."""
        name = key.partition("/")[2]
        return state.stretch(key, self._own[name]).view_as(self._masters[name])

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Restore from whole weights the masters of contiguous float32 parameters, which are not in `state`."""
        for name, master in self._masters.items():
            if _is_own_master(self._parameters[name]):
                master.copy_(self._stretch(name, weights[name]))

    def _stretch(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this shard's elements of `whole`, with all elements of a parameter, in the shape of the master."""
        begin, end = self._own[name]
        return whole.reshape(-1)[begin:end].view_as(self._masters[name])

    @torch.no_grad()
    def _spread(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy the masters of all ranks into tensors of the parameters' shapes, cast to their dtypes."""
        for owner, shard in enumerate(self.shards):
            every = [name for name in shard if name in targets]
            for first, end in buckets([shard[name][1] - shard[name][0] for name in every], BUCKET):
                names = every[first:end]
                if owner == self._ranks.rank:
                    casts = [self._masters[name].to(targets[name].dtype) for name in names]
                    data = [cast.reshape(-1).view(torch.uint8) for cast in casts] if self._ranks.count > 1 else []
                    for name, cast in zip(names, casts, strict=True):
                        _put(targets[name], shard[name], cast)
                else:
                    data = [
                        torch.empty((shard[name][1] - shard[name][0]) * targets[name].element_size(), dtype=torch.uint8)
                        for name in names
                    ]
                if data:
                    self._send(owner, targets, names, data)

    def _send(
        self, owner: int, targets: Mapping[str, torch.Tensor], names: Sequence[str], data: Sequence[torch.Tensor]
    ) -> None:
        """Broadcast some of rank `owner`'s masters to all ranks, and copy them into the targets."""
        whole = torch.cat(list(data))
        self._ranks.broadcast(whole, owner)
        if owner != self._ranks.rank:
            for name, piece in zip(names, whole.split([len(each) for each in data]), strict=True):
                values = piece.clone().view(targets[name].dtype)  # a bucket's stretches may have several dtypes
                _put(targets[name], self.shards[owner][name], values)


def _is_own_master(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.float32 and parameter.is_contiguous()


def _master(parameter: nn.Parameter, stretch: Stretch) -> nn.Parameter:
    """Return the master of a range of elements: the parameter itself if it is its own master and the range is whole,
    else a new float32 parameter."""
    if stretch == (0, parameter.numel()):
        return parameter if _is_own_master(parameter) else nn.Parameter(parameter.detach().float().contiguous())
    return nn.Parameter(parameter.detach().reshape(-1)[stretch[0] : stretch[1]].float())


def _apart(parameter: nn.Parameter, stretch: Stretch) -> nn.Parameter:
    """Return a master of a range of elements that shares no memory with the parameter."""
    values = parameter.detach().reshape(-1)[stretch[0] : stretch[1]]
    return nn.Parameter(torch.empty(len(values), device=values.device).copy_(values))


def _put(target: torch.Tensor, stretch: Stretch, values: torch.Tensor) -> None:
    """Copy values into a range of a tensor's elements. A whole tensor that shares the values' memory is left as it
    is."""
    if stretch == (0, target.numel()):
        if target.data_ptr() != values.data_ptr():
            target.copy_(values.view(target.shape))
    elif target.is_contiguous():
        target.view(-1)[stretch[0] : stretch[1]].copy_(values.reshape(-1))
    else:
        flat = target.reshape(-1)  # a copy
        flat[stretch[0] : stretch[1]] = values.reshape(-1)
        target.copy_(flat.view(target.shape))


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of the optimiser step that follows `step` finished ones.

    Warm-up: peak * (step + 1) / warmup_steps. Then, with x from 0 at the next step to 1 at the last of `total_steps`
    and m = min_ratio: constant 1, linear 1 - (1 - m) x, cosine m + (1 - m) (1 + cos(pi x)) / 2 (SGDR, arXiv 1608.03983,
    equation 5), times the peak. A schedule of one step has its peak rate; a single step after a warm-up has the rate at
    the end (x = 1).
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = total_steps - config.warmup_steps - 1
    x = min(1.0, (step - config.warmup_steps) / span) if span > 0 else float(config.warmup_steps > 0)
    if config.schedule == "linear":
        share = 1.0 - (1.0 - config.min_ratio) * x
    elif config.schedule == "cosine":
        share = config.min_ratio + (1.0 - config.min_ratio) * (1.0 + math.cos(math.pi * x)) / 2
    else:
        share = 1.0
    return config.learning_rate * share
