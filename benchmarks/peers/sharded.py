"""The ViT of vit_10b in PyTorch, cut over processes with FSDP2 on gloo, for benchmarks.sharded.

    python -m benchmarks.peers.sharded JSON

JSON has the shape, `mode`, `processes`, `batch` (of one process), `steps` and `threads`. Rank 0
prints a line of JSON: the median seconds of a step and a process's peak memory in GB.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time

import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# The first steps make buffers.
WARM_UP = 2


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, tokens, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = (
            functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, dim)
        )
        x = x + self.proj(mixed)
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(
        self, image: int, patch: int, dim: int, heads: int, blocks: int, recompute: bool
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1000)
        self.recompute = recompute

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x).mean(1))


def train(rank: int, asked: dict[str, int | str], port: int) -> None:
    torch.set_num_threads(asked["threads"])
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=asked["processes"]
    )
    mode = asked["mode"]
    model = ViT(
        *(asked[name] for name in ("image_size", "patch_size", "embed_dim", "num_heads")),
        blocks=asked["num_blocks"],
        recompute=mode == "full",
    )
    if mode == "replicated":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (asked["processes"],))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    images = torch.zeros(asked["batch"], 3, asked["image_size"], asked["image_size"])
    labels = torch.zeros(asked["batch"], dtype=torch.int64)
    seconds = []
    for _ in range(WARM_UP + asked["steps"]):
        start = time.perf_counter()
        functional.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(json.dumps([statistics.median(seconds[WARM_UP:]), memory]), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.multiprocessing.spawn(train, (asked, asked["port"]), nprocs=asked["processes"])
