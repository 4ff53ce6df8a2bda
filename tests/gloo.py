"""A layer over torch.distributed's gloo, by swathe_custom_create; the ranks are processes.

    python3 gloo.py LIBRARY [RANKS]

Three things are looked at: forward and backward over ranks give what one rank alone gives; a rank
that goes away is an error with words for every other; and they are free to go on.
"""

import ctypes as c
import datetime
import os
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist

TIMEOUT = TRANSPORT = None  # statuses; see find_statuses


class Transfer(c.Structure):
    _fields_ = [("data", c.c_void_p), ("bytes", c.c_size_t), ("peer", c.c_int32),
                ("send", c.c_bool)]


POST = c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(Transfer), c.c_int32, c.c_void_p, c.c_size_t)
WAIT = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_double, c.c_void_p, c.c_size_t)


class Custom(c.Structure):
    _fields_ = [("rank", c.c_int32), ("ranks", c.c_int32), ("deadline_s", c.c_double),
                ("name", c.c_char_p), ("user", c.c_void_p), ("post", POST), ("test", c.c_void_p),
                ("wait", WAIT), ("gather", c.c_void_p), ("abort", c.c_void_p),
                ("destroy", c.c_void_p)]


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


def find_statuses(swathe):
    """Numbers of the statuses that wait returns, by their texts."""
    global TIMEOUT, TRANSPORT
    texts = {swathe.swathe_status_text(i): i for i in range(32)}
    TIMEOUT, TRANSPORT = texts[b"a deadline passed"], texts[b"the exchange failed"]


class Gloo:
    """Messages by isend and irecv.  Gloo's own threads move them; only wait knows when."""

    def __init__(self, swathe, rank, ranks, deadline_s):
        self.works = []
        self.calls = Custom(rank=rank, ranks=ranks, deadline_s=deadline_s, name=b"gloo",
                            post=POST(self.post), wait=WAIT(self.wait))
        self.transport = c.c_void_p()
        check(swathe, swathe.swathe_custom_create(c.byref(self.calls), c.byref(self.transport)))

    def failed(self, error, words, size):
        text = str(error).encode()[:size - 1]
        c.memmove(words, text + b"\0", len(text) + 1)
        return TIMEOUT if "imed out" in str(error) else TRANSPORT

    def post(self, _user, transfers, count, words, size):
        try:
            for i in range(count):
                one = transfers[i]
                data = torch.frombuffer((c.c_char * one.bytes).from_address(one.data),
                                        dtype=torch.uint8)
                work = (dist.isend if one.send else dist.irecv)(data, one.peer)
                self.works.append((work, data))
        except RuntimeError as error:
            return self.failed(error, words, size)
        return 0

    def wait(self, _user, deadline_s, words, size):
        try:
            for work, _data in self.works:
                work.wait(datetime.timedelta(seconds=deadline_s))
            self.works = []
        except RuntimeError as error:
            return self.failed(error, words, size)
        return 0


def check(swathe, status):
    if status:
        raise RuntimeError(swathe.swathe_error().decode())


HEADS, KV_HEADS, DIM, TOKENS, WINDOW = 4, 2, 32, 230, 60
SHAPE = f"q_heads={HEADS},kv_heads={KV_HEADS},head_dim_qk={DIM},head_dim_v={DIM}," \
        f"window_left={WINDOW},window_right=0"


class Layer:
    def __init__(self, swathe, transport, rank, ranks):
        self.swathe, self.context, self.layer = swathe, c.c_void_p(), c.c_void_p()
        problem = (c.c_char * 1024)()
        swathe.swathe_problem_init(problem)
        check(swathe, swathe.swathe_problem_parse(SHAPE.encode(), problem))
        check(swathe, swathe.swathe_open(None, c.byref(self.context)))
        check(swathe, swathe.swathe_layer_create(self.context, problem, transport,
                                                 c.byref(self.layer)))
        self.begin, self.end = rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks
        sharding = Sharding(ranks=ranks, batch=1, tokens=TOKENS)
        check(swathe, swathe.swathe_layer_shard(self.layer, c.byref(sharding)))
        random = np.random.default_rng(7)
        self.arrays = {}
        for name, heads in zip(("q", "k", "v", "dout"), (HEADS, KV_HEADS, KV_HEADS, HEADS)):
            whole = random.standard_normal((TOKENS, heads, DIM)).astype(np.float32)
            self.arrays[name] = np.ascontiguousarray(whole[self.begin:self.end])
        rows = self.end - self.begin
        for name, heads, dim in (("out", HEADS, DIM), ("lse", HEADS, 1), ("dq", HEADS, DIM),
                                 ("dk", KV_HEADS, DIM), ("dv", KV_HEADS, DIM)):
            self.arrays[name] = np.zeros((rows, heads, dim), np.float32)
        self.tensors = Tensors(**{
            name: Tensor(a.ctypes.data, a.shape[1] * a.shape[2], a.shape[2], a.size)
            for name, a in self.arrays.items()})

    def forward(self):
        return self.swathe.swathe_layer_forward(self.layer, c.byref(self.tensors), None)

    def backward(self):
        return self.swathe.swathe_layer_backward(self.layer, c.byref(self.tensors), None)

    def close(self):
        self.swathe.swathe_layer_destroy(self.layer)
        self.swathe.swathe_close(self.context)


def load(path):
    swathe = c.CDLL(path)
    for name in ("swathe_error", "swathe_status_text"):
        getattr(swathe, name).restype = c.c_char_p
    return swathe


def be_rank(path, rank, ranks, meeting):
    swathe = load(path)
    find_statuses(swathe)
    dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=ranks)
    gloo = Gloo(swathe, rank, ranks, 5)
    layer, alone = Layer(swathe, gloo.transport, rank, ranks), Layer(swathe, None, 0, 1)
    for one in (layer, alone):
        check(swathe, one.forward())
        check(swathe, one.backward())
    for name in ("out", "lse", "dq", "dk", "dv"):
        error = np.abs(layer.arrays[name] - alone.arrays[name][layer.begin:layer.end]).max()
        if not error < 1e-4:
            raise RuntimeError(f"{name} is off by {error}")
    dist.barrier()
    if rank == 1:
        os._exit(0)  # without a word
    status = 0
    for _ in range(3):
        status = status or layer.forward()
    words = swathe.swathe_error().decode()
    if status not in (TIMEOUT, TRANSPORT) or f"gloo of rank {rank} failed to " not in words:
        raise RuntimeError(f"a rank went away, and the layer says {status}: {words}")
    layer.close()
    alone.close()
    swathe.swathe_transport_destroy(gloo.transport)
    print(f"rank {rank}: {' '.join(words.split())[:150]}", flush=True)
    os._exit(0)  # gloo would wait for the one that is gone


def main():
    path, ranks = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    be_rank(path, rank, ranks, directory + "/meeting")
                except Exception as error:
                    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
                    os._exit(1)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
