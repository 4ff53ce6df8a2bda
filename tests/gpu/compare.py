"""A layer beside PyTorch's attention: same device, same tensors, same run.

    python3 compare.py LIBRARY [--emulated] NAME=PROBLEM...

PROBLEM is the canonical text of one rank's share, which is run alone as one sequence.  Prints one
JSON document a line, each as soon as it is known: {"problem", "kind", "line", ...}.  Exit 1 if a
result of the layer is off, 3 if PyTorch sees no GPU.

The others: flex_attention with the window as its block mask (the sink is its output scaled by
sigmoid(lse - sink)), SDPA by cuDNN and by the memory-efficient kernel with the window as a mask,
and flash SDPA, which knows no window and does all of the causal work.  Where the sink cannot be
expressed the time is of another function, and it says so.

Times are medians on the device's clock, each run after a write larger than the cache, which also
lets the host run ahead.  Useful FLOPs are those the window asks for.  The floor is what the device
needs at least: useful FLOPs over the rate of a large matrix product, or bytes that must move once
over the rate of a large copy, both measured here first; the larger counts.

Emulated there are no times: the layer's results are compared with dense attention on the host.
"""

import ctypes as c
import json
import math
import statistics
import sys

import torch

LIMITS = {"out": 2e-2, "lse": 1e-3, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2}  # as `swathe run --check`
CUDA = 1                     # enum swathe_target
NO_DEVICE = 3                # exit status: PyTorch sees none
CHECKED = 64                 # rows of a block that is compared with the reference
RUNS, RUNS_S = 30, 0.4       # of one timing, at most


class Sharding(c.Structure):
    _fields_ = [("layout", c.c_int), ("ranks", c.c_int32), ("batch", c.c_int32),
                ("tokens", c.c_int64), ("documents", c.c_int64), ("document_starts", c.c_void_p),
                ("document_starts_padded", c.c_void_p), ("spans", c.c_void_p),
                ("rank_spans", c.c_void_p), ("rank_rows", c.c_void_p)]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("token_stride", c.c_int64), ("head_stride", c.c_int64),
                ("batch_stride", c.c_int64)]


class Tensors(c.Structure):
    _fields_ = [("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor), ("lse", Tensor),
                ("sink", c.c_void_p), ("max_logits", c.c_void_p), ("dout", Tensor), ("dq", Tensor),
                ("dk", Tensor), ("dv", Tensor), ("dsink", c.c_void_p), ("halo", c.c_void_p)]


class Problem:
    def __init__(self, name, text):
        fields = dict(field.split("=") for field in text.split(","))
        self.name, self.text = name, text
        self.tokens = int(fields["tokens_per_rank"])
        self.q_heads, self.kv_heads = int(fields["q_heads"]), int(fields["kv_heads"])
        self.qk, self.v = int(fields["head_dim_qk"]), int(fields["head_dim_v"])
        self.window, self.sinks = int(fields["window_left"]), fields["sinks"] == "1"
        self.dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[fields["dtype"]]
        self.scale = float(fields.get("scale", 0)) or 1 / math.sqrt(self.qk)
        if int(fields["window_right"]) or float(fields.get("softcap", 0)):
            raise SystemExit(f"{name}: only causal windows without a softcap are compared")

    def flops(self, direction):
        n, w = self.tokens, min(self.window + 1, self.tokens)
        pairs = (n * w - w * (w - 1) // 2) * self.q_heads
        dims = self.qk + self.v if direction == "forward" else 3 * self.qk + 2 * self.v
        return 2 * pairs * dims

    def bytes(self, direction):
        """Each array once: q, out, k, v and lse; backward twice, with the gradients."""
        arrays = 2 * self.tokens * (self.q_heads + self.kv_heads) * (self.qk + self.v)
        times = 1 if direction == "forward" else 2
        return times * arrays + 4 * self.tokens * self.q_heads


class Record:
    """What is known of one problem, told line by line."""

    def __init__(self, name):
        self.name = name

    def say(self, kind, line, **fields):
        print(json.dumps({"problem": self.name, "kind": kind, "line": f"{self.name}: {line}",
                          **fields}), flush=True)


# ---- The layer ----------------------------------------------------------------------------------

class Layer:
    def __init__(self, path, problem, arrays, emulated):
        self.swathe = c.CDLL(path)
        self.swathe.swathe_error.restype = c.c_char_p
        self.emulated, self.problem, self.arrays = emulated, problem, arrays
        self.context, self.layer, self.memory = c.c_void_p(), c.c_void_p(), {}
        text = (c.c_char * 1024)()
        self.swathe.swathe_problem_init(text)
        self.check(self.swathe.swathe_problem_parse(problem.text.encode(), text))
        self.check(self.swathe.swathe_open(None, c.byref(self.context)))
        self.check(self.swathe.swathe_layer_create(self.context, text, None, c.byref(self.layer)))
        sharding = Sharding(ranks=1, batch=1, tokens=problem.tokens)
        self.check(self.swathe.swathe_layer_shard(self.layer, c.byref(sharding)))
        self.tensors = Tensors(**{name: self.place(name, array) for name, array in arrays.items()
                                  if problem.sinks or "sink" not in name})

    def check(self, status):
        if status:
            raise RuntimeError(self.swathe.swathe_error().decode())

    def place(self, name, array):
        data = array.data_ptr()
        if self.emulated:
            size = array.numel() * array.element_size()
            self.memory[name] = c.c_void_p()
            self.check(self.swathe.swathe_memory_allocate(self.context, CUDA, c.c_size_t(size),
                                                          c.byref(self.memory[name])))
            data = self.memory[name].value
            self.check(self.swathe.swathe_memory_write(
                self.context, CUDA, c.c_void_p(data), c.c_void_p(array.data_ptr()),
                c.c_size_t(size)))
        if array.dim() == 1:
            return data
        return Tensor(data, array.stride(0), array.stride(1), 0)

    def stream(self):
        return None if self.emulated else c.c_void_p(torch.cuda.current_stream().cuda_stream)

    def forward(self):
        self.check(self.swathe.swathe_layer_forward(self.layer, c.byref(self.tensors),
                                                    self.stream()))

    def backward(self):
        self.check(self.swathe.swathe_layer_backward(self.layer, c.byref(self.tensors),
                                                     self.stream()))

    def fetch(self):
        for name, memory in self.memory.items():
            array = self.arrays[name]
            self.check(self.swathe.swathe_memory_read(
                self.context, CUDA, c.c_void_p(array.data_ptr()), memory,
                c.c_size_t(array.numel() * array.element_size())))

    def explain(self):
        text = c.create_string_buffer(4096)
        self.swathe.swathe_layer_explain(self.layer, text, c.c_size_t(len(text)))
        return " ".join(text.value.decode().split())

    def close(self):
        self.swathe.swathe_layer_destroy(self.layer)
        for memory in self.memory.values():
            self.swathe.swathe_memory_free(self.context, CUDA, memory)
        self.swathe.swathe_close(self.context)


def make_arrays(problem, device):
    random = torch.Generator(device=device).manual_seed(7)

    def normal(heads, dim):
        return torch.randn(problem.tokens, heads, dim, generator=random, device=device,
                           dtype=torch.float32).to(problem.dtype)

    def poisoned(heads, dim, dtype=problem.dtype):
        return torch.full((problem.tokens, heads, dim), math.nan, dtype=dtype, device=device)

    return {
        "q": normal(problem.q_heads, problem.qk), "k": normal(problem.kv_heads, problem.qk),
        "v": normal(problem.kv_heads, problem.v), "dout": normal(problem.q_heads, problem.v),
        "sink": torch.randn(problem.q_heads, generator=random, device=device),
        "dsink": torch.full((problem.q_heads,), math.nan, device=device),
        "out": poisoned(problem.q_heads, problem.v),
        "lse": poisoned(problem.q_heads, 1, torch.float32),
        "dq": poisoned(problem.q_heads, problem.qk), "dk": poisoned(problem.kv_heads, problem.qk),
        "dv": poisoned(problem.kv_heads, problem.v),
    }


# ---- Reference, in double -----------------------------------------------------------------------

def reference(problem, arrays, begin, end):
    """All results of the rows [begin, end), from every query that sees their keys."""
    last = min(problem.tokens, end + problem.window)
    first = max(0, begin - problem.window)
    groups = problem.q_heads // problem.kv_heads

    def grouped(name, dim):
        rows = arrays[name][begin:last].double()
        return rows.view(last - begin, problem.kv_heads, groups, dim)

    q, dout = grouped("q", problem.qk), grouped("dout", problem.v)
    k, v = arrays["k"][first:last].double(), arrays["v"][first:last].double()
    i = torch.arange(begin, last, device=q.device)[:, None]
    j = torch.arange(first, last, device=q.device)[None, :]
    scores = torch.einsum("nhgd,mhd->hgnm", q, k) * problem.scale
    scores = scores.masked_fill((j > i) | (j < i - problem.window), -math.inf)
    lse = torch.logsumexp(scores, -1)
    if problem.sinks:
        sink = arrays["sink"].double().view(problem.kv_heads, groups, 1)
        lse = torch.logaddexp(lse, sink.expand_as(lse))
    weights = torch.exp(scores - lse[..., None])
    del scores
    out = torch.einsum("hgnm,mhd->nhgd", weights, v)
    delta = (out * dout).sum(-1).permute(1, 2, 0)
    dv = torch.einsum("hgnm,nhgd->mhd", weights, dout)
    weights *= torch.einsum("nhgd,mhd->hgnm", dout, v) - delta[..., None]
    dq = torch.einsum("hgnm,mhd->nhgd", weights, k) * problem.scale
    dk = torch.einsum("hgnm,nhgd->mhd", weights, q) * problem.scale
    rows, keys = end - begin, slice(begin - first, end - first)
    return {"out": out[:rows].flatten(1, 2), "lse": lse.permute(2, 0, 1)[:rows].flatten(1, 2),
            "dq": dq[:rows].flatten(1, 2), "dk": dk[keys], "dv": dv[keys]}


def largest_error(got, want):
    """Over max(1, |wanted|); NaN is the largest of all."""
    error = ((got.double() - want.double()).abs() / want.double().abs().clamp(min=1)).max().item()
    return math.inf if math.isnan(error) else error


def check_layer(problem, arrays, record):
    worst = dict.fromkeys(LIMITS, 0.0)
    rows = min(CHECKED, problem.tokens)
    for begin in {0, (problem.tokens - rows) // 2, problem.tokens - rows}:
        want = reference(problem, arrays, begin, begin + rows)
        for name in LIMITS:
            got = arrays[name][begin:begin + rows]
            error = largest_error(got.squeeze(-1) if name == "lse" else got, want[name])
            worst[name] = max(worst[name], error)
    right = all(worst[name] <= LIMITS[name] for name in LIMITS)
    words = ", ".join(f"{name} {error:.2e}" for name, error in worst.items())
    record.say("check", f"largest errors of swathe against double in three blocks of {rows} rows: "
               f"{words}: " + ("ok" if right else "TOO LARGE"), errors={
                   name: error if math.isfinite(error) else None for name, error in worst.items()},
               passed=right)
    return right


# ---- Time ---------------------------------------------------------------------------------------

class Clock:
    def __init__(self):
        self.flushed = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
        self.flops_per_s = self.bytes_per_s = None

    def median_us(self, work, flush=True):
        def once():
            for _ in range(2 if flush else 0):
                self.flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            return 1e3 * begin.elapsed_time(end)

        for _ in range(3):
            last = once()
        return statistics.median(once() for _ in range(max(5, min(RUNS, int(1e6 * RUNS_S / last)))))

    def measure_peaks(self):
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.flops_per_s = 2 * 8192 ** 3 / self.median_us(lambda: a @ b, False) * 1e6
        half = self.flushed.numel() // 2
        copy_us = self.median_us(lambda: self.flushed[:half].copy_(self.flushed[half:]), False)
        self.bytes_per_s = 8 * half / copy_us * 1e6
        Record("device").say(
            "peak", f"a matrix product reaches {self.flops_per_s / 1e12:.0f} TFLOP/s, a copy "
            f"{self.bytes_per_s / 1e12:.2f} TB/s", flops_per_s=self.flops_per_s,
            bytes_per_s=self.bytes_per_s)

    def report(self, problem, record, who, direction, us, note=""):
        flops = problem.flops(direction)
        floors = {"multiply-adds": 1e6 * flops / self.flops_per_s,
                  "memory": 1e6 * problem.bytes(direction) / self.bytes_per_s}
        bound = max(floors, key=floors.get)
        record.say("time", f"{who} {direction}: {us:.1f} us, {flops / us / 1e6:.0f} useful TFLOP/s,"
                   f" {floors[bound] / us:.2f} of the floor ({bound}, {floors[bound]:.1f} us)"
                   + (f"; {note}" if note else ""), who=who, direction=direction, us=us,
                   useful_tflops=flops / us / 1e6, floor_us=floors[bound], bound=bound,
                   floor_share=floors[bound] / us, note=note)


# ---- The others ---------------------------------------------------------------------------------

def with_sink(problem, sink, out, lse):
    """[1][heads][tokens][dim]: what a sink leaves of the softmax's output."""
    return out * torch.sigmoid(lse - sink.view(1, -1, 1))[..., None].to(out.dtype) \
        if problem.sinks else out


def make_flex(problem, arrays):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    window = problem.window
    mask = create_block_mask(lambda b, h, i, j: (j <= i) & (j >= i - window), None, None,
                             problem.tokens, problem.tokens, device="cuda")

    def attend(q, k, v):
        out = flex_attention(q, k, v, block_mask=mask, scale=problem.scale, enable_gqa=True,
                             return_lse=problem.sinks)
        return with_sink(problem, arrays["sink"], *out) if problem.sinks else out

    return torch.compile(attend, dynamic=False)


def make_sdpa(backend, causal):
    def make(problem, _arrays):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        mask = None
        if not causal:
            i = torch.arange(problem.tokens, device="cuda")
            mask = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - problem.window)
            mask = mask[None, None]

        def attend(q, k, v):
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, scale=problem.scale,
                    enable_gqa=True)
        return attend
    return make


def make_dense(problem, arrays):
    """Whole scores in float32, for the host."""
    i = torch.arange(problem.tokens)
    hidden = (i[None, :] > i[:, None]) | (i[None, :] < i[:, None] - problem.window)
    groups = problem.q_heads // problem.kv_heads

    def attend(q, k, v):
        k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
        scores = (q.float() @ k.transpose(-1, -2) * problem.scale).masked_fill(hidden, -math.inf)
        return with_sink(problem, arrays["sink"], scores.softmax(-1) @ v, scores.logsumexp(-1))
    return attend


OTHERS = (  # name, how it is made, whether it knows windows, whether sinks
    ("flex_attention", make_flex, True, True),
    ("SDPA by cuDNN", make_sdpa("CUDNN_ATTENTION", False), True, False),
    ("SDPA memory-efficient", make_sdpa("EFFICIENT_ATTENTION", False), True, False),
    ("SDPA flash, all of the causal work", make_sdpa("FLASH_ATTENTION", True), False, False),
)
OTHERS_EMULATED = (("dense attention on the host", make_dense, True, True),)


def beside(problem, arrays, record, clock, other):
    """Times of one of the others, and how far the layer's results are from its."""
    who, make, windows, sinks = other
    same = windows and (sinks or not problem.sinks)
    note = "" if same else "another function: no " + ("window" if not windows else "sink")
    q, k, v = (arrays[name].transpose(0, 1)[None].detach().requires_grad_()
               for name in ("q", "k", "v"))
    attend = make(problem, arrays)
    if clock:
        us = clock.median_us(lambda: attend(q, k, v))  # keeps what backward needs
        clock.report(problem, record, who, "forward", us, note)
    out = attend(q, k, v)
    dout = arrays["dout"].transpose(0, 1)[None].to(out.dtype)
    gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=bool(clock))
    if clock:
        us = clock.median_us(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
        clock.report(problem, record, who, "backward", us, note)
    if not same:
        return True
    errors = {name: largest_error(arrays[name], array[0].transpose(0, 1)) for name, array
              in zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients))}
    # two results that are each within the limit of the truth
    right = all(error <= 2 * LIMITS[name] for name, error in errors.items())
    record.say("difference", f"swathe and {who} differ by at most " + ", ".join(
        f"{name} {error:.2e}" for name, error in errors.items()) + ("" if right else ": TOO LARGE"),
               who=who, passed=right, errors={
                   name: error if math.isfinite(error) else None for name, error in errors.items()})
    return right


def compare(library, problem, clock):
    record = Record(problem.name)
    arrays = make_arrays(problem, "cuda" if clock else "cpu")
    layer = Layer(library, problem, arrays, not clock)
    layer.forward()
    layer.backward()
    if clock:
        torch.cuda.synchronize()
    layer.fetch()
    right = check_layer(problem, arrays, record)
    if clock:
        clock.report(problem, record, "swathe", "forward", clock.median_us(layer.forward))
        clock.report(problem, record, "swathe", "backward", clock.median_us(layer.backward))
    record.say("configs", layer.explain())
    for other in OTHERS if clock else OTHERS_EMULATED:
        try:
            right = beside(problem, arrays, record, clock, other) and right
        except Exception as why:  # a kernel that this PyTorch or device does not have
            words = str(why).strip().splitlines() or [""]
            record.say("absent", f"{other[0]}: not here: {type(why).__name__}: {words[0][:200]}",
                       who=other[0])
            if not clock:
                right = False
    layer.close()
    return right


def main():
    arguments = [word for word in sys.argv[1:] if word != "--emulated"]
    emulated = len(arguments) < len(sys.argv) - 1
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    if not emulated and not torch.cuda.is_available():
        return NO_DEVICE
    clock = None if emulated else Clock()
    if clock:
        clock.measure_peaks()
    right = True
    for text in arguments[1:]:
        name, problem = text.split("=", 1)
        try:
            right = compare(arguments[0], Problem(name, problem), clock) and right
        except (RuntimeError, OSError) as why:
            print(f"{name}: {why}", file=sys.stderr)
            right = False
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
