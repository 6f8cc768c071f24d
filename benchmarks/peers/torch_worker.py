"""PyTorch: `eager`, `compile`, DistributedDataParallel over processes with gloo (`ddp`, `ddp-compile`), and on the GPU
of the machine, otherwise its CPU, under bfloat16 autocast with float32 parameters (`gpu-compile`).

python torch_worker.py MODEL NUM_DEVICES MODE
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from models import (
    B2,
    CLASSES,
    DECAY,
    EPS,
    GPU_MODELS,
    GROUPS,
    LEARNING_RATE,
    MODELS,
    STAGES,
    VOCAB,
    Model,
    parameters,
    rotary_angles,
    rows,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker import CHECKED_STEPS, LOG_EVERY, serve


def linear(w: Any) -> nn.Linear:
    """Returns a layer without bias for `x @ w`."""
    layer = nn.Linear(*w.shape, bias=False)
    layer.weight.data = torch.tensor(w.T).contiguous()
    return layer


def scale(w: Any) -> nn.RMSNorm:
    return nn.RMSNorm(len(w), eps=1e-6)


class Block(nn.Module):
    def __init__(self, w: dict[str, Any], model: Model):
        super().__init__()
        self.attention_norm, self.mlp_norm = scale(w["attention_norm"]), scale(w["mlp_norm"])
        for name in ("query", "key", "value", "out", "up", "down"):
            setattr(self, name, linear(w[name]))
        angles = torch.tensor(rotary_angles(model))
        self.head_width = model.head_width
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)

    def rotary(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (self.heads(layer(h)) for layer in (self.query, self.key, self.value))
        h = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class GPT(nn.Module):
    def __init__(self, w: dict[str, Any], model: Model):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.tensor(w["embed"]), freeze=False)
        of_layer = lambda i: {k.removeprefix(f"{i}."): v for k, v in w.items() if k.startswith(f"{i}.")}
        self.blocks = nn.Sequential(*(Block(of_layer(i), model) for i in range(model.layers)))
        self.norm, self.head, self.vocab = scale(w["norm"]), linear(w["head"]), model.vocab

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(x)))).view(-1, self.vocab)


class LSTM(nn.Module):
    def __init__(self, w: dict[str, Any], model: Model):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.tensor(w["embed"]), freeze=False)
        self.lstm, self.head = nn.LSTM(model.width, model.width, batch_first=True), linear(w["head"])
        self.lstm.weight_ih_l0.data = torch.tensor(w["input"].T).contiguous()
        self.lstm.weight_hh_l0.data = torch.tensor(w["recurrent"].T).contiguous()
        self.lstm.bias_ih_l0.data = torch.tensor(w["bias"])
        self.lstm.bias_hh_l0.data = torch.zeros_like(self.lstm.bias_hh_l0)
        self.lstm.bias_hh_l0.requires_grad_(False)  # the other frameworks have one bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(x))[0]).view(-1, VOCAB)


class ResNet(nn.Module):
    def __init__(self, w: dict[str, Any], model: Model):
        super().__init__()
        self.stem, self.head = self.conv(w["stem"]), linear(w["head"])
        self.project = nn.ModuleList(self.conv(w[f"{i}.project"]) for i in range(len(STAGES)))
        names = [f"{i}.{j}" for i in range(len(STAGES)) for j in range(2)]
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, len(w[f"{name}.scale"]), eps=1e-5) for name in names)
        self.convs = nn.ModuleList(self.conv(w[f"{name}.conv"]) for name in names)

    @staticmethod
    def conv(w: Any) -> nn.Conv2d:
        layer = nn.Conv2d(w.shape[2], w.shape[3], w.shape[0], padding=w.shape[0] // 2, bias=False)
        layer.weight.data = torch.tensor(w.transpose(3, 2, 0, 1)).contiguous()
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i in range(len(STAGES)):
            x = self.project[i](F.avg_pool2d(x, 2) if i else x)
            h = self.convs[2 * i](F.relu(self.norms[2 * i](x)))
            x = x + self.convs[2 * i + 1](F.relu(self.norms[2 * i + 1](h)))
        return self.head(x.mean((2, 3))).view(-1, CLASSES)


KINDS = {"gpt": GPT, "lstm": LSTM, "resnet": ResNet}


class Loop:
    """The training loop of one process: its share of the rows, shuffled in each step."""

    def __init__(self, model: Model, mode: str, rank: int, num: int):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num))
        is_gpu_mode = mode.startswith("gpu")
        self.device = torch.device("cuda" if is_gpu_mode and torch.cuda.is_available() else "cpu")
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=is_gpu_mode)
        module = net = KINDS[model.kind](parameters(model), model).to(self.device)
        if num > 1:
            module = DistributedDataParallel(module)
        if mode.endswith("compile"):
            module = torch.compile(module)
        trained = [p for p in net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, LEARNING_RATE, betas=(0.9, B2), weight_decay=DECAY, eps=EPS, fused=True
        )
        x, y = (torch.tensor(a)[rank::num].to(self.device) for a in rows(model))
        self.x, self.y = (x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x), y.long()
        self.module, self.step, self.num = module, 0, num
        self.random = torch.Generator(self.device).manual_seed(rank)

    def run(self, steps: int, log_every: int = LOG_EVERY) -> list[float]:
        """Trains `steps` steps; returns the losses that it reads."""
        found = []
        for _ in range(steps):
            order = torch.randperm(len(self.x), generator=self.random, device=self.device)
            x, y = self.x[order], self.y[order]
            with self.autocast:
                loss = F.cross_entropy(self.module(x), y.view(-1))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            if self.step % log_every == 0:
                loss = loss.detach()
                if self.num > 1:
                    dist.all_reduce(loss)
                found.append(float(loss) / self.num)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return found


def follow(rank: int, num: int, port: int, model: Model, mode: str, pipe: Any) -> None:
    """Runs rank 1 and higher: trains when rank 0 sends a number of steps."""
    join(rank, num, port)
    loop = Loop(model, mode, rank, num)
    with contextlib.suppress(EOFError):  # rank 0 has ended
        while True:
            loop.run(*pipe.recv())
            pipe.send(None)


def join(rank: int, num: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num)


def main() -> None:
    """Serves the loop of the model, mode and number of processes on the command line."""
    model, num, mode = (MODELS | GPU_MODELS)[sys.argv[1]], int(sys.argv[2]), sys.argv[3]
    pipes: list[Any] = []
    if num > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        for rank in range(1, num):
            here, there = context.Pipe()
            pipes.append(here)
            context.Process(target=follow, args=(rank, num, port, model, mode, there), daemon=True).start()
        join(0, num, port)
    loop = Loop(model, mode, 0, num)

    def run(steps: int, log_every: int = LOG_EVERY) -> list[float]:
        for pipe in pipes:
            pipe.send((steps, log_every))
        found = loop.run(steps, log_every)
        for pipe in pipes:
            pipe.recv()
        return found

    losses = run(CHECKED_STEPS, 1)
    peak = torch.cuda.max_memory_allocated() if loop.device.type == "cuda" else None
    serve(losses, run, ["torch"], peak_bytes=peak)


if __name__ == "__main__":
    main()
