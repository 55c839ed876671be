# SPDX-License-Identifier: Apache-2.0
"""
The golden numbers: a second implementation of docs/numerics.md, in NumPy, for a comparison bit for bit. Usage:
golden.py case.json out.npz, see README.md. Gradients are generated, here and in gradients.h.
"""
import json
import math
import sys
import numpy as np

F = np.float32
M64 = (1 << 64) - 1
WEIGHTS = 0x57454947485453  # ASCII "WEIGHTS"; the seed of initial values is the case's seed xor this
SCALES = np.ldexp(F(1), -23 - np.arange(16)).astype(F)
WORDS = set("""world_size seed steps optimizer type params groups micro_batches op max_norm loss_scale
    missing passes nonfinite lr betas eps weight_decay momentum dampening nesterov lr_decay adam_w_mode
    shape group grad_dtype weight_dtype trainable rank step micro param times AdamW Adam SGD Lion Adagrad
    fp32 bf16 fp16 mean sum nan inf -inf wire nodes rounded_to moments bf16-stochastic 8bit
    fp32-24bit bf16-24bit 8bit-24bit""".split())

# The generator: splitmix64 as a hash of a gradient's position. h is an int or a uint64 array.
def mix(h):
    h = (h + 0x9E3779B97F4A7C15) & M64
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & M64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & M64
    return h ^ (h >> 31)

def key(seed, step, micro, k, rank, param):
    h = mix(seed)
    for x in (step, micro, k, rank, param):
        h = mix(h ^ x)
    return h

def values(key, n):
    """Return: n exact fp32 values, each an integer in [-2^23, 2^23) times a power from 2^-38 to 2^-23."""
    x = mix(np.arange(n, dtype=np.uint64) ^ np.uint64(key))
    mantissa = (x >> np.uint64(40)).astype(np.int32) - np.int32(1 << 23)
    return mantissa.astype(F) * SCALES[(x & np.uint64(15)).astype(np.intp)]

# Dtypes: fp32 values to bits, rounded to nearest even, and exactly back.
def to_bits(x, dtype):
    if dtype == "fp16":
        return x.astype(np.float16).view(np.uint16)
    u = x.view(np.uint32)
    if dtype == "fp32":
        return u
    rounded = u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))
    return (np.where(np.isnan(x), u | np.uint32(0x400000), rounded) >> np.uint32(16)).astype(np.uint16)

def from_bits(bits, dtype):
    if dtype == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(F)
    return bits.view(F) if dtype == "fp32" else bits.view(np.float16).astype(F)

# Section 1: the sum.
def now(x, step):
    return x[step] if isinstance(x, list) else x

def matches(rule, at):
    return all(at[f] in (rule[f] if isinstance(rule[f], list) else [rule[f]]) for f in set(rule) - {"times"})

def n_passes(case, **at):
    """Return: how often a rank pushes a parameter in a micro-batch."""
    n = [1] + [rule["times"] for rule in case.get("passes", []) if matches(rule, at)]
    frozen = not case["params"][at["param"]].get("trainable", True)
    return 0 if frozen or any(matches(rule, at) for rule in case.get("missing", [])) else n[-1]

def gradient(case, step, micro, k, rank, param):
    g = values(key(case["seed"], step, micro, k, rank, param), math.prod(case["params"][param]["shape"]))
    for *place, index, value in case.get("nonfinite", []):
        if k == 0 and place == [step, rank, micro, param]:
            g[index] = F(float(value))
    dtype = case["params"][param].get("grad_dtype", "fp32")
    return from_bits(to_bits(g, dtype), dtype)

def one_has_all(nodes, first, n):
    """Return: whether one node has all ranks [first, first + n). nodes: the number of ranks of each node."""
    ends = np.cumsum(nodes)
    return any(end - count <= first and first + n <= end for end, count in zip(ends, nodes))

def tree(g, wire=None, first=0):
    """
    Return: the sum of one array per rank, split at the largest power of two below their number. wire: {nodes,
    rounded_to}: the sum of a node's largest subtree is rounded to that dtype before it is added to other sums.
    """
    if wire and one_has_all(wire["nodes"], first, len(g)):
        return from_bits(to_bits(tree(g), wire["rounded_to"]), wire["rounded_to"])
    if len(g) == 1:
        return g[0]
    split = 1 << ((len(g) - 1).bit_length() - 1)
    return tree(g[:split], wire, first) + tree(g[split:], wire, first + split)

def accumulate(case, step, param):
    """Return: a parameter's accumulator in a step, flat, or None if no rank pushed it."""
    zero, acc = np.zeros(math.prod(case["params"][param]["shape"]), F), None
    for micro in range(now(case.get("micro_batches", 1), step)):
        n = [n_passes(case, rank=r, step=step, micro=micro, param=param) for r in range(case["world_size"])]
        for k in range(max(n)):
            g = [gradient(case, step, micro, k, r, param) if k < n[r] else zero for r in range(len(n))]
            acc = (zero if acc is None else acc) + tree(g, case.get("wire"))
    return acc

# Section 2: the norm.
def runs(acc):
    """Return: the sums of squares of runs of 64, in double. The padding adds +0 to lanes, which are never -0."""
    x = np.pad(acc.astype(np.float64), (0, -acc.size % 64)).reshape(-1, 8, 8)  # run, turn, lane
    a = np.zeros((8, len(x)))
    for turn in range(8):
        a = a + x[:, turn].T * x[:, turn].T
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))

def exact_sum(x):
    """Return: the sum, rounded once. x: finite doubles that are multiples of 2^-298, like squares of fp32 values."""
    m, e = np.frexp(x)
    total = sum(m << (e + 347) for m, e in zip(np.ldexp(m, 53).astype(np.int64).tolist(), e.tolist()))
    return total / (1 << 400)  # Python's division of integers rounds once, to nearest even

# Section 4: the update. t is the parameter's step count, o its options. All return p, m, v.
def adam(p, m, v, g, t, o):
    lr, wd, (beta1, beta2) = o["lr"], o.get("weight_decay", 0.0), o["betas"]
    b1, c1, b2, c2, eps = F(beta1), F(1 - beta1), F(beta2), F(1 - beta2), F(o["eps"])
    a, q = F(lr / (1 - beta1 ** t)), F(1 / math.sqrt(1 - beta2 ** t))
    if o["adam_w_mode"]:
        p = p * F(1 - lr * wd)
    else:
        g = g + p * F(wd)
    m = m * b1 + g * c1
    v = v * b2 + (g * g) * c2
    return p - a * (m / (np.sqrt(v) * q + eps)), m, v

def sgd(p, m, v, g, t, o):
    g = g + p * F(o.get("weight_decay", 0.0))
    if m is not None:
        mu = F(o["momentum"])
        m = g if t == 1 else m * mu + g * F(1 - o.get("dampening", 0.0))
        g = g + m * mu if o.get("nesterov", False) else m
    return p - F(o["lr"]) * g, m, v

def lion(p, m, v, g, t, o):
    beta1, beta2 = o["betas"]
    p = p * F(1 - o["lr"] * o.get("weight_decay", 0.0))
    u = m * F(beta1) + g * F(1 - beta1)
    p = p - F(o["lr"]) * np.where(u > 0, F(1), np.where(u < 0, F(-1), F(0)))
    return p, m * F(beta2) + g * F(1 - beta2), v

def adagrad(p, m, v, g, t, o):
    g = g + p * F(o.get("weight_decay", 0.0))
    v = v + g * g
    a = F(o["lr"] / (1 + (t - 1) * o.get("lr_decay", 0.0)))
    return p - a * (g / (np.sqrt(v) + F(o["eps"]))), m, v
UPDATES = {"AdamW": adam, "Adam": adam, "SGD": sgd, "Lion": lion, "Adagrad": adagrad}

# Sections 5, 6 and 8: narrow state.
def mix32(x):
    x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ x >> 16

def draws(param, t, elems, flip=0):
    """Return: 32 random bits for each of these elements of a parameter."""
    place = mix32((mix32((mix32(t & 0xFFFFFFFF) + (t >> 32)) & 0xFFFFFFFF) + param) & 0xFFFFFFFF)
    places = (elems.astype(np.uint64) * np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF)
    return mix32(places ^ np.uint64(place ^ flip))

def in_groups(x, which, draw):
    """Return: a moment after it was stored in 8 bits. draw: 20 bits for each element."""
    bits = np.pad(x.view(np.uint32).astype(np.int64) & 0x7FFFFFFF, (0, -x.size % 64))
    upper = np.minimum((bits + np.pad(draw.astype(np.int64), (0, -x.size % 64))) >> 20, 0x7F7).reshape(-1, 64)
    less = 8 * np.maximum((upper.max(axis=1, keepdims=True) >> 3) - (15, 31)[which], 0)
    codes = np.maximum(upper - less, (bits != 0).reshape(-1, 64) if which else 0)
    values = np.where(codes > 0, (codes + less) << 20, 0).ravel()[:x.size].astype(np.uint32).view(F)
    return values if which else np.copysign(values, x)

def stored(case, moment, which, param, t):
    """Return: a moment, in fp32, after it was stored. which: 0 exp_avg, 1 exp_avg_sq."""
    kind = case.get("moments", "fp32").removesuffix("-24bit")
    if moment is None or kind == "fp32":
        return moment
    if kind == "bf16":
        return from_bits(to_bits(moment, "bf16"), "bf16")
    draw, late = draws(param, t, np.arange(moment.size)), np.arange(moment.size) % 64 >= 32
    if kind == "8bit":
        draw = draw[np.arange(moment.size) - 32 * late] ^ np.where(late, np.uint64(0xFFFFFFFF), np.uint64(0))
        return in_groups(moment, which, (draw & np.uint64(0xFFFFF), draw >> np.uint64(12))[which])
    u = moment.view(np.uint32).astype(np.uint64) + ((draw >> np.uint64(16 * which)) & np.uint64(0xFFFF))
    return np.where(np.isnan(moment), moment, (u & np.uint64(0xFFFF0000)).astype(np.uint32).view(F))

def stored_master(case, p, param, t):
    """Return: a master weight, in fp32, after it was stored."""
    kind = case.get("moments", "fp32")
    if case["params"][param].get("weight_dtype", "fp32") != "bf16" or not kind.endswith("-24bit"):
        return p
    e, u = np.arange(p.size), p.view(np.uint32).astype(np.int64)
    draw = draws(param, t, e // 64 * 16 + e % 16, 0xFFFFFFFF)
    draw = ((draw | draw << np.uint64(32)) >> (e % 64 // 16 * 8).astype(np.uint64)).astype(np.int64) & 0x1FF
    bits = (u + draw % 256) >> 8
    bits += np.where(bits % 256 == 128, draw // 256 * 2 - 1, 0)
    bits = np.where(np.isnan(p), (u >> 16 | 0x40) << 8, bits)
    return (bits << 8).astype(np.uint32).view(F)

# A run of a case.
def options(case, param, step):
    """Return: a parameter's options in a step. Its group's options override the optimizer's."""
    o = {**case["optimizer"]["params"], **case.get("groups", [{}])[case["params"][param].get("group", 0)]}
    o["adam_w_mode"] = case["optimizer"]["type"] == "AdamW" or o.get("adam_w_mode", True)
    return {name: x if name == "betas" else now(x, step) for name, x in o.items()}

def check(x):
    """Refuses unknown words, because a misspelt word would silently test something else."""
    unknown = (set(x) if isinstance(x, dict) else {x} if isinstance(x, str) else set()) - WORDS
    if unknown:
        raise ValueError(f"unknown in a golden case: {sorted(unknown)}")
    for child in x.values() if isinstance(x, dict) else x if isinstance(x, list) else ():
        check(child)

def begin(case, i):
    """
    Section 6: the initial state. Moments that the optimizer lacks are None, and all moments of a frozen parameter.
    """
    q, kind, o = case["params"][i], case["optimizer"]["type"], options(case, i, 0)
    p = values(key(case["seed"] ^ WEIGHTS, 0, 0, 0, 0, i), math.prod(q["shape"]))
    dtype, buffer = q.get("weight_dtype", "fp32"), kind == "SGD" and o.get("momentum", 0) != 0
    has = kind in ("AdamW", "Adam", "Lion") or buffer, kind in ("AdamW", "Adam", "Adagrad")
    moments = [np.zeros_like(p) if h and q.get("trainable", True) else None for h in has]
    return from_bits(to_bits(p, dtype), dtype), *moments

def advance(case, step, state, counts):
    """One step. Changes both lists in place. Return: norm, coef, scale, applied."""
    pushed = {i: acc for i in range(len(state)) if (acc := accumulate(case, step, i)) is not None}
    squares = np.concatenate([np.zeros(0)] + [runs(acc) for acc in pushed.values()])
    if not np.isfinite(squares).all():
        return dict(norm=math.nan, coef=math.nan, scale=F(math.nan), applied=False)
    d = case["world_size"] if case.get("op", "mean") == "mean" else 1
    divisor = d * float(now(case.get("loss_scale", 1), step))
    norm, max_norm = math.sqrt(exact_sum(squares)) / divisor, now(case.get("max_norm", 0), step)
    coef = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    s = F(coef / divisor)
    for i, acc in pushed.items():
        counts[i] += 1
        p, *moments = UPDATES[case["optimizer"]["type"]](*state[i], acc * s, counts[i], options(case, i, step))
        state[i] = stored_master(case, p, i, counts[i]), *(stored(case, m, which, i, counts[i]) for which, m in enumerate(moments))
    return dict(norm=norm, coef=coef, scale=s, applied=True)

def run(case):
    """
    Return: a dict per step: norm, coef, scale, applied, and lists over the parameters after the step: counts, master,
    exp_avg, exp_avg_sq, weights (as bits of their dtype).
    """
    check(case)
    params, results = case["params"], []
    state, counts = [begin(case, i) for i in range(len(params))], [0] * len(params)
    for step in range(case["steps"]):
        with np.errstate(all="ignore"):
            results.append(advance(case, step, state, counts) | {"counts": list(counts)})
            bits = [to_bits(xs[0], q.get("weight_dtype", "fp32")) for q, xs in zip(params, state)]
        for name, column in zip(("weights", "master", "exp_avg", "exp_avg_sq"), [bits, *zip(*state)]):
            results[-1][name] = [x if x is None else x.reshape(q["shape"]) for q, x in zip(params, column)]
    return results

if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as f:
        result = run(json.load(f))
    out = {name: [r[name] for r in result] for name in ("norm", "coef", "scale", "applied", "counts")}
    for name in ("master", "exp_avg", "exp_avg_sq", "weights"):
        out.update({f"{name}.{i}": x for i, x in enumerate(result[-1][name]) if x is not None})
    np.savez(sys.argv[2], **out)
