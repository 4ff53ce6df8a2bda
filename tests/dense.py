#!/usr/bin/python3
"""A second oracle, for files: dense masked attention in numpy double, forward and backward.

It shares no code with the library and works on whole matrices, so it is for small layers: one score
matrix of tokens x tokens per head.

  dense.py make in --tokens 300 --q-heads 8 --kv-heads 2 --sink --documents 100,190
  swathe run --q in/q.npy --k in/k.npy --v in/v.npy --dout in/do.npy --sink in/sink.npy \\
    --window-left 127 --documents 100,190 --ranks 4 --out out
  dense.py check in out --window-left 127 --documents 100,190 \\
    --tolerance-out 2e-6 --tolerance-grad 1e-5

Arrays are float32, [tokens, heads, dim] or [batch, tokens, heads, dim]; lse lacks the last; sink
and dsink are [heads].  An error is |got - want| / max(1, |want|).  Exit status: 0 all within
tolerance, 1 something is not, is missing, misshapen or not a number, 2 bad command line.
"""

import argparse
import pathlib
import sys

import numpy as np

OUTPUTS = ("out", "lse", "dq", "dk", "dv", "dsink")


def round_to_bf16(values):
    """The nearest bfloat16 values, ties to even, as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def documents_of(tokens, lengths):
    """The document of each token and its position there; -1 is padding."""
    if lengths and sum(lengths) > tokens:
        sys.exit(f"dense.py: documents hold {sum(lengths)} tokens, the arrays {tokens}")
    document = np.full(tokens, -1 if lengths else 0)
    position = np.arange(tokens)
    begin = 0
    for index, length in enumerate(lengths or []):
        document[begin : begin + length] = index
        position[begin : begin + length] = np.arange(length)
        begin += length
    return document, position


def mask_of(tokens, options):
    """mask[i, j]: query i sees key j."""
    document, position = documents_of(tokens, options.documents)
    mask = (document[:, None] == document[None, :]) & (document[:, None] >= 0)
    ahead = position[:, None] - position[None, :]
    if options.window_left is not None:
        mask &= ahead <= options.window_left
    if options.window_right is not None:
        mask &= ahead >= -options.window_right
    return mask


def attend_head(q, k, v, dout, sink, mask, scale, softcap):
    """One query head: q [n, d], k [n, d], v [n, e], dout [n, e] -> out, lse, dq, dk, dv, dsink."""
    scores = scale * (q @ k.T)
    bend = np.ones_like(scores)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
        bend = 1 - (scores / softcap) ** 2
    scores = np.where(mask, scores, -np.inf)
    seen = mask.any(axis=1)
    top = np.where(seen, scores.max(axis=1, initial=-np.inf), 0)
    if sink is not None:
        top = np.maximum(top, sink)
    weights = np.exp(scores - top[:, None])
    sink_weights = np.where(seen, np.exp(sink - top), 0) if sink is not None else np.zeros(len(q))
    total = np.where(seen, weights.sum(axis=1) + sink_weights, 1)
    weights /= total[:, None]
    sink_weights = sink_weights / total
    with np.errstate(divide="ignore"):
        lse = np.where(seen, top + np.log(total), -np.inf)

    dweights = dout @ v.T
    mean = (weights * dweights).sum(axis=1)
    dscores = weights * (dweights - mean[:, None]) * bend * scale
    return weights @ v, lse, dscores @ k, dscores.T @ q, weights.T @ dout, -(sink_weights @ mean)


def attend(q, k, v, dout, sink, options):
    """Every output of a layer; arrays [batch, tokens, heads, dim] in double."""
    batch, tokens, q_heads, dim = q.shape
    sharing = q_heads // k.shape[2]
    mask = mask_of(tokens, options)
    padding = ~mask.any(axis=1)
    q, k, v, dout = (np.where(padding[:, None, None], 0, x) for x in (q, k, v, dout))
    want = {
        "out": np.zeros_like(dout),
        "lse": np.zeros((batch, tokens, q_heads)),
        "dq": np.zeros_like(q),
        "dk": np.zeros_like(k),
        "dv": np.zeros_like(v),
        "dsink": np.zeros(q_heads),
    }
    scale = options.scale or dim**-0.5
    for b in range(batch):
        for h in range(q_heads):
            g = h // sharing
            out, lse, dq, dk, dv, dsink = attend_head(
                q[b, :, h], k[b, :, g], v[b, :, g], dout[b, :, h],
                None if sink is None else sink[h], mask, scale, options.softcap)
            want["out"][b, :, h], want["lse"][b, :, h], want["dq"][b, :, h] = out, lse, dq
            want["dk"][b, :, g] += dk
            want["dv"][b, :, g] += dv
            want["dsink"][h] += dsink
    return want


def worst(got, want):
    """The largest error and where it is; NaN anywhere is infinitely wrong."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want) / np.maximum(1, np.abs(want))
    error = np.where(got == want, 0, np.where(np.isnan(error), np.inf, error))
    if not error.size:
        return 0.0, ()
    place = np.unravel_index(np.argmax(error), error.shape)
    return float(error[place]), tuple(int(i) for i in place)


def read(path):
    """An array of float32, or words saying why not."""
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        return None, f"cannot be read: {error}"
    if values.dtype != np.float32:
        return None, f"holds {values.dtype}, not float32"
    return values, ""


def read_inputs(options):
    arrays = {}
    for name in ("q", "k", "v", "do", "sink"):
        path = options.inputs / f"{name}.npy"
        if name == "sink" and not path.exists():
            continue
        values, words = read(path)
        if values is None:
            sys.exit(f"dense.py: {path} {words}")
        if options.bf16 and name != "sink":
            values = round_to_bf16(values)
        arrays[name] = values.astype(np.float64)
    return arrays


def check_one(name, path, want, tolerance):
    """Prints a line; true if the file holds what it should."""
    got, words = read(path)
    if got is not None and got.shape != want.shape:
        got, words = None, f"has shape {got.shape}, want {want.shape}"
    if got is None:
        print(f"{name:6}  WRONG  {path} {words}")
        return False
    error, place = worst(got.astype(np.float64), want)
    passed = error <= tolerance
    verdict = "ok   " if passed else "WRONG"
    where = "" if passed else f"; at {place} got {got[place]:.9g}, want {want[place]:.9g}"
    print(f"{name:6}  {verdict}  max error {error:.3g}, allowed {tolerance:.3g}{where}")
    return passed


def check(options):
    inputs = read_inputs(options)
    flat = inputs["q"].ndim == 3
    row = {name: inputs[name][None] if flat else inputs[name] for name in ("q", "k", "v", "do")}
    sink = None if options.no_sink else inputs.get("sink")
    want = attend(row["q"], row["k"], row["v"], row["do"], sink, options)
    tolerances = dict.fromkeys(OUTPUTS, options.tolerance_grad)
    tolerances["out"] = options.tolerance_out
    tolerances["lse"] = options.tolerance_lse or options.tolerance_out
    passed = True
    for outputs in options.outputs:
        for name in OUTPUTS:
            if name in options.skip or (name == "dsink" and sink is None):
                continue
            expected = want[name][0] if flat and name != "dsink" else want[name]
            passed &= check_one(name, outputs / f"{name}.npy", expected, tolerances[name])
    return 0 if passed else 1


def make(options):
    random = np.random.default_rng(options.seed)
    lead = (options.batch, options.tokens) if options.batch else (options.tokens,)
    dim_v = options.head_dim_v or options.head_dim_qk
    kv_heads = options.kv_heads or options.q_heads
    if options.q_heads % kv_heads:
        sys.exit(f"dense.py: {options.q_heads} query heads cannot share {kv_heads} key heads")
    document, _ = documents_of(options.tokens, options.documents)
    shapes = {
        "q": (options.q_heads, options.head_dim_qk),
        "k": (kv_heads, options.head_dim_qk),
        "v": (kv_heads, dim_v),
        "do": (options.q_heads, dim_v),
    }
    options.inputs.mkdir(parents=True, exist_ok=True)
    for name, shape in shapes.items():
        values = random.standard_normal(lead + shape).astype(np.float32)
        if name == "q":
            values *= np.float32(options.gain)
        values[..., document < 0, :, :] = np.nan  # padding may not be read
        np.save(options.inputs / f"{name}.npy", values)
    sink = options.inputs / "sink.npy"
    if options.sink:
        np.save(sink, random.standard_normal(options.q_heads).astype(np.float32))
    else:
        sink.unlink(missing_ok=True)
    return 0


def lengths(text):
    values = [int(part) for part in text.split(",")]
    if min(values) < 0:
        raise ValueError(text)
    return values


def window(text):
    """Tokens beside the query's own; None is unlimited."""
    if text == "unlimited":
        return None
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)

    maker = verbs.add_parser("make", help="write random q, k, v, do and sink .npy files")
    maker.add_argument("inputs", type=pathlib.Path)
    maker.add_argument("--tokens", type=int, required=True)
    maker.add_argument("--batch", type=int, default=0, help="0: arrays without a batch dimension")
    maker.add_argument("--q-heads", type=int, default=1)
    maker.add_argument("--kv-heads", type=int, default=0, help="0: as many as query heads")
    maker.add_argument("--head-dim-qk", type=int, default=64)
    maker.add_argument("--head-dim-v", type=int, default=0, help="0: head-dim-qk")
    maker.add_argument("--sink", action="store_true")
    maker.add_argument("--seed", type=int, default=0)
    maker.add_argument("--gain", type=float, default=1, help="factor on q")
    maker.set_defaults(run=make)

    checker = verbs.add_parser("check", help="compare directories of outputs")
    checker.add_argument("inputs", type=pathlib.Path)
    checker.add_argument("outputs", type=pathlib.Path, nargs="+",
                         help="one or more directories that should hold the same")
    checker.add_argument("--window-left", type=window, required=True, metavar="N|unlimited")
    checker.add_argument("--window-right", type=window, default=0, metavar="N|unlimited")
    checker.add_argument("--softcap", type=float, default=0)
    checker.add_argument("--scale", type=float, default=0, help="0: 1/sqrt(head_dim_qk)")
    checker.add_argument("--tolerance-out", type=float, required=True)
    checker.add_argument("--tolerance-grad", type=float, required=True)
    checker.add_argument("--tolerance-lse", type=float, default=0, help="0: tolerance-out")
    checker.add_argument("--bf16", action="store_true", help="round q, k, v and do first")
    checker.add_argument("--no-sink", action="store_true", help="leave sink.npy out")
    checker.add_argument("--skip", type=lambda text: text.split(","), default=[],
                         metavar="dq,dk,...", help="outputs not to look at")
    checker.set_defaults(run=check)
    for verb in (maker, checker):
        verb.add_argument("--documents", type=lengths, default=None, metavar="LENGTH,LENGTH,...",
                          help="tokens of each document; what follows them is padding")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    sys.exit(options.run(options))
