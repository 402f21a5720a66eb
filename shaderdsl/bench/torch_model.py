"""The same models in PyTorch, on its default device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _llama(t: Any, shape: tuple[int, ...]) -> Any:
    v, d, layers, heads, kv, ffn, _ = shape
    c = d // heads
    functional = t.nn.functional

    def linear(i: int, o: int) -> Any:
        return t.nn.Linear(i, o, bias=False)

    def turn(y: Any, cos: Any, sin: Any) -> Any:
        half = t.cat((-y[..., c // 2 :], y[..., : c // 2]), -1)
        return y * cos + half * sin

    class Block(t.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = t.nn.RMSNorm(d, 1e-6), t.nn.RMSNorm(d, 1e-6)
            self.q, self.k, self.v = linear(d, d), linear(d, kv * c), linear(d, kv * c)
            self.o = linear(d, d)
            self.g, self.u, self.d = linear(d, ffn), linear(d, ffn), linear(ffn, d)

        def heads_of(self, x: Any, cos: Any, sin: Any) -> tuple[Any, Any, Any]:
            y = self.n1(x)
            n = x.shape[0]
            q = self.q(y).view(n, heads, c).transpose(0, 1)
            k = self.k(y).view(n, kv, c).transpose(0, 1)
            return (
                turn(q, cos, sin),
                turn(k, cos, sin),
                self.v(y).view(n, kv, c).transpose(0, 1),
            )

        def finish(self, x: Any, context: Any) -> Any:
            x = x + self.o(context.transpose(0, 1).reshape(x.shape[0], -1))
            y = self.n2(x)
            return x + self.d(functional.silu(self.g(y)) * self.u(y))

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            q, k, v = self.heads_of(x, cos, sin)
            context = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=True
            )[0]
            return self.finish(x, context)

        def step(
            self, x: Any, cos: Any, sin: Any, keys: Any, values: Any, at: Any, mask: Any
        ) -> Any:
            """One token against a cache of a fixed size."""
            q, k, v = self.heads_of(x, cos, sin)
            keys.index_copy_(1, at, k)
            values.index_copy_(1, at, v)
            context = functional.scaled_dot_product_attention(
                q[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
            )[0]
            return self.finish(x, context)

    class Llama(t.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = t.nn.Embedding(v, d)
            self.b = t.nn.ModuleList(Block() for _ in range(layers))
            self.n, self.head = t.nn.RMSNorm(d, 1e-6), linear(d, v)

        def angles(self, positions: Any) -> tuple[Any, Any]:
            # Said, because what is compiled does not ask for the default device.
            steps = t.arange(0, c, 2, device=positions.device)
            a = positions[:, None] * 1e4 ** (-steps / c)
            return t.cat((a.cos(),) * 2, -1), t.cat((a.sin(),) * 2, -1)

        def forward(self, ids: Any, labels: Any) -> Any:
            cos, sin = self.angles(t.arange(ids.shape[0], device=ids.device))
            x = self.e(ids)
            for block in self.b:
                x = block(x, cos, sin)
            return functional.cross_entropy(self.head(self.n(x)), labels)

    return Llama()


def training(t: Any, shape: tuple[int, ...], compiled: bool) -> Callable[[], Any]:
    """A step of AdamW; the gradients are freed between steps."""
    model = _llama(t, shape)
    optimiser = t.optim.AdamW(model.parameters(), 1e-3, fused=t.cuda.is_available())
    loss_of = t.compile(model) if compiled else model
    ids = t.randint(0, shape[0], (shape[6] + 1,))

    def step() -> Any:
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(ids[:-1], ids[1:])
        loss.backward()
        optimiser.step()
        return loss

    return step


def decoding(
    t: Any, shape: tuple[int, ...], compiled: bool, length: int
) -> Callable[[], Any]:
    """A token of greedy decoding against a full cache, as a CUDA graph."""
    assert not compiled
    v, d, layers, heads, kv, _, _ = shape
    c = d // heads
    model = _llama(t, shape)
    caches = [(t.zeros(kv, length, c), t.zeros(kv, length, c)) for _ in range(layers)]
    token = t.randint(0, v, (1,))
    at = t.full((1,), length // 2)
    every = t.arange(length)

    def step() -> Any:
        cos, sin = model.angles(at)
        mask = (every <= at)[None, None, None]
        x = model.e(token)
        for block, (keys, values) in zip(model.b, caches):
            x = block.step(x, cos, sin, keys, values, at, mask)
        token.copy_(model.head(model.n(x)).argmax(-1))
        at.add_(1).remainder_(length)
        return token

    with t.no_grad():
        if not t.cuda.is_available():
            return step
        stream = t.cuda.Stream()
        stream.wait_stream(t.cuda.current_stream())
        with t.cuda.stream(stream):
            for _ in range(3):
                step()
        t.cuda.current_stream().wait_stream(stream)
        graph = t.cuda.CUDAGraph()
        with t.cuda.graph(graph):
            step()
    return lambda: graph.replay()
