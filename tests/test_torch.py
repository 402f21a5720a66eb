"""Ops as functions of PyTorch tensors. Needs torch."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import shaderdsl as sd  # noqa: E402
from shaderdsl.bench import (  # noqa: E402
    contract_rows,
    memory_rows,
    model_rows,
    rows,
    torch_model,
)
from shaderdsl.bench import reference as bench_reference  # noqa: E402
from shaderdsl.bench.work import normal  # noqa: E402
from shaderdsl.interop.torch import wrap  # noqa: E402

on_each = pytest.mark.usefixtures("device")


@sd.op("... d, d -> ... d")
def rms_norm(x, gain, *, eps=1e-6):
    return x * sd.rsqrt(sd.mean(x * x, over="d") + eps) * gain


@sd.op("... d -> ... d, ...")
def softmax_and_lse(x):
    return sd.softmax(x, over="d"), sd.logsumexp(x, over="d")


@sd.op("v d, t -> t d")
def embedding(table, ids):
    return table.at(v=ids)


def tensor(*shape, dtype=torch.float64, seed=0):
    x = np.random.default_rng(seed).normal(size=shape)
    return torch.tensor(x, dtype=dtype, requires_grad=True)


@on_each
def test_gradcheck_in_float64():
    x, gain = tensor(3, 5), tensor(5, seed=1)
    assert torch.autograd.gradcheck(wrap(rms_norm), (x, gain))
    assert torch.autograd.gradgradcheck(wrap(rms_norm), (x, gain))
    assert torch.autograd.gradcheck(wrap(softmax_and_lse), (tensor(2, 7),))
    ids = torch.tensor([0, 3, 3, 1], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda t: wrap(embedding)(t, ids), (tensor(4, 3),))


@on_each
def test_gradients_in_float32():
    x, gain = (tensor(*s, dtype=torch.float32) for s in ((6, 33), (33,)))
    wide = [t.detach().double().requires_grad_() for t in (x, gain)]
    dy = torch.tensor(np.random.default_rng(2).normal(size=(6, 33)))
    y = wrap(rms_norm)(x, gain, eps=1e-3)
    expected = wide[0] * torch.rsqrt((wide[0] ** 2).mean(-1, True) + 1e-3) * wide[1]
    assert y.dtype == torch.float32
    wide_y = y.double()
    torch.testing.assert_close(wide_y, expected, rtol=1e-5, atol=1e-6)
    y.backward(dy.float())
    expected.backward(dy)
    for mine, theirs in zip((x, gain), wide, strict=True):
        torch.testing.assert_close(
            mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5
        )


@on_each
def test_the_gradient_of_a_gradient():
    x = tensor(4, 6, dtype=torch.float32)
    y = wrap(lambda a: sd.sum(sd.tanh(a) ** 3))(x)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad((g**2).sum(), x)
    wide = x.detach().double().requires_grad_()
    (g64,) = torch.autograd.grad((torch.tanh(wide) ** 3).sum(), wide, create_graph=True)
    (h64,) = torch.autograd.grad((g64**2).sum(), wide)
    torch.testing.assert_close(h.double(), h64, rtol=1e-4, atol=1e-5)


@on_each
def test_a_module_trains():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(8))
            self.out = torch.nn.Linear(8, 1)

        def forward(self, x):
            return self.out(wrap(rms_norm)(x, self.gain))

    torch.manual_seed(0)
    model = Model()
    opt = torch.optim.Adam(model.parameters(), 0.05)
    x = torch.randn(64, 8)
    y = x[:, :1] - x[:, 1:2]
    losses = []
    for _ in range(30):
        loss = ((model(x) - y) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert model.gain.grad is not None and losses[-1] < 0.5 * losses[0]


@on_each
def test_other_layouts_and_dtypes():
    x = tensor(5, 6, dtype=torch.float32)
    gain = torch.ones(5)
    with pytest.warns(UserWarning, match="not contiguous"):
        from shaderdsl.interop import torch as bridge

        bridge._said.clear()
        y = wrap(rms_norm)(x.T, gain)
    torch.testing.assert_close(y, wrap(rms_norm)(x.T.contiguous(), gain))
    half = wrap(rms_norm)(x.T.contiguous().to(torch.bfloat16), gain.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), y, rtol=2e-2, atol=2e-2)
    with pytest.raises(sd.errors.DTypeError, match="float64"):
        wrap(rms_norm)(x.double(), torch.ones(6))
    with pytest.raises(sd.errors.DTypeError, match="at least one tensor"):
        wrap(rms_norm)(np.ones(3))
    with pytest.raises(sd.errors.ShapeError):
        wrap(rms_norm)(x, torch.ones(7))


DDP = """
import os, sys, torch, torch.distributed as dist
import shaderdsl as sd
from shaderdsl.interop.torch import wrap
rank, world, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
dist.init_process_group("gloo", rank=rank, world_size=world)

@sd.op("t d, d -> t d")
def scale(x, gain):
    return sd.tanh(x * gain)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.linspace(0.1, 1, 6))
    def forward(self, x):
        return wrap(scale)(x, self.gain)

model = torch.nn.parallel.DistributedDataParallel(Model())
x = torch.arange(48.0).reshape(8, 6) / 48
part = x[rank * 8 // world : (rank + 1) * 8 // world]
(model(part) ** 2).mean().backward()
if rank == 0:
    print(model.module.gain.grad.tolist(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_distributed_data_parallel(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(textwrap.dedent(DDP))
    environment = dict(os.environ, SHADERDSL_DEVICE="cpu")
    found = {}
    for world in (1, 2):
        port = str(29500 + os.getpid() % 400 + world)
        ranks = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(world), port],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(world)
        ]
        out = [r.communicate(timeout=120)[0] for r in ranks]
        assert all(r.returncode == 0 for r in ranks)
        found[world] = np.array(eval(out[0].strip().splitlines()[-1]))
    np.testing.assert_allclose(found[2], found[1], rtol=1e-5)


# ------------------------------------------------------------------ peers of bench

ROWS = [r for r in rows.ROWS if r not in model_rows.MODEL_ROWS]

#: What a row makes of its normals before it is given them, where that is something.
MADE = {
    "rms_norm": [None, lambda n: 1 + 0.1 * n],
    "layer_norm": [None, lambda n: 1 + 0.1 * n],
    "row_sum": [lambda n: n + 1],
    "column_sum": [lambda n: n + 1],
}


class Given:
    """PyTorch whose random numbers are those of a row of the benchmark."""

    def __init__(self, name, arrays):
        made = next((m for n, m in MADE.items() if name.startswith(n)), [])
        made = made + [None] * len(arrays)
        self.arrays = [f(a) if f else a for f, a in zip(made, arrays)]
        self.seed = 3 if name.startswith("embedding") else 2

    def __getattr__(self, name):
        return getattr(torch, name)

    def randn(self, *shape, dtype=torch.float32, requires_grad=False):
        x = torch.tensor(self.arrays.pop(0).reshape(shape), dtype=dtype)
        return x.requires_grad_(requires_grad)

    def randn_like(self, x):
        return self.randn(*x.shape)

    def randint(self, low, high, shape):
        ids = np.random.default_rng(self.seed).integers(low, high, shape)
        return torch.tensor(ids)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_the_benchmark_times_the_same_work_in_pytorch(row, monkeypatch):
    sd.use_device("cpu")
    arrays = []

    def noted(seed, *shape):
        arrays.append(x := normal(seed, *shape))
        return x

    for module in (memory_rows, contract_rows):
        monkeypatch.setattr(module, "normal", noted)
    work = row.make(True)
    assert work.torch is not None
    arrays = [np.asarray(a) for a in arrays]
    got = work.torch(Given(row.name, arrays), False)()
    if row.name == "copy":  # of what is there, where ours is doubled
        got = 2 * got
    results = [g.numpy() for g in (got if isinstance(got, tuple) else (got,))]
    if row.name.startswith("attention"):  # a batch of one
        results = [g[0] for g in results]
    if row.name == "cross_entropy_both":  # whose loss PyTorch does not hand out
        results.insert(0, work.run()[0])
    several = len(results) > 1
    assert work.error(tuple(results) if several else results[0]) <= work.tolerance


def test_the_benchmark_trains_the_same_model_in_pytorch():
    """Its loss with our weights is the reference's, and a step lessens it."""
    shape = model_rows.QUICK
    sd.use_device("cpu")
    ours = model_rows._model(shape)
    weights = {k: np.asarray(v) for k, v in sd.nn.state_dict(ours).items()}
    model = torch_model._llama(torch, shape)
    model.load_state_dict({_named(k): torch.tensor(v) for k, v in weights.items()})
    ids = np.random.default_rng(4).integers(0, shape[0], shape[6] + 1)
    got = model(torch.tensor(ids[:-1]), torch.tensor(ids[1:])).detach()
    wide = {k: v.astype(np.float64) for k, v in weights.items()}
    want = bench_reference.llama_loss(wide, ids, ours.config)
    assert abs(float(got) - want) < 1e-5 * want
    torch.manual_seed(0)
    step = torch_model.training(torch, shape, False)
    losses = [float(step().detach()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def _named(name):
    """PyTorch's model calls things by one letter."""
    short = {
        "model.embed_tokens": "e",
        "model.norm": "n",
        "lm_head": "head",
        "input_layernorm": "n1",
        "post_attention_layernorm": "n2",
    }
    name = name.removesuffix(".weight")
    if name in short:
        return f"{short[name]}.weight"
    _, _, layer, *rest = name.split(".")
    last = rest[-1]
    return f"b.{layer}.{short.get(last, last[0])}.weight"


def test_the_benchmark_decodes_with_a_cache_in_pytorch(monkeypatch):
    """Tokens are those that the whole text gives, without a cache."""
    shape = model_rows.QUICK
    torch.manual_seed(1)
    model = torch_model._llama(torch, shape)
    monkeypatch.setattr(torch_model, "_llama", lambda *_: model)
    first = torch.randint(0, shape[0], (1,))
    monkeypatch.setattr(torch, "randint", lambda *_: first.clone())
    monkeypatch.setattr(torch, "full", lambda shape, _: torch.zeros(shape).long())
    step = torch_model.decoding(torch, shape, False, 8)
    text = [int(first), *(int(step()) for _ in range(5))]
    with torch.no_grad():
        x = model.e(torch.tensor(text))
        angles = model.angles(torch.arange(len(text)))
        for block in model.b:
            x = block(x, *angles)
        want = model.head(model.n(x)).argmax(-1)
    assert text[1:] == want[:-1].tolist()
