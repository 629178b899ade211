#!/usr/bin/env python3
"""Compares other libraries with bittern's CUDA kernels: the same inputs, in one run.

    bench/peers_cuda.py --library build/shared/libbittern.so --json peers.json
    bench/peers_cuda.py --only quantize --repeat 21

The peers are torch (the op's formula, eager and compiled; its own attention, on bf16 keys and
values) and FLA, flash-linear-attention, for the gated delta rule; fla-core, flash-linear-attention and einops may be unpacked wheels on PYTHONPATH.
A peer that is not installed, or fails, gives a row that says so. bittern is called through its C
interface, so any Python will do. Build the library with -DBUILD_SHARED_LIBS=ON, and put
libbittern_cuda.so beside it.

Every candidate is captured as a CUDA graph of many calls, which take turns with several sets of
inputs where one would fit the L2; samples of all of them and of a copy within the device's memory
go round in turn, and medians are reported. The ratio is the op's minimum traffic (each operand read
or written once) per second over the copy's, also for the peers, whatever they move. `differs` sets
each peer's result against bittern's: the share of codes that are not equal, or the root mean square
of the difference over that of the result.

--device cpu runs the same on the CPU with small problems: a check of this script, not a result.
"""

import argparse
import ctypes
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import time
import typing

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOG2_E = 1.4426950408889634
PEERS = ("torch.compile", "torch eager", "torch SDPA", "FLA")


# ---- bittern's C interface ----


class Operand(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("dtype", ctypes.c_int32), ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 6), ("optional", ctypes.c_bool), ("output", ctypes.c_bool),
        ("row_stride", ctypes.c_bool), ("in_place", ctypes.c_bool), ("in_out", ctypes.c_bool),
    ]  # fmt: skip


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("dtype", ctypes.c_int32),
        ("device", Device), ("rank", ctypes.c_int32), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    ]  # fmt: skip


class Sku(ctypes.Structure):
    _fields_ = [
        ("category", ctypes.c_char_p), ("op", ctypes.c_char_p), ("element", ctypes.c_int32),
        ("aux_element", ctypes.c_int32), ("architecture", ctypes.c_char_p),
        ("backend", ctypes.c_char_p), ("kernel", ctypes.c_char_p),
    ]  # fmt: skip


# By the number of a bittern_dtype. torch keeps the bits of u32 in int32.
DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int32")
PREFERENCES = ("exact", "fastest")


class Plan:
    """One problem of one op, and the kernel that runs it."""

    def __init__(self, library, op, fields, device, preference):
        self.library, self.device = library, device
        desc = ctypes.c_void_p()
        self._call("bittern_desc_create", op.encode(), ctypes.byref(desc))
        for name, value in fields.items():
            if isinstance(value, str):
                self._call("bittern_desc_set_text", desc, name.encode(), value.encode())
            else:
                self._call("bittern_desc_set", desc, name.encode(), ctypes.c_int64(value))
        count = ctypes.c_size_t()
        self._call("bittern_desc_operand_count", desc, ctypes.byref(count))
        self.operands = []
        for i in range(count.value):
            operand = Operand()
            self._call("bittern_desc_operand", desc, ctypes.c_size_t(i), ctypes.byref(operand))
            self.operands.append(operand)
        self.plan = ctypes.c_void_p()
        self._call(
            "bittern_select", desc, device, ctypes.c_int32(PREFERENCES.index(preference)), None,
            ctypes.c_int(0), ctypes.byref(self.plan),
        )  # fmt: skip
        sku = Sku()
        self._call("bittern_plan_sku", self.plan, ctypes.byref(sku))
        self.kernel = sku.kernel.decode()
        scratch = ctypes.c_size_t()
        self._call("bittern_plan_workspace_bytes", self.plan, ctypes.byref(scratch))
        self.scratch_bytes = scratch.value

    def _call(self, function, *arguments):
        if getattr(self.library, function)(*arguments) != 0:
            self.library.bittern_last_error.restype = ctypes.c_char_p
            raise RuntimeError(self.library.bittern_last_error().decode())

    def bind(self, torch, tensors, where):
        """-> (outputs by name, run()) over the given inputs; what an op updates is copied first."""
        held, outputs = (Tensor * len(self.operands))(), {}
        keep = []
        for slot, operand in zip(held, self.operands):
            name = operand.name.decode()
            shape = list(operand.shape[: operand.rank])
            tensor = tensors.get(name)
            if operand.output:
                if tensor is None:
                    dtype = getattr(torch, DTYPES[operand.dtype])
                    tensor = torch.zeros(shape, dtype=dtype, device=where)
                else:
                    tensor = tensor.clone()
                outputs[name] = tensor
            slot.name = operand.name
            if tensor is None:
                continue
            if tensor.numel() != math.prod(shape) or not tensor.is_contiguous():
                raise ValueError(f"{name}: {list(tensor.shape)}, expected dense {shape}")
            if str(tensor.dtype) != f"torch.{DTYPES[operand.dtype]}":
                raise ValueError(f"{name}: {tensor.dtype}, expected {DTYPES[operand.dtype]}")
            slot.data, slot.dtype, slot.device = tensor.data_ptr(), operand.dtype, self.device
            slot.rank, slot.shape = operand.rank, (ctypes.c_int64 * 6)(*shape)
            keep.append(tensor)
        scratch = torch.empty(self.scratch_bytes + 64, dtype=torch.uint8, device=where)
        at = (scratch.data_ptr() + 63) // 64 * 64 if self.scratch_bytes else 0
        keep.append(scratch)

        def run(_keep=keep):
            stream = torch.cuda.current_stream().cuda_stream if where == "cuda" else 0
            self._call(
                "bittern_plan_run", self.plan, held, ctypes.c_size_t(len(held)),
                ctypes.c_void_p(stream), ctypes.c_void_p(at), ctypes.c_size_t(self.scratch_bytes),
            )  # fmt: skip

        return outputs, run

    def traffic(self, tensors):
        """Bytes: every operand that is there once, one that is updated twice."""
        total = 0
        for operand in self.operands:
            if operand.name.decode() in tensors or operand.output:
                width = (4, 8, 2, 2, 1, 1, 4, 4)[operand.dtype]
                size = math.prod(operand.shape[: operand.rank]) * width
                total += 2 * size if operand.in_out else size
        return total


# ---- the problems ----


@dataclasses.dataclass
class Case:
    title: str
    op: str
    fields: dict
    inputs: typing.Callable  # () -> tensors by operand
    peers: dict  # peer -> function(inputs) -> tensors in the order of `compare`
    compare: tuple  # outputs; "packed 4" are codes of four bits in words
    skip: tuple = ()  # optional outputs that are left out
    note: str = ""


def cases(torch, where, small):
    """The problems of the results' table; `small` ones check the script."""
    rows, columns = (64, 512) if small else (16384, 8192)
    random = torch.Generator(device=where).manual_seed(1)
    bf16, f32 = torch.bfloat16, torch.float32

    def normal(*shape, dtype=f32):
        return torch.randn(*shape, generator=random, device=where, dtype=f32).to(dtype)

    def uniform(*shape):
        return torch.rand(*shape, generator=random, device=where, dtype=f32)

    def integers(low, high, shape, dtype):
        return torch.randint(low, high, shape, generator=random, device=where, dtype=dtype)

    def both(function):
        """torch, eager and compiled."""
        return {"torch.compile": torch.compile(function, dynamic=False), "torch eager": function}

    # -- quantise: 128 weights to a scale, true divisions in f32 as the contract has them --
    def quantize_inputs(dtype, gradient):
        def make():
            x = 0.02 * normal(rows, columns)
            scale = 3.6e-4 + 2.4e-4 * uniform(rows, columns // 128)
            zero = integers(-3, 4, scale.shape, torch.int32)
            out = {"x": x.to(dtype), "scale": scale.to(dtype), "zero_point": zero}
            return {"d_y": normal(rows, columns, dtype=dtype), **out} if gradient else out

        return make

    def grouped(t, size=128):
        return t.view(rows, columns // size, size).float()

    def quantize(t):
        s, zp = t["scale"].float()[..., None], t["zero_point"][..., None]
        q = (torch.round(grouped(t["x"]) / s) + zp).clamp(-128, 127)
        return (q.to(torch.int8).view(rows, columns),)

    def quantize_backward(t):
        s, zp = t["scale"].float()[..., None], t["zero_point"][..., None]
        code = torch.round(grouped(t["x"]) / s) + zp
        inside = (code >= -128) & (code <= 127)
        d_x = torch.where(inside, grouped(t["d_y"]) / s, 0.0)
        return (d_x.to(t["x"].dtype).view(rows, columns),)

    def fake_backward(t):
        s, zp, d_y = t["scale"].float()[..., None], t["zero_point"][..., None], grouped(t["d_y"])
        z = grouped(t["x"]) / s
        rounded = torch.round(z)
        inside = (rounded + zp >= -128) & (rounded + zp <= 127)
        clamped = (rounded + zp).clamp(-128, 127) - zp
        d_scale = (d_y * torch.where(inside, rounded - z, clamped)).sum(2)
        d_zero = torch.where(inside, 0.0, -(s * d_y)).sum(2)
        d_x = torch.where(inside, d_y, 0.0)
        kind = t["x"].dtype
        return d_x.to(kind).view(rows, columns), d_scale.to(kind), d_zero.to(kind)

    problem = {"outer_size": rows, "axis_size": columns, "group_size": 128}
    for name, dtype in (("bf16", bf16), ("f32", f32)):
        fields = {**problem, "element": name}
        yield Case(
            f"quantize_per_group {name}->s8", "quantize_per_group", fields,
            quantize_inputs(dtype, False), both(quantize), ("q",),
        )  # fmt: skip
        yield Case(
            f"quantize_per_group_backward {name}", "quantize_per_group_backward", fields,
            quantize_inputs(dtype, True), both(quantize_backward), ("d_x",),
        )  # fmt: skip
    yield Case(
        "fake_quantize_per_group_backward bf16", "fake_quantize_per_group_backward",
        {**problem, "element": "bf16"}, quantize_inputs(bf16, True), both(fake_backward),
        ("d_x", "d_scale", "d_zero_point"),
    )  # fmt: skip

    # -- affine: 64 weights to a scale and a bias, codes 0..15, one to a byte --
    def affine_init(t):
        w = grouped(t["w"], 64)
        low, high = torch.aminmax(w, dim=2, keepdim=True)
        s = (high - low) / 15
        s = torch.where(s > 0, s, 1.0)
        q = torch.floor((w - low) / s + 0.5).clamp(0, 15).to(torch.uint8)
        return s.squeeze(2), low.squeeze(2), q.view(rows, columns)

    def affine_forward(t):
        y = grouped(t["q"], 64) * t["scales"][..., None] + t["biases"][..., None]
        return (y.view(rows, columns),)

    def affine_backward(t):
        q, d_y = grouped(t["q"], 64), grouped(t["d_y"], 64)
        return (q * d_y).sum(2), d_y.sum(2)

    def codes():
        return integers(0, 16, (rows, columns), torch.uint8)

    problem = {"outer_size": rows, "axis_size": columns, "group_size": 64, "bits": 4}
    yield Case(
        "qdq_affine_init minmax f32", "qdq_affine_init", problem,
        lambda: {"w": 0.02 * normal(rows, columns)}, both(affine_init), ("scales", "biases", "q"),
    )  # fmt: skip
    yield Case(
        "qdq_affine_forward f32", "qdq_affine_forward", problem,
        lambda: {"q": codes(), "scales": 0.01 * uniform(rows, columns // 64),
                 "biases": normal(rows, columns // 64)},
        both(affine_forward), ("y",),
    )  # fmt: skip
    yield Case(
        "qdq_affine_backward f32", "qdq_affine_backward", problem,
        lambda: {"d_y": normal(rows, columns), "q": codes()}, both(affine_backward),
        ("d_scales", "d_biases"),
    )  # fmt: skip

    # -- the codec's encode with a dense rotation: a product, then a search of 15 boundaries --
    tokens, width = (512, 128) if small else (1 << 20, 128)
    levels = torch.linspace(-0.24, 0.24, 16, device=where)
    boundaries = (levels[1:] + levels[:-1]) / 2
    rotation = torch.linalg.qr(normal(width, width))[0].contiguous()
    shifts = torch.arange(0, 32, 4, device=where, dtype=torch.int32)

    def encode(t):
        norm = t["x"].norm(dim=1, keepdim=True)
        code = torch.bucketize((t["x"] / norm) @ t["table"].T, boundaries, out_int32=True)
        words = (code.view(-1, width // 8, 8) << shifts).sum(2, dtype=torch.int32)
        return words, (norm / levels[code].norm(dim=1, keepdim=True)).squeeze(1)

    def with_tf32(function):
        def run(t):
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                return function(t)
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False

        return run

    for name, wrap in (("f32", lambda f: f), ("f32, torch in TF32", with_tf32)):
        if name != "f32":
            torch._dynamo.reset()  # the product's precision is compiled in
        yield Case(
            f"aura_encode dense d128 {name}", "aura_encode",
            {"rows": tokens, "dim": width, "bits": 4, "rotation": "dense"},
            lambda: {"x": normal(tokens, width), "table": rotation, "boundaries": boundaries,
                     "codebook": levels},
            {k: wrap(f) for k, f in both(encode).items()}, ("packed 4", "scales"),
        )  # fmt: skip

    # -- attention on 4-bit codes, against torch's own on the same tokens in bf16 --
    def attention(queries, tokens, query_heads, kv_heads):
        signs = torch.where(uniform(width) < 0.5, -1.0, 1.0)
        hadamard = torch.ones(1, 1, device=where)
        while len(hadamard) < width:
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1),
                                  torch.cat([hadamard, -hadamard], 1)])  # fmt: skip

        def make():
            out = {"q": normal(1, queries, query_heads, width, dtype=bf16)}
            for name in "kv":
                code = integers(0, 16, (kv_heads, tokens, width), torch.int32)
                words = (code.view(kv_heads, tokens, width // 8, 8) << shifts).sum(3)
                scale = 6 + 6 * uniform(kv_heads, tokens)
                plain = signs * (levels[code] @ (hadamard / width**0.5)) * scale[..., None]
                out |= {f"{name}_packed": words.to(torch.int32), f"{name}_scales": scale,
                        f"{name}_codebook": levels, f"{name}_table": signs,
                        f"{name} bf16": plain.to(bf16)[None]}  # fmt: skip
            return out

        def sdpa(t):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                o = torch.nn.functional.scaled_dot_product_attention(
                    t["q"].transpose(1, 2), t["k bf16"], t["v bf16"], is_causal=queries > 1,
                    enable_gqa=True,
                )  # fmt: skip
            return (o.transpose(1, 2),)

        kind = f"{queries} queries" if queries > 1 else "1 query"
        return Case(
            f"aura_attention 4/4 bit, {kind} on {tokens} tokens, {query_heads}/{kv_heads} heads",
            "aura_attention",
            {"queries": queries, "heads": query_heads, "kv_heads": kv_heads, "dim": width,
             "capacity": tokens, "element": "bf16"},
            make, {"torch SDPA": sdpa}, ("out",), note="torch reads bf16",
        )  # fmt: skip

    yield attention(1, 256 if small else 1 << 18, 32, 4)
    yield attention(128 if small else 4096, 128 if small else 4096, 32, 8)

    # -- the gated delta rule: 16 key heads, 32 value heads of 128, chunks of 64 --
    key_heads, heads, size = (2, 4, 128) if small else (16, 32, 128)

    def fla(function):
        try:
            import fla.ops  # noqa: F401
        except ImportError as error:
            why = f"not installed: {error}"

            def missing(_):
                raise RuntimeError(why)

            return {"FLA": missing}
        return {"FLA": function}

    def delta_heads(batch, tokens):
        unit = torch.nn.functional.normalize
        return {
            "q": unit(normal(batch, tokens, key_heads, size), dim=-1).to(bf16),
            "k": unit(normal(batch, tokens, key_heads, size), dim=-1).to(bf16),
            "v": normal(batch, tokens, heads, size, dtype=bf16),
            "beta": uniform(batch, tokens, heads),
            "g": -0.1 * uniform(batch, tokens, heads),
        }

    def fla_w_u(t):
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd

        return recompute_w_u_fwd(t["k"], t["v"], t["beta"], t["a bf16"], t["g log2"])

    for tokens in (128,) if small else (8192, 32768):

        def w_u_inputs(a_dtype, tokens=tokens):
            def make():
                t = delta_heads(1, tokens)
                chunk = t["g"].view(1, tokens // 64, 64, heads)
                t["g"] = chunk.cumsum(2).view(1, tokens, heads).contiguous()
                a = 0.1 * normal(1, tokens // 64, 64, heads, 64)
                row = torch.arange(64, device=where)
                below = (row[:, None] > row[None, :])[None, None, :, None, :]
                one = (row[:, None] == row[None, :])[None, None, :, None, :]
                a = torch.where(below, a, one.float()).view(1, tokens, heads, 64).to(bf16)
                del t["q"]
                return {**t, "a": a.to(a_dtype), "a bf16": a, "g log2": t["g"] * LOG2_E}

            return make

        for name, dtype in (("bf16", bf16), ("f32", f32)):
            yield Case(
                f"gdn_recompute_w_u {tokens} tokens, A {name}", "gdn_recompute_w_u",
                {"batch": 1, "tokens": tokens, "key_heads": key_heads, "value_heads": heads,
                 "element": "bf16", "a_element": name, "lower_triangular": 1},
                w_u_inputs(dtype), fla(fla_w_u), ("w", "u"),
                note="" if name == "bf16" else "FLA reads A in bf16",
            )  # fmt: skip

    # -- the rest of FLA's chain, an op each --
    def fla_kkt(t):
        from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd

        return (chunk_scaled_dot_kkt_fwd(t["k"], t["g log2"], t["beta"]),)

    def fla_solve(t):
        from fla.ops.utils.solve_tril import solve_tril

        return (solve_tril(t["l"], output_dtype=bf16),)

    def fla_state(t):
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

        return chunk_gated_delta_rule_fwd_h(
            t["k"], t["w"], t["u"], g=t["g log2"], output_final_state=True
        )

    def fla_output(t):
        from fla.ops.common.chunk_o import chunk_fwd_o

        return (chunk_fwd_o(t["q"], t["k"], t["v_new"], t["h"], g=t["g log2"]),)

    def chain_inputs(op, batch, tokens):
        def make():
            t = delta_heads(batch, tokens)
            chunks = t["g"].view(batch, tokens // 64, 64, heads)
            g = chunks.cumsum(2).view(batch, tokens, heads).contiguous()
            out = {"k": t["k"], "g": g, "g log2": g * LOG2_E}
            if op == "kkt":
                return {**out, "beta": t["beta"]}
            if op == "solve":
                i = torch.arange(tokens, device=where) % 64
                below = i[:, None] > torch.arange(64, device=where)
                l = 0.1 * normal(batch, tokens, heads, 64)
                return {"l": torch.where(below[None, :, None, :], l, 0.0)}
            if op == "state":
                w = 0.1 * normal(batch, tokens, heads, size)
                return {**out, "w": w.to(bf16), "u": t["v"]}
            h = normal(batch, tokens // 64, heads, size, size, dtype=bf16)
            return {**out, "q": t["q"], "v_new": t["v"], "h": h}

        return make

    keys = {"key_heads": key_heads, "value_heads": heads, "element": "bf16"}
    for op, options, function, outputs in (
        ("kkt", keys, fla_kkt, ("l",)),
        ("solve", {"value_heads": heads, "a_element": "bf16"}, fla_solve, ("a",)),
        ("state", keys, fla_state, ("h", "v_new", "final_state")),
        ("output", keys, fla_output, ("o",)),
    ):
        for batch, tokens in ((1, 128),) if small else ((1, 32768), (4, 8192)):
            yield Case(
                f"gdn_{op} {batch} x {tokens} tokens", f"gdn_{op}",
                {"batch": batch, "tokens": tokens, **options},
                chain_inputs(op, batch, tokens), fla(function), outputs,
            )  # fmt: skip

    def fla_chunks(t):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return (chunk_gated_delta_rule(t["q"], t["k"], t["v"], g=t["g"], beta=t["beta"])[0],)

    for batch, tokens in ((1, 128),) if small else ((1, 32768), (4, 8192), (1, 8192)):
        yield Case(
            f"gdn_chunk_forward {batch} x {tokens} tokens", "gdn_chunk_forward",
            {"batch": batch, "tokens": tokens, "key_heads": key_heads, "value_heads": heads,
             "element": "bf16"},
            lambda batch=batch, tokens=tokens: delta_heads(batch, tokens), fla(fla_chunks),
            ("o",), skip=("final_state",),
        )  # fmt: skip

    def fla_cumsum(t):
        from fla.ops.utils import chunk_local_cumsum

        return (chunk_local_cumsum(t["g"], 64),)

    for tokens in (128,) if small else (32768, 1 << 18):
        yield Case(
            f"gdn_cumsum {tokens} tokens, 32 heads", "gdn_cumsum",
            {"batch": 1, "tokens": tokens, "value_heads": heads},
            lambda tokens=tokens: {"g": -uniform(1, tokens, heads)}, fla(fla_cumsum), ("sum",),
        )  # fmt: skip

    def fla_step(t):
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as step

        o, state = step(
            t["q"], t["k"], t["v"], g=t["g"], beta=t["beta"], initial_state=t["state"],
            output_final_state=True,
        )  # fmt: skip
        return o, state

    batch = 2 if small else 128
    yield Case(
        f"gdn_recurrent_step batch {batch}", "gdn_recurrent_step",
        {"batch": batch, "tokens": 1, "key_heads": key_heads, "value_heads": heads,
         "element": "bf16"},
        lambda: {**delta_heads(batch, 1), "state": normal(batch, heads, size, size)},
        fla(fla_step), ("o", "state"), skip=("snapshots",), note="FLA's state is not in place",
    )  # fmt: skip

    def fla_layer(t):
        """FLA has the rule; the convolution, the gates and the norm are torch's."""
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as step

        f, sizes = torch.nn.functional, [key_heads * size, key_heads * size, heads * size]
        inputs = torch.cat([t["conv_state"], t["x"].transpose(1, 2)], -1)
        mixed = f.silu(f.conv1d(inputs, t["conv_weight"][:, None], groups=inputs.shape[1]))
        parts = mixed.transpose(1, 2).split(sizes, -1)
        q, k, v = (part.reshape(*part.shape[:2], -1, size) for part in parts)
        o, state = step(
            q, k, v, g=-t["a_log"].exp() * f.softplus(t["g"].float() + t["dt_bias"]),
            beta=t["beta"].sigmoid(), initial_state=t["state"], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        y = o.float() * torch.rsqrt(o.float().square().mean(-1, keepdim=True) + 1e-6)
        return (t["norm_weight"] * y * f.silu(t["z"].float())).to(bf16), inputs[..., 1:], state

    for batch in (2,) if small else (1, 128):

        def layer_inputs(batch=batch):
            channels = (2 * key_heads + heads) * size
            tokens = {n: normal(batch, 1, heads, dtype=bf16) for n in ("g", "beta")}
            return {
                "x": normal(batch, 1, channels, dtype=bf16),
                "z": normal(batch, 1, heads, size, dtype=bf16),
                **tokens,
                "conv_weight": 0.5 * normal(channels, 4, dtype=bf16),
                "norm_weight": normal(size, dtype=bf16),
                "a_log": uniform(heads),
                "dt_bias": normal(heads),
                "conv_state": normal(batch, channels, 3, dtype=bf16),
                "state": normal(batch, heads, size, size),
            }

        yield Case(
            f"gdn_decode_step batch {batch}", "gdn_decode_step",
            {"batch": batch, "tokens": 1, "key_heads": key_heads, "value_heads": heads,
             "element": "bf16"},
            layer_inputs, fla(fla_layer), ("y", "conv_state", "state"),
            skip=("snapshots", "conv_snapshots"), note="FLA's rule; the rest is torch's",
        )  # fmt: skip


# ---- measuring ----


class Meter:
    """Seconds per call, and the copy, on one device."""

    SAMPLE, MOST = 2e-3, 128

    def __init__(self, torch, where):
        self.torch, self.where = torch, where
        self.l2 = torch.cuda.get_device_properties(0).L2_cache_size if where == "cuda" else 1 << 20
        self.copy_bytes = 16 * self.l2 if where == "cuda" else 1 << 24
        words = self.copy_bytes // 4
        self.source = torch.randint(0, 1 << 30, (words,), dtype=torch.int32, device=where)
        self.target = torch.empty_like(self.source)
        ways = {
            "memcpy": lambda: self.target.copy_(self.source),
            "kernel": lambda: torch.bitwise_not(self.source, out=self.target),
        }
        self.copies = {name: self.sampler([way] * 4) for name, way in ways.items()}
        self.rates = {
            name: 2e-9 * self.copy_bytes / statistics.median(sample() for _ in range(9))
            for name, sample in self.copies.items()
        }
        self.copy = self.copies[max(self.rates, key=self.rates.get)]

    def sets(self, size):
        return min(max(1, -(-4 * self.l2 // size)), self.MOST) if self.where == "cuda" else 1

    def sampler(self, calls):
        """-> a function that gives seconds per call of `calls`, called in turn."""
        torch = self.torch
        if self.where != "cuda":

            def sample_host():
                start = time.perf_counter()
                for call in calls:
                    call()
                return (time.perf_counter() - start) / len(calls)

            sample_host()
            return sample_host
        for call in calls:  # autotunes, compiles, loads
            call()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[0]()
        end.record()
        end.synchronize()
        once = max(1e-3 * start.elapsed_time(end), 1e-6)
        rounds = max(1, min(round(self.SAMPLE / once), self.MOST) // len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls * rounds:
                call()
        count = len(calls) * rounds
        graph.replay()
        torch.cuda.synchronize()

        def sample(_keep=calls):  # the graph reads and writes where their tensors are
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return 1e-3 * start.elapsed_time(end) / count

        return sample


def difference(torch, name, ours, theirs):
    """How far a peer's result is from ours."""
    if name.endswith(" 4"):
        shifts = torch.arange(0, 32, 4, device=ours.device, dtype=torch.int32)
        ours, theirs = ((t[..., None] >> shifts) & 15 for t in (ours, theirs))
    theirs = theirs.reshape(ours.shape)
    if not ours.is_floating_point():
        return (ours != theirs).double().mean().item()
    a, b = ours.float(), theirs.float()
    return ((a - b).square().mean().sqrt() / a.square().mean().sqrt().clamp_min(1e-30)).item()


def measure(torch, meter, library, case, device, repeat):
    """-> one result for each of our kernels, with the peers beside it."""
    where = meter.where
    plans = {}
    failed = ""
    for preference in PREFERENCES:
        try:
            plan = Plan(library, case.op, case.fields, device, preference)
            plans.setdefault(plan.kernel, plan)
        except RuntimeError as error:
            failed = str(error)
    first = case.inputs()
    if plans:
        plan = next(iter(plans.values()))
        for p in plans.values():
            p.operands = [o for o in p.operands if o.name.decode() not in case.skip]
        traffic = plan.traffic(first)
    else:
        traffic = sum(t.nbytes for t in first.values())
    sets = [first] + [case.inputs() for _ in range(meter.sets(traffic) - 1)]

    samplers, results, notes, differs = {}, {}, {}, {}
    for kernel, plan in plans.items():
        outputs, run = plan.bind(torch, first, where)
        run()
        results[kernel] = [outputs[name.split()[0]].clone() for name in case.compare]
        calls = [plan.bind(torch, tensors, where)[1] for tensors in sets]
        samplers[kernel] = meter.sampler(calls)
    for peer, function in case.peers.items():
        try:
            theirs = [t.clone() for t in function(first)]
            differs[peer] = {
                kernel: [difference(torch, n, a, b) for n, a, b in zip(case.compare, ours, theirs)]
                for kernel, ours in results.items()
            }
            del theirs
            samplers[peer] = meter.sampler([lambda t=t: function(t) for t in sets])
        except Exception as error:  # not installed, or does not compile: a note, not the end
            first_line = (str(error).strip().splitlines() or [""])[0]
            notes[peer] = f"{type(error).__name__}: {first_line}"[:120]

    times = {name: [] for name in samplers}
    ratios = {name: [] for name in samplers}
    copies = [meter.copy()]
    for _ in range(repeat):
        for name, sample in samplers.items():
            times[name].append(sample())
            copies.append(meter.copy())
            around = (copies[-1] + copies[-2]) / 2
            ratios[name].append(traffic / times[name][-1] / (2 * meter.copy_bytes / around))
    seconds = {name: statistics.median(t) for name, t in times.items()}
    ratio = {name: statistics.median(r) for name, r in ratios.items()}
    out = []
    for kernel in plans or [None]:
        row = {"op": case.title, "kernel": kernel, "bytes": traffic, "sets": len(sets)}
        row["note"] = "; ".join(filter(None, [case.note, "" if plans else failed]))
        if kernel:
            row.update(ms=1e3 * seconds[kernel], ratio=ratio[kernel])
        row["copy_gb_s"] = 2e-9 * meter.copy_bytes / statistics.median(copies)
        row["peers"] = {
            peer: {"ms": 1e3 * seconds[peer], "ratio": ratio[peer],
                   "differs": differs[peer].get(kernel)} if peer in seconds
            else {"note": notes[peer]}
            for peer in case.peers
        }  # fmt: skip
        out.append(row)
    return out


LINE = "{:<40} {:<16} {:>8} {:>6}" + " {:>15}" * len(PEERS) + "  {}"


def show(row):
    cells, differs = [], []
    for peer in PEERS:
        found = row["peers"].get(peer)
        if found is None:
            cells.append("-")
        elif "ms" not in found:
            cells.append("failed")
            differs.append(f"{peer}: {found['note']}")
        else:
            cells.append(f"{found['ms']:.4f} {found['ratio']:.3f}")
            if found["differs"] is not None:
                share = " ".join(f"{d:.1e}" if d else "0" for d in found["differs"])
                differs.append(f"{peer}: {share}")
    ours = (f"{row['ms']:.4f}", f"{row['ratio']:.3f}") if row["kernel"] else ("-", "-")
    tail = "; ".join(differs + [row["note"]] * bool(row["note"]))
    print(LINE.format(row["op"], row["kernel"] or "none", *ours, *cells, tail), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", default=str(ROOT / "build/shared/libbittern.so"), metavar="PATH")
    parser.add_argument("--only", action="append", metavar="TEXT", help="cases whose name has this")
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--without", action="append", default=[], choices=PEERS)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # its plain Triton kernels
    try:
        import torch
    except ImportError:
        sys.exit("peers_cuda.py: no torch here, which holds the inputs and is the first peer")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("peers_cuda.py: torch sees no CUDA device, expected one (or --device cpu)")
    try:
        library = ctypes.CDLL(args.library)
    except OSError as error:
        parser.error(f"--library: {error}, expected a shared libbittern.so")
    device = Device(2, 0) if args.device == "cuda" else Device(1, 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    with torch.no_grad():
        meter = Meter(torch, args.device)
        name = torch.cuda.get_device_name(0) if args.device == "cuda" else "CPU, small problems"
        print(f"{name}, torch {torch.__version__}; copies: " + ", ".join(
            f"{way} {rate:.1f} GB/s" for way, rate in meter.rates.items()))  # fmt: skip
        print(LINE.format("op", "kernel", "ms", "ratio", *PEERS, "differs from bittern's"))
        for case in cases(torch, args.device, args.device == "cpu"):
            if args.only and not any(text in case.title for text in args.only):
                continue
            case.peers = {p: f for p, f in case.peers.items() if p not in args.without}
            found = measure(torch, meter, library, case, device, args.repeat)
            for row in found:
                show(row)
            rows += found
            if args.device == "cuda":
                torch.cuda.empty_cache()
            if args.json:
                report = {"device": name, "torch": torch.__version__, "copies": meter.rates}
                pathlib.Path(args.json).write_text(json.dumps({**report, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
