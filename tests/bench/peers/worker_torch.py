"""worker_torch.py: PyTorch's ways to a sliding window, a worker each (its words: see worker.h).

  ... RESULTS MODE
    mask   scaled_dot_product_attention with a dense [tokens, tokens] mask
    bmm    a blocked band: query heads of one key head packed into rows, bmm, softmax, bmm
    sdpa   the same band, each block by scaled_dot_product_attention with a mask
    flex   FlexAttention, compiled, with a block mask

Masks, block masks and compilation stay outside the clock; blocks of 32 to 512 queries are tried on
the last 512 tokens.  Backward times the gradients alone, not what forward saved for them.
"""
import math
import sys
import time


def say(words):
    print(words, flush=True)


def absent(words):
    say("absent " + words)
    sys.exit(0)


try:
    import numpy
    import torch
    import torch.nn.functional as functional
except ImportError as missing:
    absent(f"{missing}")

if len(sys.argv) < 11:
    sys.exit("made to be started by peers; see worker.h")
TASK, DTYPE = sys.argv[1], torch.bfloat16 if sys.argv[2] == "bf16" else torch.float32
TOKENS, WINDOW, DIM, Q_HEADS, KV_HEADS = map(int, sys.argv[3:8])
DATA, RESULTS, MODE = sys.argv[8:11]
GROUP = Q_HEADS // KV_HEADS
BACKWARD = TASK == "backward"
SCALE = 1 / math.sqrt(DIM)
torch.set_num_threads(1)


def read_tensors():
    """q, k, v, dout, each [tokens, heads, dim]."""
    values = torch.from_numpy(numpy.fromfile(DATA, dtype=numpy.float32))
    heads = [Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS]
    parts = values.split([TOKENS * h * DIM for h in heads])
    return [part.view(TOKENS, h, DIM).to(DTYPE).clone() for part, h in zip(parts, heads)]


q, k, v, dout = read_tensors()
if BACKWARD:
    for tensor in (q, k, v):
        tensor.requires_grad_(True)

masks = {}


def band_mask(first, last, low, boolean=False):
    """[last - first, last - low] added to the scores; interior blocks share one."""
    key = (last - first, first - low, last - low, boolean)
    if key not in masks:
        query = torch.arange(first, last)[:, None]
        column = torch.arange(low, last)[None, :]
        visible = (column <= query) & (column > query - WINDOW)
        if not boolean:
            visible = torch.zeros(visible.shape, dtype=DTYPE).masked_fill_(~visible, -math.inf)
        masks[key] = visible
    return masks[key]


def packed_queries(first, last):
    """[kv_heads, group * queries, dim]"""
    rows = q[first:last].view(last - first, KV_HEADS, GROUP, DIM)
    return rows.permute(1, 2, 0, 3).reshape(KV_HEADS, GROUP * (last - first), DIM)


def unpacked(rows, count):
    rows = rows.view(KV_HEADS, GROUP, count, DIM).permute(2, 0, 1, 3)
    return rows.reshape(count, Q_HEADS, DIM)


def bmm_block(first, last):
    count, low = last - first, max(0, first - WINDOW + 1)
    scores = torch.bmm(packed_queries(first, last), k[low:last].permute(1, 2, 0))
    scores = scores.view(KV_HEADS, GROUP, count, last - low)
    if torch.is_grad_enabled():
        scores = scores * SCALE + band_mask(first, last, low)
    else:
        scores = scores.mul_(SCALE).add_(band_mask(first, last, low))
    weights = torch.softmax(scores, -1).view(KV_HEADS, GROUP * count, last - low)
    return unpacked(torch.bmm(weights, v[low:last].permute(1, 0, 2)), count)


def sdpa_block(first, last):
    count, low = last - first, max(0, first - WINDOW + 1)
    mask = band_mask(first, last, low)
    if GROUP > 1:
        key = ("packed", count, first - low)
        if key not in masks:
            masks[key] = mask.repeat(GROUP, 1)
        mask = masks[key]
    rows = functional.scaled_dot_product_attention(
        packed_queries(first, last)[None], k[low:last].permute(1, 0, 2)[None],
        v[low:last].permute(1, 0, 2)[None], attn_mask=mask)
    return unpacked(rows[0], count)


def band(block, length, first, last):
    blocks = [block(at, min(last, at + length)) for at in range(first, last, length)]
    return torch.cat(blocks, 0)


def best_length(block):
    """Blocks of how many queries suit the last 512 tokens best; best of 2."""
    first, best = max(0, TOKENS - 512), (math.inf, 0)
    for _ in range(2):
        for length in (32, 64, 128, 256, 512):
            out = None
            if not BACKWARD:
                begin = time.process_time()
            out = band(block, length, first, TOKENS)
            if BACKWARD:
                begin = time.process_time()
                torch.autograd.grad(out, (q, k, v), dout[first:TOKENS])
            best = min(best, (time.process_time() - begin, length))
    return best[1]


def heads_first(tensor):
    return tensor.permute(1, 0, 2)[None]


def make_mask_pass():
    mask = band_mask(0, TOKENS, 0)
    return "dense mask", lambda: functional.scaled_dot_product_attention(
        heads_first(q), heads_first(k), heads_first(v), attn_mask=mask, enable_gqa=GROUP > 1
    )[0].permute(1, 0, 2).contiguous()


def make_flex_pass():
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError as missing:
        absent(f"FlexAttention: {missing}")

    def visible(batch, head, query, key):
        return (key <= query) & (key > query - WINDOW)

    block_mask = create_block_mask(visible, None, None, TOKENS, TOKENS, device="cpu")
    compiled = torch.compile(flex_attention)
    return "block mask", lambda: compiled(
        heads_first(q), heads_first(k), heads_first(v), block_mask=block_mask,
        enable_gqa=GROUP > 1)[0].permute(1, 0, 2).contiguous()


def make_pass():
    if MODE == "mask":
        return make_mask_pass()
    if MODE == "flex":
        return make_flex_pass()
    block = bmm_block if MODE == "bmm" else sdpa_block
    with torch.set_grad_enabled(BACKWARD):
        length = best_length(block)
    return f"blocks of {length}", lambda: band(block, length, 0, TOKENS)


def run(attend):
    """One pass: its seconds and what came of it."""
    if not BACKWARD:
        with torch.no_grad():
            begin = time.process_time()
            out = attend()
            return time.process_time() - begin, [out]
    out = attend()
    begin = time.process_time()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return time.process_time() - begin, gradients


def main():
    try:
        how, attend = make_pass()
        if MODE == "flex":
            run(attend)   # compiles
    except Exception as failure:
        absent(f"{MODE}: {type(failure).__name__}: {str(failure).splitlines()[0][:160]}")
    say(f"ready PyTorch {torch.__version__}, {how}")
    results = None
    for line in sys.stdin:
        if line == "run\n":
            results = None
            seconds, results = run(attend)
            say(f"{seconds:.9f}")
        elif line == "save\n":
            with open(RESULTS, "wb") as file:
                for result in results:
                    result.detach().float().contiguous().numpy().tofile(file)
            say("saved")


main()
